"""What the planner decides, case by case, and the sentences that it says."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from placement_world import GPU, RACK, demand, node, pod, random_world, replica

from pd_operator.core.placement import planner
from pd_operator.core.placement.capacity import NodeCapacity, PodShape, Taint
from pd_operator.core.placement.demand import BACKOFF, BACKOFF_MAX, CROSSING, Demand, active, exclude
from pd_operator.core.placement.index import CapacityIndex
from pd_operator.core.placement.planner import place, reserve
from pd_operator.core.placement.result import Outcome, Placement, Share


def rack(name: str, *free: int, **more: Any) -> list[NodeCapacity]:
    """Nodes of a rack with so many of their 8 accelerators free."""
    return [node(f"{name}-{n}", name, 8, taken={GPU: 8 - f}, **more) for n, f in enumerate(free)]


def plan(wanted: Demand, *racks: list[NodeCapacity]) -> Placement:
    """Its placement."""
    return place(wanted, CapacityIndex.of(n for nodes in racks for n in nodes))


def shares(placement: Placement) -> dict[str, tuple[int, int]]:
    """Domain -> (prefill, decode)."""
    return {s.domain: (s.prefill, s.decode) for s in placement.domains}


def why(placement: Placement, domain: str) -> str:
    """The sentence about a domain."""
    return next(e.text for e in placement.explanations if e.domain == domain)


@pytest.mark.parametrize(
    ("wanted", "more", "racks", "placed"),
    [
        # the domain that holds all and has least room
        ((1, 2), {}, {"a": (8, 8, 8, 8), "b": (8, 8, 8), "c": (8, 8)}, {"b": (1, 2)}),
        # in sum there is room in a, node by node there is none
        ((1, 1), {}, {"a": (4, 4, 4, 4), "b": (8, 8, 8, 8)}, {"b": (1, 1)}),
        # one role fits and the other not: nothing
        ((1, 1), {}, {"a": (8,)}, {}),
        # less than wanted: the pool's ratio, not one role alone
        ((4, 8), {}, {"a": (8, 8, 8, 8, 8, 8, 8)}, {"a": (2, 5)}),
        # one domain unless more are allowed
        ((2, 4), {}, {"a": (8, 8, 8), "b": (8, 8, 8)}, {"a": (1, 2)}),
        ((2, 4), {"max_domains": 2}, {"a": (8, 8, 8), "b": (8, 8, 8)}, {"a": (1, 2), "b": (1, 2)}),
        # fewest domains
        ((2, 4), {"max_domains": 3}, {"a": (8, 8, 8), "b": (8, 8, 8), "c": (8,) * 7}, {"c": (2, 4)}),
        # split by largest remainder on capacity: 12 to 6
        ((6, 6), {"max_domains": 2}, {"a": (8,) * 8, "b": (8,) * 4}, {"a": (4, 4), "b": (2, 2)}),
        ((4, 4), {"max_domains": 2}, {"a": (8,) * 6, "b": (8,) * 6}, {"a": (2, 2), "b": (2, 2)}),
        # what runs stays, though another domain would hold all in less room
        ((1, 2), {"running": {"a": (1, 1)}}, {"a": (8, 8), "b": (8, 8, 8)}, {"a": (1, 2)}),
        # more effective capacity wins over fewer moves
        ((2, 2), {"running": {"a": (1, 1)}}, {"a": (), "b": (8, 8, 8, 8)}, {"b": (2, 2)}),
        # no room anywhere else: what runs stays
        ((2, 4), {"running": {"a": (1, 2)}}, {"a": (0, 0, 0), "b": (4, 4)}, {"a": (1, 2)}),
        # shrinking takes the domain away that is worth least
        ((2, 4), {"running": {"a": (2, 4), "b": (1, 2)}, "max_domains": 2}, {"a": (), "b": ()}, {"a": (2, 4)}),
        # consolidation: one pair is worth it, two are not
        ((3, 3), {"running": {"a": (2, 2), "b": (1, 1)}, "max_domains": 2}, {"a": (8, 8), "b": ()}, {"a": (3, 3)}),
        ((4, 4), {"running": {"a": (2, 2), "b": (2, 2)}, "max_domains": 2}, {"a": (8,) * 4, "b": ()}, {"a": (2, 2), "b": (2, 2)}),
        # the ratio changed: what runs is not ended for balance, and not added to
        ((2, 8), {"running": {"a": (4, 4)}}, {"a": ()}, {"a": (2, 4)}),
        ((2, 8), {"running": {"a": (1, 4)}}, {"a": (8,)}, {"a": (1, 5)}),
        # a domain with one role left, and no room for the other: nothing, elsewhere instead
        ((1, 1), {"running": {"a": (1, 0)}}, {"a": (), "b": (8, 8)}, {"b": (1, 1)}),
        ((1, 1), {"running": {"a": (1, 0)}}, {"a": (8,), "b": (8, 8)}, {"a": (1, 1)}),
        # a label that is gone from the nodes under running replicas
        ((1, 1), {"running": {"gone": (1, 1)}}, {"a": (8, 8)}, {"gone": (1, 1)}),
        ((1, 1), {"excluded": {"a": "x"}}, {"a": (8, 8), "b": (8, 8, 8)}, {"b": (1, 1)}),
        ((1, 1), {"excluded": {"a": "x"}, "running": {"a": (1, 1)}}, {"a": (8, 8), "b": (8, 8, 8)}, {"b": (1, 1)}),
        ((1, 1), {"pinned": frozenset({"b"})}, {"a": (8, 8), "b": (8, 8, 8)}, {"b": (1, 1)}),
        ((1, 1), {"topology_key": ""}, {"a": (8,), "b": (8,)}, {"": (1, 1)}),  # no key: the cluster is one domain
    ],
)
def test_where_replicas_of_8_accelerators_go(
    wanted: tuple[int, int], more: dict[str, Any], racks: dict[str, tuple[int, ...]], placed: dict[str, tuple[int, int]]
) -> None:
    found = plan(demand(*wanted, pod(8), pod(8), **more), *(rack(name, *free) for name, free in racks.items()))
    assert shares(found) == placed
    assert found.exact


def test_the_sentence_about_a_role_that_does_not_fit() -> None:
    found = plan(demand(1, 3, pod(8), pod(4)), rack("rack-b", 4, 4, 4, 2))
    assert why(found, "rack-b") == (
        "rack-b: 3 decode replicas fit, 0 prefill: nodes with nvidia.com/gpu=8 free: 0 of 4; largest free is 4"
    )
    assert found.reason is Outcome.NO_CAPACITY and found.floating and found.avoid == ("rack-b",)
    assert found.message == (
        f"no domain of {RACK} holds one prefill and one decode replica; closest is rack-b: 3 decode replicas fit, 0 prefill: "
        "nodes with nvidia.com/gpu=8 free: 0 of 4; largest free is 4"
    )


@pytest.mark.parametrize(
    ("p", "d", "nodes", "text"),
    [
        (pod(4), pod(8), rack("r", 8), "1 prefill replica or 1 decode replica would fit alone, but not one of each: "
         "beside a prefill replica, nodes with nvidia.com/gpu=8 free: 0 of 1; largest free is 4"),
        (pod(8), pod(8), rack("r", 4), "neither role fits: nodes with nvidia.com/gpu=8 free: 0 of 1; largest free is 4"),
        (pod(8), pod(1, cpu=80), rack("r", 8, 8),
         "1 prefill replica fits, 0 decode: nodes with cpu=80 free: 0 of 2; largest free is 64"),
        (pod(8), pod(1, gib=600), rack("r", 8),
         "1 prefill replica fits, 0 decode: nodes with memory=600Gi free: 0 of 1; largest free is 512Gi"),
        (pod(8), pod(8, node_selector={"gpu": "l40"}), rack("r", 8),
         "1 prefill replica fits, 0 decode: nodes that its pods may use: 0 of 1 (1 node: node selector does not match)"),
        (pod(8), pod(8), rack("r", 8, 8, taints=(Taint("spot"),)),
         "neither role fits: nodes that its pods may use: 0 of 2 (2 nodes: untolerated taint spot:NoSchedule)"),
        (pod(8), pod(8), [*rack("r", 4), node("c", "r", unschedulable=True)],
         "neither role fits: nodes with nvidia.com/gpu=8 free: 0 of 1; largest free is 4 (1 node: node is cordoned)"),
        (pod(8), replica("decode", pod(8), pod(8)), rack("r", 8, 4, 4),
         "1 prefill replica fits, 0 decode: nodes with nvidia.com/gpu=8 free: 1 of 3; a replica needs 2 nodes"),
        (pod(8), PodShape({GPU: 8, "example.org/fpga": 1}), rack("r", 8),
         "1 prefill replica fits, 0 decode: nodes with example.org/fpga=1 free: 0 of 1; largest free is 0"),
        (pod(4), PodShape({GPU: 6, "cpu": 50_000}), [node("a", "r", taken={"cpu": 30_000}), node("b", "r", taken={GPU: 4})],
         "1 prefill replica fits, 0 decode: nodes with cpu=50 and nvidia.com/gpu=6 free: 0 of 2"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named(p: Any, d: Any, nodes: list[NodeCapacity], text: str) -> None:
    assert why(plan(demand(1, 1, p, d), nodes), "r") == f"r: {text}"


def test_what_was_chosen_and_why_not_more() -> None:
    racks = rack("a", 8, 8, 8), rack("b", 8, 8), rack("c", 8, 8, 8, 8)
    found = plan(demand(2, 4, pod(8), pod(8)), *racks)
    assert found.message.startswith(
        "1 of 2 prefill and 3 of 4 decode in c; c: 1 prefill and 3 decode chosen; no room for one more prefill"
    )
    assert why(found, "c").endswith("no room for one more decode: nodes with nvidia.com/gpu=8 free: 0 of 4; largest free is 0")
    assert (
        why(found, "a")
        == "a: 1 prefill and 2 decode fit together; not used: placement.maxDomains is 1, and c holds as much or more"
    )
    found = plan(demand(1, 1, pod(8), pod(8)), *racks)
    assert found.message == "1 prefill and 1 decode in b"
    assert why(found, "b") == "b: 1 prefill and 1 decode chosen"
    assert why(found, "c") == "c: 1 prefill and 1 decode fit together; not used: b has less room to spare"
    found = plan(demand(1, 1, pod(8), pod(8), running={"c": (1, 1)}, excluded={"a": "wedged twice"}), *racks)
    assert why(found, "c") == "c: 1 prefill and 1 decode chosen, of which 1 prefill and 1 decode run there"
    assert why(found, "b") == "b: 1 prefill and 1 decode fit together; not needed: c holds everything, and fewer replicas move"
    assert why(found, "a") == "a: excluded: wedged twice"
    found = plan(demand(1, 1, pod(8), pod(8), running={"z": (1, 1)}, pinned=frozenset({"z"})), *racks)
    assert why(found, "z").endswith("no node has this label value any more, 1 prefill and 1 decode still run there")
    assert why(found, "a") == "a: not used: only z may be"
    found = plan(demand(1, 4, pod(8), pod(8), max_domains=2), *racks)
    assert why(found, "a") == "a: 1 prefill and 2 decode fit together; not used: no prefill replica is left for it"


def test_only_the_closest_domains_are_explained() -> None:
    racks = [rack(f"r{n:02d}", *([8] * (n % 5))) for n in range(1, 30)]
    found = place(demand(1, 3, pod(8), pod(8)), CapacityIndex.of(n for nodes in racks for n in nodes), explained=5)
    assert [e.domain for e in found.explanations] == ["r04", "r09", "r14", "r19", "r24"]
    assert len(found.explanations) + found.unexplained == 29 - 5  # every fifth has no node


def test_no_node_has_the_label() -> None:
    found = plan(demand(1, 1, pod(8), pod(8)), [node("n1", ""), node("n2", "")])
    assert (found.reason, found.floating, found.avoid) == (Outcome.NO_DOMAIN_LABEL, True, ())
    assert found.message == f"placement.transferDomain.topologyKey: none of 2 nodes has the label {RACK}"


def test_nodes_without_the_label_are_counted() -> None:
    found = plan(demand(1, 1, pod(8), pod(8)), rack("a", 8), [node("n1", "")])
    assert found.message.endswith(f"; 1 node lacks the label {RACK}")


def test_a_floating_slice_keeps_out_of_domains_that_hold_half_of_it() -> None:
    found = plan(demand(1, 1, pod(4), pod(8), excluded={"e": "x"}), rack("a", 4), rack("b", 2), rack("c", 8), rack("e", 8, 8))
    assert found.floating and found.avoid == ("a", "c", "e")  # b holds nothing: the scheduler starts nothing there
    group = replica("decode", pod(8), pod(8))
    found = plan(demand(1, 1, replica("prefill", pod(8), pod(8)), group), rack("a", 8))
    assert found.avoid == ("a",)  # one pod of a group would bind


def test_nothing_is_wanted() -> None:
    found = plan(demand(0, 0, pod(8), pod(8), running={"a": (1, 1)}), rack("a", 8, 8))
    assert (found.domains, found.floating, found.reason) == ((), False, Outcome.SUSPENDED)


def test_preferred_stays_in_a_domain_while_one_holds_everything() -> None:
    found = plan(demand(1, 2, pod(8), pod(8), mode="Preferred"), rack("a", 8, 8, 8), rack("b", 8, 8))
    assert found.domains == (Share("a", 1, 2),) and not found.crossing


def test_preferred_crosses_and_says_so() -> None:
    racks = rack("a", 8, 8, 8), rack("b", 8, 8), [node("x", "")]
    required, preferred = (plan(demand(2, 4, pod(8), pod(8), mode=mode), *racks) for mode in ("Required", "Preferred"))
    assert required.domains == (Share("a", 1, 2),)
    assert preferred.domains == (Share(CROSSING, 2, 4, crossing=True),) and preferred.crossing and preferred.anchor == "a"
    assert preferred.message == (
        f"2 prefill and 4 decode in several domains; no single domain of {RACK} holds them, so handoffs cross domains "
        "(most room: a)"
    )


def test_preferred_with_one_role_in_each_domain() -> None:
    p, d = pod(8, node_selector={"gpu": "h100"}), pod(8, node_selector={"gpu": "l40"})
    racks = rack("a", 8, labels={"gpu": "h100"}), rack("b", 8, labels={"gpu": "l40"})
    assert plan(demand(1, 1, p, d), *racks).domains == ()
    assert plan(demand(1, 1, p, d, mode="Preferred"), *racks).domains == (Share(CROSSING, 1, 1, crossing=True),)
    assert plan(demand(1, 1, p, d, mode="Preferred", excluded={"b": "x"}), *racks).domains == ()


def test_preferred_crosses_with_the_rest_only_when_a_slice_more_is_allowed() -> None:
    racks = rack("a", 8, 8, 8), rack("b", 8), rack("c", 8), rack("d", 8)
    found = plan(demand(2, 4, pod(8), pod(8), mode="Preferred", max_domains=2), *racks)
    assert found.domains == (Share(CROSSING, 1, 2, crossing=True), Share("a", 1, 2))
    found = plan(demand(2, 4, pod(8), pod(8), mode="Preferred"), *racks)
    assert found.domains == (Share(CROSSING, 2, 4, crossing=True),)


def test_a_role_with_room_to_spare_is_not_started_for_nothing() -> None:
    """One prefill fits and any number of decode: as many decode as one prefill has use for, rounded to the pool's ratio."""
    p, d = pod(8, node_selector={"gpu": "h100"}), pod(1, node_selector={"gpu": "l40"})
    nodes = [*rack("a", 8, labels={"gpu": "h100"}), *(node(f"l{n}", "a", 8, labels={"gpu": "l40"}) for n in range(2))]
    assert shares(plan(demand(4, 8, p, d), nodes)) == {"a": (1, 3)}
    assert shares(plan(demand(4, 16, p, d), nodes)) == {"a": (1, 6)}
    assert shares(plan(demand(8, 4, replace(d, requests={GPU: 1}), pod(8, node_selector={"gpu": "h100"})), nodes)) == {"a": (3, 1)}


