"""Slices per transfer domain: what is made, kept, moved and given up, for worlds of nodes, pods and workloads."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import builders
import pytest
from builders import NOW
from hypothesis import given, settings
from hypothesis import strategies as st
from placing_world import GPU, KEY, Racks, Slice, counts, node, pinned

from pd_operator.core.placement.result import Outcome
from pd_operator.core.placing import MAX_AVOIDED, anchor, split, uncounted
from pd_operator.core.plan import make_plan
from pd_operator.core.sites import Kind, Site

TWO_RACKS = (node("a0", "a"), node("a1", "a"), node("b0", "b"), node("b1", "b"))
FLOATING = Site(Kind.FLOATING, KEY, "", "decode", (), ("a0", "a1", "b0", "b1"))
P2D2 = {"prefill": {"replicas": 2}, "decode": {"replicas": 2}}


def test_without_a_topology_key_there_is_one_slice_without_a_site() -> None:
    plan = make_plan(builders.make_snapshot())
    (only,) = plan.placing.targets
    assert (only.name, only.site, only.replicas) == (f"chat-{plan.revision}-0", Site(), {"prefill": 1, "decode": 1})
    assert plan.placing.placement is None and plan.placing.unseen == ""


def test_a_new_slice_is_pinned_to_a_domain_with_room_for_a_pair() -> None:
    world = Racks(TWO_RACKS, foreign={"a0": 1})
    assert counts(world.place()) == {world.name(): ("b", 1, 1)}


def test_what_runs_stays_and_grows_where_it_is() -> None:
    world = Racks((*TWO_RACKS, node("a2", "a", 2)), [Slice(pinned("a"), ["a0"], ["a1"])], P2D2)
    assert counts(world.place()) == {world.name(): ("a", 2, 2)}


def test_the_next_domain_is_used_when_the_first_is_full_and_the_spec_allows_two() -> None:
    world = Racks(TWO_RACKS, [Slice(pinned("a"), ["a0"], ["a1"])], {**P2D2, "placement": {"maxDomains": 2}})
    assert counts(world.place()) == {world.name(0): ("a", 1, 1), world.name(1): ("b", 1, 1)}


def test_what_fits_nowhere_waits_in_the_slice_that_serves() -> None:
    """So that an autoscaler sees it, and the scheduler starts it as soon as there is room."""
    world = Racks(TWO_RACKS, [Slice(pinned("a"), ["a0"], ["a1"])], P2D2)
    placing = world.place()
    assert counts(placing) == {world.name(): ("a", 2, 2)} and placing.short == (1, 1)


def test_a_shrinking_pool_gives_up_the_slice_it_needs_least() -> None:
    slices = [Slice(pinned("a"), ["a0"], ["a1"]), Slice(pinned("b"), ["b0"], ["b1"], index=1)]
    world = Racks(TWO_RACKS, slices, {"placement": {"maxDomains": 2}})
    assert list(counts(world.place()).values()) == [("a", 1, 1)]


def test_a_slice_without_a_pod_moves_as_soon_as_its_room_is_taken() -> None:
    """Somebody else's pod was faster. The old name is not used again while anything carries it."""
    world = Racks(TWO_RACKS, [Slice(pinned("a"), [None], [None])], foreign={"a0": 1})
    assert counts(world.place()) == {world.name(1): ("b", 1, 1)}


def test_half_a_slice_moves_whole_when_the_other_half_does_not_fit_any_more() -> None:
    nodes = (replace(TWO_RACKS[0], capacity=replace(TWO_RACKS[0].capacity, unschedulable=True)), *TWO_RACKS[1:])
    world = Racks(nodes, [Slice(pinned("a"), [None], ["a1"])])
    assert counts(world.place()) == {world.name(1): ("b", 1, 1)}


