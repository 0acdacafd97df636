"""Statistics of a comparison: matched attainment, paired bootstrap, wins, Kendall's tau, Pareto fronts. Random only by seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal, TypeVar

RESAMPLES = 2000  # bootstrap resamples: the 2.5 % tail then rests on 50 of them
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Point:
    """What one run attained (good requests / offered, 0..1) and what it cost (GPU-seconds)."""

    attainment: float
    gpu_seconds: float


@dataclass(frozen=True, slots=True)
class Matched:
    """GPU-seconds at one attainment, read off one policy's sweep.

    `reached`: interpolated. `never`: the best point attains less, there is no number. `always`: the cheapest point attains more
    already; `gpu_seconds` is then that point's cost, an upper bound and not a match.
    """

    state: Literal["reached", "never", "always"]
    gpu_seconds: float | None


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean of paired values with its 95 % interval, over `count` pairs."""

    mean: float
    low: float
    high: float
    count: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the interval lies on one side of zero."""
        return self.low > 0 or self.high < 0


def pareto(points: Iterable[Point]) -> list[Point]:
    """Points that no other point beats (at least as good at no more cost), by rising cost; equal points count once."""
    return front(points, lambda point: point)


def front(items: Iterable[Item], point: Callable[[Item], Point]) -> list[Item]:
    """Items whose `point` no other item's point beats, by rising cost."""
    best = -math.inf
    kept = []
    for item in sorted(items, key=lambda item: (point(item).gpu_seconds, -point(item).attainment)):
        if point(item).attainment > best:
            best = point(item).attainment
            kept.append(item)
    return kept


def matched(points: Iterable[Point], target: float) -> Matched:
    """GPU-seconds at `target` attainment: linear between neighbours of the sweep's Pareto front, never beyond its ends.

    A dominated knob value is one that nobody would choose, hence the front and not the knob's order. Raises ValueError without
    points.
    """
    line = pareto(points)
    if not line:
        raise ValueError("matched attainment needs at least one point")
    if target > line[-1].attainment:
        return Matched("never", None)
    if target < line[0].attainment:
        return Matched("always", line[0].gpu_seconds)
    for low, high in itertools.pairwise(line):
        if target <= high.attainment:
            share = (target - low.attainment) / (high.attainment - low.attainment)
            return Matched("reached", low.gpu_seconds + share * (high.gpu_seconds - low.gpu_seconds))
    return Matched("reached", line[0].gpu_seconds)  # a single point, hit exactly


def bootstrap(values: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """Percentile bootstrap of the mean of paired values (one a seed). Raises ValueError without values.

    Efron 1979, percentile method: resample the pairs with replacement, take the 2.5 and 97.5 percentiles of the means. One value
    gives an interval without width: it says nothing, `count` shows it.
    """
    if not values:
        raise ValueError("a bootstrap needs at least one value")
    draw = random.Random(seed)
    means = sorted(fmean(draw.choices(values, k=len(values))) for _ in range(resamples))
    return Interval(fmean(values), percentile(means, 2.5), percentile(means, 97.5), len(values))


def percentile(ordered: Sequence[float], share: float) -> float:
    """Percentile `share` (0..100) of an ascending sequence, linear between ranks; NaN when it is empty."""
    if not ordered:
        return math.nan
    rank = (len(ordered) - 1) * share / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (rank - below) * (ordered[above] - ordered[below])


def wins(ours: Sequence[float], theirs: Sequence[float]) -> tuple[int, int, int]:
    """Pairs in which ours is lower, equal, higher. Raises ValueError when the lengths differ."""
    pairs = list(zip(ours, theirs, strict=True))
    return sum(a < b for a, b in pairs), sum(a == b for a, b in pairs), sum(a > b for a, b in pairs)


def kendall(first: Sequence[float], second: Sequence[float]) -> float:
    """Kendall's tau-b of two rankings of the same things (-1..1); NaN when one of them is all ties.

    Raises ValueError on unequal lengths.
    tau_b = (C - D) / sqrt((n0 - t1)(n0 - t2)), n0 = n(n-1)/2, t = pairs tied in one ranking (Kendall 1945).
    """
    items = list(zip(first, second, strict=True))
    balance = untied_first = untied_second = 0
    for index, (a, b) in enumerate(items):
        for c, d in items[:index]:
            signs = (a > c) - (a < c), (b > d) - (b < d)
            balance += signs[0] * signs[1]
            untied_first += abs(signs[0])
            untied_second += abs(signs[1])
    scale = math.sqrt(untied_first * untied_second)
    return balance / scale if scale else math.nan