def test_different_accelerators_for_the_roles_in_one_domain() -> None:
    p, d = pod(8, node_selector={"gpu": "h100"}), pod(2, node_selector={"gpu": "l40"})
    mixed = [*rack("a", 8, labels={"gpu": "h100"}), node("a-l40", "a", 8, labels={"gpu": "l40"})]
    found = plan(demand(1, 3, p, d), mixed, rack("b", 8, 8, 8, labels={"gpu": "h100"}))
    assert shares(found) == {"a": (1, 3)}
    amd = PodShape({"amd.com/gpu": 4})
    other = NodeCapacity("amd", {RACK: "a"}, free := {"amd.com/gpu": 8, "pods": 9}, free)
    assert shares(plan(demand(1, 2, pod(8), amd), [*rack("a", 8), other], rack("b", 8, 8))) == {"a": (1, 2)}


def test_several_resources_are_packed_together() -> None:
    """Two pods of 4 accelerators fit on a node, but not their memory."""
    shape = pod(4, cpu=4, gib=300)
    assert shares(plan(demand(2, 2, shape, shape), rack("a", 8, 8, 8, 8))) == {"a": (2, 2)}
    assert shares(plan(demand(2, 2, shape, shape), rack("a", 8, 8))) == {"a": (1, 1)}