def test_half_a_slice_gives_up_replicas_for_the_role_that_it_lacks() -> None:
    """Decode was faster than prefill, and somebody else's pod than both: two of its three GPUs make a pair."""
    four = {"prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    world = Racks(TWO_RACKS, [Slice(pinned("a"), [None, None], ["a0", "a1"])], four, foreign={"b0": 1})
    assert counts(world.place()) == {world.name(): ("a", 1, 1)}


def test_a_slice_that_no_watch_has_shown_keeps_its_name_and_its_place() -> None:
    """It was made for domain a a moment ago; the plan has changed since."""
    world = Racks(TWO_RACKS, foreign={"a0": 1})
    made = {world.name(0): pinned("a").encode()}
    assert counts(world.place(unshown=made)) == {world.name(1): ("b", 1, 1)}
    assert counts(Racks(TWO_RACKS).place(unshown=made)) == {world.name(0): ("a", 1, 1)}


def test_half_a_slice_stays_when_there_is_no_better_place() -> None:
    world = Racks(TWO_RACKS, [Slice(pinned("a"), [None], ["a1"])], foreign={"a0": 1, "b0": 1})
    assert counts(world.place()) == {world.name(): ("a", 1, 1)}


def test_what_is_reserved_stays_put_between_plan_and_bind() -> None:
    """Both domains have room; the pods were made a moment ago and the scheduler has not looked at them."""
    world = Racks(TWO_RACKS, [Slice(pinned("b"), [None], [None])])
    assert counts(world.place()) == {world.name(): ("b", 1, 1)}


# --- floating -----------------------------------------------------------------------------------------------------------------


def test_with_room_for_one_role_per_domain_a_slice_floats_and_keeps_off_todays_nodes() -> None:
    world = Racks((node("a0", "a"), node("b0", "b")))
    placing = world.place()
    (only,) = placing.targets
    assert only.site == Site(Kind.FLOATING, KEY, "", "decode", (), ("a0", "b0")) and only.replicas == {"prefill": 1, "decode": 1}
    assert placing.placement is not None and placing.placement.reason is Outcome.NO_CAPACITY
    assert placing.lacking == f"Insufficient {GPU}"


def test_a_floating_slice_is_pinned_as_soon_as_a_pair_fits() -> None:
    world = Racks(TWO_RACKS, [Slice(FLOATING, [None], [None], front=False)])
    assert counts(world.place()) == {world.name(1): ("a", 1, 1)}


def test_a_floating_slice_stays_while_nothing_fits() -> None:
    world = Racks(TWO_RACKS, [Slice(FLOATING, [None], [None])], foreign=dict.fromkeys(("a0", "a1", "b0", "b1"), 1))
    (only,) = world.place().targets
    assert (only.name, only.site) == (world.name(), FLOATING)


def test_a_floating_slice_that_bound_keeps_its_domain() -> None:
    """An autoscaler's node took its larger half; the rest follows there, though another domain had room for both."""
    world = Racks((*TWO_RACKS, node("new", "c", 2)), [Slice(FLOATING, [None], ["new"])])
    placing = world.place()
    assert counts(placing) == {world.name(): ("Floating", 1, 1)} and placing.domains == {world.name(): "c"}


def test_many_nodes_are_avoided_by_their_domains() -> None:
    nodes = [node(f"n{i}", f"d{i}") for i in range(MAX_AVOIDED + 1)]
    (only,) = Racks(nodes).place().targets
    assert only.site.avoid_nodes == () and len(only.site.avoid_domains) == MAX_AVOIDED + 1


def test_nodes_that_the_pods_cannot_use_are_not_listed() -> None:
    cordoned = node("a1", "a", unschedulable=True)
    world = Racks((node("a0", "a"), cordoned, node("cpu", "a", 0), node("none", "")))
    (only,) = world.place().targets
    assert only.site.avoid_nodes == ("a0", "a1")  # a cordon may end


def test_no_node_has_the_label() -> None:
    placing = Racks((node("x", "", 8),)).place()
    assert placing.placement is not None and placing.placement.reason is Outcome.NO_DOMAIN_LABEL
    assert [t.site.kind for t in placing.targets] == [Kind.FLOATING]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ({"spec": {"resourceClaims": [{"name": "gpu"}]}}, "its pods ask for devices by resourceClaims"),
        ({"spec": {"schedulingGates": [{"name": "g"}]}}, "a queue admits its pods"),
        ({"metadata": {"labels": {"kueue.x-k8s.io/queue-name": "q"}}}, "a queue admits its pods"),
    ],
)
def test_where_node_capacity_says_nothing_a_slice_floats_anywhere(template: dict[str, Any], why: str) -> None:
    world = Racks(TWO_RACKS, changes={"decode": {"template": template}})
    placing = world.place()
    assert placing.unseen == why and [t.site for t in placing.targets] == [Site(Kind.FLOATING, KEY)]


def test_an_install_that_reads_no_nodes_floats() -> None:
    world = Racks(observed=False)
    placing = world.place()
    assert placing.unseen == "nodes cannot be read" and [t.site for t in placing.targets] == [Site(Kind.FLOATING, KEY)]


def test_without_nodes_to_read_the_slices_that_exist_share_the_pools() -> None:
    """An install that was cluster-wide before: nothing that runs moves."""
    slices = [Slice(pinned("a"), ["a0"] * 3, ["a1"] * 3), Slice(pinned("b"), ["b0"], ["b1"], index=1)]
    world = Racks(slices=slices, changes={"prefill": {"replicas": 8}, "decode": {"replicas": 4}}, observed=False)
    assert counts(world.place()) == {world.name(0): ("a", 6, 3), world.name(1): ("b", 2, 1)}


