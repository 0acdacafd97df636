"""GapLog: the time of every decode step of one D replica, kept as runs of steps, and the percentiles of a request's gaps."""

from __future__ import annotations

from array import array
from bisect import bisect_left

import numpy as np

from pd_simulate.workload import Floats


class GapLog:
    """Runs of steps with an unchanged batch: in one of them gaps grow linearly, since each step adds a token per request."""

    __slots__ = ("batch", "end", "first", "grow", "steps")

    def __init__(self) -> None:
        self.steps = array("q")
        self.first = array("d")  # seconds of the first step
        self.grow = array("d")  # seconds that each further step takes more
        self.batch = array("q")
        self.end = array("d")

    def __len__(self) -> int:
        return len(self.steps)

    def add(self, steps: int, first: float, grow: float, batch: int, end: float) -> None:
        """A run has ended at `end` seconds."""
        self.steps.append(steps)
        self.first.append(first)
        self.grow.append(grow)
        self.batch.append(batch)
        self.end.append(end)

    def gaps(self, since: int, skip: int) -> Floats:
        """Seconds of every step of the runs from number `since` on, without the first `skip` steps."""
        if since >= len(self.steps):
            return np.zeros(0)
        steps = np.frombuffer(self.steps, dtype=np.int64, offset=8 * since)
        first = np.frombuffer(self.first, offset=8 * since)
        grow = np.frombuffer(self.grow, offset=8 * since)
        starts = np.cumsum(steps) - steps
        # first + grow x (position in the run), for all runs at once
        return (np.repeat(first - grow * starts, steps) + np.repeat(grow, steps) * np.arange(int(steps.sum())))[skip:]

    def p95(self, since: int, skip: int, total: int) -> float:
        """p95 of a request's `total` gaps, the largest if they are fewer than 20 (facts/autoscaling.md section 8), 0 if none."""
        if total == 0:
            return 0.0
        if total >= 20:
            return p95(self.gaps(since, skip))
        largest = 0.0
        for number in range(since, len(self.steps)):
            count = self.steps[number]
            if skip < count:
                largest = max(largest, self.first[number] + self.grow[number] * (count - 1))
            skip = max(0, skip - count)
        return largest

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