def test_a_pod_slot_is_a_resource() -> None:
    full = [node("a", "a", taken={"pods": 109}), node("b", "a", taken={"pods": 110})]
    assert plan(demand(1, 1, pod(1), pod(1)), full).domains == ()


def test_a_group_wants_as_many_nodes_as_it_has_pods() -> None:
    group = replica("decode", *[pod(4)] * 2)
    assert plan(demand(1, 1, pod(4), group), rack("a", 8, 4)).domains == (Share("a", 1, 1),)
    assert plan(demand(1, 1, pod(4), group), rack("a", 8, 2, 2)).domains == ()  # two pods on one node are no group
    assert plan(demand(1, 2, pod(4), group), rack("a", 8, 8, 4)).domains == (Share("a", 1, 2),)  # two groups share nodes


def test_reservations_of_one_are_not_free_for_the_next() -> None:
    view = CapacityIndex.of([*rack("a", 8, 8), *rack("b", 8, 8, 8)]).fork()
    wanted = demand(1, 1, pod(8), pod(8))
    first = place(wanted, view)
    assert reserve(wanted, view, first.domains) and shares(first) == {"a": (1, 1)}
    second = place(wanted, view)
    assert reserve(wanted, view, second.domains) and shares(second) == {"b": (1, 1)}
    assert not reserve(wanted, view, second.domains)
    assert place(wanted, view).floating


