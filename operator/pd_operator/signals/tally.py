"""Tallies: the counters of each pod by itself, for core/evidence, out of the windows of podScrape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pd_operator.core.evidence.counters import Counters
from pd_operator.signals.fleet import Target
from pd_operator.signals.window import Window

LATE: Final = 2.5  # periods: a page that old is not had any more


def of_window(target: Target, window: Window | None, failure: str, now: float) -> Counters:
    """What the newest page of a target showed; without one, why."""
    values: dict[str, float] = {}
    buckets: dict[str, Mapping[float, float]] = {}
    time = 0.0
    if window is not None and window.points:
        time = window.points[-1].time
        for quantity in window.table.evidence:
            if quantity.role not in ("", target.side):
                continue
            number = window.tally(quantity)
            if isinstance(number, dict):
                buckets[quantity.name] = number
            elif number is not None:
                values[quantity.name] = number
        if not failure and window.age(now) > LATE * window.period:
            failure = f"no page for {window.age(now):.0f} s"
    return page_of(target, time, values, buckets, failure)


def page_of(
    target: Target, time: float, values: Mapping[str, float], buckets: Mapping[str, Mapping[float, float]], failure: str
) -> Counters:
    """The page of a target, whoever read it."""
    return Counters(
        target.pod, target.uid, target.slice, target.side, time, values, buckets,
        ready=target.ready, deleting=target.deleting, failure=failure, running=target.running, created=target.created,
    )  # fmt: skip
