"""The queries of a tick, and groups out of their answers. Pure: who asks is in `prometheus`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pd_operator.signals.exposition import info_number
from pd_operator.signals.fleet import Deployment, Target
from pd_operator.signals.group import Group, GroupKey, group_key, quantities_of
from pd_operator.signals.roll import Page, Roll, pages
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
    return f"{quantity.name}/{percentile}" if quantity.how is How.QUANTILE else quantity.name


def queries(expressions: Expressions, percentiles: Iterable[int]) -> list[Query]:
    """The queries of a tick: the roll call, then one a quantity; of a quantile one a percentile."""
    found = [Query(PODS, expressions.pods())]
    for quantity, tables in catalog.union():
        infos = tuple(t.series[q.info or q.series] for t in tables for q in t.quantities if q.name == quantity.name)
        for percentile in sorted(set(percentiles)) if quantity.how is How.QUANTILE else (0,):
            expression = expressions.quantity(quantity, tables, percentile)
            found.append(Query(name_of(quantity, percentile), expression, quantity, infos))
    return found


class Reader:
    """Answers of one tick, sorted by group."""

    def __init__(self, asked: Sequence[Query], answers: Answers, roll: Roll, source: str) -> None:
        self._answers = answers
        self._roll = roll
        self._source = source
        self._pages: dict[GroupKey, list[Page]] = pages(answers.rows.get(PODS, ()))
        self._numbers = {q.name: _numbers(q, rows) for q in asked if q.quantity and (rows := answers.rows.get(q.name))}

    def groups(self, deployment: Deployment) -> dict[GroupKey, Group]:
        """The groups of one PDDeployment."""
        members: dict[GroupKey, list[Target]] = {}
        for target in deployment.targets:
            members.setdefault(group_key(target), []).append(target)
        return {key: self._group(key, targets, deployment.percentile) for key, targets in members.items() if key[3] != "cache"}

    def _group(self, key: GroupKey, targets: Sequence[Target], percentile: int) -> Group:
        if failure := self._answers.failures.get(PODS):
            return Group(problem=f"query {PODS}: {failure}", source=self._source)
        roll = self._roll.check(targets, self._pages.get(key, ()), self._answers.asked)
        if roll.problem:
            return Group(problem=f"query {PODS}: {roll.problem}", source=self._source, age=roll.age)
        wanted: dict[str, tuple[Quantity, bool]] = {}
        for program, version in {(t.program, t.version) for t in targets}:
            if (table := catalog.table(program, version)) is not None:
                wanted |= {q.name: (q, table.series[q.series].optional) for q in quantities_of(table, key[3])}
        values: dict[str, float] = {}
        unknown: dict[str, str] = {}
        for quantity, optional in wanted.values():
            number = self._number(name_of(quantity, percentile), quantity, optional, key)
            if isinstance(number, str):
                unknown[quantity.name] = number
            else:
                values[quantity.name] = number
        return Group(values, unknown, age=roll.age, pods=roll.count, source=self._source)

    def _number(self, name: str, quantity: Quantity, optional: bool, key: GroupKey) -> float | str:
        """A group's number, or why there is none."""
        if failure := self._answers.failures.get(name):
            return f"query {name}: {failure}"
        value = self._numbers.get(name, {}).get(key)
        if value is None and optional:
            return 0.0
        if value is None:
            return f"query {name}: no series for {key[0]}/{key[1]} {key[3]} in slice {key[2]}"
        if math.isfinite(value):
            return value
        # histogram_quantile() of a histogram that did not move is NaN.
        empty = quantity.how is How.QUANTILE and math.isnan(value)
        return f"query {name}: {'nothing was observed in the window' if empty else f'{value} is no number'}"


def _numbers(query: Query, rows: Sequence[Row]) -> dict[GroupKey, float]:
    """Rows by group. Rows of an info are multiplied by the number in their labels, and added."""
    found: dict[GroupKey, float] = {}
    with_labels = query.quantity is not None and query.quantity.how in (How.SIZE, How.SHARE)
    for metric, value in rows:
        key = _key(metric)
        if key is None:
            continue
        if with_labels:
            number = next((n for info in query.infos if (n := info_number(info, metric)) is not None), math.nan)
            found[key] = found.get(key, 0.0) + value * number
        else:
            found[key] = value
    return found


def _key(metric: Mapping[str, str]) -> GroupKey | None:
    role: Any = metric.get(labels.ROLE) or "router"
    if role not in ("prefill", "decode", "router"):
        return None
    return metric.get(labels.NAMESPACE, ""), metric.get(labels.DEPLOYMENT, ""), metric.get(labels.SLICE, ""), role