def test_a_domain_is_left_alone_for_longer_each_time() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    first = exclude("a", "wedged", now)
    assert (first.until - now, first.times) == (BACKOFF, 1)
    second = exclude("a", "wedged", now, first)
    assert (second.until - now, second.times) == (2 * BACKOFF, 2)
    for _ in range(40):
        second = exclude("a", "wedged", now, second)
    assert second.until - now == BACKOFF_MAX
    assert active([first], now) == {"a": "wedged"} and active([first], first.until) == {}
    assert active([first], first.until - timedelta(seconds=1)) == {"a": "wedged"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prefill": 0}, "prefill=0, decode=1: both must be 0, or both at least 1"),
        ({"decode": -1}, "decode=-1: both must be 0, or both at least 1"),
        ({"max_domains": 0}, "max_domains=0: must be at least 1"),
        ({"running": {"a": (-1, 0)}}, r"running\['a'\]=\(-1, 0\): must not be negative"),
    ],
)
def test_impossible_demands_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(demand(1, 1, pod(8), pod(8)), **change)


def test_what_runs_whole_in_one_domain_stays_as_the_search_would_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster of objects that rest is asked again and again; no search is made, and it would not find anything else."""
    rested = 0
    for seed in range(300):
        world = random_world(seed)
        first = place(replace(world.demand, running={}), world.view)
        if first.reason is not Outcome.PLACED or len(first.domains) != 1 or not world.demand.allows(first.domains[0].domain):
            continue
        rested += 1
        (share,) = first.domains
        runs = replace(world.demand, running={share.domain: (share.prefill, share.decode)})
        view = world.view
        assert reserve(replace(runs, running={}), view, first.domains)
        quick = place(runs, view)
        monkeypatch.setattr(planner, "at_rest", lambda demand: None)
        slow = place(runs, view)
        monkeypatch.undo()
        assert (
            quick.domains == slow.domains == first.domains and quick.objective == slow.objective and quick.message == slow.message
        )
    assert rested > 50
