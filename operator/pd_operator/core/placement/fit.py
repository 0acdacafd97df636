"""What fits into one domain, node by node: for each number of prefill replicas, the most decode replicas beside them.

Exact. A node offers choices: numbers of pods of each kind that fit on it together (vector packing; two or three kinds and few
pods per node, so they are listed). Choices add up over the nodes (`box`).

A replica of several pods wants as many distinct nodes. Whatever the shapes of its pods, N replicas can be dealt out to the
nodes so that none has two pods on one node if and only if no node holds more than N pods of the role: the pods are the edges
of a bipartite multigraph (node - kind of pod), to be coloured with N colours (the replicas) so that every colour appears at
most once at a node and equally often at each kind; such a colouring exists (D. de Werra, Equitable colorations of graphs,
R.I.R.O. 5, 1971). So a group of pods needs a cap per node and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Final, NamedTuple

from pd_operator.core.placement.box import NOTHING, Box, Counts
from pd_operator.core.placement.capacity import NodeCapacity, PodShape, ReplicaShape, accelerators_of

# Numbers of pods looked at together. A group with unlike pods that would need more counts them all as the largest of them.
SUMS: Final = 1 << 20

Choices = tuple[Counts, ...]  # what one node takes, only those that no other exceeds in every kind
Staircase = tuple[int, ...]  # index: prefill; value: the most decode beside them


class Kind(NamedTuple):
    """Pods of one shape in the replicas of a role; of several shapes where they count as the largest of them."""

    role: int  # 0 prefill, 1 decode
    shapes: tuple[PodShape, ...]  # a node must admit all
    needs: Mapping[str, int]
    each: int  # per replica


class Pod(NamedTuple):
    """A pod that was given a node."""

    node: str
    needs: Mapping[str, int]


def most(free: Mapping[str, int], needs: Mapping[str, int], limit: int) -> int:
    """Pods with these needs that fit into `free`, at most `limit`."""
    for name, amount in needs.items():
        here = free.get(name, 0) // amount
        if here < limit:
            if here <= 0:
                return 0
            limit = here
    return limit


class Packer:
    """Packs replicas of two shapes onto nodes."""

    def __init__(self, prefill: ReplicaShape, decode: ReplicaShape, largest: bool = False) -> None:
        """With `largest`, unlike pods of a replica count as the largest of them: fewer kinds, never more than really fits."""
        of = _as_largest if largest else kinds_of
        self.shapes = (prefill, decode)
        self.kinds: tuple[Kind, ...] = (*of(0, prefill), *of(1, decode))
        self.resources = tuple(sorted({name for kind in self.kinds for name in kind.needs}))
        self.accelerators = accelerators_of(prefill, decode)
        self.exact = True  # False once something was counted by its largest pod
        self.grouped = (len(prefill.pods), len(decode.pods)) != (1, 1)
        self.plain = len(self.kinds) == 2
        first, last = self.kinds[0].needs, self.kinds[-1].needs
        self._triples = tuple((name, first.get(name, 0), last.get(name, 0)) for name in self.resources)
        self._boxes: dict[Counts, Box] = {}
        self._prefill_kinds = sum(kind.role == 0 for kind in self.kinds)
        self._peaks: dict[Choices, tuple[int, int]] = {}
        self._capped: dict[tuple[Choices, tuple[int, int]], Choices] = {}

    def tops(self, node: NodeCapacity, caps: tuple[int, int]) -> Counts:
        """Pods of each kind that a node takes when they are alone, at most `caps` by role."""
        free = node.free
        return tuple(
            top if (top := most(free, kind.needs, caps[kind.role])) and all(s.admits(node) for s in kind.shapes) else 0
            for kind in self.kinds
        )

    def choices(self, node: NodeCapacity, caps: tuple[int, int]) -> Choices:
        """What a node takes of all kinds together, with at most `caps` pods of the roles."""
        tops = self.tops(node, caps)
        if not any(tops):
            return ()
        if self.plain:
            return _pairs(node.free, self._triples, tops)
        return _maximal(self._combinations(node.free, tops, caps))

    def frontier(self, nodes: Iterable[NodeCapacity], prefill: int, decode: int) -> Staircase:
        """f[x] = most decode replicas beside x prefill replicas, for x = 0 .. as many as fit; both are cut at what is given."""
        if self._too_many(prefill, decode):
            self.exact = False
            return Packer(*self.shapes, largest=True).frontier(nodes, prefill, decode)
        offers = Counter(self.choices(node, (prefill, decode)) for node in nodes)
        offers.pop((), None)
        if self.grouped:
            return _walk(prefill, decode, lambda x, y: self._holds(offers, x, y))
        box = self._box(prefill, decode)
        taken = _fill(box, offers)
        return _walk(prefill, decode, lambda x, y: box.holds(taken, (x, y)))

    def pack(self, nodes: Sequence[NodeCapacity], prefill: int, decode: int) -> list[Pod] | None:
        """Nodes for all pods of so many replicas, those with least room first; None where they do not fit."""
        if self._too_many(prefill, decode):
            return Packer(*self.shapes, largest=True).pack(nodes, prefill, decode)
        box = self._box(prefill, decode)
        taken = NOTHING
        row: list[tuple[str, Choices, int]] = []  # a node, its choices, what those before it take
        for node in sorted(nodes, key=lambda n: (sum(n.free.get(name, 0) for name in self.accelerators), n.name)):
            if taken & box.top:
                break
            offered = self.choices(node, (prefill, decode))
            if offered:
                row.append((node.name, offered, taken))
                taken = box.add(taken, offered)
        if not taken & box.top:
            return None
        placed: list[Pod] = []
        left = box.needed
        for name, offered, before in reversed(row):
            rests = (_without(left, choice) for choice in ((0,) * len(left), *offered))
            rest = next(rest for rest in rests if box.holds(before, rest))
            for kind, now, then in zip(self.kinds, left, rest, strict=True):
                placed += [Pod(name, kind.needs)] * (now - then)
            left = rest
        return placed

    def _needed(self, prefill: int, decode: int) -> Counts:
        return tuple(kind.each * (prefill, decode)[kind.role] for kind in self.kinds)

    def _too_many(self, prefill: int, decode: int) -> bool:
        return not self.plain and prod(count + 1 for count in self._needed(prefill, decode)) > SUMS

    def _box(self, prefill: int, decode: int) -> Box:
        needed = self._needed(prefill, decode)
        if needed not in self._boxes:
            self._boxes[needed] = Box(needed)
        return self._boxes[needed]

    def _combinations(self, free: Mapping[str, int], tops: Counts, caps: tuple[int, int]) -> Iterator[Counts]:
        """All numbers of pods of all kinds but the last, with the most of the last."""
        last = self.kinds[-1]
        for counts in product(*(range(top + 1) for top in tops[:-1])):
            total = [0, 0]
            used: dict[str, int] = {}
            for count, kind in zip(counts, self.kinds, strict=False):
                total[kind.role] += count
                if count:
                    for name, amount in kind.needs.items():
                        used[name] = used.get(name, 0) + count * amount
            left = {name: free.get(name, 0) - used.get(name, 0) for name in self.resources}
            if total[0] <= caps[0] and total[1] <= caps[1] and all(left[name] >= 0 for name in used):
                yield (*counts, most(left, last.needs, min(tops[-1], caps[last.role] - total[last.role])))

    def _holds(self, offers: Mapping[Choices, int], prefill: int, decode: int) -> bool:
        """Whether nodes with these choices hold so many replicas: no node more pods of a role than there are replicas of it."""
        capped: Counter[Choices] = Counter()
        for offered, count in offers.items():
            capped[self._cap(offered, (prefill, decode))] += count
        capped.pop((), None)
        box = self._box(prefill, decode)
        for at, need in enumerate(box.needed):
            if sum(count * max(choice[at] for choice in offered) for offered, count in capped.items()) < need:
                return False
        return bool(_fill(box, capped) & box.top)

    def _cap(self, offered: Choices, caps: tuple[int, int]) -> Choices:
        """Choices cut to at most `caps` pods of each role on a node."""
        highest = self._peaks.get(offered)
        if highest is None:
            totals = [self._totals(choice) for choice in offered]
            highest = self._peaks[offered] = max(t[0] for t in totals), max(t[1] for t in totals)
        if highest[0] <= caps[0] and highest[1] <= caps[1]:
            return offered
        caps = min(highest[0], caps[0]), min(highest[1], caps[1])
        known = self._capped.get((offered, caps))
        if known is None:
            below = (c for choice in offered for c in product(*(range(count + 1) for count in choice)))
            inside = (c for c in below if all(t <= cap for t, cap in zip(self._totals(c), caps, strict=True)))
            known = self._capped[offered, caps] = _maximal(inside)
        return known

    def _totals(self, choice: Counts) -> tuple[int, int]:
        """Pods of each role."""
        first = self._prefill_kinds
        return sum(choice[:first]), sum(choice[first:])


def kinds_of(role: int, shape: ReplicaShape) -> list[Kind]:
    """The distinct pods of a replica, in its order."""
    found: list[Kind] = []
    for pod in shape.pods:
        at = next((i for i, known in enumerate(found) if known.shapes == (pod,)), -1)
        if at < 0:
            found.append(Kind(role, (pod,), pod.needs(), 1))
        else:
            found[at] = found[at]._replace(each=found[at].each + 1)
    return found


def _as_largest(role: int, shape: ReplicaShape) -> list[Kind]:
    """One kind that asks for the most of each resource, on nodes that all pods may use."""
    needs: dict[str, int] = {}
    for pod in shape.pods:
        for name, amount in pod.needs().items():
            needs[name] = max(needs.get(name, 0), amount)
    return [Kind(role, shape.pods, needs, len(shape.pods))]


def _pairs(free: Mapping[str, int], triples: Sequence[tuple[str, int, int]], tops: Counts) -> Choices:
    """Choices of two kinds: for each number of the first the most of the second."""
    found: list[Counts] = []
    rows = [(free.get(name, 0), first, second) for name, first, second in triples]
    for a in range(tops[0], -1, -1):
        b = tops[1]
        if a:
            for amount, first, second in rows:
                if second:
                    b = min(b, (amount - a * first) // second)
        if (a or b) and (not found or b > found[-1][1]):
            found.append((a, max(b, 0)))
    return tuple(found)


def _walk(prefill: int, decode: int, holds: Callable[[int, int], bool]) -> Staircase:
    """Down the staircase: more prefill never leave room for more decode."""
    found: list[int] = []
    y = decode
    for x in range(prefill + 1):
        while y >= 0 and not holds(x, y):
            y -= 1
        if y < 0:
            break
        found.append(y)
    return tuple(found)


def _fill(box: Box, offers: Mapping[Choices, int]) -> int:
    """What nodes with these choices take together; everything as soon as all that is needed fits."""
    taken = NOTHING
    for offered, count in sorted(offers.items(), reverse=True):
        for _ in range(count):
            before, taken = taken, box.add(taken, offered)
            if taken & box.top:
                return (box.top << 1) - 1
            if taken == before:
                break
    return taken


def _without(counts: Counts, choice: Counts) -> Counts:
    """What is left to be given a node once one took a choice."""
    return tuple(max(0, count - gone) for count, gone in zip(counts, choice, strict=True))


def _maximal(choices: Iterable[Counts]) -> Choices:
    """Those that no other exceeds in every kind; zeros alone are no choice."""
    kept: list[Counts] = []
    for choice in sorted(set(choices), reverse=True):
        if any(choice) and not any(all(a <= b for a, b in zip(choice, other, strict=True)) for other in kept):
            kept.append(choice)
    return tuple(kept)
