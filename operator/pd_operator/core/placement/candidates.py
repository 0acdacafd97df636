"""From a domain's nodes to what it could get: a quick bound from the sums, then the options node by node."""

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
    """The domains of one demand in one view."""

    def __init__(self, demand: Demand, view: Capacity, packer: Packer, key: str | None = None) -> None:
        """`key` is the demand's topology key unless given; "" puts all nodes that the demand allows into one domain."""
        self.demand, self.packer = demand, packer
        self.whole = demand.prefill * demand.decode
        self._view = view
        self._key = demand.topology_key if key is None else key
        self._needs = tuple(_per_replica(packer, role) for role in (0, 1))

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

        E = min(p D, d P), so p >= E / D and d >= E / P, and what they ask for is at most the sum of what is free.
        """
        room = self._view.room(self._key, domain)
        p, d = self.demand.prefill, self.demand.decode
        most = self.whole
        for name in self.packer.resources:
            first, second = self._needs[0].get(name, 0), self._needs[1].get(name, 0)
            free = room.get(name, 0)
            if free < first + second:
                most = 0
                break
            most = min(most, self.whole * free // (p * first + d * second))
        return Bound(-most, sum(room.get(name, 0) for name in self.packer.accelerators), domain)

    def may_hold(self, domain: str, prefill: int, decode: int) -> bool:
        """Whether the sums of what is free there allow so many replicas."""
        room = self._view.room(self._key, domain)
        return all(
            prefill * self._needs[0].get(name, 0) + decode * self._needs[1].get(name, 0) <= room.get(name, 0)
            for name in self.packer.resources
        )

    def frontier(self, domain: str) -> Staircase:
        """What fits there beside what runs there."""
        rp, rd = self.running(domain)
        return self.packer.frontier(self.nodes(domain), max(0, self.demand.prefill - rp), max(0, self.demand.decode - rd))

    def candidate(self, domain: str) -> Candidate:
        """A domain with all of its options."""
        room, (rp, rd) = self.room(domain), self.running(domain)
        options = []
        best = 0
        for p, d in self._options(domain):
            effective = min(p * self.demand.decode, d * self.demand.prefill)
            best = max(best, effective)
            disruption = max(0, rp - p) + max(0, rd - d) + CONSOLIDATION
            options.append(Option(p, d, cost(effective, disruption, p + d, room)))
        return Candidate(domain, tuple(options), best, rp + rd)

    def _options(self, domain: str) -> Iterator[tuple[int, int]]:
        """Pairs that fit and that balance allows (see planner)."""
        wanted_p, wanted_d = self.demand.prefill, self.demand.decode
        slack = max(wanted_p, wanted_d)
        rp, rd = self.running(domain)
        frontier = self.frontier(domain)
        for p in range(1, min(wanted_p, rp + len(frontier) - 1) + 1):
            most = min(wanted_d, rd + frontier[max(0, p - rp)])
            low = 1 if p <= max(1, rp) else max(1, -((slack - 2 * p * wanted_d) // (2 * wanted_p)))
            high = min(most, max(1, rd, (2 * p * wanted_d + slack) // (2 * wanted_p)))
            for d in range(low, high + 1):
                yield p, d


def _per_replica(packer: Packer, role: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for kind in packer.kinds:
        if kind.role == role:
            for name, amount in kind.needs.items():
                total[name] = total.get(name, 0) + amount * kind.each
    return total
