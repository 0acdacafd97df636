"""The capacity of the cluster as one PDDeployment may use it: what nodes have free, less what our own pods will still take.

Kept by increments from three watches (nodes, bound pods, our workloads) and from the plans of this process, whose workloads
no watch has shown yet. All but the last is derived from the cluster, so a restart or another leader finds the same reservations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pd_operator.core.groups import whole
from pd_operator.core.names import ROLE, ROLES, SLICE, WORKLOADS
from pd_operator.core.observed import ChildFact, NodeFact, UsageFact
from pd_operator.core.placement.capacity import NodeCapacity, PodShape
from pd_operator.core.placement.index import CapacityIndex, CapacityView
from pd_operator.core.sites import Kind, Site, decode

Owner = tuple[str, str]  # (namespace, name) of a PDDeployment
Part = tuple[str, str]  # (slice, role)


@dataclass(frozen=True, slots=True)
class Need:
    """A workload of engines: how many replicas it should have, of which pods, and where they may go."""

    replicas: int
    site: Site
    pods: tuple[PodShape, ...]  # of one replica, the one that serves first; the others are alike
    kind: str = ""  # of the workload that a watch showed


@dataclass(frozen=True, slots=True)
class Held:
    """Replicas of one role of one slice."""

    nodes: tuple[str, ...] = ()  # of the pods that serve, those that are bound and not ending, by name
    reserved: int = 0  # not whole, and there is room for what they lack in the slice's domain
    workers: tuple[str, ...] = ()  # nodes of the other pods of groups
    whole: int | None = None  # replicas of which every pod is bound; None: each is one pod

    @property
    def bound(self) -> int:
        """Replicas of which every pod is bound."""
        return len(self.nodes) if self.whole is None else self.whole

    @property
    def places(self) -> tuple[str, ...]:
        """Nodes of all pods."""
        return (*self.nodes, *self.workers)


@dataclass(frozen=True, slots=True)
class Room:
    """What one PDDeployment sees: `view` is what is free after everything that is bound or reserved, its own included."""

    view: CapacityView
    held: Mapping[Part, Held] = field(default_factory=dict)
    labels: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of nodes that hold its pods; {} for a node that is gone
    unready: Mapping[str, datetime | None] = field(default_factory=dict)  # nodes that are not ready -> when they were made
    newest: Mapping[str, datetime] = field(default_factory=dict)  # domain of its slices -> creation of the newest node there


class Ledger:
    """One per process. Not thread-safe: one event loop reads and writes it."""

    def __init__(self) -> None:
        self.index = CapacityIndex()
        self._created: dict[str, datetime] = {}
        self._unready: set[str] = set()
        self._bound: dict[Owner, dict[Part, dict[str, UsageFact]]] = {}  # -> pod name -> fact
        self._seen: dict[Owner, dict[Part, Need]] = {}
        self._assumed: dict[Owner, dict[Part, Need]] = {}
        self._open: set[Owner] = set()  # those with fewer bound pods than their replicas need

    # --- what the watches show ------------------------------------------------------------------------------------------------

    def node(self, name: str, new: NodeFact | None) -> None:
        """A node is there, or is gone (None)."""
        self._created.pop(name, None)
        self._unready.discard(name)
        if new is None:
            self.index.remove_node(name)
            return
        if new.created is not None:
            self._created[name] = new.created
        if not new.capacity.ready:
            self._unready.add(name)
        self.index.set_node(new.capacity)

    def pod(self, old: UsageFact | None, new: UsageFact | None) -> None:
        """A bound pod changed, or is gone or finished (new is None)."""
        if new is None and old is not None:
            self.index.unbind(f"{old.namespace}/{old.name}")
        elif new is not None and (old is None or (old.node, old.requests) != (new.node, new.requests)):
            self.index.bind(f"{new.namespace}/{new.name}", new.node, new.requests)
        for fact, there in ((old, False), (new, True)):
            if fact is None or not fact.slice:
                continue
            owner, part = (fact.namespace, fact.deployment), (fact.slice, fact.role)
            pods = self._bound.setdefault(owner, {}).setdefault(part, {})
            if there:
                pods[fact.name] = fact
            else:
                pods.pop(fact.name, None)
                if not pods:
                    del self._bound[owner][part]
            self._look(owner)

    def child(self, owner: Owner, old: ChildFact | None, new: ChildFact | None) -> None:
        """A child of a PDDeployment changed. Only engine workloads with a site count."""
        for fact, there in ((old, False), (new, True)):
            part, need = _need(fact)
            if part is None:
                continue
            seen = self._seen.setdefault(owner, {})
            if there and need is not None:
                seen[part] = need
                assumed = self._assumed.get(owner, {}).get(part)
                if assumed is not None and _same(assumed) == _same(need):
                    del self._assumed[owner][part]
            elif part in seen and fact is not None and seen[part].kind in ("", fact.kind):  # not of another kind that came for it
                del seen[part]
        self._look(owner)

    def assume(self, owner: Owner, needs: Mapping[Part, Need]) -> None:
        """What the newest plan of an owner asks for and the watch may not show yet; replaces what its last plan asked for."""
        seen = self._seen.get(owner, {})
        waits = {part: n for part, n in needs.items() if _same(seen.get(part)) != _same(n)}
        if waits:
            self._assumed[owner] = waits
        else:
            self._assumed.pop(owner, None)
        self._look(owner)

    def forget(self, owner: Owner) -> None:
        """The object is gone: what its last plan asked for does not count any more."""
        self._assumed.pop(owner, None)
        self._look(owner)

    # --- what a plan reads ----------------------------------------------------------------------------------------------------

    def room(self, owner: Owner, key: str) -> Room:
        """What `owner` may use. Reservations of others come first: they were made before this plan."""
        view = self.index.fork()
        for other in sorted(self._open - {owner}):
            self._reserve(view, other)
        reserved = self._reserve(view, owner)
        bound = self._bound.get(owner, {})
        held = {part: self._held(owner, part, reserved.get(part, 0)) for part in sorted({*bound, *reserved})}
        labels = {name: self._labels(name) for mine in held.values() for name in mine.places}
        domains = {d for mine in labels.values() if (d := mine.get(key))} | {n.site.domain for n in self._needs(owner).values()}
        newest = {d: max(times) for d in sorted(domains) if (times := self._times(key, d))}
        return Room(view, held, labels, {n: self._created.get(n) for n in sorted(self._unready)}, newest)

    def waiting(self) -> set[Owner]:
        """PDDeployments that have replicas without a node."""
        return set(self._open)

    def on(self, domain: str, key: str) -> set[Owner]:
        """PDDeployments with a slice pinned to a domain of a topology key."""
        return {o for o, parts in self._seen.items() if any(n.site.key == key and n.site.domain == domain for n in parts.values())}

    def holders(self, node: str) -> set[Owner]:
        """PDDeployments with an engine pod on a node."""
        return {o for o, parts in self._bound.items() if any(f.node == node for pods in parts.values() for f in pods.values())}

    def _needs(self, owner: Owner) -> dict[Part, Need]:
        return {**self._seen.get(owner, {}), **self._assumed.get(owner, {})}

    def _pods_of(self, owner: Owner, part: Part, worker: bool) -> list[UsageFact]:
        """Bound pods that are not ending: those that serve, or the other ones of groups."""
        pods = self._bound.get(owner, {}).get(part, {})
        return [f for f in pods.values() if not f.deleting and f.worker is worker]

    def _held(self, owner: Owner, part: Part, reserved: int = 0) -> Held:
        leaders, workers = (self._pods_of(owner, part, worker) for worker in (False, True))
        nodes, others = (tuple(sorted(f.node for f in pods)) for pods in (leaders, workers))
        need = self._needs(owner).get(part)
        size = len(need.pods) if need else 1
        complete = whole((f.name for f in leaders), (f.name for f in workers), size) if size > 1 else None
        return Held(nodes, reserved, others, complete)

    def _lacks(self, owner: Owner, part: Part, need: Need) -> tuple[int, int]:
        """Pods that have no node yet: those that serve, and the other ones of groups."""
        leaders, workers = (len(self._pods_of(owner, part, worker)) for worker in (False, True))
        return max(0, need.replicas - leaders), max(0, need.replicas * (len(need.pods) - 1) - workers)

    def _look(self, owner: Owner) -> None:
        """Whether the owner still waits for nodes; drops empty entries."""
        needs = self._needs(owner)
        tables: tuple[dict[Owner, dict[Part, Any]], ...] = (self._seen, self._assumed, self._bound)
        for table in tables:
            if owner in table and not table[owner]:
                del table[owner]
        if any(any(self._lacks(owner, part, need)) for part, need in needs.items()):
            self._open.add(owner)
        else:
            self._open.discard(owner)

    def _reserve(self, view: CapacityView, owner: Owner) -> dict[Part, int]:
        """Take room for the owner's unbound pods; how many replicas found all that they lack."""
        found: dict[Part, int] = {}
        for part, need in sorted(self._needs(owner).items(), key=lambda item: item[0]):
            leaders, workers = self._lacks(owner, part, need)
            domain = self._domain(owner, part[0], need.site) if leaders or workers else None
            if domain is None:
                continue
            held, more = self._held(owner, part), len(need.pods) - 1
            # N groups, each on nodes of its own: no node has more than N of their pods (placement/fit.py).
            used = Counter(held.places)
            short = leaders - take(view, need.site.key, domain, need.pods[0], leaders, used, need.replicas)
            if workers:
                lacking = workers - take(view, need.site.key, domain, need.pods[-1], workers, used, need.replicas)
                short = max(short, -(-lacking // more))
            found[part] = max(0, need.replicas - held.bound - short)
        return found

    def _domain(self, owner: Owner, slice_: str, site: Site) -> str | None:
        """Where the unbound replicas of a slice will go; None where only the scheduler knows."""
        if site.kind is Kind.PINNED:
            return site.domain
        if site.kind is not Kind.FLOATING:
            return None
        nodes = [n for role in ROLES for n in self._held(owner, (slice_, role)).places]
        return domain_of_slice(nodes, {n: self._labels(n) for n in nodes}, site.key)

    def _labels(self, node: str) -> Mapping[str, str]:
        found = self.index.node(node)
        return found.labels if found else {}

    def _times(self, key: str, domain: str) -> list[datetime]:
        return [t for n in self.index.nodes(key, domain) if (t := self._created.get(n.name))]


def domain_of_slice(nodes: Iterable[str], labels: Mapping[str, Mapping[str, str]], key: str) -> str | None:
    """The domain in which most of the nodes are (the first by name of equals); None when none of them has a label."""
    counts: dict[str, int] = {}
    for name in nodes:
        domain = labels.get(name, {}).get(key)
        if domain:
            counts[domain] = counts.get(domain, 0) + 1
    return min(counts, key=lambda d: (-counts[d], d)) if counts else None


def take(
    view: CapacityView,
    key: str,
    domain: str,
    shape: PodShape,
    count: int,
    used: Counter[str] | None = None,
    most: int | None = None,
) -> int:
    """Reserve `count` pods in a domain, each on the node that has least left for it; how many found room.

    Args:
        used: pods by node that count towards `most`, the number of them that one node may have; grows with what is reserved.
    """
    used = Counter() if used is None else used
    wanted = shape.needs()
    order = sorted(shape.requests, key=lambda name: ("/" not in name, name))  # accelerators first
    for done in range(count):
        fits = [
            n
            for n in view.nodes(key, domain)
            if (most is None or used[n.name] < most) and shape.admits(n) and all(n.free.get(r, 0) >= a for r, a in wanted.items())
        ]
        if not fits:
            return done
        best: NodeCapacity = min(fits, key=lambda n: ([n.free.get(r, 0) for r in order], n.name))
        view.take(best.name, shape.requests)
        used[best.name] += 1
    return count


def _need(fact: ChildFact | None) -> tuple[Part | None, Need | None]:
    if fact is None or fact.kind not in WORKLOADS or fact.workload is None or not fact.workload.shapes:
        return None, None
    part = (fact.labels.get(SLICE, ""), fact.labels.get(ROLE, ""))
    replicas = 0 if fact.deleting else fact.workload.spec_replicas or 0
    return part, Need(replicas, decode(fact.site), fact.workload.shapes, fact.kind)


def _same(need: Need | None) -> tuple[int, Site, int] | None:
    return (need.replicas, need.site, len(need.pods)) if need else None
