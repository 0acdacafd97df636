"""Packing of one domain against brute force that gives every pod of every replica a node; splits; the search over domains."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
from placement_world import GIB, GPU, node, pod, replica

from pd_operator.core.placement import fit
from pd_operator.core.placement.box import NOTHING, Box
from pd_operator.core.placement.capacity import NodeCapacity, PodShape, ReplicaShape
from pd_operator.core.placement.fit import Packer
from pd_operator.core.placement.search import Candidate, Option, Search, cost, emptied
from pd_operator.core.placement.split import apportion, split_pools


def frontier(nodes: list[NodeCapacity], shapes: tuple[ReplicaShape, ReplicaShape], prefill: int, decode: int) -> tuple[int, ...]:
    """The same as Packer.frontier: replica by replica, every choice of distinct nodes for its pods."""
    names = tuple(sorted({name for shape in shapes for p in shape.pods for name in p.needs()}))
    admits = {(id(p), n): p.admits(node) for shape in shapes for p in shape.pods for n, node in enumerate(nodes)}

    def seats(free: tuple[tuple[int, ...], ...], pods: tuple[PodShape, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        for where in product(range(len(nodes)), repeat=len(pods)):
            if len(set(where)) < len(pods):
                continue
            left = [list(f) for f in free]
            for p, n in zip(pods, where, strict=True):
                needs = p.needs()
                left[n] = [amount - needs.get(name, 0) for amount, name in zip(left[n], names, strict=True)]
            used = [(n, p.needs()) for p, n in zip(pods, where, strict=True)]
            if all(admits[id(p), n] for p, n in zip(pods, where, strict=True)) and all(
                left[n][names.index(name)] >= 0 for n, needs in used for name in needs
            ):
                yield tuple(map(tuple, left))

    @cache
    def possible(free: tuple[tuple[int, ...], ...], p: int, d: int) -> bool:
        if not p and not d:
            return True
        role = 0 if p else 1
        return any(possible(left, p - (role == 0), d - (role == 1)) for left in set(seats(free, shapes[role].pods)))

    start = tuple(tuple(n.free.get(name, 0) for name in names) for n in nodes)
    found = []
    for x in range(prefill + 1):
        most = max((y for y in range(decode + 1) if possible(start, x, y)), default=-1)
        if most < 0:
            break
        found.append(most)
    return tuple(found)


def cluster(rng: random.Random) -> tuple[list[NodeCapacity], tuple[ReplicaShape, ReplicaShape]]:
    """Up to four small nodes; replicas of one to three pods, sometimes with a leader that is unlike."""
    nodes = [
        node(f"n{n}", "a", rng.choice((2, 4)), gib=rng.choice((4, 6)), cpu=rng.choice((3, 6)), labels={"gpu": rng.choice("xy")})
        for n in range(rng.randint(1, 4))
    ]
    shapes = []
    for role in ("prefill", "decode"):
        worker = pod(rng.randint(1, 2), cpu=1, gib=rng.randint(1, 2), node_selector={"gpu": "x"} if rng.random() < 0.2 else {})
        leader = pod(worker.requests[GPU], cpu=2, gib=rng.randint(1, 4))
        count = rng.choice((1, 2, 2, 3))
        shapes.append(replica(role, leader if rng.random() < 0.6 else worker, *[worker] * (count - 1)))
    return nodes, (shapes[0], shapes[1])


@pytest.mark.parametrize("seed", range(60))
def test_a_domain_holds_what_can_be_given_nodes_pod_by_pod(seed: int) -> None:
    nodes, shapes = cluster(random.Random(seed))
    packer = Packer(*shapes)
    found = packer.frontier(nodes, 2, 2)
    assert found == frontier(nodes, shapes, 2, 2)
    assert packer.exact
    for x, y in enumerate(found):
        assert packer.pack(nodes, x, y) is not None
        assert y == 2 or packer.pack(nodes, x, y + 1) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_packing_keeps_to_nodes(seed: int) -> None:
    nodes, shapes = cluster(random.Random(seed))
    packer = Packer(*shapes)
    for x, y in enumerate(packer.frontier(nodes, 3, 3)):
        pods = packer.pack(nodes, x, y)
        assert pods is not None and len(pods) == x * len(shapes[0].pods) + y * len(shapes[1].pods)
        for n in nodes:
            mine = [p.needs for p in pods if p.node == n.name]
            assert all(sum(needs.get(name, 0) for needs in mine) <= n.free.get(name, 0) for needs in mine for name in needs)


def test_groups_with_many_unlike_pods_are_counted_by_their_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node(f"n{n}", "a") for n in range(6)]
    leader, worker = pod(4, gib=300), pod(4, gib=100)
    shapes = replica("prefill", leader, worker, worker), replica("decode", pod(8))
    exact = Packer(*shapes)
    assert exact.frontier(nodes, 2, 6) == (6, 3, 3) and exact.exact
    monkeypatch.setattr(fit, "SUMS", 10)
    largest = Packer(*shapes)
    found = largest.frontier(nodes, 2, 6)
    assert found == (6, 3, 0) and not largest.exact  # never more than really fits
    assert largest.pack(nodes, 1, 3) is not None


def test_a_resource_that_is_overcommitted_keeps_out_those_who_ask_for_it() -> None:
    crowded = node("n", "a", taken={"cpu": 70_000})
    assert Packer(replica("prefill", PodShape({GPU: 4})), replica("decode", pod(4))).frontier([crowded], 3, 3) == (0, 0, 0)
    unlike = replica("prefill", PodShape({GPU: 4}), PodShape({GPU: 2, "memory": GIB}))
    assert Packer(unlike, replica("decode", pod(4))).frontier([crowded, node("m", "a")], 1, 3) == (2, 1)


@pytest.mark.parametrize("seed", range(20))
def test_a_box_is_the_set_of_sums(seed: int) -> None:
    rng = random.Random(seed)
    needed = tuple(rng.randint(0, 4) for _ in range(rng.randint(1, 3)))
    box, taken, sums = Box(needed), NOTHING, {tuple(0 for _ in needed)}
    for _ in range(3):
        choices = [tuple(rng.randint(0, 3) for _ in needed) for _ in range(rng.randint(1, 3))]
        taken = box.add(taken, choices)
        sums |= {tuple(map(sum, zip(s, c, strict=True))) for s in sums for c in choices}
    for counts in product(*(range(n + 1) for n in needed)):
        assert box.holds(taken, counts) == any(all(a <= b for a, b in zip(counts, s, strict=True)) for s in sums)
    assert bool(taken & box.top) == box.holds(taken, needed)


@pytest.mark.parametrize(
    ("total", "weights", "parts"),
    [
        (10, [1, 1], [5, 5]),
        (10, [2, 1], [7, 3]),
        (5, [1, 1], [3, 2]),  # of equal remainders the earlier
        (4, [97, 1, 1, 1], [1, 1, 1, 1]),
        (10, [97, 1, 1, 1], [7, 1, 1, 1]),  # each at least one
        (6, [0, 0, 0], [2, 2, 2]),
        (7, [5, 0, 2], [4, 1, 2]),
        (3, [1], [3]),
    ],
)
def test_largest_remainder(total: int, weights: list[int], parts: list[int]) -> None:
    assert apportion(total, weights) == parts


def test_pools_are_split_by_decode_and_then_by_ratio() -> None:
    assert split_pools(4, 12, [2, 1]) == [(3, 8), (1, 4)]
    assert split_pools(2, 12, [5, 1]) == [(1, 10), (1, 2)]
    with pytest.raises(ValueError, match="total=1: must be at least 2 to give 1 to each of 2"):
        split_pools(1, 12, [1, 1])


def options(rng: random.Random, wanted: tuple[int, int], running: int) -> Candidate:
    """A domain that takes anything up to a corner."""
    p, d, room = rng.randint(0, wanted[0]), rng.randint(0, wanted[1]), rng.randint(0, 9)
    found = tuple(
        Option(x, y, cost(min(x * wanted[1], y * wanted[0]), 2 + max(0, running - x - y), x + y, room))
        for x in range(1, p + 1)
        for y in range(1, d + 1)
    )
    best = max((min(o.prefill * wanted[1], o.decode * wanted[0]) for o in found), default=0)
    return Candidate("", found, best, running, room)


def all_of_them(candidates: list[Candidate], wanted: tuple[int, int], limit: int) -> int:
    """The least cost, by trying everything."""
    best = None
    for choice in product(*((None, *c.options) for c in candidates)):
        used = [o for o in choice if o]
        if len(used) <= limit and sum(o.prefill for o in used) <= wanted[0] and sum(o.decode for o in used) <= wanted[1]:
            total = sum(o.cost for o in used) + emptied(sum(c.running for c, o in zip(candidates, choice, strict=True) if not o))
            best = total if best is None or total < best else best
    assert best is not None
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_search_finds_the_best_of_all(seed: int) -> None:
    rng = random.Random(seed)
    wanted = rng.randint(1, 4), rng.randint(1, 4)
    candidates = [options(rng, wanted, rng.choice((0, 0, 1, 5))) for _ in range(rng.randint(1, 4))]
    candidates.sort(key=lambda c: -c.best)
    limit = rng.randint(1, 4)
    found = Search(candidates, wanted, limit, 2).run()
    assert found.exact and found.cost == all_of_them(candidates, wanted, limit)
    chosen = {c.domain: (c.prefill, c.decode) for c in found.choices}
    total = sum(o.cost for n, c in enumerate(candidates) for o in c.options if chosen.get(n) == (o.prefill, o.decode))
    assert total + emptied(sum(c.running for n, c in enumerate(candidates) if n not in chosen)) == found.cost


def test_a_search_cut_short_says_so_and_still_answers() -> None:
    rng = random.Random(5)
    small = [options(rng, (5, 4), 0) for _ in range(12)]
    candidates = sorted(small, key=lambda c: -c.best)
    full, short = Search(candidates, (17, 19), 6, 2).run(), Search(candidates, (17, 19), 6, 2).run(steps=300)
    assert short.choices and short.cost >= full.cost
    assert full.exact and not short.exact
