"""Pages out of Prometheus: the queries that give the counters of each pod by itself, and the pages made of their answers. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pd_operator.core.evidence.counters import Counters
from pd_operator.signals.answers import PODS, Answers, Query
from pd_operator.signals.fleet import Deployment, Key, Side, Target
from pd_operator.signals.roll import pages as scraped
from pd_operator.signals.tally import page_of
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_promql import Expressions
from pd_operator.upstream.signals_table import How

PROGRAMS = (*catalog.TICK, "lmcache")
Place = tuple[str, str, Side]  # namespace, pod, side


def page_queries(expressions: Expressions) -> list[Query]:
    """The roll call, then one query a number."""
    found = [Query(PODS, expressions.pods())]
    for quantity, tables in catalog.union(PROGRAMS, evidence=True):
        found.append(Query(quantity.name, expressions.by_pod(quantity, tables), quantity))
    return found


def pages_of(fleet: Sequence[Deployment], asked: Sequence[Query], answers: Answers) -> dict[Key, tuple[Counters, ...]]:
    """The pages of every deployment; one whose query failed does not know that number."""
    values: dict[Place, dict[str, float]] = {}
    buckets: dict[Place, dict[str, dict[float, float]]] = {}
    for query in asked[1:]:
        for metric, value in answers.rows.get(query.name, ()):
            place = _place(metric, query)
            if place is None or not math.isfinite(value):
                continue
            if query.quantity is not None and query.quantity.how is How.QUANTILE:
                buckets.setdefault(place, {}).setdefault(query.name, {})[float(metric.get("le", "nan"))] = value
            else:
                values.setdefault(place, {})[query.name] = value
    times = {(key[0], pod): time for key, pods in scraped(answers.rows.get(PODS, ())).items() for pod, time in pods.items()}
    why = answers.failures.get(PODS, "")
    return {d.key: tuple(_page(t, values, buckets, times, answers, why) for t in d.targets) for d in fleet}


def _page(
    target: Target,
    values: Mapping[Place, Mapping[str, float]],
    buckets: Mapping[Place, Mapping[str, Mapping[float, float]]],
    times: Mapping[tuple[str, str], float],
    answers: Answers,
    why: str,
) -> Counters:
    place = (target.namespace, target.pod, target.side)
    found = dict(values.get(place, {}))
    time = times.get(place[:2], 0.0) if target.side != "cache" else (answers.asked if found else 0.0)
    table = catalog.table(target.program, target.version)
    if time and table is not None:  # a series that appears with its first event is zero before it, unless its query failed
        mine = (q for q in table.evidence if q.role in ("", target.side) and q.how is not How.QUANTILE)
        absent = (q for q in mine if q.name not in found and q.name not in answers.failures)
        found |= {q.name: 0.0 for q in absent if table.series[q.series].optional}
    return page_of(target, time, found, buckets.get(place, {}), why or ("" if time else "Prometheus has no page of it"))


def _place(metric: Mapping[str, str], query: Query) -> Place | None:
    """Whose row it is: numbers of the cache are told by their query, engines by their role."""
    pod, namespace = metric.get(labels.POD, ""), metric.get(labels.NAMESPACE, "")
    side: Any = "cache" if query.quantity is not None and query.quantity.role == "cache" else metric.get(labels.ROLE) or "router"
    return (namespace, pod, side) if pod and side in ("prefill", "decode", "router", "cache") else None
