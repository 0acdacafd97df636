"""The roll call: which of our pods Prometheus scraped lately, and who else claims to be one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.signals.fleet import Deployment, Target
from pd_operator.signals.group import GroupKey
from pd_operator.upstream import signals_labels as labels

# The container whose page has the load; LMCache's page of the same pod is no proof that the engine was scraped.
ENGINE_CONTAINER: Final = "engine"
ROUTER_CONTAINER: Final = "router"


@dataclass(frozen=True, slots=True)
class Page:
    """One scraped page."""

    pod: str
    time: float  # of the scrape, the server's clock


@dataclass(frozen=True, slots=True)
class Answer:
    """What a roll call found: how many pods count, how old the oldest is, or what is wrong."""

    count: int = 0
    age: float = 0.0
    problem: str = ""


def pages(rows: Iterable[tuple[Mapping[str, str], float]]) -> dict[GroupKey, list[Page]]:
    """The rows of the query `pods` by group."""
    found: dict[GroupKey, list[Page]] = {}
    for metric, time in rows:
        container = metric.get(labels.CONTAINER, "")
        role = metric.get(labels.ROLE, "")
        if container == ROUTER_CONTAINER and not role:
            side: Any = "router"
        elif container == ENGINE_CONTAINER and role in ("prefill", "decode"):
            side = role
        else:
            continue
        key = (metric.get(labels.NAMESPACE, ""), metric.get(labels.DEPLOYMENT, ""), metric.get(labels.SLICE, ""), side)
        found.setdefault(key, []).append(Page(metric.get(labels.POD, ""), time))
    return found


class Roll:
    """Remembers pods that left the fleet, since Prometheus shows them a little longer."""

    def __init__(self, fresh: float) -> None:
        self._fresh = fresh
        self._seen: dict[tuple[str, str], float] = {}  # namespace and pod -> when it was last in the fleet

    def call(self, fleet: tuple[Deployment, ...], now: float) -> None:
        """Take the fleet in; pods that left longer ago than a rate looks back are forgotten."""
        for deployment in fleet:
            for target in deployment.targets:
                self._seen[target.namespace, target.pod] = now
        for gone in [pod for pod, last in self._seen.items() if now - last > 5 * self._fresh]:
            del self._seen[gone]

    def check(self, targets: Sequence[Target], seen: Sequence[Page], asked: float) -> Answer:
        """Compare a group's pods with what was scraped. `asked` is the server's time of the query."""
        namespace = targets[0].namespace
        ours = {t.pod for t in targets}
        fresh = {page.pod: page.time for page in seen if asked - page.time <= self._fresh}
        if foreign := sorted(pod for pod in fresh if (namespace, pod) not in self._seen):
            return Answer(problem=f"pod {foreign[0]} carries the labels of {targets[0].deployment} and is none of its pods")
        lost = sorted(t.pod for t in targets if t.ready and t.pod not in fresh)
        known = {page.pod: page.time for page in seen}
        if lost:
            pod, others = lost[0], f" ({len(lost)} of {len(ours)} pods are missing)" if len(lost) > 1 else ""
            since = f"last scraped {asked - known[pod]:.0f} s ago" if pod in known else "not scraped"
            return Answer(problem=f"pod {pod}: {since}{others}", age=max(0.0, asked - known.get(pod, asked)))
        counted = [time for pod, time in fresh.items() if pod in ours]
        if not counted:
            return Answer(problem=f"pod {min(ours)}: not scraped, and no pod of the group is ready")
        return Answer(len(counted), max(0.0, asked - min(counted)))
