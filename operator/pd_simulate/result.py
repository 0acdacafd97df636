"""Result: what became of every request, what the fleet looked like over time, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pd_simulate.view import Role
from pd_simulate.workload import Floats, Ints

# Result.outcome holds positions in this table. Each request has exactly one.
OUTCOMES = ("completed", "rejected", "cancelled", "timed_out", "expired", "failed", "unfinished")
COMPLETED, REJECTED, CANCELLED, TIMED_OUT, EXPIRED, FAILED, UNFINISHED = range(len(OUTCOMES))

# Columns of Result.timeline, sampled every scrape interval.
TIMELINE = (
    "time",
    "prefill_ready",
    "prefill_starting",
    "prefill_draining",
    "decode_ready",
    "decode_starting",
    "decode_draining",
    "blocked",
    "router_queue",
    "prefill_queue",
    "prefill_queue_tokens",
    "prefill_running",
    "handoffs",
    "held_tokens",
    "decode_running",
    "decode_kv_used",
    "offered",
    "completed",
)

# Attributes of Result that its summary repeats.
_TOTALS = ("wasted_prefill_tokens", "held_token_seconds", "preemptions", "clamps", "drain_aborted", "events", "wall_seconds")


@dataclass(frozen=True, slots=True)
class Decision:
    """One tick: what the policy asked for, what was applied after the clamps, and why."""

    time: float
    asked: dict[Role, int]
    applied: dict[Role, int]
    note: str
    clamped: bool


@dataclass
class Result:
    """One run. Per-request arrays are in the workload's order; NaN where it does not apply (no first token, no gap).

    `ttft` seconds from arrival to the first token that D streams; `itl` p95 of the request's gaps (the largest when it has
    fewer than 20, 0 when it has none); `handoff_wait` seconds from the end of prefill to D's reservation.
    GPU-seconds count from creation to end, starting and draining included, in the measured window [`warmup`, `duration`].
    """

    workload: str
    policy: str
    seed: int
    warmup: float
    duration: float
    arrival: Floats
    uncached: Ints
    outcome: NDArray[np.int8]
    good: NDArray[np.bool_]
    ttft: Floats
    itl: Floats
    handoff_wait: Floats
    recomputed: NDArray[np.bool_]
    retried: NDArray[np.bool_]
    timeline: Floats  # one row per sample, columns TIMELINE
    decisions: list[Decision]
    gpu_seconds: dict[str, float]  # "prefill/ready", "prefill/starting", "decode/draining", ...
    wasted_prefill_tokens: int  # computed and never decoded, or computed again
    held_token_seconds: float
    preemptions: int
    clamps: int
    drain_aborted: int
    retries: int
    events: int
    wall_seconds: float
    extra: dict[str, Any] = field(default_factory=dict)

    def _measured(self) -> NDArray[np.bool_]:
        return np.asarray(self.arrival >= self.warmup)

    @property
    def offered(self) -> int:
        """Requests that arrived after the warm-up."""
        return int(self._measured().sum())

    @property
    def attainment(self) -> float:
        """Good / offered, warm-up excluded; 1.0 when nothing was offered."""
        mask = self._measured()
        return float(self.good[mask].mean()) if mask.any() else 1.0

    @property
    def gpu_seconds_total(self) -> float:
        """GPU-seconds of all states of both roles in the measured window."""
        return sum(self.gpu_seconds.values())

    def counts(self, warmup: bool = False) -> dict[str, int]:
        """Requests per outcome; with `warmup` those of the warm-up too. The sum is what was offered."""
        outcomes = self.outcome if warmup else self.outcome[self._measured()]
        return {name: int((outcomes == code).sum()) for code, name in enumerate(OUTCOMES)}

    def reversals(self) -> dict[Role, int]:
        """Changes of direction of the applied counts in the measured window."""
        found: dict[Role, int] = {}
        roles: tuple[Role, ...] = ("prefill", "decode")
        for role in roles:
            counts = np.array([d.applied[role] for d in self.decisions if self.warmup <= d.time <= self.duration])
            signs = np.sign(np.diff(counts))
            signs = signs[signs != 0]
            found[role] = int((np.diff(signs) != 0).sum())
        return found

    def summary(self) -> dict[str, float | int | str]:
        """One flat row: the numbers of facts/autoscaling.md section 8, warm-up excluded. Rates per second, times in seconds."""
        mask = self._measured()
        window = max(self.duration - self.warmup, 1e-9)
        done = mask & (self.outcome == COMPLETED)
        good = int(self.good[mask].sum())
        gpu = self.gpu_seconds_total
        row: dict[str, float | int | str] = {
            "workload": self.workload,
            "policy": self.policy,
            "seed": self.seed,
            "offered": self.offered,
            "good": good,
            "attainment": self.attainment,
            "goodput": good / window,
            "gpu_seconds": gpu,
            "mean_gpus": gpu / window,
            "good_per_1000_gpu_seconds": 1000 * good / gpu if gpu else 0.0,
            **self.counts(),
            "recomputed": int(self.recomputed[mask].sum()),
            "retried": int(self.retried[mask].sum()),
        }
        for name, values in (("ttft", self.ttft), ("itl", self.itl), ("handoff_wait", self.handoff_wait)):
            taken = values[done & np.isfinite(values)]
            for percent in (50, 95, 99):
                row[f"{name}_p{percent}"] = float(np.percentile(taken, percent)) if len(taken) else float("nan")
        turns = self.reversals()
        row["reversals_per_hour"] = 3600 * sum(turns.values()) / window
        row.update({name: getattr(self, name) for name in _TOTALS})
        return row
