"""Status: each condition from what was observed, Ready from the first that stands in the way, kstatus never contradicted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import NOW, conditions, deployment, kstatus, make_snapshot, pod, revision_of, serving, unschedulable

from pd_operator.api.conditions import MAX_MESSAGE, REASONS, Reason, Type
from pd_operator.api.status import PDDeploymentStatus
from pd_operator.core.capabilities import Refusal
from pd_operator.core.names import ROLES
from pd_operator.core.observed import ChildFact, ContainerFact, PodFact
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status, refused_status

REV = revision_of()
SLICE = f"chat-{REV}-0"
TYPES_OF_EVERY_STATUS = set(Type) - {Type.OFFLOAD_VERIFIED}


def status_of(snapshot: Snapshot, **fields: Any) -> dict[str, Any]:
    """Status of a snapshot, checked for what every status must be."""
    plan = replace(make_plan(snapshot), **fields)
    status = build_status(snapshot, plan)
    check(snapshot, plan, status)
    return status


def check(snapshot: Snapshot, plan: Plan, status: dict[str, Any]) -> None:
    """What holds for every status: the schema keeps all of it, its conditions are documented and do not contradict each other."""
    read = PDDeploymentStatus.model_validate(status).model_dump(by_alias=True, exclude_unset=True)
    assert read == status, "the API server would drop a field, and the status would be written again and again"
    found = conditions(status)
    wanted = TYPES_OF_EVERY_STATUS | ({Type.OFFLOAD_VERIFIED} if snapshot.spec.lmcache else set())
    assert list(found) == sorted(wanted)
    for type_, condition in found.items():
        assert condition["observedGeneration"] == snapshot.generation
        assert len(condition["message"]) <= MAX_MESSAGE and "\n" not in condition["message"]
        documented = REASONS[Reason(condition["reason"])].conditions
        follows = type_ in (Type.READY, Type.RECONCILING, Type.STALLED) or (type_ == Type.PROGRESSING and plan.refusal)
        assert Type(type_) in documented or follows, (
            f"{type_} has the reason {condition['reason']}, which the reference gives to others"
        )
    ready, stalled, reconciling = (found[t]["status"] == "True" for t in (Type.READY, Type.STALLED, Type.RECONCILING))
    assert not (stalled and reconciling) and not (stalled and ready)
    assert ready or stalled or reconciling or found[Type.READY]["reason"] == Reason.SUSPENDED


def parts(*, front: bool = True, **changed: dict[str, Any]) -> tuple[ChildFact, ...]:
    """The Deployments of the slice, some of them changed."""
    return tuple(deployment(REV, p, **{"front": front and p == ROUTER, **changed.get(p, {})}) for p in (*ROLES, ROUTER))


def pods(*, without: tuple[str, ...] = (), front: bool = True) -> tuple[PodFact, ...]:
    """Ready pods of the slice."""
    found = [pod(REV, p, front=front and p == ROUTER) for p in (*ROLES, ROUTER) if p not in without]
    return tuple(found)


def crashed(role: str) -> PodFact:
    main = ContainerFact("engine", restarts=5, waiting_reason="CrashLoopBackOff", exit_code=1)
    return pod(REV, role, ready=False, containers=(main,))


def refused_pods(role: str) -> ChildFact:
    """A Deployment whose pods the API server does not let in."""
    child = deployment(REV, role, ready=0)
    assert child.workload is not None
    return replace(child, workload=replace(child.workload, replicas=0, failure='pods "x" is forbidden: exceeded quota: gpus'))


# --- conditions -----------------------------------------------------------------------------------------------------------

MISSING = {"ready": 0}
WORLDS: dict[str, tuple[dict[str, Any], dict[str, tuple[str, str]], str]] = {
    "nothing yet": (
        {},
        {
            "Accepted": ("True", "Accepted"),
            "Placed": ("Unknown", "Starting"),
            "PrefillReady": ("False", "Starting"),
            "DecodeReady": ("False", "Starting"),
            "RouterReady": ("False", "Starting"),
            "HandoffVerified": ("Unknown", "NotYetRun"),
            "Progressing": ("True", "RollingOut"),
            "Degraded": ("False", "AsExpected"),
            "UpdateAvailable": ("False", "AsExpected"),
            "Ready": ("False", "Starting"),
            "Reconciling": ("True", "Starting"),
            "Stalled": ("False", "AsExpected"),
        },
        "InProgress",
    ),
    "all ready": (
        {"children": parts(), "pods": pods()},
        {
            "Placed": ("True", "Bound"),
            "PrefillReady": ("True", "Ready"),
            "DecodeReady": ("True", "Ready"),
            "RouterReady": ("True", "Ready"),
            "Progressing": ("True", "Updated"),
            "Ready": ("True", "Ready"),
            "Reconciling": ("False", "AsExpected"),
        },
        "Current",
    ),
    "decode crashes": (
        {"children": parts(decode=MISSING, router=MISSING), "pods": (*pods(without=("decode", ROUTER)), crashed("decode"))},
        {
            "PrefillReady": ("True", "Ready"),
            "DecodeReady": ("False", "CrashLoop"),
            "RouterReady": ("False", "Starting"),
            "Ready": ("False", "CrashLoop"),
            "Reconciling": ("True", "CrashLoop"),
        },
        "InProgress",
    ),
    "prefill has no node": (
        {
            "children": parts(prefill=MISSING, router=MISSING),
            "pods": (*pods(without=("prefill", ROUTER)), unschedulable(REV, "prefill")),
        },
        {
            "Placed": ("False", "NoCapacity"),
            "PrefillReady": ("False", "Unschedulable"),
            "Progressing": ("True", "RollingOut"),
            "Ready": ("False", "Unschedulable"),
        },
        "InProgress",
    ),
    "held by a gate": (
        {
            "children": parts(prefill=MISSING, router=MISSING),
            "pods": (
                *pods(without=("prefill", ROUTER)),
                replace(unschedulable(REV, "prefill"), scheduling_reason="SchedulingGated"),
            ),
        },
        {"Placed": ("False", "Gated"), "PrefillReady": ("False", "Starting")},
        "InProgress",
    ),
    "router sees nobody": (
        {"children": parts(router=MISSING), "pods": (*pods(without=(ROUTER,)), pod(REV, ROUTER, ready=False, front=True))},
        {"DecodeReady": ("True", "Ready"), "RouterReady": ("False", "NotDiscovered"), "Ready": ("False", "NotDiscovered")},
        "InProgress",
    ),
    "router is not there": (
        {"children": parts(router=MISSING), "pods": pods(without=(ROUTER,))},
        {"RouterReady": ("False", "Starting"), "Ready": ("False", "Starting")},
        "InProgress",
    ),
    "image of the router": (
        {
            "children": parts(router=MISSING),
            "pods": (
                *pods(without=(ROUTER,)),
                pod(REV, ROUTER, ready=False, containers=(ContainerFact(ROUTER, waiting_reason="ImagePullBackOff"),)),
            ),
        },
        {"RouterReady": ("False", "ImageError"), "Ready": ("False", "ImageError")},
        "InProgress",
    ),
    "a quota refuses pods": (
        {
            "children": (*parts(router=MISSING)[:1], refused_pods("decode"), parts(router=MISSING)[2]),
            "pods": pods(without=("decode", ROUTER)),
        },
        {"DecodeReady": ("False", "PodsRefused"), "Ready": ("False", "PodsRefused")},
        "InProgress",
    ),
    "a spare replica rolls": (
        {"children": parts(decode={"replicas": 1, "settled": False}), "pods": pods()},
        {"Ready": ("True", "Ready"), "Progressing": ("True", "RollingOut"), "Reconciling": ("True", "RollingOut")},
        "InProgress",
    ),
    "only routers from before the flip are ready": (
        {"children": parts(), "pods": (*pods(without=(ROUTER,)), pod(REV, ROUTER), pod(REV, ROUTER, 1, ready=False, front=True))},
        {"RouterReady": ("True", "Ready"), "Ready": ("False", "RollingOut")},
        "InProgress",
    ),
}


@pytest.mark.parametrize(("world", "expected", "read_as"), WORLDS.values(), ids=WORLDS)
def test_conditions(world: dict[str, Any], expected: dict[str, tuple[str, str]], read_as: str) -> None:
    snapshot = make_snapshot(**world)
    status = status_of(snapshot)
    found = {type_: (c["status"], c["reason"]) for type_, c in conditions(status).items()}
    assert {type_: found[type_] for type_ in expected} == expected
    assert kstatus({"metadata": {"generation": 1}, "status": status}) == read_as


def test_suspended() -> None:
    children = parts(**{p: {"replicas": 0} for p in ROLES}, router=MISSING)
    status = status_of(make_snapshot({"suspend": True}, children=children))
    found = conditions(status)
    for type_ in ("Placed", "PrefillReady", "DecodeReady", "Ready"):
        assert (found[type_]["status"], found[type_]["reason"]) == ("False", "Suspended"), type_
    assert found["Reconciling"]["status"] == "False"
    assert [r["desiredReplicas"] for r in status["roles"]] == [0, 0]


def test_ready_names_the_condition_that_stands_in_the_way() -> None:
    snapshot = make_snapshot(**WORLDS["decode crashes"][0])
    message = conditions(status_of(snapshot))["Ready"]["message"]
    assert message.startswith("DecodeReady: 0 of 1 ready; pod ") and "kubectl" in message


def test_ready_names_what_needs_somebody_before_what_needs_time() -> None:
    broken = pod(REV, ROUTER, ready=False, containers=(ContainerFact(ROUTER, waiting_reason="ErrImagePull"),))
    starting = pod(REV, "prefill", ready=False)
    snapshot = make_snapshot(children=parts(prefill=MISSING, router=MISSING), pods=(pod(REV, "decode"), starting, broken))
    found = conditions(status_of(snapshot))
    assert (found["PrefillReady"]["reason"], found["RouterReady"]["reason"]) == ("Starting", "ImageError")
    assert found["Ready"]["reason"] == "ImageError" and found["Ready"]["message"].startswith("RouterReady: ")


def test_what_the_api_server_says_about_pods_reaches_the_message() -> None:
    message = conditions(status_of(make_snapshot(**WORLDS["a quota refuses pods"][0])))["DecodeReady"]["message"]
    assert message == '0 of 1 ready; pods "x" is forbidden: exceeded quota: gpus'


def test_offload_is_a_condition_only_with_a_cache() -> None:
    assert "OffloadVerified" in conditions(status_of(make_snapshot({"lmcache": {}})))


@pytest.mark.parametrize(("desired", "ready", "enough"), [(1, 1, True), (1, 0, False), (4, 3, True), (4, 2, False), (3, 2, False)])
def test_a_role_is_ready_with_what_a_roll_leaves(desired: int, ready: int, enough: bool) -> None:
    """maxUnavailable is 25 %, rounded down as a Deployment does it."""
    children = parts(decode={"replicas": desired, "ready": ready})
    found = conditions(status_of(make_snapshot({"decode": {"replicas": desired}}, children=children, pods=pods())))
    assert (found["DecodeReady"]["status"] == "True") is enough
    assert f"{ready} of {desired} ready" in found["DecodeReady"]["message"]


def test_a_renderer_that_changed_is_told_and_holds_nothing_back() -> None:
    found = conditions(status_of(serving(), renderer_changed=True))
    assert (found["UpdateAvailable"]["status"], found["UpdateAvailable"]["reason"]) == ("True", "RendererChanged")
    assert "rollout.restartID" in found["UpdateAvailable"]["message"] and found["Ready"]["status"] == "True"


# --- refusals -------------------------------------------------------------------------------------------------------------


def test_refused_before_anything_exists() -> None:
    status = status_of(make_snapshot({"rollout": {"maxSurge": 1}}))
    found = conditions(status)
    for type_ in ("Accepted", "Ready", "Progressing"):
        assert (found[type_]["status"], found[type_]["reason"]) == ("False", "NotImplemented")
    assert found["Stalled"]["status"] == "True" and "spec.rollout.maxSurge" in found["Stalled"]["message"]
    assert "nothing is made" in found["PrefillReady"]["message"] and "nothing is made" in found["Placed"]["message"]
    assert status["slices"] == [] and status["servingSlices"] == 0
    assert kstatus({"metadata": {"generation": 1}, "status": status}) == "Failed"


def test_refused_while_serving_says_that_it_serves() -> None:
    base = serving()
    changes = {"engine": {"args": ["--new"]}, "rollout": {"maxSurge": 1, "type": "Recreate"}}
    status = status_of(make_snapshot(changes, children=base.children, pods=base.pods))
    assert status["servingSlices"] == 1 and status["currentRevision"] == REV
    assert [(s["name"], s["state"]) for s in status["slices"]] == [(SLICE, "Serving")]
    assert "keeps serving" in conditions(status)["Ready"]["message"]
    assert [r["ready"] for r in status["roles"]] == ["1/1", "1/1"]


def test_several_refusals_show_the_first_and_the_number_of_others() -> None:
    found = conditions(status_of(make_snapshot({"rollout": {"maxUnavailable": 1, "maxSurge": 1}, "engine": {"type": "sglang"}})))
    assert found["Accepted"]["message"].startswith("spec.engine.type") and found["Accepted"]["message"].endswith("(and 3 more)")


def test_a_spec_that_cannot_be_read_keeps_the_rest_of_the_status() -> None:
    base = serving()
    before = status_of(make_snapshot({"engine": {"args": ["--new"]}}, children=base.children, pods=base.pods))
    assert conditions(before)["Reconciling"]["status"] == "True"
    refusal = Refusal(Reason.INVALID_SPEC, "spec.engine.type", "x", "vllm")
    status = refused_status(before, refusal, 7, "pd-operator", NOW)
    found = conditions(status)
    assert {t: found[t]["status"] for t in ("Accepted", "Ready", "Reconciling", "Stalled")} == {
        "Accepted": "False",
        "Ready": "False",
        "Reconciling": "False",
        "Stalled": "True",
    }
    assert kstatus({"metadata": {"generation": 7}, "status": status}) == "Failed"
    assert status["slices"] == before["slices"] and status["observedGeneration"] == 7
    assert list(found) == sorted(found)


def test_a_new_object_that_cannot_be_read() -> None:
    status = refused_status({}, Refusal(Reason.INVALID_SPEC, "spec.engine.type", "x", "vllm"), 1, "pd-operator", NOW)
    assert kstatus({"metadata": {"generation": 1}, "status": status}) == "Failed"
    assert PDDeploymentStatus.model_validate(status).model_dump(by_alias=True, exclude_unset=True) == status
