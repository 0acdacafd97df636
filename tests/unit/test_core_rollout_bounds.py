"""A rollout that is paused or late, and edits that come while one is under way."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import by_name, conditions, deployment, kstatus, make_snapshot, make_spec, revision_of, templates_of, whole_slice
from rollout_world import World

from pd_operator.api.conditions import Reason
from pd_operator.core.kept import spec_of
from pd_operator.core.names import ROLES, SLICE
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status
from pd_operator.render.bundle import render

NEW: dict[str, Any] = {"engine": {"args": ["--max-num-seqs=8"]}}
A, B = revision_of(), revision_of(NEW)
PAUSED = {"rollout": {"paused": True}}


def rolling(changes: dict[str, Any], *, old: int = 1, made_with: dict[str, Any] | None = None, begun: bool = True) -> Snapshot:
    """Revision A serves with `old` replicas of each role, B is begun and nothing of it is ready."""
    children, pods = whole_slice(A, front=True, replicas=old)
    mine = tuple(deployment(B, part, ready=0) for part in (*ROLES, ROUTER)) if begun else ()
    revisions = (templates_of(), templates_of({**NEW, **(made_with or {})}, number=2))
    return make_snapshot({**NEW, **changes}, children=(*children, *mine), pods=pods, revisions=revisions)


def status(snapshot: Snapshot) -> dict[str, dict[str, Any]]:
    return conditions(build_status(snapshot, make_plan(snapshot)))


# --- paused ---------------------------------------------------------------------------------------------------------------


def test_a_change_that_comes_while_paused_is_not_begun() -> None:
    snapshot = rolling(PAUSED, begun=False)
    plan = make_plan(snapshot)
    assert [(s.revision, s.state.value, s.front) for s in plan.rollout.slices] == [(A, "Serving", True)]
    assert not [name for kind, name in by_name(render(snapshot, plan)) if kind == "Deployment" and B in name]
    found = status(snapshot)
    assert (found["Progressing"]["status"], found["Progressing"]["reason"]) == ("False", "Paused")
    assert "is not begun" in found["Progressing"]["message"] and found["Ready"]["status"] == "True"


@pytest.mark.parametrize("kind", ["RollingUpdate", "Recreate"])
def test_a_rollout_that_is_under_way_stays_where_it_is(kind: str) -> None:
    snapshot = rolling({"rollout": {"paused": True, "type": kind}})
    plan = make_plan(snapshot)
    assert {s.revision: (s.state.value, s.front) for s in plan.rollout.slices} == {A: ("Serving", True), B: ("Dark", False)}
    assert plan.rollout.reason is Reason.PAUSED and "stays as it is" in plan.rollout.message


def test_a_new_slice_that_is_ready_does_not_join_while_paused() -> None:
    ready, _ = whole_slice(B, front=False)
    base = rolling(PAUSED, begun=False)
    snapshot = replace(base, children=(*base.children, *ready))
    assert {s.revision: s.front for s in make_plan(snapshot).rollout.slices} == {A: True, B: False}
    going_on = replace(snapshot, spec=make_spec(NEW))
    assert {s.revision: s.front for s in make_plan(going_on).rollout.slices} == {A: True, B: True}


def test_a_first_start_and_a_suspended_object_are_not_held() -> None:
    first = make_snapshot(PAUSED)
    bundle = render(first, make_plan(first))
    assert make_plan(first).rollout.reason is Reason.ROLLING_OUT
    assert all("paused" not in m["spec"] for m in builders.manifests(bundle, "Deployment"))
    assert make_plan(rolling({**PAUSED, "suspend": True})).rollout.reason is Reason.SUSPENDED


def test_where_nothing_serves_any_more_a_pause_does_not_prolong_it() -> None:
    snapshot = rolling(PAUSED)
    dark = tuple(c for c in snapshot.children if not c.name.endswith(f"{A}-0-router"))
    assert make_plan(replace(snapshot, children=dark)).rollout.reason is Reason.ROLLING_OUT


def test_paused_world_scales_and_goes_on_afterwards() -> None:
    world = World()
    world.pairing_edit(1)
    world.settle()
    world.edit(PAUSED)
    world.pairing_edit(2)
    world.edit({"decode": {"replicas": 3}})
    for _ in range(12):
        world.reconcile()
        world.tick()
    engines = {p.labels["pdserve.dev/revision"] for p in world.pods if p.gpus}
    assert engines == {world.revision(1)} and len([p for p in world.pods if p.labels.get("pdserve.dev/role") == "decode"]) == 3
    assert world.reconcile() == 0  # and it costs nothing (I2)
    world.edit({"rollout": {"paused": False}})
    world.settle()
    assert world.broken_rules == [] and {p.labels["pdserve.dev/revision"] for p in world.pods if p.gpus} == {world.revision(2)}


def test_a_change_of_one_roles_pods_waits_too() -> None:
    world = World()
    world.settle()
    pods = {p.name for p in world.pods if p.gpus}
    world.edit(PAUSED)
    world.edit({"decode": {"template": {"spec": {"priorityClassName": "high"}}}})
    for _ in range(8):
        world.reconcile()
        world.tick()
    assert {p.name for p in world.pods if p.gpus} == pods
    assert world.plan.rollout.reason is Reason.PAUSED and "-decode waits" in world.plan.rollout.message
    assert kstatus({"metadata": {"generation": world.generation}, "status": world.status}) == "InProgress"
    world.edit({"rollout": {"paused": False}})
    world.settle()
    assert {p.name for p in world.pods if p.gpus} & pods == {n for n in pods if "prefill" in n}


def test_paused_without_a_change_says_nothing() -> None:
    world = World(changes=dict(PAUSED))
    world.settle()
    assert conditions(world.status)["Progressing"]["reason"] == "Updated"


# --- late -----------------------------------------------------------------------------------------------------------------


def test_a_deployment_without_progress_is_named_with_the_cause() -> None:
    base = rolling({"rollout": {"progressDeadlineSeconds": 60}})
    crashed = builders.pod(B, "decode", ready=False)
    bad = replace(crashed.containers[0], restarts=4, waiting_reason="CrashLoopBackOff", exit_code=1)
    children = tuple(
        replace(c, workload=replace(c.workload, late=True)) if c.workload and c.name.endswith(f"{B}-0-decode") else c
        for c in base.children
    )
    snapshot = replace(base, children=children, pods=(*base.pods, replace(crashed, containers=(bad,))))
    found = status(snapshot)
    assert (found["Progressing"]["status"], found["Progressing"]["reason"]) == ("False", "DeadlineExceeded")
    message = found["Progressing"]["message"]
    assert message.startswith(f"chat-{B}-0-decode made no progress for 60 s") and "container engine ended 4 times" in message
    assert found["Ready"]["status"] == "True"  # the old slice serves
    assert kstatus({"metadata": {"generation": 1}, "status": build_status(snapshot, make_plan(snapshot))}) == "Failed"
    back = replace(snapshot, spec=make_spec())
    assert make_plan(back).rollout.reason is Reason.ROLLING_OUT  # going back is an ordinary rollout
    assert {s.revision: s.state.value for s in make_plan(back).rollout.slices} == {A: "Serving", B: "Removing"}


def test_an_old_deployment_that_is_late_says_nothing() -> None:
    base = rolling({})
    children = tuple(
        replace(c, workload=replace(c.workload, late=True)) if c.workload and A in c.name else c for c in base.children
    )
    assert make_plan(replace(base, children=children)).rollout.reason is Reason.ROLLING_OUT


def test_the_deadline_reaches_every_deployment() -> None:
    bundle = render(s := make_snapshot({"rollout": {"progressDeadlineSeconds": 60}}), make_plan(s))
    assert {m["spec"]["progressDeadlineSeconds"] for m in builders.manifests(bundle, "Deployment")} == {60}


# --- edits while a rollout is under way -----------------------------------------------------------------------------------


def numbers(snapshot: Snapshot) -> dict[str, int]:
    return {s.name: s.replicas for s in make_plan(snapshot).scalings}


@pytest.mark.parametrize(
    ("old", "made_with", "now", "expected"),
    [
        (2, 2, 2, {}),
        (2, 2, 5, {"decode": 5}),  # more, later
        (2, 5, 5, {"decode": 5}),  # more, with the new revision
        (4, 4, 2, {"decode": 2}),  # fewer, later
        (4, 2, 2, {}),  # fewer, with the new revision: made for larger replicas, so what serves stays
        (4, 2, 1, {"decode": 1}),
    ],
)
def test_replicas_reach_the_slice_that_still_serves(old: int, made_with: int, now: int, expected: dict[str, int]) -> None:
    both: Any = {"prefill": {"replicas": old}}
    snapshot = rolling({**both, "decode": {"replicas": now}}, old=old, made_with={**both, "decode": {"replicas": made_with}})
    assert numbers(snapshot) == {f"chat-{A}-0-{role}": n for role, n in expected.items()}


def test_router_edits_reach_it_while_it_is_the_same_program() -> None:
    def old_router(changes: dict[str, Any]) -> dict[str, Any] | None:
        snapshot = rolling(changes)
        return by_name(render(snapshot, make_plan(snapshot))).get(("Deployment", f"chat-{A}-0-router"))

    made = old_router({"router": {"replicas": 3, "args": ["--policy=random"]}})
    assert made is not None and made["spec"]["replicas"] == 3 and "--policy=random" in str(made)
    assert made["spec"]["template"]["metadata"]["labels"]["pdserve.dev/front"] == "chat"
    assert A in str(made["spec"]["template"]["spec"]["containers"][0]["args"]) and B not in str(made)
    for other in ({"type": "vllm-router"}, {"version": "1.12.0"}, {"image": "example.org/router:1"}):
        changes = {"router": {"replicas": 3, **other}}
        assert old_router(changes) is None
        assert numbers(rolling(changes)) == {f"chat-{A}-0-router": 3}  # its number follows all the same


def test_the_router_keeps_what_belongs_to_its_engines() -> None:
    """A key of the engines is of their revision: the old router goes on with the old one."""

    def key(name: str) -> dict[str, Any]:
        source = {"secretKeyRef": {"name": name, "key": "k"}}
        return {"engine": {"env": [{"name": "VLLM_API_KEY", "valueFrom": source}]}, "router": {"type": "vllm-router"}}

    first, second = revision_of(key("one")), revision_of(key("two"))
    children, pods = whole_slice(first, front=True)
    revisions = (templates_of(key("one")), templates_of(key("two"), number=2))
    snapshot = make_snapshot(key("two"), children=children, pods=pods, revisions=revisions)
    made = by_name(render(snapshot, make_plan(snapshot)))
    assert "'name': 'one'" in str(made["Deployment", f"chat-{first}-0-router"])
    assert "'name': 'two'" in str(made["Deployment", f"chat-{second}-0-router"])


def test_a_revision_that_nobody_remembers_keeps_its_routers() -> None:
    snapshot = rolling({"router": {"args": ["--policy=random"]}})
    assert spec_of(replace(snapshot, revisions=()), A) is None
    broken = replace(snapshot.revisions[0], spec={"engine": {"type": "of-tomorrow"}})
    assert spec_of(replace(snapshot, revisions=(broken,)), A) is None


def test_an_unchanged_rollout_renders_the_old_router_as_it_was() -> None:
    """So that no router pod rolls because a rollout began."""
    before = builders.serving()
    was = by_name(render(before, make_plan(before)))["Deployment", f"chat-{A}-0-router"]
    snapshot = rolling({})
    assert by_name(render(snapshot, make_plan(snapshot)))["Deployment", f"chat-{A}-0-router"] == was


def test_edits_in_the_middle_reach_both_slices_in_the_world() -> None:
    world = World()
    world.pairing_edit(1)
    world.settle()
    world.broken.add("--max-num-seqs=2")
    world.pairing_edit(2)
    for _ in range(6):
        world.reconcile()
        world.tick()
    world.edit({"decode": {"replicas": 2}, "router": {"replicas": 3}})
    for _ in range(10):
        world.reconcile()
        world.tick()
    for revision in (world.revision(1), world.revision(2)):
        mine = [p for p in world.pods if p.labels[SLICE] == f"chat-{revision}-0"]
        roles = [p.labels.get("pdserve.dev/role", ROUTER) for p in mine]
        assert sorted(roles) == ["decode"] * 2 + ["prefill"] + [ROUTER] * 3
    assert world.reconcile() == 0
    world.broken.clear()
    world.settle()
    assert world.broken_rules == []
