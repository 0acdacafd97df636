"""Rollouts: the decision over one snapshot."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import deployment, make_snapshot, pod, revision_of, templates_of, unschedulable, whole_slice

from pd_operator.api.conditions import Reason
from pd_operator.core.names import ROLES, slice_name
from pd_operator.core.plan import make_plan
from pd_operator.core.rollout import RolloutPlan, State, requested
from pd_operator.core.slices import complete, settled
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status

OLD = {"engine": {"args": ["--old"]}}
NEW = {"engine": {"args": ["--new"]}}
A, B = revision_of(OLD), revision_of(NEW)
DARK, SERVING, REMOVING = (s.value for s in State)


def decide(snapshot: Snapshot) -> RolloutPlan:
    return make_plan(snapshot).rollout


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


@pytest.mark.parametrize("left", [deployment("0badcafe", "prefill"), pod("0badcafe", "prefill", ready=False, deleting=True)])
def test_the_old_slice_stays_while_another_one_still_holds_room(left: Any) -> None:
    parts = tuple(deployment(B, p, ready=0) for p in (*ROLES, ROUTER))
    children, pods = ((left,), ()) if hasattr(left, "kind") else ((), (left,))
    plan = decide(both((*parts, *children), (unschedulable(B, "prefill"), *pods)))
    assert shown(plan)[A][0] == SERVING and plan.reason is Reason.NO_CAPACITY_FOR_PAIR
    assert "chat-0badcafe-0 is still ending" in plan.message


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
        changes = builders.deep(NEW, {"rollout": {"type": rollout, "maxSurge": 1}})
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