# --- Preferred ----------------------------------------------------------------------------------------------------------------

PREFERRED = {"placement": {"transferDomain": {"mode": "Preferred"}}}


def test_preferred_takes_one_domain_where_it_can() -> None:
    world = Racks(TWO_RACKS, changes=PREFERRED)
    assert counts(world.place()) == {world.name(): ("a", 1, 1)}


def test_preferred_crosses_where_no_domain_holds_a_pair() -> None:
    world = Racks((node("a0", "a"), node("b0", "b")), changes=PREFERRED)
    (only,) = world.place().targets
    assert (only.site.kind, only.replicas) == (Kind.CROSSING, {"prefill": 1, "decode": 1})


def test_a_crossing_slice_stays_one() -> None:
    site = Site(Kind.CROSSING, KEY, "a")
    world = Racks((node("a0", "a"), node("b0", "b")), [Slice(site, ["a0"], ["b0"])], PREFERRED)
    (only,) = world.place().targets
    assert (only.name, only.site) == (world.name(), site)


# --- labels that change -------------------------------------------------------------------------------------------------------


def test_pods_outside_their_slices_domain_are_named() -> None:
    nodes = (node("a0", "a"), node("a1", "elsewhere"))
    world = Racks(nodes, [Slice(pinned("a"), ["a0"], ["a1"])])
    placing = world.place()
    assert placing.strays == (f"{world.name()} belongs to a and has pods on a1 (elsewhere)",)
    assert counts(placing) == {world.name(): ("a", 1, 1)}  # reported; nothing that runs is ended for it


def test_a_node_that_lost_its_label_is_named_and_a_node_that_is_gone_is_not() -> None:
    world = Racks((node("a0", ""),), [Slice(pinned("a"), ["a0"], ["gone"])])
    assert world.place().strays == (f"{world.name()} belongs to a and has pods on a0 (no label)",)


# --- parts --------------------------------------------------------------------------------------------------------------------


def test_the_larger_shape_is_the_anchor() -> None:
    for gpus, expected in (((2, 1), "prefill"), ((1, 2), "decode"), ((1, 1), "decode")):
        changes = {role: {"resources": {"limits": {GPU: n}}} for role, n in zip(("prefill", "decode"), gpus, strict=True)}
        assert anchor(Racks(changes=changes).snapshot().shapes) == expected


@given(st.integers(1, 60), st.lists(st.integers(0, 20), min_size=1, max_size=6))
def test_a_split_keeps_the_total_and_gives_each_part_one(total: int, weights: list[int]) -> None:
    parts = split(total, weights)
    assert sum(parts) == total and min(parts) >= (1 if total >= len(weights) else 0)
    for i, j in ((i, j) for i in range(len(weights)) for j in range(len(weights)) if weights[i] > weights[j]):
        assert parts[i] >= parts[j] - (total < len(weights))


def test_a_plain_template_is_counted() -> None:
    assert uncounted({"metadata": {"labels": {"team": "x"}}, "spec": {"containers": []}}) == ""


@settings(max_examples=40, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 4), st.integers(1, 2))
def test_whatever_the_world_no_slice_has_one_role_alone_and_the_same_world_gives_the_same_plan(
    random: Any, prefill: int, decode: int, domains: int
) -> None:
    """Invariants I2 and I6: totals are those of the spec, or of what fits until that has its nodes, and a name is used once."""
    nodes = [node(f"n{i}", random.choice("abc"), random.randint(0, 3)) for i in range(6)]
    foreign = {n.capacity.name: random.randint(0, 2) for n in nodes if random.random() < 0.3}
    bound = [random.choice([n.capacity.name, None]) for n in nodes[:4]]
    slices = [Slice(pinned(random.choice("abc")), bound[:2], bound[2:])] if random.random() < 0.6 else []
    changes = {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}, "placement": {"maxDomains": domains}}
    first, second = (Racks(nodes, slices, changes, foreign).place() for _ in range(2))
    assert first.targets == second.targets and first.placement == second.placement
    assert all(t.replicas["prefill"] >= 1 and t.replicas["decode"] >= 1 for t in first.targets)
    assert sum(t.replicas["prefill"] for t in first.targets) in (prefill, prefill - first.short[0])
    assert sum(t.replicas["decode"] for t in first.targets) in (decode, decode - first.short[1])
    assert len({t.name for t in first.targets}) == len(first.targets) <= domains
    assert len({t.site.domain for t in first.targets}) == len(first.targets)


def test_a_day_later_nothing_is_different() -> None:
    world = Racks(TWO_RACKS, [Slice(pinned("a"), ["a0"], ["a1"])])
    snapshot = world.snapshot()
    later = replace(snapshot, now=NOW + timedelta(days=1))
    assert make_plan(later) == make_plan(snapshot)
