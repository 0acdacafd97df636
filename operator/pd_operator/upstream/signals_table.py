"""Tables of signals: which series of a program at a version say what, and how exactly. Types only; one file a program beside this.

A *series* is a family in the page of /metrics. A *quantity* is one number of a group (one role of one slice, or its router) made
of one series, or, as `evidence`, of one pod: `signals/` makes it from scrapes, `signals_promql` says it in PromQL, and the same
formulas (`signals/formulas`) make signals of both. A *row* says for each signal of core/scaling whether a program gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What a series is."""

    GAUGE = "gauge"
    COUNTER = "counter"  # also _sum, _count and _bucket of histograms
    INFO = "info"  # always 1; the numbers are in its labels


class How(StrEnum):
    """How a quantity is made of the series of one group's pods."""

    SUM = "sum"  # of the newest values
    RATE = "rate"  # per second, over the window
    TOTAL = "total"  # sum of counters since each pod's start
    LEAST = "least"  # over the pods, the least value of the window
    QUANTILE = "quantile"  # of the histogram's increase in the window
    SIZE = "size"  # sum of the number in an info's labels
    SHARE = "share"  # sum of gauge (0..1) times the number in the labels of an info of the same pod and rank


class Quality(StrEnum):
    """How well a program gives a signal."""

    EXACT = "Exact"
    DERIVED = "Derived"
    MISSING = "Missing"


@dataclass(frozen=True, slots=True)
class Series:
    """One family. `names` are spellings of one thing, newest first (the first that is there counts), or, with `added`, parts."""

    kind: Kind
    names: tuple[str, ...]
    match: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # label -> values; a series with others is not read
    added: bool = False
    optional: bool = False  # it appears with its first event: absent is zero
    numbers: tuple[tuple[str, ...], ...] = ()  # INFO: labels whose product is the number; the first set that is there counts


@dataclass(frozen=True, slots=True)
class Quantity:
    """One number of a group. `role` is the only role that is read, "" = both engines' roles, "router" and "cache" the others.

    `percentile` is of a QUANTILE: 0 = that of the PDDeployment's SLO.
    """

    name: str
    how: How
    series: str  # key of Table.series
    role: str = ""
    info: str = ""  # SHARE: key of the info
    percentile: int = 0


@dataclass(frozen=True, slots=True)
class Row:
    """How one signal of `Readings` is had. `side` is where it is read: prefill, decode, router, or several."""

    signal: str
    side: str
    quality: Quality
    formula: str  # in quantities, for people; for Missing, what is missing


@dataclass(frozen=True, slots=True)
class Table:
    """All that is known of one program at a version. `source` names where the names were seen."""

    program: str
    series: Mapping[str, Series]
    quantities: tuple[Quantity, ...]
    rows: tuple[Row, ...]
    source: str
    # Numbers of each pod by itself, for core/evidence: TOTAL and SUM are one number, QUANTILE the counts by upper bound.
    evidence: tuple[Quantity, ...] = ()

    def row(self, signal: str) -> Row | None:
        """The row of a signal."""
        return next((row for row in self.rows if row.signal == signal), None)
