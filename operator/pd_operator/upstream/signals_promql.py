"""Quantities in PromQL: one expression for all PDDeployments of a cluster, every program and version at once. Pure.

Traps that the forms below avoid: `timestamp()` of anything but a bare selector is the query's own time; `rate()` and sums drop
the name, so two names of one pod would collide; a pod scraped twice would count twice; a series without staleness markers stays
for 5 minutes after its pod.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_table import How, Quantity, Series, Table

WINDOW: Final = 60  # seconds: four scrapes at the usual 15 s, so that one or two missed ones leave a rate
FRESH: Final = 60  # seconds: a gauge older than that is not counted
RECORDED: Final = 95  # percentile of the recorded quantiles that have none of their own
PREFIX: Final = "pdserve"
PODS: Final = f"{PREFIX}:pod_sample_time_seconds:max"  # recorded: when each page of each pod was scraped
_GROUP = ", ".join(labels.GROUP)
_COPIES = ", ".join(labels.COPIES)


@dataclass(frozen=True, slots=True)
class Expressions:
    """What every expression has in common. `recorded`: read the recording rules of the chart instead of the pods' series."""

    matchers: Mapping[str, str] = field(default_factory=lambda: {labels.DEPLOYMENT: '!=""'})
    window: int = WINDOW
    fresh: int = FRESH
    recorded: bool = False

    def pods(self) -> str:
        """Seconds since 1970 of the last scrape of each page, by group, pod and container; failed scrapes are not in it."""
        if self.recorded:
            return self._selector(PODS, {})
        up = self._selector("up", {})
        return f"max by ({_GROUP}, {labels.POD}, {labels.CONTAINER}) (timestamp({up}) and ({up} == 1))"

    def quantity(self, quantity: Quantity, tables: Sequence[Table], percentile: int = 95) -> str:
        """A quantity by group; SIZE and SHARE also by the labels of the info, whose product Python makes."""
        if self.recorded and (quantity.how is not How.QUANTILE or percentile in (quantity.percentile, RECORDED)):
            return self._selector(rule_name(quantity), {})
        series = catalog.series_of(quantity, list(tables))
        if quantity.how is How.SHARE:
            infos = [t.series[q.info] for t in tables for q in t.quantities if q.name == quantity.name]
            return " or ".join(self._share(quantity, one, info) for one, info in zip(series, infos, strict=True))
        if quantity.how is How.SIZE:
            by = ", ".join([*labels.GROUP, *info_labels(series)])
            return f"sum by ({by}) ({self._either(quantity, series, 'plain')})"
        if quantity.how is How.QUANTILE:
            return f"histogram_quantile({percentile / 100:g}, sum by ({_GROUP}, le) ({self._either(quantity, series, 'rate')}))"
        form = {How.SUM: "fresh", How.RATE: "rate", How.TOTAL: "plain", How.LEAST: "least"}[quantity.how]
        either = self._either(quantity, series, form)
        if quantity.how is How.LEAST:
            return f"min by ({_GROUP}) (sum by ({_GROUP}, {labels.POD}) ({either}))"
        return f"sum by ({_GROUP}) ({either})"

    def by_pod(self, quantity: Quantity, tables: Sequence[Table]) -> str:
        """A number of each pod by itself, for core/evidence: the newest one, of counters since the start of the process."""
        series = [t.series[q.series] for t in tables for q in t.evidence if q.name == quantity.name]
        bucket = ", le" if quantity.how is How.QUANTILE else ""
        return f"sum by ({_GROUP}, {labels.POD}{bucket}) ({self._either(quantity, series, 'fresh')})"

    def _share(self, quantity: Quantity, gauge: Series, info: Series) -> str:
        """Gauge times 1, carrying the info's labels over, matched by pod and rank.

        topk: a pod with two infos would otherwise be an error, and an error of one pod fails the query for everybody.
        """
        on = ", ".join([labels.NAMESPACE, labels.POD, *labels.RANKS])
        carried = ", ".join(info_labels([info]))
        left, right = self._one(quantity, gauge, "fresh"), self._one(quantity, info, "plain")
        return f"sum by ({_GROUP}, {carried}) ({left} * on ({on}) group_left ({carried}) topk by ({on}) (1, {right}))"

    def _either(self, quantity: Quantity, series: Sequence[Series], form: str) -> str:
        return " or ".join(self._one(quantity, one, form) for one in series)

    def _one(self, quantity: Quantity, series: Series, form: str) -> str:
        """One family with copies merged. Spellings are alternatives, pod by pod; parts are kept apart by a label, to be added."""
        found = []
        for part, name in enumerate(series.names):
            merged = f"max without ({_COPIES}) ({self._form(self._selector(name, series.match, quantity.role), form)})"
            found.append(f'label_replace({merged}, "part", "{part}", "", "")' if series.added else merged)
        return found[0] if len(found) == 1 else f"({' or '.join(found)})"

    def _form(self, selector: str, form: str) -> str:
        if form == "rate":
            return f"rate({selector}[{self.window}s])"
        if form == "least":
            return f"min_over_time({selector}[{self.window}s])"
        if form == "fresh":
            return f"{selector} and timestamp({selector}) > time() - {self.fresh}"
        return selector

    def _selector(self, name: str, match: Mapping[str, tuple[str, ...]], role: str = "") -> str:
        found = dict(self.matchers)
        if role in ("prefill", "decode"):
            found[labels.ROLE] = f'="{role}"'
        for label, values in match.items():
            one = len(values) == 1
            found[label] = ("=" if one else "=~") + labels.quoted(values[0] if one else "|".join(values))
        return f"{name}{{{','.join(k + v for k, v in sorted(found.items()))}}}"


def info_labels(series: Sequence[Series]) -> list[str]:
    """The labels of an info whose numbers count."""
    return sorted({label for one in series for numbers in one.numbers for label in numbers})


def rule_name(quantity: Quantity) -> str:
    """The name of a quantity's recording rule: level, metric, operation (prometheus.io/docs/practices/rules)."""
    return (
        f"{PREFIX}:{quantity.name}:{f'p{quantity.percentile or RECORDED}' if quantity.how is How.QUANTILE else quantity.how.value}"
    )


def rules() -> dict[str, object]:
    """The rule file: every expression of a tick under its name. A tick that reads them costs Prometheus next to nothing."""
    expressions = Expressions()
    found = [{"record": PODS, "expr": expressions.pods()}]
    found += [
        {"record": rule_name(q), "expr": expressions.quantity(q, tables, q.percentile or RECORDED)} for q, tables in catalog.union()
    ]
    return {"groups": [{"name": "pd-operator-signals", "interval": "15s", "rules": found}]}
