"""Learned: what the law carries from tick to tick. It lives in the status of the two PDPools, so it is small and plain JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_PEAKS = 32  # entries of the down window that are kept; older ones are merged upwards, which only delays a step down


@dataclass(frozen=True, slots=True)
class Memory:
    """The past of one role's counts. `peaks` are (time, recommendation), falling: each is the highest since its time."""

    peaks: tuple[tuple[float, int], ...] = ()
    stepped_down: float | None = None  # time of the last step down
    patience: float = 1.0  # factor of the down window: a step down that had to be taken back makes the next one wait longer
    flow: float | None = None  # replicas: averaged flow, the key of a split
    frozen_backlog: float | None = None  # replicas: the backlog part that ordered what is starting now

    def push(self, now: float, recommendation: int, window: float) -> tuple[tuple[float, int], ...]:
        """Peaks after one more recommendation: only entries that can still be the highest of a window are kept."""
        kept = [(t, n) for t, n in self.peaks if t > now - window and n > recommendation]
        if len(kept) >= MAX_PEAKS:
            kept = [(kept[1][0], kept[0][1]), *kept[2:]]
        return (*kept, (round(now, 3), recommendation))


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate as the law sees it: its average, and what a forecast and a tail need."""

    mean: float
    variance: float = 0.0  # of single ticks about the mean
    level: float = 0.0  # damped Holt, per second
    trend: float = 0.0  # per tick


@dataclass(frozen=True, slots=True)
class Gate:
    """Congestion of decode in one slice, with hysteresis."""

    slice: str
    congested: bool = False
    streak: int = 0  # ticks in a row that disagree with `congested`
    starts: float | None = None  # x: decode starts per second


@dataclass(frozen=True, slots=True)
class PrefillLearned:
    """Learned numbers of prefill."""

    throughput: float | None = None  # V: prompt tokens per second that one replica does
    tokens: float = 0.0  # decayed prompt tokens computed
    seconds: float = 0.0  # decayed seconds of prefill
    gain: float = 1.0  # rate of a saturated replica over tokens per prefill second
    prompt_rate: Rate | None = None  # A
    request_rate: Rate | None = None  # lam
    queue: float | None = None  # Q at the last tick
    ready: int = 0  # replicas at the last tick
    late: int = 0  # ticks in a row with TTFT above its objective
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True)
class DecodeLearned:
    """Learned numbers of decode."""

    kv_per_request: float | None = None  # c
    kv_capacity: float | None = None  # C
    itl_batch: float | None = None  # requests of one replica that hold the ITL objective, where it was ever broken
    output: float | None = None  # OSL
    starts: float | None = None  # x over all slices
    running: Rate | None = None  # R, its mean and variance over the tail's window; kept where the law has that term
    stuck_since: float | None = None  # time since which handoffs wait while nothing runs
    gates: tuple[Gate, ...] = ()
    memory: Memory = field(default_factory=Memory)


@dataclass(frozen=True, slots=True)
class Learned:
    """Everything learned of one PDDeployment; `prefill` and `decode` go to the status of their PDPools."""

    time: float | None = None  # of the last decision, seconds
    prefill: PrefillLearned = field(default_factory=PrefillLearned)
    decode: DecodeLearned = field(default_factory=DecodeLearned)


def significant(value: float) -> float:
    """Six significant digits: what survives a status in JSON, and no more than the last bit of exp() could disturb."""
    return float(f"{value:.6g}")


def average(previous: float | None, sample: float, elapsed: float, window: float) -> float:
    """Exponentially weighted average over `window` seconds, for ticks of any length; the first sample stands for itself."""
    if previous is None or window <= 0:
        return significant(sample)
    return significant(previous + (1 - math.exp(-elapsed / window)) * (sample - previous))
