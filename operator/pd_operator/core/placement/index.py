"""The capacity view as a data structure: nodes, what is bound to them, and sums per domain, kept up to date by increments.

Every update costs as much as what changed (the resources of one node or pod, for each topology key in use), never a scan.
Order does not matter: a pod may be seen before its node, a node may go and come back under its pods. `fork` gives a view to
plan on: reads go through to the index, what the plan takes stays in the view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from pd_operator.core.placement.capacity import PODS, NodeCapacity

_NOTHING: Mapping[str, int] = {}


class Capacity(Protocol):
    """What the planner reads: an index or a view."""

    def domains(self, key: str) -> tuple[str, ...]:
        """Names of the domains of a topology key, sorted; the key "" has the one domain "", which holds every node."""

    def nodes(self, key: str, domain: str) -> list[NodeCapacity]:
        """Nodes of a domain, by name."""

    def room(self, key: str, domain: str) -> Mapping[str, int]:
        """Sum of what the nodes of a domain have free; a node that has less than nothing counts as nothing."""

    def spread(self, key: str, domain: str, resource: str) -> Mapping[int, int]:
        """Free amount of an extended resource (one with a "/") -> number of nodes that have it; nodes with nothing are left out."""

    def unlabelled(self, key: str) -> int:
        """Number of nodes that are in no domain of the key: without the label, or with an empty value."""


@dataclass(frozen=True, slots=True)
class _Bound:
    node: str
    requests: Mapping[str, int]


class _Domain:
    """Members and sums of one domain."""

    __slots__ = ("_sorted", "members", "room", "spread")

    def __init__(self) -> None:
        self.members: set[str] = set()
        self.room: dict[str, int] = {}
        self.spread: dict[str, Counter[int]] = {}
        self._sorted: list[str] | None = None

    def names(self) -> list[str]:
        if self._sorted is None:
            self._sorted = sorted(self.members)
        return self._sorted

    def join(self, node: NodeCapacity) -> None:
        self.members.add(node.name)
        self._sorted = None
        self.change({}, node.free, node.free)

    def leave(self, node: NodeCapacity) -> None:
        self.members.discard(node.name)
        self._sorted = None
        self.change(node.free, {}, node.free)

    def change(self, before: Mapping[str, int], after: Mapping[str, int], names: Iterable[str]) -> None:
        for name in names:
            new, old = max(0, after.get(name, 0)), max(0, before.get(name, 0))
            self.room[name] = self.room.get(name, 0) + new - old
            if not self.room[name]:
                del self.room[name]
            if "/" in name:
                _shift(self.spread.setdefault(name, Counter()), old, new)


class CapacityIndex:
    """Nodes and bound pods of the cluster. One writer; a fork is good until the next change."""

    def __init__(self, nodes: Iterable[NodeCapacity] = ()) -> None:
        self._nodes: dict[str, NodeCapacity] = {}
        self._used: dict[str, dict[str, int]] = {}  # node name -> sum of the requests bound to it, also of nodes not seen yet
        self._pods: dict[str, _Bound] = {}
        self._keys: dict[str, dict[str, _Domain]] = {}
        self.version = 0  # grows with each change
        for node in nodes:
            self.set_node(node)

    @classmethod
    def of(cls, nodes: Iterable[NodeCapacity]) -> CapacityIndex:
        """An index of nodes whose `free` is given: the difference to `allocatable` is bound as one nameless pod each."""
        index = cls()
        for node in nodes:
            index.set_node(node)
            names = {*node.allocatable, *node.free}
            used = {n: node.allocatable.get(n, 0) - node.free.get(n, 0) for n in names}
            index.bind(f"\0{node.name}", node.name, used | {PODS: used.get(PODS, 0)})
        return index

    def set_node(self, node: NodeCapacity) -> None:
        """Add a node, or replace what is known of it. Its `free` is not read: it follows from `allocatable` and the bound pods."""
        used = self._used.get(node.name, _NOTHING)
        free = {name: amount - used.get(name, 0) for name, amount in node.allocatable.items()}
        free |= {name: -amount for name, amount in used.items() if name not in free}
        self._swap(node.name, replace(node, free=free))

    def remove_node(self, name: str) -> None:
        """Forget a node; pods bound to it are remembered until they are unbound."""
        self._swap(name, None)

    def bind(self, pod: str, node: str, requests: Mapping[str, int]) -> None:
        """A pod (any unique key) takes its requests on a node; a pod that is bound already moves. `pods` is 1 unless given."""
        self.unbind(pod)
        bound = _Bound(node, requests if PODS in requests else {**requests, PODS: 1})
        self._pods[pod] = bound
        self._charge(bound, 1)

    def unbind(self, pod: str) -> None:
        """A pod is gone or finished. Unknown pods are ignored."""
        bound = self._pods.pop(pod, None)
        if bound is not None:
            self._charge(bound, -1)

    def node(self, name: str) -> NodeCapacity | None:
        """A node by name."""
        return self._nodes.get(name)

    def all_nodes(self) -> list[NodeCapacity]:
        """Every node, by name."""
        return [self._nodes[name] for name in sorted(self._nodes)]

    def fork(self) -> CapacityView:
        """A view to plan on, at the cost of what the plan takes."""
        return CapacityView(self)

    def domains(self, key: str) -> tuple[str, ...]:
        """See Capacity."""
        return tuple(sorted(self._grouped(key)))

    def nodes(self, key: str, domain: str) -> list[NodeCapacity]:
        """See Capacity."""
        found = self._grouped(key).get(domain)
        return [self._nodes[name] for name in found.names()] if found else []

    def room(self, key: str, domain: str) -> Mapping[str, int]:
        """See Capacity."""
        found = self._grouped(key).get(domain)
        return found.room if found else _NOTHING

    def spread(self, key: str, domain: str, resource: str) -> Mapping[int, int]:
        """See Capacity."""
        found = self._grouped(key).get(domain)
        return found.spread.get(resource, {}) if found else {}

    def unlabelled(self, key: str) -> int:
        """See Capacity."""
        return len(self._nodes) - sum(len(d.members) for d in self._grouped(key).values())

    def _charge(self, bound: _Bound, sign: int) -> None:
        self.version += 1
        used = self._used.setdefault(bound.node, {})
        for name, amount in bound.requests.items():
            total = used.get(name, 0) + sign * amount
            if total:
                used[name] = total
            else:
                used.pop(name, None)
        if not used:
            del self._used[bound.node]
        node = self._nodes.get(bound.node)
        if node is None:
            return
        free = dict(node.free)
        for name, amount in bound.requests.items():
            free[name] = free.get(name, 0) - sign * amount
            if not free[name] and name not in node.allocatable:
                del free[name]
        self._nodes[bound.node] = replace(node, free=free)
        for key, groups in self._keys.items():
            domain = domain_of(node, key)
            if domain is not None:
                groups[domain].change(node.free, free, bound.requests)

    def _swap(self, name: str, new: NodeCapacity | None) -> None:
        old = self._nodes.pop(name, None)
        self.version += 1
        if new is not None:
            self._nodes[name] = new
        for key, groups in self._keys.items():
            if old is not None and (domain := domain_of(old, key)) is not None:
                groups[domain].leave(old)
                if not groups[domain].members:
                    del groups[domain]
            if new is not None and (domain := domain_of(new, key)) is not None:
                groups.setdefault(domain, _Domain()).join(new)

    def _grouped(self, key: str) -> dict[str, _Domain]:
        """Domains of a key. The first question about a key groups all nodes; from then on it is kept."""
        groups = self._keys.get(key)
        if groups is None:
            groups = self._keys[key] = {}
            for node in self._nodes.values():
                domain = domain_of(node, key)
                if domain is not None:
                    groups.setdefault(domain, _Domain()).join(node)
        return groups


class CapacityView:
    """An index as it would be with some pods more. A fork of a view is a copy of what it took."""

    def __init__(self, index: CapacityIndex) -> None:
        self._index = index
        self._version = index.version
        self._changed: dict[str, NodeCapacity] = {}
        self._taken: dict[str, dict[str, dict[str, int]]] = {}  # topology key -> domain -> taken from the index's room

    def fork(self) -> CapacityView:
        """A view on top of this one."""
        view = CapacityView(self._index)
        view._changed = dict(self._changed)
        return view

    def take(self, node: str, requests: Mapping[str, int]) -> None:
        """Reserve the requests of one pod on a node; `pods` is 1 unless given. Negative amounts give room back.

        Raises:
            KeyError: no such node.
        """
        before = self._changed.get(node) or self._current().node(node)
        if before is None:
            raise KeyError(node)
        free = dict(before.free)
        for name, amount in (requests if PODS in requests else {**requests, PODS: 1}).items():
            free[name] = free.get(name, 0) - amount
        self._changed[node] = replace(before, free=free)
        self._taken.clear()  # summed again when asked for: few nodes change in a view

    def domains(self, key: str) -> tuple[str, ...]:
        """See Capacity."""
        return self._current().domains(key)

    def nodes(self, key: str, domain: str) -> list[NodeCapacity]:
        """See Capacity."""
        found = self._current().nodes(key, domain)
        if not self._changed:
            return found
        return [self._changed.get(node.name, node) for node in found]

    def room(self, key: str, domain: str) -> Mapping[str, int]:
        """See Capacity."""
        room = self._current().room(key, domain)
        if not self._changed:
            return room
        taken = self._sums(key).get(domain)
        return {name: room.get(name, 0) - taken.get(name, 0) for name in {**room, **taken}} if taken else room

    def spread(self, key: str, domain: str, resource: str) -> Mapping[int, int]:
        """See Capacity."""
        spread = self._current().spread(key, domain, resource)
        moved = [n for n in self._changed.values() if domain_of(n, key) == domain] if domain in self._sums(key) else []
        if not moved:
            return spread
        found = Counter(spread)
        for node in moved:
            before = self._current().node(node.name)
            _shift(found, max(0, before.free.get(resource, 0)) if before else 0, max(0, node.free.get(resource, 0)))
        return found

    def unlabelled(self, key: str) -> int:
        """See Capacity."""
        return self._current().unlabelled(key)

    def _sums(self, key: str) -> dict[str, dict[str, int]]:
        """What was taken in each domain of a key."""
        found = self._taken.get(key)
        if found is not None:
            return found
        found = self._taken[key] = {}
        for name, node in self._changed.items():
            before, domain = self._current().node(name), domain_of(node, key)
            if before is not None and domain is not None:
                sums = found.setdefault(domain, {})
                for resource, amount in node.free.items():
                    taken = max(0, before.free.get(resource, 0)) - max(0, amount)
                    if taken:
                        sums[resource] = sums.get(resource, 0) + taken
        return found

    def _current(self) -> CapacityIndex:
        if self._index.version != self._version:
            raise RuntimeError("the capacity index changed under a view; fork it again")
        return self._index


def _shift(spread: Counter[int], old: int, new: int) -> None:
    """One node that had `old` has `new`."""
    if old:
        spread[old] -= 1
        if not spread[old]:
            del spread[old]
    if new:
        spread[new] += 1


def domain_of(node: NodeCapacity, key: str) -> str | None:
    """Domain of a node: the value of the label, None where it is absent or empty; "" for every node when the key is ""."""
    return "" if not key else node.labels.get(key) or None
