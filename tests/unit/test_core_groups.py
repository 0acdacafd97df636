"""Replicas of several pods: what is whole, where a group fits, what is reserved, and a role that goes from pods to groups."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import builders
import pytest
from builders import NAME, NAMESPACE, deployment, make_snapshot, rendered, revision_of, whole_slice
from placing_world import GPU, KEY, OWNER, Racks, Slice, counts, node, pinned
from test_core_exclusions import LONG

from pd_operator.api.conditions import Reason
from pd_operator.core.groups import whole
from pd_operator.core.ledger import Held, Ledger, Need
from pd_operator.core.names import GROUP_KIND, ROLE, SLICE, WORKER
from pd_operator.core.observed import ChildFact, PodFact, UsageFact, WorkloadFact
from pd_operator.core.placement.capacity import PodShape
from pd_operator.core.plan import make_plan
from pd_operator.core.prune import prune
from pd_operator.core.sites import Kind, Site
from pd_operator.core.slices import settled
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.status import build_status
from pd_operator.render.bundle import render

# Decode is a group of two pods with a GPU each.
PAIRS: dict[str, Any] = {"decode": {"nodes": 2, "parallelism": {"tensor": 2}}, "prefill": {"parallelism": {"tensor": 1}}}
RACKS = (node("a0", "a"), node("a1", "a"), node("b0", "b"), node("b1", "b"), node("b2", "b"))
SHAPE = PodShape({GPU: 1})


@pytest.mark.parametrize(
    ("leaders", "workers", "size", "found"),
    [
        ("g-0 g-1", "g-0-1 g-1-1", 2, 2),
        ("g-0 g-1", "g-0-1 g-0-2", 3, 1),
        ("g-0", "g-1-1", 2, 0),  # one leader and one worker, and no group
        ("g-1 g-10", "g-10-1", 2, 1),
        ("g-0", "", 1, 1),
    ],
)
def test_a_group_is_whole_when_all_of_its_own_pods_are_there(leaders: str, workers: str, size: int, found: int) -> None:
    assert whole(leaders.split(), workers.split(), size) == found


# --- placement ----------------------------------------------------------------------------------------------------------------


def test_a_group_goes_where_all_of_its_pods_find_a_node_of_their_own() -> None:
    world = Racks(RACKS, changes=PAIRS)
    assert counts(world.place()) == {world.name(): ("b", 1, 1)}


def test_room_on_one_node_is_no_room_for_a_group_of_two() -> None:
    world = Racks((node("a0", "a", 8), node("b0", "b", 2), node("b1", "b", 1)), changes=PAIRS)
    assert counts(world.place()) == {world.name(): ("b", 1, 1)}


def test_where_no_domain_holds_a_group_and_its_prefill_nothing_is_pinned() -> None:
    placing = Racks(RACKS[:4], changes=PAIRS).place()
    (only,) = placing.targets
    assert only.site.kind is Kind.FLOATING and placing.lacking == f"Insufficient {GPU}"


def test_a_group_that_runs_stays_and_the_next_goes_beside_it() -> None:
    world = Racks([node(f"a{n}", "a") for n in range(5)], [Slice(pinned("a"), ["a0"], [("a1", "a2")])], {**PAIRS})
    grown = builders.deep(PAIRS, {"decode": {"replicas": 2}})
    more = Racks([node(f"a{n}", "a") for n in range(5)], [Slice(pinned("a"), ["a0"], [("a1", "a2"), (None, None)])], grown)
    assert counts(world.place()) == {world.name(): ("a", 1, 1)}
    assert counts(more.place()) == {more.name(): ("a", 1, 2)} and not any(more.place().short)


def test_half_a_group_whose_rest_fits_nowhere_moves_with_its_slice() -> None:
    """Somebody else took the node of the worker."""
    world = Racks(RACKS, [Slice(pinned("a"), [], [("a0", None)])], PAIRS, foreign={"a1": 1})
    assert counts(world.place()) == {world.name(1): ("b", 1, 1)}


def test_half_a_group_is_not_moved_while_its_rest_has_room() -> None:
    world = Racks((*RACKS, node("a2", "a")), [Slice(pinned("a"), [None], [("a0", None)])], PAIRS)
    assert counts(world.place()) == {world.name(): ("a", 1, 1)}


def test_the_wedge_rule_sees_a_worker_without_a_node() -> None:
    """A floating slice: its leader is bound and so is prefill, and the worker finds nothing where they are."""
    nodes = (node("a0", "a"), node("a1", "a"))
    world = Racks(nodes, [Slice(Site(Kind.FLOATING, KEY), ["a1"], [("a0", None)], waits_for=LONG)], PAIRS)
    placing = world.place()
    assert [(w.slice, w.places) for w in placing.wedged] == [(world.name(), ("a",))]
    assert "a decode pod found no node" in placing.excluded[0].reason
    fine = Racks(nodes, [Slice(Site(Kind.FLOATING, KEY), ["a1"], [("a0", None)], waits_for=LONG / 2)], PAIRS)
    assert fine.place().wedged == () and fine.place().due is not None


def test_the_wedge_rule_where_no_node_can_be_read() -> None:
    """Only a worker is bound: something of the slice is somewhere, so the clock runs."""
    slices = [Slice(Site(Kind.FLOATING, KEY), [None], [(None, "n7")], waits_for=LONG)]
    placing = Racks((), slices, PAIRS, observed=False).place()
    assert [w.places for w in placing.wedged] == [("node/n7",)]


def test_a_worker_outside_its_slices_domain_is_named() -> None:
    world = Racks(RACKS, [Slice(pinned("b"), ["b2"], [("b0", "a1")])], PAIRS)
    assert world.place().strays == (f"{world.name()} belongs to b and has pods on a1 (a)",)


def test_status_names_the_worker_that_finds_no_node() -> None:
    slices = [Slice(Site(Kind.FLOATING, KEY), ["b2"], [("b0", None)], waits_for=60, ready=False)]
    world = Racks((), slices, PAIRS, observed=False)
    snapshot = world.snapshot()
    found = {c["type"]: c for c in build_status(snapshot, make_plan(snapshot))["conditions"]}
    assert found["DecodeReady"]["reason"] == "Unschedulable" and "-decode-0-1: no node for it" in found["DecodeReady"]["message"]


# --- ledger -------------------------------------------------------------------------------------------------------------------


def book_of(*free: int) -> Ledger:
    """One rack `a` of nodes with so many GPUs."""
    book = Ledger()
    for number, gpus in enumerate(free):
        one = node(f"a{number}", "a", gpus)
        book.node(one.capacity.name, one)
    return book


def group_child(replicas: int, size: int = 2) -> ChildFact:
    labels = {SLICE: "s", ROLE: "decode"}
    fact = WorkloadFact(spec_replicas=replicas, shapes=(SHAPE,) * size, size=size)
    return ChildFact(GROUP_KIND, NAMESPACE, "s-decode", "u", labels=labels, workload=fact, site=pinned("a").encode())


def bound(group: int, index: int, at: str) -> UsageFact:
    name = f"s-decode-{group}" + (f"-{index}" if index else "")
    return UsageFact(NAMESPACE, name, at, {GPU: 1}, NAME, "s", "decode", worker=index > 0)


def test_all_pods_of_unbound_groups_are_reserved() -> None:
    book = book_of(2, 2, 2)
    book.child(OWNER, None, group_child(2))
    room = book.room(("others", "x"), KEY)
    assert room.view.room(KEY, "a")[GPU] == 2 and book.waiting() == {OWNER}
    assert book.room(OWNER, KEY).held["s", "decode"] == Held((), reserved=2, whole=0)


def test_a_group_is_reserved_on_nodes_of_its_own() -> None:
    book = book_of(4)
    book.child(OWNER, None, group_child(1))
    room = book.room(OWNER, KEY)
    assert room.held["s", "decode"].reserved == 0 and room.view.room(KEY, "a")[GPU] == 3  # its leader fits, its worker does not


def test_what_half_a_group_lacks_is_reserved() -> None:
    book = book_of(1, 1, 1)
    book.child(OWNER, None, group_child(1))
    book.pod(None, bound(0, 0, "a0"))
    assert book.room(OWNER, KEY).held["s", "decode"] == Held(("a0",), 1, whole=0)
    assert book.room(("others", "x"), KEY).view.room(KEY, "a")[GPU] == 1 and book.waiting() == {OWNER}
    book.pod(None, bound(0, 1, "a1"))
    assert book.room(OWNER, KEY).held["s", "decode"] == Held(("a0",), 0, ("a1",), 1) and book.waiting() == set()
    assert book.holders("a1") == {OWNER}


def test_a_workload_that_goes_does_not_take_the_one_that_came_for_it_away() -> None:
    book = book_of(1, 1, 1)
    labels = {SLICE: "s", ROLE: "decode"}
    fact = WorkloadFact(spec_replicas=1, shapes=(SHAPE,))
    before = ChildFact("Deployment", NAMESPACE, "s-decode", "d", labels=labels, workload=fact, site=pinned("a").encode())
    book.child(OWNER, None, before)
    book.child(OWNER, None, group_child(1))
    book.child(OWNER, before, None)
    assert book.room(OWNER, KEY).view.room(KEY, "a")[GPU] == 1
    book.child(OWNER, group_child(1), None)
    assert book.room(OWNER, KEY).view.room(KEY, "a")[GPU] == 3


def test_a_plan_of_groups_counts_until_the_watch_shows_it() -> None:
    book = book_of(1, 1, 1)
    book.child(OWNER, None, replace(group_child(1, size=1), kind="Deployment"))
    book.assume(OWNER, {("s", "decode"): Need(1, pinned("a"), (SHAPE,) * 2)})
    assert book.room(("others", "x"), KEY).view.room(KEY, "a")[GPU] == 1
    book.child(OWNER, None, group_child(1))
    assert book.room(("others", "x"), KEY).view.room(KEY, "a")[GPU] == 1


def test_whatever_is_bound_reservations_never_exceed_what_is_free_nor_what_is_missing() -> None:
    rng = Random(7)
    for _ in range(300):
        size, replicas = rng.randint(2, 4), rng.randint(1, 4)
        free = [rng.randint(0, 4) for _ in range(rng.randint(1, 6))]
        book = book_of(*free)
        book.child(OWNER, None, group_child(replicas, size))
        left = list(free)
        taken = [(g, i) for g in range(replicas) for i in range(size) if rng.random() < 0.4]
        placed = 0
        for group, index in taken:
            at = next((n for n, gpus in enumerate(left) if gpus > 0), None)
            if at is not None:
                left[at], placed = left[at] - 1, placed + 1
                book.pod(None, bound(group, index, f"a{at}"))
        room = book.room(OWNER, KEY)
        held = room.held.get(("s", "decode"), Held(whole=0))
        assert min((n.free[GPU] for n in room.view.nodes(KEY, "a")), default=0) >= 0
        reserved_pods = sum(left) - room.view.room(KEY, "a").get(GPU, 0)
        assert 0 <= reserved_pods <= replicas * size - placed
        assert 0 <= held.bound + held.reserved <= replicas
        if held.bound + held.reserved == replicas:
            assert reserved_pods == replicas * size - placed  # all that is missing has room


# --- from pods to groups and back -----------------------------------------------------------------------------------------------

WIDE: dict[str, Any] = {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"parallelism": {"tensor": 2}}}
GROUPS = builders.deep(WIDE, {"decode": {"nodes": 2}})
REVISION = revision_of(WIDE)


def changing(*, ready: int, changes: dict[str, Any] | None = None, old: dict[str, Any] | None = None) -> Snapshot:
    """Decode was a Deployment of one pod and is to be one group, of which `ready` are ready."""
    new = deployment(REVISION, "decode", ready=ready)
    group = replace(new, kind=GROUP_KIND, uid="uid-group", workload=replace(new.workload, size=2))  # type: ignore[type-var]
    return make_snapshot(builders.deep(changes or GROUPS, old or {}), children=(*whole_slice(REVISION, front=True)[0], group))


def pruned(snapshot: Snapshot) -> list[tuple[str, str]]:
    plan = make_plan(snapshot)
    assert plan.refusal is None
    return [(d.kind, d.reason) for d in prune(snapshot, plan, render(snapshot, plan).keys)]


def test_the_old_workload_serves_until_the_new_one_is_ready() -> None:
    snapshot = changing(ready=0)
    child = snapshot.deployments()[f"{NAME}-{REVISION}-0"]["decode"]
    assert child.kind == GROUP_KIND and child.workload is not None
    assert (child.workload.replicas, child.workload.ready, child.workload.updated) == (2, 1, 1)
    assert not settled(child) and pruned(snapshot) == []
    assert make_plan(snapshot).rollout.reason is Reason.ROLLING_OUT


def test_the_old_workload_goes_when_the_new_one_is_ready() -> None:
    assert pruned(changing(ready=1)) == [("Deployment", "a workload of another kind has taken over")]


def test_with_recreate_it_goes_at_once() -> None:
    assert pruned(changing(ready=0, old={"rollout": {"type": "Recreate"}})) == [
        ("Deployment", "a workload of another kind has taken over")
    ]


def test_the_way_back_is_the_same() -> None:
    assert pruned(changing(ready=1, changes=WIDE)) == [(GROUP_KIND, "a workload of another kind has taken over")]


def test_while_paused_nothing_takes_over() -> None:
    paused = builders.deep(GROUPS, {"rollout": {"paused": True}})
    snapshot = make_snapshot(paused, children=whole_slice(REVISION, front=True)[0])
    plan = make_plan(snapshot)
    made = {kind for kind, name in render(snapshot, plan).keys if name.endswith("-decode") and REVISION in name}
    assert made == set() and pruned(snapshot) == []
    assert plan.rollout.reason is Reason.PAUSED and plan.rollout.message.endswith("-decode waits")
    going_on = replace(snapshot, spec=builders.make_spec(GROUPS))
    assert (GROUP_KIND, f"{NAME}-{REVISION}-0-decode") in render(going_on, make_plan(going_on)).keys


def test_while_paused_every_group_keeps_its_template() -> None:
    paused = builders.deep(GROUPS, {"rollout": {"paused": True}, "decode": {"replicas": 3}})
    for changes, there, partition in ((paused, True, 3), (paused, False, 0), (GROUPS, True, 0)):
        base = changing(ready=1, changes=changes)
        children = [c for c in base.children if (c.kind == GROUP_KIND) is there or not c.name.endswith("-decode")]
        snapshot = replace(base, children=tuple(children) if there else ())
        (made,) = builders.manifests(render(snapshot, make_plan(snapshot)), GROUP_KIND)
        config = made["spec"]["rolloutStrategy"]["rollingUpdateConfiguration"]
        assert config["partition"] == partition
        assert (config["maxSurge"], config["maxUnavailable"]) == ((0, 1) if partition else ("25%", "25%"))


def test_a_pool_that_is_made_anew_does_not_count_a_role_twice() -> None:
    snapshot = replace(changing(ready=1), spec=builders.make_spec(builders.deep(GROUPS, {"decode": {"replicas": None}})))
    assert make_plan(snapshot).pools["decode"].number == 1


def test_workers_are_engines_and_no_replicas() -> None:
    name = f"{NAME}-{REVISION}-0"
    pods = [
        PodFact(NAMESPACE, f"{name}-decode-0{'-1' * n}", f"u{n}", labels={SLICE: name, (WORKER if n else ROLE): "decode"})
        for n in (0, 1)
    ]
    snapshot = make_snapshot(GROUPS, pods=tuple(pods))
    assert [p.name for p in snapshot.engines_of(name, "decode")] == [f"{name}-decode-0", f"{name}-decode-0-1"]
    assert [p.name for p in snapshot.pods_of(name, "decode")] == [f"{name}-decode-0"]
    assert snapshot.engines_of(name, "prefill") == ()


# --- a cluster without LeaderWorkerSet --------------------------------------------------------------------------------------------

WHY = "the API server does not know LeaderWorkerSet of leaderworkerset.x-k8s.io/v1"


def test_a_missing_kind_is_named_with_field_value_and_remedy() -> None:
    plan = make_plan(make_snapshot(GROUPS, missing_kinds={GROUP_KIND: WHY}))
    assert plan.refusal is not None and plan.refusal.reason is Reason.MISSING_KIND and plan.refusal.outside
    assert plan.refusal.message == (
        f"spec.decode.nodes=2: {WHY}: install LeaderWorkerSet, which runs a replica as a group of pods, or set 1"
    )


def test_one_that_needs_no_group_does_not_care() -> None:
    assert make_plan(make_snapshot(WIDE, missing_kinds={GROUP_KIND: WHY})).refusal is None


def test_what_runs_stays_when_the_kind_goes() -> None:
    snapshot = replace(changing(ready=1), missing_kinds={GROUP_KIND: WHY})
    plan = make_plan(snapshot)
    assert plan.refusal is not None and plan.targets == () and all(s.keep_engines for s in plan.rollout.slices)


def test_engines_over_several_nodes_are_said_to_be_unproven() -> None:
    assert [u.field for u in rendered(GROUPS)[1].unproven] == ["spec.decode.nodes"]
