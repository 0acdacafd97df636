"""The last samples of one pod, and what they say: newest gauges, and how far counters moved, restarts of the process included.

No clock and no I/O: samples carry their time, and whether the newest is too old is asked with `now`.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from pd_operator.signals.exposition import Slot
from pd_operator.upstream.signals_table import How, Kind, Quantity, Table

MISSED: Final = 3  # samples in a row whose absence makes a pod's signals unknown (DESIGN §7: unknown is not zero)
SLACK: Final = 0.5  # of a period: a sample that is that late is not missed yet

Column = tuple[str, float | None]  # series and upper bound of the bucket


class Columns:
    """Places of counters in the arrays of all windows of one table, so that a point is 8 bytes a counter."""

    def __init__(self) -> None:
        self._places: dict[Column, int] = {}

    def place(self, column: Column) -> int:
        """The place of a counter; a new one is given at its first sight."""
        return self._places.setdefault(column, len(self._places))

    def of(self, series: str) -> list[tuple[float | None, int]]:
        """Bounds and places of all columns of a series."""
        return [(bound, place) for (name, bound), place in self._places.items() if name == series]


@dataclass(frozen=True, slots=True)
class Point:
    """One sample. `sums` are over the pod's series of one family (an info's is the sum of its numbers)."""

    time: float
    sums: Mapping[str, float]
    shares: Mapping[str, float]  # quantity -> gauge x number, rank by rank
    bad: frozenset[str]  # series with NaN, an infinity, or a number that cannot be
    grown: array[float]  # how far each counter has moved since the first sample


class Window:
    """Samples of one pod over the last `seconds`. Counters that fall were reset: what they show then is growth."""

    def __init__(self, table: Table, columns: Columns, seconds: float, period: float) -> None:
        self.table = table
        self.columns = columns
        self.seconds = seconds
        self.period = period
        self.points: deque[Point] = deque()
        self._rated = frozenset(q.series for q in table.quantities)
        self._values: Mapping[Slot, float] = {}
        self._last: dict[Slot, float] = {}
        self._grown: array[float] = array("d")

    def add(self, time: float, values: Mapping[Slot, float]) -> None:
        """Take a sample in. One that is not newer than the last is dropped."""
        if self.points and time <= self.points[-1].time:
            return
        sums: dict[str, float] = {}
        bad: set[str] = set()
        for slot, value in values.items():
            number = value if slot.number is None else value * slot.number
            if not _possible(slot, value):
                bad.add(slot.series)
            sums[slot.series] = sums.get(slot.series, 0.0) + number
            if slot.kind is Kind.COUNTER and slot.series in self._rated:
                self._grow(slot, value)
        self._values = values
        self.points.append(Point(time, sums, self._shares(values), frozenset(bad), array("d", self._grown)))
        # One point older than the window stays, so that the window is covered in full.
        while len(self.points) > 2 and self.points[1].time <= time - self.seconds:
            self.points.popleft()

    def _grow(self, slot: Slot, value: float) -> None:
        place = self.columns.place((slot.series, slot.bound))
        while len(self._grown) <= place:
            self._grown.append(0.0)
        # A series that was not in the last sample began at zero since; at the pod's first sample nobody knows.
        last = self._last.get(slot, 0.0 if self.points else math.nan)
        if math.isfinite(value) and value >= 0:
            if math.isfinite(last):
                self._grown[place] += value - last if value >= last else value
            self._last[slot] = value
        else:
            self._last.setdefault(slot, math.nan)

    def _shares(self, values: Mapping[Slot, float]) -> dict[str, float]:
        found = {}
        for quantity in self.table.quantities:
            if quantity.how is How.SHARE:
                sizes = {s.rank: s.number for s in values if s.series == quantity.info and s.number is not None}
                parts = [v * sizes.get(s.rank, math.nan) for s, v in values.items() if s.series == quantity.series]
                if parts:
                    found[quantity.name] = sum(parts)
        return found

    def age(self, now: float) -> float:
        """Seconds since the newest sample, infinite without one."""
        return max(0.0, now - self.points[-1].time) if self.points else math.inf

    def stale(self, now: float) -> bool:
        """Whether three samples were missed."""
        return self.age(now) > (MISSED + SLACK) * self.period

    def value(self, quantity: Quantity) -> float | str:
        """The pod's part of a quantity, or why there is none. QUANTILE has no part: see `buckets`."""
        newest, series, name = self.points[-1], self.table.series[quantity.series], self.table.series[quantity.series].names[0]
        if quantity.how in (How.RATE, How.LEAST, How.QUANTILE) and len(self.points) < 2:
            return f"{name} has one sample only, a rate needs two"
        looked_at = self.points if quantity.how is How.RATE else [newest]
        if any(quantity.series in p.bad or quantity.info in p.bad for p in looked_at):
            return f"{name} is no number"
        if quantity.series not in newest.sums:
            return 0.0 if series.optional else f"{name} is absent"
        return self._value(quantity, newest)

    def _value(self, quantity: Quantity, newest: Point) -> float | str:
        if quantity.how is How.RATE:
            return sum(grown for _, grown in self._growth(quantity.series)) / (newest.time - self.points[0].time)
        if quantity.how is How.LEAST:
            return min(p.sums.get(quantity.series, 0.0) for p in self.points)
        if quantity.how is How.SHARE:
            share = newest.shares.get(quantity.name, math.nan)
            return share if math.isfinite(share) else f"{self.table.series[quantity.info].names[0]} is absent"
        return newest.sums[quantity.series]

    def _growth(self, series: str) -> list[tuple[float | None, float]]:
        oldest, newest = self.points[0].grown, self.points[-1].grown
        return [
            (bound, newest[place] - (oldest[place] if place < len(oldest) else 0.0))
            for bound, place in self.columns.of(series)
            if place < len(newest)
        ]

    def tally(self, quantity: Quantity) -> float | dict[float, float] | None:
        """What the newest page says of a number of this pod alone, as it stands there; a QUANTILE's is by upper bound. None when
        it does not say it."""
        newest, series = self.points[-1], self.table.series[quantity.series]
        if quantity.series in newest.bad:
            return None
        if quantity.how is not How.QUANTILE:
            return newest.sums.get(quantity.series, 0.0 if series.optional else None)
        found: dict[float, float] = {}
        for slot, value in self._values.items():
            if slot.series == quantity.series and slot.bound is not None:
                found[slot.bound] = found.get(slot.bound, 0.0) + value
        return found or None

    def buckets(self, quantity: Quantity) -> dict[float, float]:
        """How many observations came in the window, by upper bound, cumulative as Prometheus' buckets are."""
        return {bound: grown for bound, grown in self._growth(quantity.series) if bound is not None}


def _possible(slot: Slot, value: float) -> bool:
    """Whether a series can show this: a finite number, of a counter none below zero, of an info one in its labels."""
    if not math.isfinite(value) or (slot.kind is Kind.INFO and slot.number is None):
        return False
    return slot.kind is Kind.GAUGE or value >= 0


def quantile(share: float, buckets: Mapping[float, float]) -> float | None:
    """The quantile as PromQL's histogram_quantile() has it: linear inside a bucket; None when nothing was observed.

    Above the highest finite bound it is that bound: the truth may be greater.
    """
    bounds = sorted(buckets)
    if not bounds or not buckets[bounds[-1]] > 0 or not math.isinf(bounds[-1]) or len(bounds) < 2:
        return None
    rank, below, start = share * buckets[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        count = max(below, buckets[bound])
        if count >= rank and count > below:
            if math.isinf(bound):
                return bounds[-2]
            return start + (bound - start) * (rank - below) / (count - below)
        below, start = count, bound
    return bounds[-2]
