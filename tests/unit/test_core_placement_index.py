"""The capacity index: whatever comes in whatever order, it is what a new one would be."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from placement_world import GIB, GPU, RACK, node

from pd_operator.core.placement.capacity import NodeCapacity
from pd_operator.core.placement.index import CapacityIndex


def state(index: CapacityIndex) -> dict[str, object]:
    """All that can be read of an index."""
    keys = (RACK, "", "zone")
    places = [(key, domain) for key in keys for domain in index.domains(key)]
    found: dict[str, object] = {f"{k}={d}": (index.nodes(k, d), dict(index.room(k, d))) for k, d in places}
    found |= {f"{k}={d} spread": dict(index.spread(k, d, GPU)) for k, d in places}
    return found | {f"{k} without": index.unlabelled(k) for k in keys}


@pytest.mark.parametrize("seed", range(30))
def test_increments_equal_a_new_index(seed: int) -> None:
    rng = random.Random(seed)
    index = CapacityIndex()
    if seed % 2:
        index.domains(RACK)  # grouped from the start, or only when asked
    nodes: dict[str, NodeCapacity] = {}
    pods: dict[str, tuple[str, dict[str, int]]] = {}
    for _ in range(120):
        name = f"n{rng.randint(0, 7)}"
        match rng.randint(0, 4):
            case 0:
                nodes[name] = node(
                    name, rng.choice(("", "rack-a", "rack-b")), rng.choice((0, 8)), labels={"zone": rng.choice("xy")}
                )
                index.set_node(nodes[name])
            case 1:
                nodes.pop(name, None)
                index.remove_node(name)
            case 2:
                gone = f"p{rng.randint(0, 9)}"
                pods.pop(gone, None)
                index.unbind(gone)
            case _:
                new = f"p{rng.randint(0, 9)}"
                pods[new] = (name, {GPU: rng.randint(0, 9), "cpu": rng.randint(0, 10**5), "rdma/hca": rng.randint(0, 1)})
                index.bind(new, *pods[new])
    rebuilt = CapacityIndex(nodes.values())
    for key, (where, requests) in pods.items():
        rebuilt.bind(key, where, requests)
    assert state(index) == state(rebuilt)


def test_free_is_allocatable_less_all_bound_pods() -> None:
    index = CapacityIndex([node("n1")])
    index.bind("a", "n1", {GPU: 3, "cpu": 1500, "memory": GIB})
    index.bind("b", "n1", {GPU: 7, "example.org/fpga": 1})
    found = index.node("n1")
    assert found is not None
    assert found.free == {GPU: -2, "cpu": 62_500, "memory": 511 * GIB, "pods": 108, "example.org/fpga": -1}
    assert index.room(RACK, "rack-a") == {"cpu": 62_500, "memory": 511 * GIB, "pods": 108}  # less than nothing is nothing
    index.bind("b", "n1", {GPU: 1})  # the same pod again, resized
    assert index.spread(RACK, "rack-a", GPU) == {4: 1}


def test_a_pod_may_be_seen_before_its_node() -> None:
    index = CapacityIndex()
    index.bind("a", "n1", {GPU: 3})
    index.set_node(node("n1"))
    assert index.room(RACK, "rack-a")[GPU] == 5
    index.remove_node("n1")
    index.set_node(node("n1"))
    assert index.room(RACK, "rack-a")[GPU] == 5


def test_a_node_moves_with_its_label() -> None:
    index = CapacityIndex([node("n1"), node("n2")])
    assert index.domains(RACK) == ("rack-a",)
    index.set_node(node("n2", "rack-b"))
    assert index.domains(RACK) == ("rack-a", "rack-b")
    index.set_node(node("n2", ""))
    assert index.domains(RACK) == ("rack-a",)
    assert index.unlabelled(RACK) == 1


def test_the_order_of_arrival_does_not_show() -> None:
    names = [f"n{n}" for n in range(9)]
    one, other = CapacityIndex(map(node, names)), CapacityIndex(map(node, reversed(names)))
    assert [n.name for n in one.nodes(RACK, "rack-a")] == [n.name for n in other.nodes(RACK, "rack-a")] == names


def test_a_view_takes_and_the_index_keeps() -> None:
    index = CapacityIndex([node("n1"), node("n2", "rack-b")])
    view = index.fork()
    view.take("n1", {GPU: 5})
    deeper = view.fork()
    deeper.take("n1", {GPU: 3})
    assert [v.room(RACK, "rack-a").get(GPU, 0) for v in (index, view, deeper)] == [8, 3, 0]
    assert [dict(v.spread(RACK, "rack-a", GPU)) for v in (index, view, deeper)] == [{8: 1}, {3: 1}, {}]
    assert [v.nodes(RACK, "rack-a")[0].free["pods"] for v in (index, view, deeper)] == [110, 109, 108]
    assert view.room(RACK, "rack-b")[GPU] == deeper.nodes(RACK, "rack-b")[0].free[GPU] == 8
    view.take("n1", {GPU: 1})
    assert (view.room(RACK, "rack-a")[GPU], dict(view.spread(RACK, "rack-a", GPU))) == (2, {2: 1})
    with pytest.raises(KeyError):
        view.take("n9", {GPU: 1})


def test_a_view_says_that_it_is_old() -> None:
    index = CapacityIndex([node("n1")])
    view = index.fork()
    index.bind("a", "n1", {GPU: 1})
    with pytest.raises(RuntimeError, match="fork it again"):
        view.domains(RACK)


def test_an_update_touches_what_changed_only() -> None:
    """Nodes of other domains are the same objects afterwards, and so are their lists of names."""
    index = CapacityIndex([node(f"n{n}", f"rack-{n % 5}") for n in range(50)])
    index.domains(RACK)
    before = {d: index.nodes(RACK, d) for d in index.domains(RACK)}
    index.bind("a", "n0", {GPU: 1})
    index.set_node(replace(node("n1", "rack-1"), unschedulable=True))
    for domain, nodes in before.items():
        now = index.nodes(RACK, domain)
        changed = [old.name for old, new in zip(nodes, now, strict=True) if old is not new]
        assert changed == {"rack-0": ["n0"], "rack-1": ["n1"]}.get(domain, [])
