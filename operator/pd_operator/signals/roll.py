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


NEVER: Final = float("-inf")
Pages = Mapping[str, float]  # pod -> time of its scrape, the server's clock


@dataclass(frozen=True, slots=True)
class Answer:
    """What a roll call found: how many pods count, how old the oldest is, or what is wrong."""

    count: int = 0
    age: float = 0.0
    problem: str = ""
    unread: int = 0  # ready engines that are too new to have been scraped


def pages(rows: Iterable[tuple[Mapping[str, str], float]]) -> Mapping[GroupKey, Pages]:
    """The rows of the query `pods` by group."""
    found: dict[GroupKey, dict[str, float]] = {}
    for metric, time in rows:
        container = metric.get(labels.CONTAINER, "")
        role: Any = metric.get(labels.ROLE, "")
        if container == ROUTER_CONTAINER and not role:
            role = "router"
        elif container != ENGINE_CONTAINER or role not in ("prefill", "decode"):
            continue
        key = (metric.get(labels.NAMESPACE, ""), metric.get(labels.DEPLOYMENT, ""), metric.get(labels.SLICE, ""), role)
        found.setdefault(key, {})[metric.get(labels.POD, "")] = time
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

    def check(self, targets: Sequence[Target], seen: Pages, asked: float, now: float) -> Answer:
        """Compare a group's pods with what was scraped. `asked` is the server's time of the query, `now` ours.

        Engines that became ready within half of `fresh` (a scrape of the usual 15 s and a tick) and were never scraped are left out
        and counted, as long as others were.
        """
        since = asked - self._fresh
        times = [(target, seen.get(target.pod, NEVER)) for target in targets]
        counted = [time for _, time in times if time >= since]
        if len(counted) < len(seen) and (stranger := self._stranger(targets, seen, since)):
            return Answer(problem=f"pod {stranger} carries the labels of {targets[0].deployment} and is none of its pods")
        unread = [t.pod for t, time in times if time == NEVER and t.young(now, self._fresh / 2)] if counted else []
        lost = sorted((t.pod, time) for t, time in times if t.ready and time < since and t.pod not in unread)
        if lost:
            pod, time = lost[0]
            others = f" ({len(lost)} of {len(targets)} pods are missing)" if len(lost) > 1 else ""
            told = f"last scraped {asked - time:.0f} s ago" if time > NEVER else "not scraped"
            return Answer(problem=f"pod {pod}: {told}{others}", age=max(0.0, asked - time) if time > NEVER else 0.0)
        if not counted:
            return Answer(problem=f"pod {min(t.pod for t in targets)}: not scraped, and no pod of the group is ready")
        return Answer(len(counted), max(0.0, asked - min(counted)), unread=len(unread))

    def _stranger(self, targets: Sequence[Target], seen: Pages, since: float) -> str:
        """The first pod that was scraped lately and neither is nor lately was of the fleet."""
        namespace = targets[0].namespace
        return min((pod for pod, time in seen.items() if time >= since and (namespace, pod) not in self._seen), default="")
