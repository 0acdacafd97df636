"""Rollouts in which a revision has several slices: which serve, which wait in the dark, which go, and when (invariant I3)."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import builders
import pytest
from placing_world import GPU, KEY, Racks, Slice, node, pinned

from pd_operator.api.conditions import Reason
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.rollout import SlicePlan, State
from pd_operator.core.sites import Kind, Site
from pd_operator.core.status import build_pool_status, build_status

RACKS = tuple(node(f"{rack}{n}", rack, 2) for rack in "abc" for n in (0, 1))
TWO = {"prefill": {"replicas": 4}, "decode": {"replicas": 4}, "placement": {"maxDomains": 2}}
A = Slice(pinned("a"), ["a0", "a1"], ["a0", "a1"])
B = Slice(pinned("b"), ["b0", "b1"], ["b0", "b1"], index=1)
OLD = "0badcafe"


def plan_of(*slices: Slice, changes: dict[str, Any] | None = None, nodes: Any = RACKS, **fields: Any) -> tuple[Racks, Plan]:
    world = Racks(nodes, slices, TWO if changes is None else changes, **fields)
    return world, make_plan(world.snapshot())


def states(plan: Plan) -> dict[str, tuple[str, bool]]:
    """Index, and "old" where it is of the old revision -> (state, front)."""

    def label(slice_: SlicePlan) -> str:
        return slice_.name.rsplit("-", 1)[1] + (" old" if slice_.revision == OLD else "")

    return {label(s): (s.state.value, s.front) for s in plan.rollout.slices}


def test_the_first_slices_do_not_wait_for_each_other() -> None:
    _, plan = plan_of()
    assert states(plan) == {"0": ("Serving", True), "1": ("Serving", True)}


def test_a_further_slice_is_dark_until_it_is_complete() -> None:
    starting = Slice(pinned("b"), ["b0", "b1"], ["b0", "b1"], index=1, front=False, ready=False)
    _, plan = plan_of(A, starting)
    assert states(plan) == {"0": ("Serving", True), "1": ("Dark", False)}
    whole = Slice(pinned("b"), ["b0", "b1"], ["b0", "b1"], index=1, front=False)
    _, plan = plan_of(A, whole)
    assert states(plan) == {"0": ("Serving", True), "1": ("Serving", True)}


def test_a_slice_that_is_not_wanted_any_more_goes_when_the_others_are_complete() -> None:
    shrunk = {**TWO, "prefill": {"replicas": 2}, "decode": {"replicas": 2}}
    world, plan = plan_of(A, B, changes=shrunk)
    assert states(plan) == {"0": ("Serving", True), "1": ("Removing", False)}
    assert plan.rollout.reason is Reason.ROLLING_OUT and world.name(1) in plan.rollout.message
    broken = Slice(pinned("a"), ["a0", "a1"], ["a0", "a1"], ready=False)
    _, plan = plan_of(broken, B, changes=shrunk)
    assert states(plan)["1"] == ("Serving", True)  # it is what serves


def test_a_slice_that_serves_nobody_goes_at_once() -> None:
    lost = Slice(Site(Kind.FLOATING, KEY), [None, None], [None, None], index=1)
    _, plan = plan_of(Slice(pinned("a"), ["a0"], ["a1"], ready=False), lost, changes={})
    assert states(plan)["1"] == ("Removing", False)


def test_what_replaces_a_slice_that_serves_nobody_does_not_start_in_the_dark() -> None:
    """Its routers would be rolled at once, and the new pod of a router may land where nothing starts it."""
    lost = Slice(Site(Kind.FLOATING, KEY), [None], ["c0"], index=1)
    _, plan = plan_of(Slice(pinned("a"), ["a0"], ["a1"], ready=False, front=False), lost, changes={})
    assert states(plan) == {"0": ("Serving", True), "1": ("Removing", False)}


def test_slices_of_a_new_revision_come_up_dark_beside_all_of_the_old_one() -> None:
    old = [Slice(pinned(d), [f"{d}0"], [f"{d}1"], index=n, revision=OLD) for n, d in enumerate("ab")]
    _, plan = plan_of(*old)
    assert states(plan) == {
        "0": ("Dark", False),
        "1": ("Dark", False),
        "0 old": ("Serving", True),
        "1 old": ("Serving", True),
    }
    assert {t.site.domain for t in plan.placing.targets} <= {"a", "b", "c"}


def test_the_old_revision_goes_when_every_new_slice_is_complete_and_fronted() -> None:
    old = [Slice(pinned("c"), ["c0"], ["c1"], revision=OLD)]
    dark_b = Slice(pinned("b"), ["b0", "b1"], ["b0", "b1"], index=1, front=False)
    _, plan = plan_of(A, dark_b, *old)
    assert states(plan) == {"0": ("Dark", True), "1": ("Dark", True), "0 old": ("Serving", True)}
    _, plan = plan_of(A, B, *old)
    assert states(plan) == {"0": ("Serving", True), "1": ("Serving", True), "0 old": ("Removing", False)}


@pytest.mark.parametrize(("waits", "state"), [(29.0, State.SERVING), (31.0, State.REMOVING)])
def test_where_both_do_not_fit_the_old_one_goes_after_some_patience(waits: float, state: State) -> None:
    """The new slice floats, kept off the nodes of today, so the scheduler does not say what is missing: the planner does."""
    nodes = (node("a0", "a"), node("a1", "a"))
    old = Slice(pinned("a"), ["a0"], ["a1"], revision=OLD)
    new = Slice(Site(Kind.FLOATING, KEY, "", "decode", (), ("a0", "a1")), [None], [None], waits_for=waits, front=False)
    world = Racks(nodes, [old, new])
    silent = "0/2 nodes: 2 node(s) didn't match Pod's node affinity/selector"
    world.pods = [p if p.scheduled else replace(p, scheduling_message=silent) for p in world.pods]
    stored = builders.templates_of()
    snapshot = world.snapshot(revisions=(replace(stored, pairing=OLD), replace(stored, pairing=world.revision)))
    plan = make_plan(snapshot)
    assert plan.rollout.reason is Reason.NO_CAPACITY_FOR_PAIR and f"Insufficient {GPU}" in plan.rollout.message
    assert next(s.state for s in plan.rollout.slices if s.revision == OLD) is state


def test_while_suspended_the_slices_stay_where_they_are_with_no_replica() -> None:
    _, plan = plan_of(A, B, changes={**TWO, "suspend": True})
    assert [(s.name[-1], s.replicas) for s in plan.targets] == [(n, {"prefill": 0, "decode": 0}) for n in "01"]


def test_suspended_from_the_start_nothing_is_placed() -> None:
    _, plan = plan_of(changes={**TWO, "suspend": True})
    assert plan.targets == () and plan.rollout.reason is Reason.SUSPENDED


# --- status -------------------------------------------------------------------------------------------------------------------


def conditions(world: Racks) -> dict[str, dict[str, Any]]:
    snapshot = world.snapshot()
    return builders.conditions(build_status(snapshot, make_plan(snapshot)))


def test_status_counts_over_all_slices_and_names_their_domains() -> None:
    world, plan = plan_of(A, B)
    status = build_status(world.snapshot(), plan)
    assert [(s["name"][-1], s["domain"], s["prefill"], s["decode"]) for s in status["slices"]] == [
        ("0", "a", 2, 2),
        ("1", "b", 2, 2),
    ]
    assert [(r["ready"], r["updatedReplicas"], r["gpus"]) for r in status["roles"]] == [("4/4", 4, 4), ("4/4", 4, 4)]
    placed = builders.conditions(status)["Placed"]
    assert (placed["status"], placed["reason"]) == ("True", "Bound")
    assert placed["message"] == "8 engine pods on 4 nodes in transfer domains a, b"
    assert "excludedDomains" not in status


FULL = {"a0": 2, "a1": 2, "b0": 2, "b1": 2, "c0": 2, "c1": 2}
ANY = Site(Kind.FLOATING, KEY)


def floats(**fields: Any) -> Slice:
    return Slice(ANY, [None], [None], **fields)


GATED = floats(pod_fields={"scheduling_reason": "SchedulingGated"})
NOMINATED = floats(pod_fields={"nominated": "d0"})
YOUNG = node("d0", "d", 2, created=builders.NOW, ready=False)
THREE = {"prefill": {"replicas": 3}, "decode": {"replicas": 3}}
ACROSS = (
    (node("a0", "a"), node("b0", "b")),
    [Slice(Site(Kind.CROSSING, KEY), ["a0"], ["b0"])],
    {"placement": {"transferDomain": {"mode": "Preferred"}}},
)
WEDGED = Slice(pinned("a"), [None], ["a0"], waits_for=601.0)
NO, YES, MAYBE = "False", "True", "Unknown"
PLACED: dict[str, tuple[Racks, str, str, str]] = {
    "no room": (Racks(RACKS, foreign=FULL), NO, "NoCapacity", f"{GPU}=1 free: 0 of 2"),
    "no label": (Racks((node("x", "", 8),)), NO, "NoDomainLabel", KEY),
    "a node is being made": (Racks((*RACKS, YOUNG), foreign=FULL), NO, "WaitingForNodes", "a node is being made"),
    "a node is named": (Racks(RACKS, [NOMINATED], foreign=FULL), NO, "WaitingForNodes", "a node is being made"),
    "a gate": (Racks(slices=[GATED], observed=False), NO, "Gated", "gate"),
    "not seen yet": (Racks(observed=False), MAYBE, "CapacityUnobserved", "nodes cannot be read"),
    "not seen, no room": (Racks(slices=[floats(waits_for=5.0)], observed=False), NO, "NoCapacity", "the scheduler chooses"),
    "not seen, bound": (Racks(slices=[Slice(ANY, ["n"], ["n"])], observed=False), YES, "Bound", "not known which"),
    "short": (Racks(RACKS, [A], THREE), NO, "NoCapacity", "2 of 3 prefill and 2 of 3 decode in a"),
    "wedged": (Racks(RACKS, [WEDGED], foreign=FULL | {"a0": 1}), NO, "Wedged", "left alone: a until 2026-01-02T03:09:05Z"),
    "crossing": (Racks(*ACROSS), YES, "Bound", "may be in different transfer domains"),
}


@pytest.mark.parametrize("name", PLACED)
def test_placed_says_which_case_it_is(name: str) -> None:
    world, status, reason, words = PLACED[name]
    found = conditions(world)["Placed"]
    assert (found["status"], found["reason"]) == (status, reason) and words in found["message"], found


def test_ready_takes_over_what_placement_knows() -> None:
    found = conditions(PLACED["no room"][0])
    assert found["Ready"]["reason"] == "NoCapacity" and "Placed: no domain" in found["Ready"]["message"]


def test_the_domains_that_come_closest_stand_first() -> None:
    nodes = (node("a0", "a", 0), node("m0", "m", 1), node("z0", "z", 4, unschedulable=True))
    message = conditions(Racks(nodes))["Placed"]["message"]
    assert re.findall("[:;] ([amz]): ", message) == ["m", "z", "a"]


def test_a_changed_label_is_a_degradation() -> None:
    world = Racks((node("a0", "a"), node("a1", "x")), [Slice(pinned("a"), ["a0"], ["a1"])])
    found = conditions(world)["Degraded"]
    assert (found["status"], found["reason"]) == ("True", "PairingNotEnforced") and "a1 (x)" in found["message"]


@pytest.mark.parametrize(("replicas", "status"), [(2, "False"), (3, "True")])
def test_a_pool_that_finds_no_room_is_limited(replicas: int, status: str) -> None:
    world = Racks(RACKS, [A], {role: {"replicas": replicas} for role in ("prefill", "decode")})
    snapshot = world.snapshot()
    found = builders.conditions(build_pool_status(snapshot, make_plan(snapshot), "decode", {}, 1))["ScalingLimited"]
    assert found["status"] == status and (found["reason"] == "NoCapacity") is (status == "True")


def test_a_refused_spec_keeps_what_status_knew() -> None:
    world = Racks(RACKS, [A], {"prefill": {"replicas": 2}, "decode": {"replicas": 2}})
    excluded = [{"name": "b", "reason": "x", "until": "2026-01-02T04:00:00Z", "times": 1}]
    world.status = {"slices": [{"name": world.name(), "domain": "a"}], "excludedDomains": excluded}
    snapshot = world.snapshot(conflicts=("Service chat",))
    status = build_status(snapshot, make_plan(snapshot))
    assert [s["domain"] for s in status["slices"]] == ["a"] and status["excludedDomains"] == excluded
