"""docs/reference/metrics.md, made from the metrics themselves: those of /metrics, and what the recording rules record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client.core import Metric

from pd_operator.controller.evidence_metrics import EvidenceMetrics
from pd_operator.controller.object_metrics import ObjectMetrics, Shown
from pd_operator.controller.roster import Roster
from pd_operator.controller.scaling_metrics import ScalingMetrics
from pd_operator.controller.telemetry import Telemetry
from pd_operator.kube.store import Stores
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_promql import PODS, rule_name
from pd_operator.upstream.signals_table import How, Quantity, Series
from pd_operator.upstream.signals_vllm import SHOWN

INTRO: Final = """\
# Metrics

Made from the code (`make generate`). [Monitoring](../operations/monitoring.md) says how they get into Prometheus, and which
alerts and dashboards there are.

## Of the operator

On port 8081, path `/metrics`. Scrape with `honorLabels: true`: `namespace` and `name` are the PDDeployment's.
Series of an object go with it.
"""
HOW: Final = {
    How.SUM: "sum of the newest values",
    How.RATE: "per second, over 60 s",
    How.TOTAL: "sum of counters",
    How.LEAST: "the least within 60 s of the pod that has least",
    How.QUANTILE: "percentile over 60 s",
    How.SIZE: "sum of the number in the labels",
    How.SHARE: "sum of share times size",
}
PROCESS: Final = "process_"


def families() -> list[Metric]:
    """Every family of /metrics, by name, without the process' own."""
    telemetry = Telemetry()
    telemetry.observe(depth=lambda: 0, delayed=lambda: 0, oldest=lambda: 0, leader=lambda: False, lag=lambda: 0, stream_ages=dict)
    telemetry.registry.register(ObjectMetrics(Shown()))
    telemetry.registry.register(ScalingMetrics(Roster(Stores())))
    telemetry.registry.register(EvidenceMetrics(Roster(Stores())))
    found = (m for m in telemetry.registry.collect() if not m.name.startswith(PROCESS))
    return sorted(found, key=lambda metric: metric.name)


def markdown() -> str:
    """The page."""
    return "\n".join([INTRO, *_ours(label_names()), "", *_recorded(), "", *_read(), ""])


def label_names() -> dict[str, tuple[str, ...]]:
    """Labels of each family, in prometheus_client's own attributes: a family without a series has no other place for them."""
    collectors = Telemetry().registry._collector_to_names
    known = {getattr(c, "_name", ""): tuple(getattr(c, "_labelnames", ())) for c in collectors}
    return {m.name: known.get(m.name) or tuple(getattr(m, "_labelnames", ())) for m in families()}


def _ours(known: dict[str, tuple[str, ...]]) -> Iterator[str]:
    yield "| metric | type | labels | meaning |\n|---|---|---|---|"
    for metric in families():
        suffix = "_total" if metric.type == "counter" else ""
        yield f"| `{metric.name}{suffix}` | {metric.type} | {', '.join(known[metric.name])} | {metric.documentation} |"
    yield "\nAnd `process_*`: memory, CPU and file descriptors of the process."


def _recorded() -> Iterator[str]:
    yield "## Recorded\n"
    own = ", ".join(f"`{label}`" for label in labels.GROUP)
    yield f"By the rules of `charts/pd-operator/files/rules/signals.yaml`, with the labels {own} (routers have no role).\n"
    yield "| record | made of | how |\n|---|---|---|"
    yield f"| `{PODS}` | `up` of our pods | when each page was scraped |"
    for quantity, tables in catalog.union():
        names = _names(catalog.series_of(quantity, tables))
        yield f"| `{rule_name(quantity)}` | {names} | {_percent(quantity)}{HOW[quantity.how]}{_side(quantity)} |"


def _read() -> Iterator[str]:
    yield "## Read from the programs\n"
    yield "What the operator, the rules and the dashboards read of each program, and where its names were seen.\n"
    yield "| program | series | seen |\n|---|---|---|"
    for program in catalog.PROGRAMS:
        table = catalog.table(program, "")
        assert table is not None
        yield f"| {program} | {_names(table.series.values())} | {table.source} |"
    yield f"| vllm, for people | {', '.join(f'`{name}`' for name in SHOWN)} | NIXL's stats.py at 0.32.0 |"


def _names(series: Iterable[Series]) -> str:
    return ", ".join(f"`{name}`" for one in series for name in one.names)


def _percent(quantity: Quantity) -> str:
    return f"{quantity.percentile or 95}th " if quantity.how is How.QUANTILE else ""


def _side(quantity: Quantity) -> str:
    return f", on {quantity.role}" if quantity.role else ""
