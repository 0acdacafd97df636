"""GapLog: the time of every decode step of one D replica, and the percentiles of a request's gaps."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np

from pd_simulate.workload import Floats


class GapLog:
    """Every step's seconds, by the replica's step number, and runs of steps with an unchanged batch.

    In a run gaps grow linearly, since each step adds a token per request. Steps are written out once for all requests of the
    batch: a request's gaps are then a slice, which is what most of a simulation's time went into before.
    """

    __slots__ = ("batch", "each", "end", "first", "grow", "steps")

    def __init__(self) -> None:
        self.each = array("d")  # seconds of every step
        self.steps = array("q")
        self.first = array("d")  # seconds of a run's first step
        self.grow = array("d")  # seconds that each further step takes more
        self.batch = array("q")
        self.end = array("d")

    def __len__(self) -> int:
        return len(self.each)

    def add(self, steps: int, first: float, grow: float, batch: int, end: float) -> None:
        """A run has ended at `end` seconds."""
        self.steps.append(steps)
        self.first.append(first)
        self.grow.append(grow)
        self.batch.append(batch)
        self.end.append(end)
        if steps == 1:
            self.each.append(first)
        else:
            self.each.extend([first + grow * number for number in range(steps)])

    def gaps(self, since: int) -> Floats:
        """Seconds of every step from number `since` on. A copy: the log grows on."""
        return np.array(self.each[since:])

    def p95(self, since: int) -> float:
        """p95 of the steps from number `since` on; of fewer than 20 the largest (facts/autoscaling.md section 8), of none 0."""
        gaps = self.each[since:]
        return p95(np.frombuffer(gaps)) if len(gaps) >= 20 else max(gaps, default=0.0)

    def recent(self, since: float) -> tuple[Floats, Floats]:
        """Of the runs that ended at `since` or later: mean gap of each, and its weight (tokens streamed)."""
        low = bisect_left(self.end, since)
        steps = np.array(self.steps[low:], dtype=np.float64)
        means = np.array(self.first[low:]) + np.array(self.grow[low:]) * (steps - 1) / 2
        return means, steps * np.array(self.batch[low:], dtype=np.float64)


def p95(gaps: Floats) -> float:
    """Smallest gap that at least 95 % of the gaps do not exceed; the largest if they are fewer than 20."""
    count = len(gaps)
    if count < 20:
        return float(gaps.max()) if count else 0.0
    rank = -(-95 * count // 100) - 1
    return float(np.partition(gaps, rank)[rank])
