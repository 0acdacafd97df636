"""A group: one role of one slice, or its routers, as one source showed it; and the group's numbers out of its pods' windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pd_operator.core.scaling.readings import Quality, Signal, State
from pd_operator.signals.fleet import Side, Target
from pd_operator.signals.window import Window, quantile
from pd_operator.upstream.signals_table import How, Quantity, Table

GroupKey = tuple[str, str, str, Side]  # namespace, deployment, slice, side


@dataclass(frozen=True, slots=True)
class Group:
    """Numbers of one group, by quantity, and why those that are missing are."""

    values: Mapping[str, float] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    problem: str = ""  # why nothing is known
    age: float = 0.0  # seconds since the oldest sample in it
    pods: int = 0  # that count
    unread: int = 0  # ready engines that are too new to have been read; they count nowhere
    source: str = ""  # where from, for people

    def signal(self, quantity: str, quality: Quality = Quality.EXACT) -> Signal:
        """One number as a signal."""
        value = self.values.get(quantity)
        if value is not None and math.isfinite(value) and not self.problem:
            return Signal(State.VALUE if value else State.IDLE, value, self.age, quality, self.source)
        why = self.problem or self.unknown.get(quantity) or f"{quantity} is {'absent' if value is None else 'no number'}"
        return Signal(State.UNKNOWN, age=self.age, quality=quality, source=f"{self.source}: {why}")


def group_key(target: Target) -> GroupKey:
    """The group of a target."""
    return target.namespace, target.deployment, target.slice, target.side


def quantities_of(table: Table, side: Side) -> list[Quantity]:
    """What is wanted of a group of this side."""
    roles = ("", side) if side in ("prefill", "decode") else (side,)
    return [q for q in table.quantities if q.role in roles]


def from_windows(
    members: Sequence[tuple[Target, Window | None, str]],
    now: float,
    percentile: int,
    source: str = "podScrape",
    patience: float = 0.0,
) -> Group:
    """The group of these targets; a window is None before the first sample, the text is why the last try failed.

    A ready pod without a fresh sample makes all of the group unknown: what the others show is not the whole load. Engines that
    became ready within `patience` seconds and have no rates yet are left out and counted, as long as others tell something.
    """
    found = [m for m in members if not _is_unread(m, now, patience)]
    if any(target.ready or window is not None for target, window, _ in found):
        return replace(_from_windows(found, now, percentile, source), unread=len(members) - len(found))
    return _from_windows(members, now, percentile, source)


def _is_unread(member: tuple[Target, Window | None, str], now: float, patience: float) -> bool:
    target, window, _ = member
    return (window is None or len(window.points) < 2) and target.young(now, patience)


def _from_windows(members: Sequence[tuple[Target, Window | None, str]], now: float, percentile: int, source: str) -> Group:
    fresh = [(target, window) for target, window, _ in members if window is not None and not window.stale(now)]
    held = {target.uid for target, _ in fresh}
    missing = [(t, w, why) for t, w, why in members if t.uid not in held]
    lost = next(((t, w, why) for t, w, why in missing if t.ready), missing[0] if missing and not fresh else None)
    if lost is not None:
        return Group(
            problem=_lost(lost, now, sum(t.ready for t, *_ in missing), len(members)), source=source, age=_oldest(members, now)
        )
    values: dict[str, float] = {}
    unknown: dict[str, str] = {}
    for quantity in _wanted(fresh):
        number = _number(quantity, fresh, percentile)
        if isinstance(number, str):
            unknown[quantity.name] = number
        else:
            values[quantity.name] = number
    age = max((window.age(now) for _, window in fresh), default=0.0)
    return Group(values, unknown, age=age, pods=len(fresh), source=source)


def _wanted(fresh: Sequence[tuple[Target, Window]]) -> Iterable[Quantity]:
    return {q.name: q for target, window in fresh for q in quantities_of(window.table, target.side)}.values()


def _number(quantity: Quantity, fresh: Sequence[tuple[Target, Window]], percentile: int) -> float | str:
    """The group's number, or why there is none. Pods that are not ready count only when they have the number."""
    parts: list[float] = []
    counted: list[Window] = []
    for target, window in fresh:
        if quantity.series not in window.table.series:
            return f"{quantity.name}: {window.table.program} {target.version} has no such series"
        part = window.value(quantity)
        if not isinstance(part, str):
            parts.append(part)
            counted.append(window)
        elif target.ready:
            return f"pod {target.pod}: {part}"
    if not parts:
        return f"{quantity.name}: no pod shows it yet"
    if quantity.how is How.LEAST:
        return min(parts)
    if quantity.how is How.QUANTILE:
        found = quantile((quantity.percentile or percentile) / 100, _merged(window.buckets(quantity) for window in counted))
        return "nothing was observed in the window" if found is None else found
    return sum(parts)


def _merged(all_buckets: Iterable[Mapping[float, float]]) -> dict[float, float]:
    total: dict[float, float] = {}
    for buckets in all_buckets:
        for bound, count in buckets.items():
            total[bound] = total.get(bound, 0.0) + count
    return total


def _lost(lost: tuple[Target, Window | None, str], now: float, ready: int, members: int) -> str:
    target, window, why = lost
    since = f"last sample {window.age(now):.0f} s ago" if window is not None and window.points else "no sample yet"
    others = f" ({ready} of {members} pods are missing)" if ready > 1 else ""
    return f"pod {target.pod}: {since}{f', {why}' if why else ''}{others}"


def _oldest(members: Sequence[tuple[Target, Window | None, str]], now: float) -> float:
    return max((w.age(now) for _, w, _ in members if w is not None and w.points), default=0.0)
