"""What fits into one domain, node by node: for each number of prefill replicas, the most decode replicas beside them.

Exact, by dynamic programming over the nodes. A node offers choices: numbers of pods of each kind that fit on it together
(vector packing; two or three kinds and few pods per node, so they are listed). Choices add up over the nodes.

A replica of several pods wants as many distinct nodes. Whatever the shapes of its pods, N replicas can be dealt out to the
nodes so that none has two pods on one node if and only if no node holds more than N pods of the role: the pods are the edges
of a bipartite multigraph (node - kind of pod), to be coloured with N colours (the replicas) so that every colour appears at
most once at a node and equally often at each kind; such a colouring exists (D. de Werra, Equitable colorations of graphs,
R.I.R.O. 5, 1971). So a group of pods needs a cap per node and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Final, NamedTuple

from pd_operator.core.placement.capacity import NodeCapacity, PodShape, ReplicaShape, accelerators_of

STATES: Final = (
    4000  # partial sums kept while groups with unlike pods are packed; above it all pods of a group count as its largest
)

Counts = tuple[int, ...]  # pods by kind
Choices = tuple[Counts, ...]  # what one node takes, only those that no other exceeds in every kind
Staircase = tuple[int, ...]  # index: prefill; value: the most decode beside them
_Layer = dict[Counts, Counts]  # partial sum -> the one before this node


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


class _TooMany(Exception):
    """More than STATES partial sums."""


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
        self.pods_each = (len(prefill.pods), len(decode.pods))
        self.accelerators = accelerators_of(prefill, decode)
        self.exact = True  # False once something was counted by its largest pod
        self.grouped = self.pods_each != (1, 1)
        self._plain = len(self.kinds) == 2
        self._triples = tuple(
            (name, self.kinds[0].needs.get(name, 0), self.kinds[-1].needs.get(name, 0)) for name in self.resources
        )

    def tops(self, node: NodeCapacity, caps: tuple[int, int]) -> Counts:
        """Pods of each kind that a node takes when they are alone, at most `caps` by role."""
        free = node.free
        return tuple(
            top if (top := most(free, kind.needs, caps[kind.role])) and all(s.admits(node) for s in kind.shapes) else 0
            for kind in self.kinds
        )

    def frontier(self, nodes: Iterable[NodeCapacity], prefill: int, decode: int) -> Staircase:
        """f[x] = most decode replicas beside x prefill replicas, for x = 0 .. as many as fit; both are cut at what is given."""
        offers = Counter(self.choices(node, (prefill, decode)) for node in nodes)
        offers.pop((), None)
        if not self.grouped:
            return _sum({_staircase(offered): count for offered, count in offers.items()}, prefill, decode)
        try:
            return self._walk(offers, prefill, decode)
        except _TooMany:
            self.exact = False
            return Packer(*self.shapes, largest=True).frontier(nodes, prefill, decode)

    def choices(self, node: NodeCapacity, caps: tuple[int, int]) -> Choices:
        """What a node takes of all kinds together, with at most `caps` pods of the roles."""
        tops = self.tops(node, caps)
        if not any(tops):
            return ()
        if self._plain:
            return _pairs(node.free, self._triples, tops)
        return _maximal(self._combinations(node.free, tops, caps))

    def pack(self, nodes: Sequence[NodeCapacity], prefill: int, decode: int) -> list[Pod] | None:
        """Nodes for all pods of so many replicas, those with least room first; None where they do not fit.

        For groups with unlike pods it may give up where a packing exists, if more than STATES partial sums come up.
        """
        needed = self._needed(prefill, decode)
        order = sorted(nodes, key=lambda n: (sum(n.free.get(name, 0) for name in self.accelerators), n.name))
        layers: list[tuple[str, _Layer]] = []
        states = {tuple(0 for _ in needed)}
        for node in order:
            if needed in states:
                break
            offered = self.choices(node, (prefill, decode))
            if offered:
                reached = _reach(states, offered, needed)
                layers.append((node.name, reached))
                states = set(sorted(_undominated(reached), key=lambda s: (-sum(s), s))[:STATES])
        if needed not in states:
            return None
        placed: list[Pod] = []
        state = needed
        for name, reached in reversed(layers):
            before = reached[state]
            for kind, was, now in zip(self.kinds, before, state, strict=True):
                placed += [Pod(name, kind.needs)] * (now - was)
            state = before
        return placed

    def _needed(self, prefill: int, decode: int) -> Counts:
        return tuple(kind.each * (prefill, decode)[kind.role] for kind in self.kinds)

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

    def _walk(self, offers: Mapping[Choices, int], prefill: int, decode: int) -> Staircase:
        """Down the staircase: more prefill never leave room for more decode."""
        found: list[int] = []
        y = decode
        for x in range(prefill + 1):
            while y >= 0 and not self._holds(offers, x, y):
                y -= 1
            if y < 0:
                break
            found.append(y)
        return tuple(found)

    def _holds(self, offers: Mapping[Choices, int], prefill: int, decode: int) -> bool:
        """Whether nodes with these choices hold so many replicas: no node more pods of a role than there are replicas of it."""
        needed = self._needed(prefill, decode)
        capped: Counter[Choices] = Counter()
        for offered, count in offers.items():
            capped[self._cap(offered, (prefill, decode))] += count
        capped.pop((), None)
        if any(
            sum(count * max(c[at] for c in offered) for offered, count in capped.items()) < need for at, need in enumerate(needed)
        ):
            return False
        head, last = needed[:-1], needed[-1]
        best: dict[Counts, int] = {tuple(0 for _ in head): 0}
        for offered, count in sorted(capped.items()):
            for _ in range(min(count, sum(needed))):
                best = _step(best, offered, head, last)
                if best.get(head, -1) >= last:
                    return True
                if not self._plain and len(best) > STATES:
                    raise _TooMany
        return best.get(head, -1) >= last

    def _cap(self, offered: Choices, caps: tuple[int, int]) -> Choices:
        """Choices cut to at most `caps` pods of each role on a node."""
        if all(self._within(choice, caps) for choice in offered):
            return offered
        if self._plain:
            return _maximal((min(a, caps[0]), min(b, caps[1])) for a, b in offered)
        below = (c for choice in offered for c in product(*(range(count + 1) for count in choice)))
        return _maximal(choice for choice in below if self._within(choice, caps))

    def _within(self, choice: Counts, caps: tuple[int, int]) -> bool:
        return all(sum(c for c, kind in zip(choice, self.kinds, strict=True) if kind.role == role) <= caps[role] for role in (0, 1))


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


def _reach(states: Iterable[Counts], offered: Choices, needed: Counts) -> _Layer:
    """Partial sums with one node more, cut at what is needed, each with one that it came from."""
    reached: _Layer = {}
    for state in sorted(states):
        for choice in offered:
            reached.setdefault(tuple(min(s + c, n) for s, c, n in zip(state, choice, needed, strict=True)), state)
    return reached


def _step(best: Mapping[Counts, int], offered: Choices, head: Counts, last: int) -> dict[Counts, int]:
    """The same for sums of all kinds but the last, with the most of the last."""
    after = dict(best)
    for state, value in best.items():
        for choice in offered:
            at = tuple(min(s + c, n) for s, c, n in zip(state, choice, head, strict=False))
            gain = min(value + choice[-1], last)
            if after.get(at, -1) < gain:
                after[at] = gain
    return after


def _maximal(choices: Iterable[Counts]) -> Choices:
    """Those that no other exceeds in every kind; zeros alone are no choice."""
    kept: list[Counts] = []
    for choice in sorted(set(choices), reverse=True):
        if any(choice) and not any(all(a <= b for a, b in zip(choice, other, strict=True)) for other in kept):
            kept.append(choice)
    return tuple(kept)


def _undominated(states: Iterable[Counts]) -> list[Counts]:
    """With each sum of all kinds but the last only the most of the last."""
    best: dict[Counts, int] = {}
    for state in states:
        if best.get(state[:-1], -1) < state[-1]:
            best[state[:-1]] = state[-1]
    return [(*head, last) for head, last in best.items()]


def _staircase(offered: Choices) -> Staircase:
    """Choices of two kinds, for each number of the first the most of the second."""
    return tuple(max(b for a, b in offered if a >= x) for x in range(1 + max(a for a, _ in offered)))


def _sum(stairs: Mapping[Staircase, int], prefill: int, decode: int) -> Staircase:
    """Staircases of several nodes added up: f[x] = max over x = a1 + a2 + ... of b1(a1) + b2(a2) + ..."""
    total: Sequence[int] = (0,)
    for stair, number in sorted(stairs.items(), reverse=True):
        count = min(number, prefill + decode)  # each of them takes one pod at least
        power: Sequence[int] = stair
        while count:
            if count & 1:
                total = _add(total, power, prefill, decode)
                if len(total) > prefill and total[prefill] >= decode:
                    return (decode,) * (prefill + 1)
            count >>= 1
            if count:
                power = _add(power, power, prefill, decode)
    return tuple(total)


def _add(left: Sequence[int], right: Sequence[int], prefill: int, decode: int) -> list[int]:
    length = min(prefill, len(left) + len(right) - 2) + 1
    found = [0] * length
    for a, b in enumerate(left):
        for at, d in enumerate(right[: max(0, length - a)], start=a):
            found[at] = max(found[at], b + d)
    return [min(value, decode) for value in found]
