"""Rollouts, played in a small world, and the decisions of single snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import deployment, make_snapshot, pod, revision_of, templates_of, unschedulable, whole_slice
from rollout_world import World

from pd_operator.api.conditions import Reason
from pd_operator.core.names import FRONT, ROLES, slice_name
from pd_operator.core.plan import make_plan
from pd_operator.core.rollout import RolloutPlan, State, complete, plan_rollout, requested, settled
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status

OLD = {"engine": {"args": ["--old"]}}
NEW = {"engine": {"args": ["--new"]}}
A, B = revision_of(OLD), revision_of(NEW)
DARK, SERVING, REMOVING = (s.value for s in State)


# --- scenarios ------------------------------------------------------------------------------------------------------------


def up(**fields: Any) -> World:
    """A world whose first slice serves."""
    world = World(**fields)
    world.pairing_edit(1)
    world.settle()
    return world


def states(world: World, seen: list[dict[str, str]]) -> list[dict[int, str]]:
    """The same with the number of the edit in place of the revision."""
    number = {world.revision(n): n for n in (1, 2, 3)}
    return [{number[r]: s for r, s in step.items()} for step in seen]


def play(world: World) -> list[dict[int, str]]:
    """Settle, and check that nothing that must hold was broken on the way."""
    seen = states(world, world.settle())
    assert world.broken_rules == []
    assert len(world.endpoints()) == 2
    return seen


def test_first_slice() -> None:
    world = World()
    world.pairing_edit(1)
    assert play(world) == [{1: SERVING}]
    assert world.plan.rollout.reason is Reason.UPDATED


def test_pairing_edit_with_room() -> None:
    world = up()
    world.pairing_edit(2)
    assert play(world) == [{2: DARK, 1: SERVING}, {2: SERVING, 1: REMOVING}, {2: SERVING}]


def test_the_front_door_never_closes_while_there_is_room() -> None:
    world = up()
    world.pairing_edit(2)
    open_all_the_time: list[int] = []

    def watch(w: World) -> bool:
        open_all_the_time.append(len(w.endpoints()))
        return w.settled()

    world.run(watch)
    assert min(open_all_the_time) >= 2


def test_pairing_edit_without_room() -> None:
    world = up(gpus=2)
    world.pairing_edit(2)
    assert play(world) == [{2: DARK, 1: SERVING}, {2: DARK, 1: REMOVING}, {2: SERVING}]


def test_without_room_the_old_routers_end_before_the_old_engines() -> None:
    world = up(gpus=2)
    world.pairing_edit(2)
    world.run(lambda w: w.plan.rollout.reason is Reason.NO_CAPACITY_FOR_PAIR)
    names = {d.part for d in world.deployments.values() if d.slice.endswith(f"{world.revision(1)}-0")}
    assert names == set(ROLES)  # its routers are gone, its engines wait for the routers' pods
    play(world)


def test_recreate() -> None:
    world = up()
    world.edit({"rollout": {"type": "Recreate"}})
    world.pairing_edit(2)
    assert play(world) == [{1: REMOVING}, {2: SERVING}]


def test_recreate_chosen_in_the_middle_does_not_throw_away_what_was_begun() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.tick()
    world.edit({"rollout": {"type": "Recreate"}})
    assert play(world) == [{2: DARK, 1: REMOVING}, {2: SERVING}]


def test_back_to_the_old_revision_while_the_new_one_starts() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    before = {p.name for p in world.pods if p.labels["pdserve.dev/revision"] == world.revision(1)}
    world.pairing_edit(1)
    assert play(world) == [{1: SERVING, 2: REMOVING}, {1: SERVING}]
    assert before <= {p.name for p in world.pods}  # what served was not touched


def test_back_to_the_old_revision_while_it_ends() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: REMOVING in w.slices().values())
    world.pairing_edit(1)
    seen = play(world)
    assert seen[0] == {1: DARK, 2: SERVING} and seen[-1] == {1: SERVING}


def test_third_revision_waits_for_the_end_of_the_second() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.tick(2)
    world.pairing_edit(3)
    assert play(world) == [
        {1: SERVING, 2: REMOVING},
        {1: SERVING},
        {3: DARK, 1: SERVING},
        {3: SERVING, 1: REMOVING},
        {3: SERVING},
    ]


def test_third_revision_does_not_end_the_serving_one_for_room_that_the_second_still_holds() -> None:
    world = up(gpus=4)
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.tick(2)
    world.pairing_edit(3)
    seen = play(world)
    assert {3: SERVING, 1: REMOVING} in seen and {1: REMOVING} not in seen


def test_third_revision_while_two_serve() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: sum(d.part == ROUTER and FRONT in _labels(d) for d in w.deployments.values()) == 2)
    world.pairing_edit(3)
    assert play(world)[0] == {1: SERVING, 2: REMOVING}


def _labels(d: Any) -> dict[str, str]:
    return dict(d.manifest["spec"]["template"]["metadata"]["labels"])


def test_a_broken_revision_never_ends_the_serving_one() -> None:
    world = up()
    world.broken.add("--max-num-seqs=2")
    world.pairing_edit(2)
    with pytest.raises(AssertionError, match="not reached"):
        world.run(lambda w: w.settled(), limit=40)
    assert states(world, [world.slices()]) == [{2: DARK, 1: SERVING}]
    assert world.broken_rules == [] and len(world.endpoints()) == 2
    assert world.plan.rollout.reason is Reason.ROLLING_OUT
    assert "CrashLoop" not in world.plan.rollout.message and "logs" in world.plan.rollout.message  # says what to do
    ready = next(c for c in world.status["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "True"  # the old slice serves
    world.pairing_edit(3)  # the way out
    assert play(world)[-1] == {3: SERVING}


def test_a_role_rolls_inside_its_slice() -> None:
    world = up()
    before = {p.name for p in world.pods if p.labels.get("pdserve.dev/role") == "decode"}
    world.edit({"prefill": {"template": {"spec": {"priorityClassName": "high"}}}})
    assert play(world) == [{1: SERVING}]
    assert before == {p.name for p in world.pods if p.labels.get("pdserve.dev/role") == "decode"}


def test_a_role_that_cannot_roll_says_so() -> None:
    world = up(gpus=2)
    world.edit({"prefill": {"template": {"spec": {"priorityClassName": "high"}}}})
    world.run(lambda w: w.plan.rollout.reason is Reason.NO_CAPACITY_FOR_PAIR)
    assert "Insufficient nvidia.com/gpu" in world.plan.rollout.message and "Recreate" in world.plan.rollout.message
    assert len(world.endpoints()) == 2
    world.edit({"rollout": {"type": "Recreate"}})
    play(world)


def test_suspend_and_resume() -> None:
    world = up()
    world.edit({"suspend": True})
    world.run(lambda w: not any(p.gpus for p in w.pods))
    world.reconcile()
    assert world.plan.rollout.reason is Reason.SUSPENDED and world.reconcile() == 0
    world.edit({"suspend": None})
    assert play(world) == [{1: SERVING}]


def test_suspend_ends_the_engines_of_every_slice() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.edit({"suspend": True})
    world.run(lambda w: not any(p.gpus for p in w.pods), limit=30)
    assert world.broken_rules == []
    world.edit({"suspend": None})
    assert play(world)[-1] == {2: SERVING}


def test_pairing_edit_while_suspended() -> None:
    world = up()
    world.edit({"suspend": True})
    world.run(lambda w: not any(p.gpus for p in w.pods))
    world.pairing_edit(2)
    world.run(lambda w: list(w.slices()) == [w.revision(2)])
    world.edit({"suspend": None})
    assert play(world)[-1] == {2: SERVING}


def test_replicas_and_routers_change_without_touching_engines() -> None:
    world = up()
    before = {p.name for p in world.pods if p.gpus}
    world.edit({"decode": {"replicas": 3}, "router": {"replicas": 3, "args": ["--policy=random"]}})
    world.settle()
    assert before <= {p.name for p in world.pods}
    assert len([p for p in world.pods if p.gpus]) == 4 and len(world.endpoints()) == 3


def test_a_settled_world_is_not_written() -> None:
    world = up()
    assert [world.reconcile() for _ in range(3)] == [0, 0, 0]


# --- single snapshots -----------------------------------------------------------------------------------------------------


def decide(snapshot: Snapshot) -> RolloutPlan:
    return plan_rollout(snapshot, make_plan(snapshot).revision)


def both(new: tuple[Any, ...], pods: tuple[Any, ...] = (), old_front: bool = True, **fields: Any) -> Snapshot:
    """The old slice serving, and whatever there is of the new one."""
    children, old_pods = whole_slice(A, front=old_front)
    return make_snapshot(
        NEW, **{"children": (*children, *new), "pods": (*old_pods, *pods), "revisions": (templates_of(OLD),), **fields}
    )


def shown(plan: RolloutPlan) -> dict[str, tuple[str, bool, bool, bool]]:
    return {s.revision: (s.state.value, s.front, s.keep_routers, s.keep_engines) for s in plan.slices}


def test_nothing_yet() -> None:
    assert shown(decide(make_snapshot(NEW))) == {B: (SERVING, True, True, True)}


def test_new_slice_is_dark_until_it_is_complete() -> None:
    parts = tuple(deployment(B, part) for part in (*ROLES, ROUTER))
    for missing in range(3):
        plan = decide(both(parts[:missing] + parts[missing + 1 :]))
        assert shown(plan)[B] == (DARK, False, True, True)
    assert shown(decide(both(parts)))[B] == (DARK, True, True, True)


@pytest.mark.parametrize(
    "what",
    [
        {"ready": 1},
        {"updated": 1},
        {"settled": False},
        {"deleting": True},
        {"replicas": 0},
        {"workload": None},
    ],
)
@pytest.mark.parametrize("part", [*ROLES, ROUTER])
def test_the_old_slice_stays_until_every_part_of_the_new_one_is_settled(part: str, what: dict[str, Any]) -> None:
    changed = deployment(B, part, front=part == ROUTER, **{"replicas": 2, **what})
    parts = [deployment(B, p, replicas=2, front=p == ROUTER) for p in (*ROLES, ROUTER) if p != part]
    assert not settled(changed)
    assert shown(decide(both((*parts, changed))))[A] == (SERVING, True, True, True)


def test_the_old_slice_goes_when_the_new_one_serves() -> None:
    children, pods = whole_slice(B, front=True)
    plan = decide(both(children, pods))
    assert shown(plan) == {B: (SERVING, True, True, True), A: (REMOVING, False, False, True)}


def test_old_engines_stay_while_a_router_pod_of_their_slice_ends() -> None:
    children, pods = whole_slice(B, front=True)
    old = tuple(deployment(A, role) for role in ROLES)
    ending = pod(A, ROUTER, ready=False, deleting=True, front=True)
    base = make_snapshot(NEW, children=(*children, *old), pods=(*pods, ending))
    assert shown(decide(base))[A] == (REMOVING, False, False, True)
    assert shown(decide(replace(base, pods=pods)))[A] == (REMOVING, False, False, False)


MESSAGES = {
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available.": True,
    "0/3 nodes are available: 1 Insufficient nvidia.com/gpu, 2 node(s) had untolerated taint {a: b}.": True,
    "0/2 nodes are available: 1 node(s) didn't match Pod's node affinity/selector.": False,  # ending the old one changes nothing
    "0/2 nodes are available: 2 Insufficient nvidia.com/gpu, 2 Insufficient example.org/nic.": False,  # it holds no nic
    "pod has unbound immediate PersistentVolumeClaims": False,
}


@pytest.mark.parametrize(("message", "ends"), MESSAGES.items())
def test_the_old_slice_ends_first_only_if_that_frees_what_is_missing(message: str, ends: bool) -> None:
    parts = tuple(deployment(B, p, ready=0) for p in (*ROLES, ROUTER))
    plan = decide(both(parts, (unschedulable(B, "prefill", message=message), unschedulable(B, "decode", message=message))))
    assert shown(plan)[A][0] == (REMOVING if ends else SERVING)
    assert shown(plan)[B][:2] == (DARK, False)
    if "Insufficient" in message:  # either way it does not fit, and the user is told what is missing
        assert plan.reason is Reason.NO_CAPACITY_FOR_PAIR
        assert "nvidia.com/gpu" in plan.message and A in plan.message


def test_without_the_old_templates_the_old_slice_stays() -> None:
    parts = tuple(deployment(B, p, ready=0) for p in (*ROLES, ROUTER))
    plan = decide(both(parts, (unschedulable(B, "prefill"),), revisions=()))
    assert shown(plan)[A][0] == SERVING


def test_with_nobody_serving_the_new_slice_does_not_wait_in_the_dark() -> None:
    parts = tuple(deployment(B, p, ready=0) for p in (*ROLES, ROUTER))
    plan = decide(both(parts, old_front=False))
    assert shown(plan)[B] == (DARK, True, True, True) and shown(plan)[A][0] == REMOVING


def test_a_dark_slice_that_is_not_wanted_goes() -> None:
    children, pods = whole_slice("0badcafe", front=False)
    plan = decide(both(children, pods))
    assert shown(plan)["0badcafe"] == (REMOVING, False, False, True)
    assert B not in shown(plan)  # it waits
    assert "0badcafe" in plan.message and slice_name("chat", B) in plan.message


def test_pods_left_behind_that_have_ended_hold_nothing_up() -> None:
    ended = pod("0badcafe", "prefill", ready=False, phase="Failed")
    assert B in shown(decide(both((), (ended,))))


def test_recreate_makes_nothing_before_the_old_slice_is_gone() -> None:
    changes = builders.deep(NEW, {"rollout": {"type": "Recreate"}})
    children, pods = whole_slice(A, front=True)
    plan = decide(make_snapshot(changes, children=children, pods=pods))
    assert shown(plan) == {A: (REMOVING, False, False, True)} and plan.reason is Reason.ROLLING_OUT


def test_a_refused_spec_leaves_every_slice_as_it_is() -> None:
    children, pods = whole_slice(A, front=True)
    for rollout in ("RollingUpdate", "Recreate"):
        changes = builders.deep(NEW, {"rollout": {"type": rollout, "paused": True}})
        snapshot = make_snapshot(changes, children=children, pods=pods)
        plan = make_plan(snapshot)
        assert plan.refusal is not None
        assert shown(plan.rollout) == {A: (SERVING, True, True, True)}
        status = build_status(snapshot, plan)
        assert status["servingSlices"] == 1 and status["currentRevision"] == A
        assert [s["state"] for s in status["slices"]] == [SERVING]


def test_complete_needs_all_three() -> None:
    parts = {p: deployment(B, p) for p in (*ROLES, ROUTER)}
    assert complete(parts)
    assert not any(complete({k: v for k, v in parts.items() if k != p}) for p in parts)


def test_requested_counts_sidecars_and_takes_limits_where_no_request_stands() -> None:
    template = templates_of({"lmcache": {"l1Size": "1Gi"}}).templates["prefill"]
    assert requested(template, "nvidia.com/gpu") == 1
    assert requested(template, "cpu") == 0.2  # the server's
    assert requested(template, "example.org/nic") == 0
    assert requested({"spec": {"containers": [{"resources": {"limits": {"cpu": "500m"}, "requests": None}}]}}, "cpu") == 0.5
    assert requested({}, "cpu") == 0


def own(role: str, **fields: Any) -> RolloutPlan:
    """The only slice, with one role changed and a pod of that role that finds no node."""
    parts = [deployment(B, p, front=p == ROUTER) for p in (*ROLES, ROUTER) if p != role]
    pods = (pod(B, "decode"), pod(B, "prefill"), unschedulable(B, role, 1))
    return decide(make_snapshot(NEW, children=(*parts, deployment(B, role, **fields)), pods=pods))


def test_a_roll_without_room_is_told_apart_from_a_start_and_from_more_replicas() -> None:
    roll = own("prefill", replicas=2, ready=1, updated=1)
    assert roll.reason is Reason.NO_CAPACITY_FOR_PAIR and "Recreate" in roll.message and "nvidia.com/gpu" in roll.message
    start = own("prefill", ready=0)
    grown = own("prefill", replicas=2, ready=1)
    for plan in (start, grown):
        assert (
            plan.reason is Reason.ROLLING_OUT and "Insufficient nvidia.com/gpu" in plan.message and "Recreate" not in plan.message
        )
