"""The operator's own metrics of scaling, made from the roster when they are scraped, so that no series outlives its object."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_operator.api.scalars import seconds
from pd_operator.controller.roster import Entry, Roster
from pd_operator.core.names import ROLES
from pd_operator.core.scaled import Scaled
from pd_operator.core.scaling.decision import Alert, Bottleneck

PREFIX = "pd_operator_scaling"
OBJECT = ["namespace", "name"]


class ScalingMetrics(Collector):
    """Gauges of every need, input, gate, limit and reason of the last tick."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def describe(self) -> Iterable[Metric]:
        """Nothing is collected at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        role = [*OBJECT, "role"]
        families = {
            "desired": GaugeMetricFamily(f"{PREFIX}_desired_replicas", "Replicas that the last decision asks for.", labels=role),
            "need": GaugeMetricFamily(f"{PREFIX}_need_replicas", "Fractional replicas needed.", labels=role),
            "input": GaugeMetricFamily(f"{PREFIX}_input", "Inputs of the last decision.", labels=[*role, "input"]),
            "reason": GaugeMetricFamily(f"{PREFIX}_reason", "1 for the reason of the last decision.", labels=[*role, "reason"]),
            "limit": GaugeMetricFamily(f"{PREFIX}_limit", "1 for each bound that changed it.", labels=[*role, "limit"]),
            "congested": GaugeMetricFamily(f"{PREFIX}_congested", "1 while decode of the object is congested.", labels=OBJECT),
            "most": GaugeMetricFamily(f"{PREFIX}_budget_gpus", "GPUs of a budget.", labels=["budget"]),
            "held": GaugeMetricFamily(f"{PREFIX}_budget_gpus_held", "GPUs of it that replicas hold.", labels=["budget"]),
            "unknown": GaugeMetricFamily(f"{PREFIX}_signals_unknown", "1 while a signal is not known.", labels=OBJECT),
            "bottleneck": GaugeMetricFamily(f"{PREFIX}_bottleneck", "1 for what limits it.", labels=[*OBJECT, "bottleneck"]),
            "alert": GaugeMetricFamily(f"{PREFIX}_alert", "1 for what looks like load and is not.", labels=[*OBJECT, "alert"]),
            "decided": GaugeMetricFamily(f"{PREFIX}_decided_timestamp_seconds", "When it was last decided.", labels=OBJECT),
            "patience": GaugeMetricFamily(f"{PREFIX}_max_queue_seconds", "backpressure.maxQueueTime.", labels=OBJECT),
            "lead": GaugeMetricFamily(
                f"{PREFIX}_lead_seconds", "From creating a replica to its being ready, measured.", labels=[*role, "quantile"]
            ),
        }
        for entry in self._roster.entries():
            scaled = self._roster.scaled(entry.key, entry.uid)
            if scaled is not None:
                _add(families, entry, scaled)
        for budget, (most, held) in sorted(self._roster.budgets.items()):
            families["most"].add_metric([budget], most)
            families["held"].add_metric([budget], held)
        yield from families.values()


def _add(families: dict[str, GaugeMetricFamily], entry: Entry, scaled: Scaled) -> None:
    decision = scaled.decision
    key = list(entry.key)
    families["congested"].add_metric(key, float(bool(decision.congested)))
    families["unknown"].add_metric(key, float(bool(scaled.unknown)))
    families["decided"].add_metric(key, scaled.time)
    families["patience"].add_metric(key, seconds(entry.spec.backpressure.max_queue_time))
    for bottleneck in Bottleneck:
        families["bottleneck"].add_metric([*key, bottleneck.value], float(bottleneck is decision.bottleneck))
    for alert in Alert:
        families["alert"].add_metric([*key, alert.value], float(alert in decision.alerts))
    for role in ROLES:
        answer = decision.of(role)
        labels = [*key, role]
        families["desired"].add_metric(labels, answer.desired)
        if answer.need is not None:
            families["need"].add_metric(labels, answer.need)
        for name, value in sorted(answer.inputs.items()):
            if value is not None:
                families["input"].add_metric([*labels, name], value)
        if (lead := scaled.lead.get(role)) is not None:
            families["lead"].add_metric([*labels, "0.5"], lead.p50)
            families["lead"].add_metric([*labels, "0.9"], lead.p90)
        families["reason"].add_metric([*labels, answer.reason.value], 1)
        for limit in sorted({limit.reason.value for limit in answer.limits}):
            families["limit"].add_metric([*labels, limit], 1)
