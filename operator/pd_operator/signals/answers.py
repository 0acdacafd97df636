"""The queries of a tick, and groups out of their answers. Pure: who asks is in `prometheus`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final

from pd_operator.signals.exposition import info_number
from pd_operator.signals.fleet import Deployment, Part, Side
from pd_operator.signals.group import Group, GroupKey, quantities_of
from pd_operator.signals.roll import Pages, Roll, pages
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_promql import Expressions
from pd_operator.upstream.signals_table import How, Quantity, Series

PODS: Final = "pods"
Row = tuple[Mapping[str, str], float]


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a tick. `infos` are the series in whose labels the number of a SIZE or SHARE stands."""

    name: str  # for people, and for logs
    expression: str
    quantity: Quantity | None = None  # None: the roll call
    infos: tuple[Series, ...] = ()


@dataclass(frozen=True, slots=True)
class Answers:
    """All answers of one tick: rows by query, and why a query has none."""

    rows: Mapping[str, Sequence[Row]] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    asked: float = 0.0  # the server's time of evaluation: ages are differences of its own times, so clocks may differ


def name_of(quantity: Quantity, percentile: int) -> str:
    """The name of the query that gives a quantity."""
    return f"{quantity.name}/{quantity.percentile or percentile}" if quantity.how is How.QUANTILE else quantity.name


def queries(expressions: Expressions, percentiles: Iterable[int]) -> list[Query]:
    """The queries of a tick: the roll call, then one a quantity; of a quantile one a percentile."""
    found = [Query(PODS, expressions.pods())]
    for quantity, tables in catalog.union():
        infos = tuple(t.series[q.info or q.series] for t in tables for q in t.quantities if q.name == quantity.name)
        own = {quantity.percentile} if quantity.percentile else set(percentiles)
        for percentile in sorted(own) if quantity.how is How.QUANTILE else (0,):
            expression = expressions.quantity(quantity, tables, percentile)
            found.append(Query(name_of(quantity, percentile), expression, quantity, infos))
    return found


class Reader:
    """Answers of one tick, sorted by group."""

    def __init__(self, asked: Sequence[Query], answers: Answers, roll: Roll, source: str, now: float) -> None:
        self._answers = answers
        self._now = now
        self._roll = roll
        self._source = source
        self._pages: Mapping[GroupKey, Pages] = pages(answers.rows.get(PODS, ()))
        self._numbers: dict[GroupKey, dict[str, float]] = {}
        for query in asked:
            if query.quantity is not None:
                _sort(query, answers.rows.get(query.name, ()), self._numbers)

    def groups(self, deployment: Deployment) -> dict[GroupKey, Group]:
        """The groups of one PDDeployment."""
        name = deployment.key
        groups = (((*name, part.slice, part.side), part) for part in deployment.parts if part.side != "cache")
        return {key: self._group(key, part, deployment.percentile) for key, part in groups}

    def _group(self, key: GroupKey, part: Part, percentile: int) -> Group:
        if failure := self._answers.failures.get(PODS):
            return Group(problem=f"query {PODS}: {failure}", source=self._source)
        roll = self._roll.check(part.targets, self._pages.get(key, {}), self._answers.asked, self._now)
        if roll.problem:
            return Group(problem=f"query {PODS}: {roll.problem}", source=self._source, age=roll.age)
        values: dict[str, float] = {}
        unknown: dict[str, str] = {}
        numbers = self._numbers.get(key, {})
        for quantity, optional in _wanted(part.programs, part.side):
            name = name_of(quantity, percentile)
            number = numbers.get(name)
            if number is not None and math.isfinite(number):
                values[quantity.name] = number
            elif number is None and optional and name not in self._answers.failures:
                values[quantity.name] = 0.0
            else:
                unknown[quantity.name] = self._why(name, quantity, number, key)
        return Group(values, unknown, age=roll.age, pods=roll.count, unread=roll.unread, source=self._source)

    def _why(self, name: str, quantity: Quantity, number: float | None, key: GroupKey) -> str:
        """Why a group has no such number."""
        if failure := self._answers.failures.get(name):
            return f"query {name}: {failure}"
        if number is None:
            return f"query {name}: no series for {key[0]}/{key[1]} {key[3]} in slice {key[2]}"
        # histogram_quantile() of a histogram that did not move is NaN.
        empty = quantity.how is How.QUANTILE and math.isnan(number)
        return f"query {name}: {'nothing was observed in the window' if empty else f'{number} is no number'}"


@lru_cache(maxsize=1024)
def _wanted(programs: frozenset[tuple[str, str]], side: Side) -> tuple[tuple[Quantity, bool], ...]:
    """What a group of these programs has, and whether its absence is zero."""
    found: dict[str, tuple[Quantity, bool]] = {}
    for program, version in sorted(programs):
        if (table := catalog.table(program, version)) is not None:
            found |= {q.name: (q, table.series[q.series].optional) for q in quantities_of(table, side)}
    return tuple(found.values())


def _sort(query: Query, rows: Sequence[Row], into: dict[GroupKey, dict[str, float]]) -> None:
    """Rows by group. Rows of an info are multiplied by the number in their labels, and added."""
    with_labels = query.quantity is not None and query.quantity.how in (How.SIZE, How.SHARE)
    for metric, value in rows:
        key = _key(metric)
        if key is None:
            continue
        mine = into.setdefault(key, {})
        if with_labels:
            number = next((n for info in query.infos if (n := info_number(info, metric)) is not None), math.nan)
            mine[query.name] = mine.get(query.name, 0.0) + value * number
        else:
            mine[query.name] = value


def _key(metric: Mapping[str, str]) -> GroupKey | None:
    role: Any = metric.get(labels.ROLE) or "router"
    if role not in ("prefill", "decode", "router"):
        return None
    return metric.get(labels.NAMESPACE, ""), metric.get(labels.DEPLOYMENT, ""), metric.get(labels.SLICE, ""), role
