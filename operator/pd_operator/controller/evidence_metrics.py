"""Metrics of the evidence, made from the roster when they are scraped, so that no series outlives its object."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_operator.controller.roster import Roster
from pd_operator.core.evidence.finding import ORDER

PREFIX = "pd_operator_handoff"
OBJECT = ["namespace", "name"]
COUNTERS = {
    "transfers": ("transfers", "Transfers of state that ended on decode."),
    "transferred_bytes": ("transferred_bytes", "Bytes that they moved."),
    "failed_transfers": ("failed_transfers", "Transfers that failed."),
    "fallbacks": ("fallback", "Requests whose prompt decode computed itself; none of them is among the transfers."),
    "expired": ("expired", "Leases that ended before decode took the state."),
    "read_late": ("read_late", "Reads of state after its lease had ended: the answers may be wrong."),
}


class EvidenceMetrics(Collector):
    """Counts since the operator first saw the object, or since its status told them, and what is wrong now."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    def describe(self) -> Iterable[Metric]:
        """Nothing is collected at registration."""
        return []

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        counters = {n: CounterMetricFamily(f"{PREFIX}_{short}", text, labels=OBJECT) for n, (short, text) in COUNTERS.items()}
        verified = GaugeMetricFamily(
            f"{PREFIX}_verified_replicas", "Ready replicas that evidence proved.", labels=[*OBJECT, "role"]
        )
        findings = GaugeMetricFamily(f"{PREFIX}_findings", "What is wrong now, by reason.", labels=[*OBJECT, "reason"])
        proved = GaugeMetricFamily(
            f"{PREFIX}_last_verified_timestamp_seconds", "When counters last proved a handoff.", labels=OBJECT
        )
        unread = GaugeMetricFamily(f"{PREFIX}_unread_replicas", "Ready replicas whose page was never read.", labels=OBJECT)
        for entry in self._roster.watched():
            evidence = self._roster.evidence(entry.key, entry.uid)
            if evidence is None:
                continue
            key = list(entry.key)
            for name, family in counters.items():
                family.add_metric(key, evidence.totals.get(name, 0.0))
            for role, count in sorted(evidence.verified.items()):
                verified.add_metric([*key, role], count)
            for reason in ORDER:
                findings.add_metric([*key, reason.value], sum(f.reason is reason for f in evidence.findings))
            if evidence.last_verified is not None:
                proved.add_metric(key, evidence.last_verified)
            unread.add_metric(key, len(evidence.unread))
        yield from (*counters.values(), verified, findings, proved, unread)
        yield from self._attained()

    def _attained(self) -> Iterable[Metric]:
        share = GaugeMetricFamily(
            "pd_operator_attainment_ratio", "Share of requests within an objective: ttft, itl.", labels=[*OBJECT, "objective"]
        )
        goodput = GaugeMetricFamily(
            "pd_operator_goodput_ratio", "Share of requests within both objectives, at least (min) and at most (max).",
            labels=[*OBJECT, "bound"],
        )  # fmt: skip
        window = GaugeMetricFamily("pd_operator_attainment_window_seconds", "Time that the shares cover.", labels=OBJECT)
        ended = CounterMetricFamily(
            "pd_operator_requests",
            "Requests by who counted them and how they ended; what a program does not count is absent.",
            labels=[*OBJECT, "by", "outcome"],
        )
        for entry in self._roster.watched():
            evidence = self._roster.evidence(entry.key, entry.uid)
            if evidence is None:
                continue
            key, found = list(entry.key), evidence.attained
            for name, value in (("ttft", found.ttft), ("itl", found.itl)):
                if value is not None:
                    share.add_metric([*key, name], value)
            for bound, value in zip(("min", "max"), found.goodput or (), strict=False):
                goodput.add_metric([*key, bound], value)
            window.add_metric(key, found.window)
            for (by, outcome), count in sorted(evidence.outcomes.items()):
                ended.add_metric([*key, by, outcome], count)
        yield from (share, goodput, window, ended)
