"""From a domain's nodes to what it could get: a quick bound from sums, then the options node by node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from pd_operator.core.placement.capacity import NodeCapacity
from pd_operator.core.placement.demand import CROSSING, Demand
from pd_operator.core.placement.fit import Packer, Staircase
from pd_operator.core.placement.index import Capacity, domain_of
from pd_operator.core.placement.search import Candidate, Option, cost

CONSOLIDATION: Final = 2  # replicas that may be moved to use one domain less: one pair


class Bound(NamedTuple):
    """A domain before its nodes were looked at; sorts the most promising first."""

    negative: int  # - the most effective capacity that the sums allow
    room: int  # accelerators free
    domain: str


class Domains:
    """The domains of one demand in one view. What was found of a domain is kept."""

    def __init__(self, demand: Demand, view: Capacity, packer: Packer, key: str | None = None) -> None:
        """`key` is the demand's topology key unless given; "" puts all nodes that the demand allows into one domain."""
        self.demand, self.packer = demand, packer
        self.whole = demand.prefill * demand.decode
        self._view = view
        self._key = demand.topology_key if key is None else key
        self._needs = tuple(_per_replica(packer, role) for role in (0, 1))
        p, d = demand.prefill, demand.decode
        pairs = ((name, self._needs[0].get(name, 0), self._needs[1].get(name, 0)) for name in packer.resources)
        self._weights = [(name, first + second, p * first + d * second) for name, first, second in pairs]
        self._loads: dict[int, tuple[int, int, int]] = {}
        self._sums: dict[tuple[int, int, int], int] = {}
        self._bounds: dict[str, Bound] = {}
        self._frontiers: dict[str, Staircase] = {}
        self._candidates: dict[str, Candidate] = {}

    def nodes(self, domain: str) -> Sequence[NodeCapacity]:
        """Nodes of a domain; of the whole cluster without those in domains that the demand must not use."""
        found = self._view.nodes(self._key, domain)
        if self._key == self.demand.topology_key or not (self.demand.excluded or self.demand.pinned):
            return found
        return [n for n in found if self.demand.allows(domain_of(n, self.demand.topology_key) or CROSSING)]

    def running(self, domain: str) -> tuple[int, int]:
        """(prefill, decode) that run there."""
        return self.demand.running.get(domain, (0, 0))

    def room(self, domain: str) -> int:
        """Accelerators free in a domain."""
        room = self._view.room(self._key, domain)
        return sum(room.get(name, 0) for name in self.packer.accelerators)

    def bound(self, domain: str) -> Bound:
        """For a domain where nothing runs: no packing of its nodes has more effective capacity E.

        E = min(p D, d P), so p >= E / D and d >= E / P, and what they ask for is at most the sum of what is free. Of
        accelerators each node counts only as much as whole pods can use.
        """
        known = self._bounds.get(domain)
        if known is not None:
            return known
        room = self._view.room(self._key, domain)
        most = self.whole
        for name, pair, weight in self._weights:
            free = room.get(name, 0)
            if free < pair:
                most = 0
                break
            if self.whole * free < most * weight:
                most = self.whole * free // weight
        if most:
            most = min(most, self._by_accelerator(domain))
        found = self._bounds[domain] = Bound(-most, sum(room.get(name, 0) for name in self.packer.accelerators), domain)
        return found

    def _by_accelerator(self, domain: str) -> int:
        """The bound from the accelerators that each node has free, when both roles use one kind of them and pods are alike."""
        resource = self.packer.accelerators[0]
        if len(self.packer.accelerators) > 1 or "/" not in resource or not self.packer.plain:
            return self.whole
        p, d, used = 0, 0, 0
        for free, count in self._view.spread(self._key, domain, resource).items():
            load = self._loads.get(free) or self._load(free, resource)
            p, d, used = p + load[0] * count, d + load[1] * count, used + load[2] * count
        known = self._sums.get((p, d, used))
        if known is None:
            known = self._sums[p, d, used] = self._effective(p, d, used, resource)
        return known

    def _effective(self, p: int, d: int, used: int, resource: str) -> int:
        """The most effective capacity of replicas with at most p and d pods and `used` accelerators."""
        wanted_p, wanted_d = self.demand.prefill, self.demand.decode
        first, second = (kind.each for kind in self.packer.kinds)
        a, b = self._needs[0].get(resource, 0), self._needs[1].get(resource, 0)
        best = 0
        for x in range(1, min(wanted_p, p // first) + 1):
            y = min(d // second, wanted_d, (used - x * a) // b if b else wanted_d) if used >= x * a else 0
            best = max(best, min(x * wanted_d, y * wanted_p))
        return best

    def _load(self, free: int, resource: str) -> tuple[int, int, int]:
        """Of a node with so many accelerators: prefill pods alone, decode pods alone, the most that both use together."""
        a, b = (kind.needs.get(resource, 0) for kind in self.packer.kinds)
        caps = self.demand.prefill * self.packer.kinds[0].each, self.demand.decode * self.packer.kinds[1].each
        alone = (min(caps[0], free // a) if a else caps[0]), (min(caps[1], free // b) if b else caps[1])
        used = max(n * a + (free - n * a) // b * b if b else n * a for n in range((free // a if a else 0) + 1))
        self._loads[free] = (*alone, used)
        return self._loads[free]

    def may_hold(self, domain: str, prefill: int, decode: int) -> bool:
        """Whether the sums of what is free there allow so many replicas."""
        room = self._view.room(self._key, domain)
        return all(
            prefill * self._needs[0].get(name, 0) + decode * self._needs[1].get(name, 0) <= room.get(name, 0)
            for name in self.packer.resources
        )

    def frontier(self, domain: str) -> Staircase:
        """What fits there beside what runs there, cut at what is wanted."""
        known = self._frontiers.get(domain)
        if known is None:
            rp, rd = self.running(domain)
            wanted = max(0, self.demand.prefill - rp), max(0, self.demand.decode - rd)
            known = self._frontiers[domain] = self.packer.frontier(self.nodes(domain), *wanted)
        return known

    def fits(self, domain: str) -> tuple[int, int]:
        """Replicas of each role that fit if they were alone, those that run there included, at most what is wanted."""
        frontier, (rp, rd) = self.frontier(domain), self.running(domain)
        return min(self.demand.prefill, rp + len(frontier) - 1), min(self.demand.decode, rd + frontier[0])

    def best(self, domain: str) -> int:
        """The most effective capacity that a domain could have alone. Balance never stands in its way."""
        p, d = self.demand.prefill, self.demand.decode
        return max((min(a * d, b * p) for a, b in self._pairs(domain)), default=0)

    def candidate(self, domain: str) -> Candidate:
        """A domain with all of its options: the pairs that fit and that balance allows (see planner)."""
        known = self._candidates.get(domain)
        if known is not None:
            return known
        wanted_p, wanted_d = self.demand.prefill, self.demand.decode
        half = max(wanted_p, wanted_d) // 2
        room, (rp, rd) = self.room(domain), self.running(domain)
        options = []
        for p, most in self._pairs(domain):
            low = 1 if p <= max(1, rp) else max(1, -((max(half, wanted_d - 1) - p * wanted_d) // wanted_p))
            high = min(most, max(1, rd, (p * wanted_d + max(half, wanted_p - 1)) // wanted_p))
            for d in range(low, high + 1):
                ended = max(0, rp - p) + max(0, rd - d)
                options.append(Option(p, d, cost(min(p * wanted_d, d * wanted_p), ended + CONSOLIDATION, p + d, room)))
        found = self._candidates[domain] = Candidate(domain, tuple(options), self.best(domain), rp + rd, room)
        return found

    def _pairs(self, domain: str) -> Iterator[tuple[int, int]]:
        """Each number of prefill replicas with the most decode replicas beside them, at least one of both."""
        frontier, (rp, rd) = self.frontier(domain), self.running(domain)
        for p in range(1, min(self.demand.prefill, rp + len(frontier) - 1) + 1):
            d = min(self.demand.decode, rd + frontier[max(0, p - rp)])
            if d:
                yield p, d


def _per_replica(packer: Packer, role: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for kind in packer.kinds:
        if kind.role == role:
            for name, amount in kind.needs.items():
                total[name] = total.get(name, 0) + amount * kind.each
    return total
