"""Views for tests of scaling policies: everything has a default, a test names what it is about."""

from __future__ import annotations

from typing import Any

import numpy as np

from pd_simulate.view import Counters, Latency, Profile, ReplicaView, Role, View
from pd_simulate.workload import Floats, Workload

# 10,000 prompt tokens/s and 50 ms a pass; a decode step of B requests takes 10 ms + 1 ms B.
PROFILE = Profile("round", 0.05, 1e-4, 0.0, 0.010, 0.001, 0.0, 100_000, 100_000, 64, 131_072)
EVEN = Profile("even", 0.0, 1e-4, 0.0, 0.010, 0.001, 0.0, 100_000, 100_000, 64, 131_072)
NO_LATENCY = Latency(60.0, float("nan"), float("nan"), float("nan"), float("nan"), 0)


def latency(p90: float, count: int = 100) -> Latency:
    """A latency whose percentiles are all `p90`."""
    return Latency(60.0, p90, p90, p90, p90, count)


def pods(role: Role, count: int, state: str = "ready", first: int = 0, **fields: Any) -> tuple[ReplicaView, ...]:
    """`count` replicas with the same numbers."""
    ready = 0.0 if state == "ready" else None
    given = {"kv_capacity": 100_000, **fields}
    return tuple(ReplicaView(f"{role}-{first + i}", role, "a", state, 0.0, ready, **given) for i in range(count))  # type: ignore[arg-type]


def view(now: float = 0.0, replicas: tuple[ReplicaView, ...] = (), **fields: Any) -> View:
    """A view; `desired` defaults to what there is and is not draining."""
    there = {r: sum(1 for p in replicas if p.role == r and p.state != "draining") for r in ("prefill", "decode")}
    given: dict[str, Any] = {
        "counters": Counters(),
        "counters_known": True,
        "counters_age": 0.0,
        "ttft": NO_LATENCY,
        "itl": NO_LATENCY,
        "prefill_latency": NO_LATENCY,
        "handoff_wait": NO_LATENCY,
        "desired": there,
        "gpus": {"prefill": 1, "decode": 1},
        "minimum": {"prefill": 1, "decode": 1},
        "maximum": {"prefill": 64, "decode": 64},
        "budget": 64,
        "lead_time": {"prefill": 60.0, "decode": 60.0},
        "slo_ttft": 0.5,
        "slo_ttft_per_token": 0.0,
        "slo_itl": 0.050,
    }
    return View(now=now, replicas=replicas, **{**given, **fields})


def traffic(seconds: float, rate: float, isl: int, osl: int, cached: int = 0) -> Counters:
    """Counters after `seconds` of a steady load, everything finished at once."""
    count = round(seconds * rate)
    return Counters(
        offered=count,
        offered_tokens=count * isl,
        offered_uncached=count * (isl - cached),
        accepted=count,
        prefilled=count,
        prefill_tokens=count * (isl - cached),
        decode_starts=count,
        output_tokens=count * osl,
        finished=count,
        finished_output=count * osl,
        finished_prompt=count * isl,
    )


def load_of(arrival: Floats, prompt: int, output: int, duration: float | None = None) -> Workload:
    """Requests of equal lengths at sorted times; the window ends with the last one unless `duration` says so."""
    count = len(arrival)
    end = float(arrival[-1]) if duration is None else duration
    return Workload("made", arrival, np.full(count, prompt), np.full(count, output), end)
