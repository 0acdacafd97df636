"""Referee: the same policies in NVIDIA's own discrete-event replay (the `ai-dynamo-runtime` wheel) and in this simulator.

The engine of the replay is the optional extra `referee`; the Python around it is in `ai-dynamo`, which wants another kubernetes
client than the operator and so goes in without its dependencies. The planner's own code uses those: it gets a virtual environment
of its own (docs/simulate/referee.md). Without the wheels nothing runs, and `missing()` says so.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from pd_simulate.fleet import Fleet, LeadTime, Link, Router, Scrape, Slice, Slo
from pd_simulate.referee_view import Blurred, Scaling
from pd_simulate.simulation import simulate
from pd_simulate.view import Policy, Profile
from pd_simulate.workload import Workload

BLOCK = 64  # tokens of a KV block in the replay
TRACE_BLOCK = 512  # tokens that one hash id of a trace file stands for
FOREVER = 1e6  # seconds
WALL = 150.0  # seconds that one replay may take
WHEELS = ("ai-dynamo-runtime==1.4.2", "ai-dynamo==1.4.2")  # the engine of the replay, and the Python around it


def missing() -> str | None:
    """Why the referee cannot run, or None."""
    if importlib.util.find_spec("dynamo") is None or importlib.util.find_spec("dynamo.mocker") is None:
        return (
            f"the referee needs the wheels {' and '.join(WHEELS)}: pip install 'pd-operator[simulate,referee]', which has the "
            f"first, and pip install --no-deps {WHEELS[1]} (by itself it would ask for an older kubernetes client)"
        )
    return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run of one policy."""

    policy: str
    attainment: float  # good / offered
    gpus: float  # mean GPUs held over the window, starting and draining included
    completed: int

    @property
    def per_gpu(self) -> float:
        """Share of the offered requests that were good, per GPU held."""
        return self.attainment / self.gpus if self.gpus else 0.0


def flat(profile: Profile, kv_capacity: int) -> Profile:
    """The profile that both engines can mean: no quadratic term (each prices a batch of prompts in its own way), floor or knots."""
    return replace(profile, c=0.0, floor=0.0, knots=(), kv_capacity=kv_capacity, prefill_kv_capacity=kv_capacity)


def fleet(profile: Profile, prefill: int, decode: int, budget: int, slo: Slo, lead: float) -> Fleet:
    """A fleet without what the replay lacks: time-outs, lease ends, losses of scrapes, prefix hits, spread of lead times.

    One prompt a prefill pass in both: with more, the replay's P keeps every finished prompt until the whole batch has ended.
    """
    return Fleet(
        profile=profile,
        prefill=prefill,
        decode=decode,
        maximum={"prefill": budget - 1, "decode": budget - 1},
        budget=budget,
        slo=replace(slo, patience=FOREVER),
        slices=(Slice(link=Link(25e9, 0.0)),),
        lead_prefill=LeadTime(lead, 0.0),
        lead_decode=LeadTime(lead, 0.0),
        router=Router("round_robin"),
        scrape=Scrape(interval=5.0, jitter=0.0, loss=0.0),
        lease=FOREVER,
        drain_timeout=FOREVER,
        prefix="off",
        step_requests=1,
        warmup=0.0,
    )


def simulated(load: Workload, where: Fleet, policy: Policy) -> Outcome:
    """The policy in this package's simulator, shown no more than the replay tells."""
    result = simulate(load, where, Blurred(policy), seed=0)
    return Outcome(policy.name, result.attainment, result.gpu_seconds_total / load.duration, int((result.outcome == 0).sum()))


