"""Attainment: the share of requests that met the objectives, and each way in which a request can end otherwise (docs/evidence.md).

Routers send the head of a stream before its first token, so only engines know the time to it: on prefill from arrival to the
one token that it makes, on decode from arrival to the first token that a client sees. No counter joins the two, nor TTFT with the
gaps of the same request, so goodput is an interval.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pd_operator.core.evidence.counters import Track, fallbacks, grown_buckets

WINDOW: Final = 300.0  # seconds
FEWEST: Final = 5  # requests; fewer say nothing
Buckets = Mapping[float, float]  # upper bound -> how many came, cumulative


@dataclass(frozen=True, slots=True)
class Objectives:
    """spec.slo in seconds; None where there is none."""

    ttft: float | None = None
    ttft_per_thousand: float = 0.0  # for each thousand prompt tokens; with the mean prompt, since no counter has it by request
    itl: float | None = None
    percentile: int = 95


@dataclass(frozen=True, slots=True)
class Point:
    """What came between two looks, over all pods."""

    time: float
    since: float  # the look before; the same time where there was none
    sums: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (side, name)
    buckets: Mapping[tuple[str, str], Buckets] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Attained:
    """Shares from 0 to 1; None where nothing says it. `window` and `age` are seconds."""

    ttft: float | None = None
    itl: float | None = None
    window: float = 0.0
    age: float = 0.0
    percentile: int = 95

    @property
    def goodput(self) -> tuple[float, float] | None:
        """The share that met both, at least and at most."""
        if self.ttft is None or self.itl is None:
            return None
        return max(0.0, self.ttft + self.itl - 1.0), min(self.ttft, self.itl)


def point(before: Mapping[tuple[str, str], Track], after: Iterable[Track], now: float, since: float | None) -> Point:
    """The growth from the tracks of one look, at `since`, to those of the next."""
    sums: dict[tuple[str, str], float] = {}
    buckets: dict[tuple[str, str], dict[float, float]] = {}
    for track in after:
        old = before.get((track.last.uid, track.last.side))
        if old is None or not old.seen or track.last.time <= old.last.time or not track.steps:
            continue
        side = track.last.side
        for name, value in track.steps[-1].grown.items():
            sums[side, name] = sums.get((side, name), 0.0) + value
        for name, grown in grown_buckets(old.last.buckets, track.last.buckets).items():
            mine = buckets.setdefault((side, name), {})
            for bound, value in grown.items():
                mine[bound] = mine.get(bound, 0.0) + value
    return Point(now, now if since is None else since, sums, buckets)


def attained(points: Sequence[Point], slo: Objectives, now: float) -> Attained:
    """The shares over the points; each None without an objective, or with too few requests to say."""
    full = [p for p in points if p.buckets]
    if not full:
        return Attained(percentile=slo.percentile)
    itl = None if slo.itl is None else within(_merged(full, "decode", "mean_gap"), slo.itl)
    return Attained(_ttft(full, slo), itl, now - points[0].since, now - full[-1].time, slo.percentile)


def _ttft(points: Sequence[Point], slo: Objectives) -> float | None:
    """The share of requests whose two waits together are within the objective, taking the waits to know nothing of each other, as
    the law does (signals/formulas): for each bucket of decode, at its middle, the share of prefill that leaves room for it."""
    if slo.ttft is None:
        return None
    computed, prompts = _sum(points, "prefill", "computed"), _sum(points, "prefill", "prompts")
    limit = slo.ttft + (slo.ttft_per_thousand * computed / prompts / 1000 if computed and prompts else 0.0)
    prefill, decode = (_merged(points, side, "first_token") for side in ("prefill", "decode"))
    if within(decode, limit) is None:
        return None
    share, below, start = 0.0, 0.0, 0.0
    for bound in sorted(decode):
        count = max(below, decode[bound])
        left = within(prefill, limit - (start + bound) / 2)
        if left is None:
            return None
        share, below, start = share + left * (count - below), count, bound
    return share / below


def within(buckets: Buckets, limit: float) -> float | None:
    """The share of observations up to `limit`, linear inside a bucket; None with too few. Above the last finite bound nobody knows:
    it counts as beyond."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds and math.isinf(bounds[-1]) else 0.0
    if total < FEWEST:
        return None
    below, start = 0.0, 0.0
    for bound in bounds:
        count = max(below, buckets[bound])
        if limit < bound:
            part = 0.0 if math.isinf(bound) or limit <= start else (limit - start) / (bound - start)
            return min(1.0, (below + part * (count - below)) / total)
        below, start = count, bound
    return 1.0


def _sum(points: Iterable[Point], side: str, name: str) -> float | None:
    found = [p.sums[side, name] for p in points if (side, name) in p.sums]
    return sum(found) if found else None


def _merged(points: Iterable[Point], side: str, name: str) -> Buckets:
    total: dict[float, float] = {}
    for one in points:
        for bound, value in one.buckets.get((side, name), {}).items():
            total[bound] = total.get(bound, 0.0) + value
    return total


# (side, number) -> who counted it and what became of the request. What a program does not count is absent, and not zero.
OUTCOMES: Final[Mapping[tuple[str, str], tuple[str, str]]] = {
    ("router", "rejected"): ("router", "rejected"),
    ("router", "timed_out"): ("router", "timed_out"),
    ("router", "unavailable"): ("router", "unavailable"),
    ("router", "failed"): ("router", "failed"),
    ("router", "not_handed"): ("router", "not_handed"),
    ("prefill", "errors"): ("prefill", "failed"),
    ("prefill", "rejected"): ("prefill", "rejected"),
    ("decode", "ended"): ("decode", "answered"),
    ("decode", "errors"): ("decode", "failed"),
    ("decode", "cancelled"): ("decode", "cancelled"),
    ("decode", "rejected"): ("decode", "rejected"),
    ("decode", "fallbacks"): ("decode", "fallback"),
}


def outcomes(before: Mapping[tuple[str, str], float], came: Point) -> dict[tuple[str, str], float]:
    """Requests by who counted them and how they ended, since this process first looked."""
    found = dict(before)
    sums = dict(came.sums)
    alone = fallbacks({name: value for (side, name), value in sums.items() if side == "decode"})
    if alone is not None:
        sums["decode", "fallbacks"] = alone
    for key, value in sums.items():
        if key in OUTCOMES:
            name = OUTCOMES[key]
            found[name] = found.get(name, 0.0) + value
    return found
