"""The wedge rule: a slice of which one part has a node and the other finds none for too long is given up, and its domain is left
alone for a while. What is left alone stands in status, so that it survives a restart.

The clock of a pod is its condition PodScheduled. It stops while a scheduling gate holds a pod of the slice and while a node is
being made, and starts anew when the slice's domain gets a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from pd_operator.api.scalars import seconds
from pd_operator.core.names import ROLE, ROLES, WORKER
from pd_operator.core.observed import PodFact
from pd_operator.core.placement.demand import BACKOFF_MAX, Exclusion, exclude
from pd_operator.core.sites import Kind, Site
from pd_operator.core.snapshot import Snapshot

EXCLUDED_NODE: Final = "node/"  # prefix where only nodes are known and not their domain; no label value holds a slash
NEW_NODE: Final = timedelta(minutes=15)  # a node that is not ready and older than this is broken, not being made

Place = tuple[str, Site, tuple[int, int], str]  # slice, site, (prefill, decode) replicas of which every pod is bound, domain


@dataclass(frozen=True, slots=True)
class Wedge:
    """A slice that does not come together."""

    slice: str
    places: tuple[str, ...]  # domains, or nodes with EXCLUDED_NODE in front
    reason: str


def due(snapshot: Snapshot, slices: Sequence[Place]) -> float | None:
    """Seconds until the clock of a slice runs out; None while none runs. No event comes then."""
    limit = seconds(snapshot.spec.placement.scheduling_timeout)
    starts = [s for name, site, bound, domain in slices if (s := _clock(snapshot, name, site, bound, domain)[0]) is not None]
    left = [limit - (snapshot.now - start).total_seconds() for start in starts]
    return max(1.0, min(left)) if left else None


def exclusions(snapshot: Snapshot, slices: Sequence[Place]) -> tuple[tuple[Exclusion, ...], tuple[Wedge, ...]]:
    """What is left alone, and the slices of the current revision that are given up for it."""
    before = {e.domain: e for e in recorded(snapshot.status)}
    held = {domain for _, _, bound, domain in slices if all(bound)}
    kept = {d: e for d, e in before.items() if d not in held and snapshot.now < e.until + BACKOFF_MAX}
    wedged = []
    for name, site, bound, domain in slices:
        stuck = _stuck(snapshot, name, site, bound, domain)
        if not stuck:
            continue
        nodes = {p.node for role in ROLES for p in snapshot.engines_of(name, role) if p.node and not p.deleting}
        places = (domain,) if domain else tuple(sorted(EXCLUDED_NODE + n for n in nodes))
        wedged.append(Wedge(name, places, stuck))
        for place in places:
            if place not in kept or kept[place].until <= snapshot.now:
                kept[place] = exclude(place, stuck, snapshot.now.replace(microsecond=0), kept.get(place))
    return tuple(kept[d] for d in sorted(kept)), tuple(wedged)


def recorded(status: Mapping[str, Any]) -> list[Exclusion]:
    """Exclusions that status holds."""
    found = []
    for item in status.get("excludedDomains", ()):
        until = datetime.fromisoformat(item["until"])
        found.append(Exclusion(item["name"], item.get("reason", ""), until, int(item.get("times", 1))))
    return found


def record(excluded: Sequence[Exclusion]) -> list[dict[str, Any]]:
    """Exclusions for status."""
    return [
        {"name": e.domain, "reason": e.reason[:1024], "until": e.until.strftime("%Y-%m-%dT%H:%M:%SZ"), "times": e.times}
        for e in excluded
    ]


def _stuck(snapshot: Snapshot, name: str, site: Site, bound: tuple[int, int], domain: str) -> str:
    """Why a slice is given up; "" while it is not."""
    since, waiting = _clock(snapshot, name, site, bound, domain)
    limit = snapshot.spec.placement.scheduling_timeout
    if since is None or (snapshot.now - since).total_seconds() < seconds(limit):
        return ""
    labels = waiting[0].labels
    role = labels.get(ROLE) or labels.get(WORKER, "engine")
    return f"a {role} pod found no node for {limit}: {waiting[0].scheduling_message[:300]}"


def _clock(snapshot: Snapshot, name: str, site: Site, bound: tuple[int, int], domain: str) -> tuple[datetime | None, list[PodFact]]:
    """When the clock of a slice started (None: it stands) and the pods that wait."""
    pods = [p for role in ROLES for p in snapshot.engines_of(name, role) if not p.deleting]
    waiting = [p for p in pods if p.scheduling_reason == "Unschedulable" and not p.scheduled]
    begun = any(bound) or any(p.node for p in pods)  # of a group some pods may have a node and others none
    if all(bound) or not waiting or not (begun or site.kind is Kind.PINNED):
        return None, waiting  # a pair runs, nobody waits, or nothing of it is anywhere yet
    return _since(snapshot, pods, waiting, domain), waiting


def _since(snapshot: Snapshot, pods: Sequence[PodFact], waiting: Sequence[PodFact], domain: str) -> datetime | None:
    """When the clock started; None while it is stopped."""
    if any(p.scheduling_reason == "SchedulingGated" or (p.nominated and not p.node) for p in pods) or making(snapshot):
        return None
    starts = [p.scheduling_since for p in waiting if p.scheduling_since]
    if not starts:
        return None
    since = min(starts)
    newest = snapshot.room.newest.get(domain) if snapshot.room else None
    return max(since, newest) if newest else since


def making(snapshot: Snapshot) -> bool:
    """Whether a node of the cluster is being made: it exists, is new and is not ready yet."""
    if snapshot.room is None:
        return False
    return any(created is not None and snapshot.now - created < NEW_NODE for created in snapshot.room.unready.values())