def write_trace(load: Workload, path: Path) -> None:
    """Mooncake's format; every request gets hash ids of its own."""
    with path.open("w", encoding="utf-8") as file:
        first = 0
        for at, prompt, output in zip(load.arrival.tolist(), load.prompt.tolist(), load.output.tolist(), strict=True):
            blocks = -(-prompt // TRACE_BLOCK)
            row = {"timestamp": at * 1000, "input_length": prompt, "output_length": output}
            file.write(json.dumps({**row, "hash_ids": list(range(first, first + blocks))}) + "\n")
            first += blocks


def write_profile(profile: Profile, path: Path) -> None:
    """The step times as the replay's tables (it looks the nearest entry up): milliseconds of a prefill pass, of a decode step."""
    tokens = np.concatenate((np.arange(1, 64), np.arange(64, 16_385, 16), np.arange(16_448, 262_145, 256))).astype(np.float64)
    used = np.linspace(0, profile.kv_capacity * 1.02, 513)
    context = np.unique(np.round(np.geomspace(1, 200_000, 160)))
    steps = [[1000 * profile.step(max(1.0, kv / one), kv) for one in context] for kv in used]
    np.savez(
        path,
        prefill_isl=tokens,
        prefill_ttft_ms=[1000 * profile.prefill(n) for n in tokens],
        decode_active_kv_tokens=used,
        decode_context_length=context,
        decode_itl=np.array(steps),
    )


@dataclass(slots=True)
class _Limited:
    """A scaling policy that ends the run when its time is over."""

    scaling: Scaling
    until: float
    over: bool = False

    def initial_tick_ms(self) -> float:
        return self.scaling.initial_tick_ms()

    def on_tick(self, tick: dict[str, Any]) -> dict[str, float | int | None]:
        if time.monotonic() > self.until:
            self.over = True
            raise TimeoutError("wall clock")
        return self.scaling.on_tick(tick)


@dataclass(frozen=True, slots=True)
class Replay:
    """The replay engine for one load and fleet."""

    load: Workload
    fleet: Fleet
    folder: Path
    context_length: int = 131_072

    def run(self, policy: Policy) -> Outcome:
        """One of our policies there. Raises TimeoutError after WALL seconds: with very long queues the replay hardly moves."""
        from dynamo._core import run_mocker_trace_replay  # type: ignore[import-not-found]  # noqa: PLC0415

        scaling = Scaling(policy, self.load, self.fleet)
        limited = _Limited(scaling, time.monotonic() + WALL)
        try:
            report = run_mocker_trace_replay([str(self._trace())], scaling_policy=limited, **self._arguments())
        except Exception as exc:
            if limited.over:
                raise TimeoutError(f"no end after {WALL:g} s, at {scaling.decisions[-1][0]:g} s of simulated time") from exc
            raise
        found = self._outcome(policy.name, report)
        # Of the window only, as in the simulator: with a backlog the replay goes on for long after it, at frozen counts.
        return replace(found, gpus=scaling.gpu_seconds / scaling.last[0]) if scaling.last[0] else found

    def planner(self, target: str) -> Outcome:
        """Dynamo's own planner code with that optimization target."""
        from dynamo.replay.api import run_trace_replay  # type: ignore[import-not-found]  # noqa: PLC0415

        config = {
            "mode": "disagg",
            "backend": "mocker",
            "environment": "virtual",
            "max_gpu_budget": self.fleet.budget,
            "optimization_target": target,
            "report_interval_hours": None,
            "live_dashboard_port": 0,
            "prefill_engine_num_gpu": self.fleet.gpus("prefill"),
            "decode_engine_num_gpu": self.fleet.gpus("decode"),
        }
        with redirect_stderr(StringIO()):
            report = run_trace_replay(str(self._trace()), planner_config=config, **self._arguments())
        return self._outcome(f"planner-{target}", report.trace_report)

    def _trace(self) -> Path:
        path = self.folder / "trace.jsonl"
        if not path.exists():
            write_trace(self.load, path)
        return path

    def _arguments(self) -> dict[str, Any]:
        from dynamo.mocker import MockEngineArgs  # type: ignore[import-not-found]  # noqa: PLC0415

        table = self.folder / "profile.npz"
        if not table.exists():
            write_profile(self.fleet.profile, table)
        profile = self.fleet.profile
        common = {
            "block_size": BLOCK,
            "max_num_batched_tokens": self.fleet.step_tokens,
            "enable_prefix_caching": False,
            "startup_time": self.fleet.lead_prefill.mean,
            "kv_bytes_per_token": profile.kv_bytes_per_token,
            "kv_transfer_bandwidth": self.fleet.slices[0].link.bandwidth / 1e9,
            "planner_profile_data": str(table),
            "max_model_len": self.context_length,
        }
        return {
            "prefill_engine_args": MockEngineArgs(
                worker_type="prefill", num_gpu_blocks=profile.prefill_kv_capacity // BLOCK, max_num_seqs=1, **common
            ),
            "decode_engine_args": MockEngineArgs(
                worker_type="decode", num_gpu_blocks=profile.kv_capacity // BLOCK, max_num_seqs=profile.max_num_seqs, **common
            ),
            "num_prefill_workers": self.fleet.prefill,
            "num_decode_workers": self.fleet.decode,
            "trace_block_size": TRACE_BLOCK,
            "sla_ttft_ms": self.fleet.slo.ttft * 1000,
            "sla_itl_ms": self.fleet.slo.itl * 1000,
        }

    def _outcome(self, name: str, report: dict[str, Any]) -> Outcome:
        seconds = report["prefill_worker_seconds"] * self.fleet.gpus("prefill")
        seconds += report["decode_worker_seconds"] * self.fleet.gpus("decode")
        # The replay ends with its last request; of the planner only the mean up to there is known.
        span = max(self.load.duration, report["duration_ms"] / 1000)
        good = int(report["goodput_completed_requests"])
        return Outcome(name, good / max(1, len(self.load)), seconds / span, int(report["completed_requests"]))


def tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings, ties taken into account; NaN when one of them is all ties."""
    agree = ties_first = ties_second = pairs = 0
    for i in range(len(first)):
        for j in range(i):
            a, b = np.sign(first[i] - first[j]), np.sign(second[i] - second[j])
            pairs += 1
            agree += int(a * b)
            ties_first += a == 0
            ties_second += b == 0
    scale = float(np.sqrt(float(pairs - ties_first) * float(pairs - ties_second)))
    return agree / scale if scale else float("nan")
