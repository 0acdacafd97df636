"""I5: Ready only with slices that evidence has proven. When a canary runs, what it opens, and what status keeps of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest
from builders import NAME, NAMESPACE, NOW, UID, conditions, deployment, make_snapshot, make_spec, manifests, pod, templates_of
from test_proof import FELL_BACK, evidence

from pd_operator.api.conditions import Reason
from pd_operator.core.canary_case import Case
from pd_operator.core.names import ABOUT, CANARY, ROLES, canary, slice_labels, slice_name
from pd_operator.core.observed import ChildFact, ContainerFact, JobFact, PodFact
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.proof import Evidence
from pd_operator.core.prune import prune
from pd_operator.core.revision import pairing_hash
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status
from pd_operator.core.verification import LATER, POD_WAIT, SOON, TRIES, subject
from pd_operator.render.bundle import render

REQUIRED = {"verification": "Required"}
GOOD = evidence()
BAD = evidence(**FELL_BACK)


def up(changes: Mapping[str, Any] | None = None, *, front: bool = False, now: datetime = NOW, **fields: Any) -> Snapshot:
    """A slice of which everything is ready."""
    spec = make_spec({**REQUIRED, **(changes or {})})
    revision = pairing_hash(spec)
    children = [*(deployment(revision, role) for role in ROLES), deployment(revision, ROUTER, replicas=2, front=front)]
    pods = [pod(revision, role, ip=f"10.0.0.{n}") for n, role in enumerate(ROLES)]
    pods += [pod(revision, ROUTER, n, front=front, ip=f"10.0.1.{n}") for n in range(2)]
    given = {"children": tuple(children), "pods": tuple(pods), "revisions": (templates_of(changes),), **fields}
    return replace(make_snapshot(spec, **given), now=now)


def job(snapshot: Snapshot, number: int, seen: Evidence | str | None = None, **fields: Any) -> Snapshot:
    """The snapshot with a canary Job; `seen` is what its pod left, "" for a pod that still runs, None for no pod."""
    revision = pairing_hash(snapshot.spec)
    slice_ = slice_name(NAME, revision)
    labels = slice_labels(NAME, "canary", slice_, revision) | {CANARY: str(number), ABOUT: subject(snapshot)}
    name = canary(slice_, number)
    fact = ChildFact("Job", NAMESPACE, name, f"uid-{name}", owner_uid=UID, labels=labels, job=JobFact(), created=snapshot.now)
    pods = snapshot.pods
    if seen is not None:
        text = seen if isinstance(seen, str) else seen.model_dump_json(exclude_defaults=True)
        ended = ContainerFact("canary", exit_code=0 if text else None, exit_message=text)
        pods = (*pods, PodFact(NAMESPACE, f"{name}-x", "u", labels=labels, owner_uid=fact.uid, containers=(ended,)))
    return replace(snapshot, children=(*snapshot.children, replace(fact, **fields)), pods=pods)


def after(snapshot: Snapshot, status: Mapping[str, Any], seconds: float = 0.0) -> Snapshot:
    """What a later reconcile sees, of which the status was written."""
    return replace(snapshot, status=status, now=snapshot.now + timedelta(seconds=seconds))


def fronts(plan: Plan) -> list[bool]:
    return [s.front for s in plan.rollout.slices]


def shown(snapshot: Snapshot, type_: str) -> tuple[str, str, str]:
    found = conditions(build_status(snapshot, make_plan(snapshot)))[type_]
    return found["status"], found["reason"], found["message"]


# --- from nothing to serving ----------------------------------------------------------------------------------------------


def test_a_first_slice_waits_in_the_dark_and_its_canary_starts() -> None:
    snapshot = up()
    plan = make_plan(snapshot)
    assert fronts(plan) == [False]
    (found,) = plan.canaries
    assert found.number == 1 and found.dark
    bundle = render(snapshot, plan)
    (made,) = bundle.canaries
    case = Case.model_validate_json(made["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"])
    assert [e.url for e in (*case.prefill, *case.decode)] == ["http://10.0.0.0:8000", "http://10.0.0.1:8000"]
    assert case.routers == ("http://10.0.1.0:29000", "http://10.0.1.1:29000")
    assert case.url == f"http://{found.slice.name}.{NAMESPACE}.svc" and case.mark == f"pdd-canary-{found.slice.name}-1"
    status = shown(snapshot, "Ready")
    assert status[:2] == ("False", "NotYetRun")


@pytest.mark.parametrize(
    ("part", "fields"), [("prefill", {"ready": 0}), ("decode", {"ready": 0}), (ROUTER, {"ready": 0}), ("decode", {"replicas": 0})]
)
def test_no_canary_before_a_slice_could_serve(part: str, fields: dict[str, Any]) -> None:
    snapshot = up()
    revision = pairing_hash(snapshot.spec)
    others = tuple(c for c in snapshot.children if not c.name.endswith(f"-{part}"))
    plan = make_plan(replace(snapshot, children=(*others, deployment(revision, part, **fields))))
    assert not plan.canaries and fronts(plan) == [False]


def test_one_of_eight_that_does_not_come_up_does_not_keep_a_slice_dark() -> None:
    snapshot = up({"decode": {"replicas": 8, "resources": {"limits": {"nvidia.com/gpu": 1}}}})
    revision = pairing_hash(snapshot.spec)
    others = tuple(c for c in snapshot.children if not c.name.endswith("-decode"))
    snapshot = replace(snapshot, children=(*others, deployment(revision, "decode", replicas=8, ready=7)))
    assert len(make_plan(snapshot).canaries) == 1
    assert fronts(make_plan(job(snapshot, 1, GOOD))) == [True]


def test_evidence_opens_the_door_and_status_keeps_it() -> None:
    snapshot = job(up(), 1, GOOD)
    plan = make_plan(snapshot)
    assert fronts(plan) == [True] and not plan.canaries
    status = build_status(snapshot, plan)
    (slice_,) = status["slices"]
    assert slice_["verified"]["canary"] == 1 and len(slice_["verified"]["evidence"]) == 16
    # The pod may go now, and the operator may start anew.
    later = after(replace(snapshot, pods=tuple(p for p in snapshot.pods if "canary" not in p.name)), status)
    assert fronts(make_plan(later)) == [True] and not make_plan(later).canaries
    assert build_status(later, make_plan(later))["slices"] == status["slices"]
    assert shown(later, "HandoffVerified")[:2] == ("True", "Verified")


def test_ready_comes_with_the_front_door() -> None:
    snapshot = job(up(front=True), 1, GOOD)
    assert shown(snapshot, "Ready")[0] == "True"
    assert shown(up(front=True), "Ready")[:2] == ("False", "NotYetRun"), "an older version served without a proof"


@pytest.mark.parametrize("mode", ["Advisory", "Disabled"])
def test_nobody_waits_where_nothing_is_required(mode: str) -> None:
    snapshot = up({"verification": mode})
    plan = make_plan(snapshot)
    assert fronts(plan) == [True]
    assert len(plan.canaries) == (1 if mode == "Advisory" else 0)
    served = up({"verification": mode}, front=True)
    assert shown(served, "Ready")[0] == "True"
    failed = served
    for number in range(1, TRIES + 1):
        failed = after(job(served, number, BAD), failed.status, 1.0)
        failed = replace(failed, status=build_status(failed, make_plan(failed)))
    assert shown(failed, "Ready")[0] == "True"
    assert shown(failed, "HandoffVerified")[:2] == (("False", "NoTransfer") if mode == "Advisory" else ("Unknown", "NotYetRun"))


# --- the default, and what served before it was one -----------------------------------------------------------------------

ABSENT = {"verification": None}


def test_what_says_nothing_is_verified() -> None:
    snapshot = up(ABSENT)
    plan = make_plan(snapshot)
    assert snapshot.spec.verification == "Required"
    assert fronts(plan) == [False] and [c.dark for c in plan.canaries] == [True]
    assert shown(snapshot, "Ready")[:2] == ("False", "NotYetRun")


def workloads(snapshot: Snapshot) -> list[dict[str, Any]]:
    return list(manifests(render(snapshot, make_plan(snapshot)), "Deployment"))


def test_what_serves_unproven_serves_on_and_none_of_its_pods_is_touched() -> None:
    """An upgrade of the operator brings the default to an object that was stored without one (invariant I12)."""
    before, after_it = up({"verification": "Disabled"}, front=True), up(ABSENT, front=True)
    assert workloads(after_it) == workloads(before)
    plan = make_plan(after_it)
    assert fronts(plan) == [True] and [c.dark for c in plan.canaries] == [False], "verified while it serves"
    assert shown(after_it, "Ready")[:2] == ("False", "NotYetRun"), "and Ready says that nothing is proven yet"
    snapshot = after_it
    for number in range(1, TRIES + 2):  # whatever the canary finds
        status = build_status(snapshot, make_plan(snapshot))
        snapshot = job(replace(up(ABSENT, front=True), status=status, now=NOW + timedelta(seconds=number)), number, BAD)
        assert fronts(make_plan(snapshot)) == [True] and workloads(snapshot) == workloads(before)
    assert shown(snapshot, "Ready")[:2] == ("False", "NoTransfer")
    good = job(replace(up(ABSENT, front=True), status=build_status(after_it, plan)), 1, GOOD)
    assert shown(good, "Ready")[0] == "True" and workloads(good) == workloads(before)


@pytest.mark.parametrize("changes", [{"suspend": True}, {"rollout": {"paused": True}}, {"router": {"replicas": 3}}])
def test_an_edit_of_what_serves_unproven_does_not_make_it_dark(changes: dict[str, Any]) -> None:
    assert fronts(make_plan(replace(up(ABSENT, front=True), spec=make_spec({**ABSENT, **changes})))) == [True]


def test_without_an_image_what_serves_unproven_serves_on() -> None:
    snapshot = up(ABSENT, front=True)
    snapshot = replace(snapshot, images={**snapshot.images, "canary": ""})
    plan = make_plan(snapshot)
    assert plan.refusal is not None and plan.refusal.message.startswith("spec.verification=Required: ")
    assert fronts(plan) == [True] and prune(snapshot, plan, frozenset()) == []


# --- failures -------------------------------------------------------------------------------------------------------------


def failed(times: int, seen: Evidence | str = BAD, changes: Mapping[str, Any] | None = None) -> Snapshot:
    """A slice whose canary has failed so often."""
    snapshot = up(changes)
    for number in range(1, times + 1):
        snapshot = replace(up(changes), status=snapshot.status, now=NOW + timedelta(seconds=number))
        snapshot = job(snapshot, number, seen)
        snapshot = replace(snapshot, status=build_status(snapshot, make_plan(snapshot)))
    return snapshot


def test_a_failure_is_tried_again_soon_and_then_it_is_a_condition() -> None:
    for times, wait in ((1, SOON[0]), (2, SOON[1]), (3, LATER), (4, LATER)):
        snapshot = failed(times)
        plan = make_plan(snapshot)
        assert not plan.canaries and fronts(plan) == [False]
        assert plan.canary_due == wait
        (again,) = make_plan(after(snapshot, snapshot.status, wait)).canaries
        assert again.number == times + 1
        expected = ("Unknown", "NotYetRun") if times < TRIES else ("False", "NoTransfer")
        assert shown(snapshot, "HandoffVerified")[:2] == expected
        progress = conditions(snapshot.status)["Progressing"]
        assert (progress["reason"] == "VerificationFailed") is (times >= TRIES), progress
    message = shown(failed(3), "Ready")[2]
    assert "no byte came to decode" in message and "canary-3" in message
    assert message.endswith(
        "Next: look at the connector of both engines and at the network between their pods; then run the canary again."
    )


def test_a_success_after_failures_starts_the_count_anew() -> None:
    snapshot = failed(2)
    good = job(replace(up(), status=snapshot.status), 3, GOOD)
    (slice_,) = build_status(good, make_plan(good))["slices"]
    assert slice_["canary"]["failures"] == 0 and fronts(make_plan(good)) == [True]


def test_deleting_the_job_asks_again_at_once() -> None:
    snapshot = failed(3)
    gone = replace(snapshot, children=tuple(c for c in snapshot.children if c.kind != "Job"))
    (again,) = make_plan(gone).canaries
    assert again.number == 4
    proven = job(up(front=True), 1, GOOD)
    proven = after(proven, build_status(proven, make_plan(proven)))
    assert not make_plan(proven).canaries
    gone = replace(proven, children=tuple(c for c in proven.children if c.kind != "Job"))
    plan = make_plan(gone)
    assert [c.number for c in plan.canaries] == [2] and not plan.canaries[0].dark
    assert fronts(plan) == [True], "what serves is not taken from the door for a question"
    assert shown(gone, "Ready")[0] == "True"


def test_a_serving_slice_whose_canary_fails_is_not_ready_and_keeps_serving() -> None:
    snapshot = job(up(front=True), 1, GOOD)
    status = build_status(snapshot, make_plan(snapshot))
    for number in range(2, 2 + TRIES):
        snapshot = job(replace(up(front=True), status=status, now=NOW + timedelta(seconds=number)), number, BAD)
        status = build_status(snapshot, make_plan(snapshot))
        ready = conditions(status)["Ready"]
        assert (ready["status"] == "False") is (number == 1 + TRIES), ready
        assert fronts(make_plan(snapshot)) == [True]
    assert conditions(status)["Ready"]["reason"] == "NoTransfer"


@pytest.mark.parametrize("seen", [GOOD, BAD])
def test_a_change_that_is_not_through_yet_is_not_asked_about(seen: Evidence) -> None:
    snapshot = job(up(front=seen is GOOD), 1, seen)
    status = build_status(snapshot, make_plan(snapshot))
    routers = tuple(c for c in snapshot.children if c.name.endswith(f"-{ROUTER}"))
    rolling = tuple(replace(c, generation=c.generation + 1) for c in routers)
    changed = replace(snapshot, status=status, spec=make_spec({**REQUIRED, "router": {"type": "vllm-router"}}))
    assert len(make_plan(changed).canaries) == 1
    others = tuple(c for c in snapshot.children if c not in routers)
    assert not make_plan(replace(changed, children=(*others, *rolling))).canaries


def test_a_change_of_the_router_is_proven_again_while_the_slice_serves() -> None:
    snapshot = job(up(front=True), 1, GOOD)
    status = build_status(snapshot, make_plan(snapshot))
    changed = replace(snapshot, status=status, spec=make_spec({**REQUIRED, "router": {"type": "vllm-router"}}))
    plan = make_plan(changed)
    assert [c.number for c in plan.canaries] == [2] and fronts(plan) == [True]
    scaled = replace(snapshot, status=status, spec=make_spec({**REQUIRED, "router": {"replicas": 3}}))
    assert subject(scaled) == subject(snapshot)


@pytest.mark.parametrize(
    ("seen", "fields", "seconds", "reason", "words"),
    [
        ("Traceback: boom", {}, 0, Reason.CANARY_FAILED, "boom"),
        (None, {"job": JobFact("Failed", NOW, "DeadlineExceeded")}, POD_WAIT + 1, Reason.CANARY_FORBIDDEN, "describe job"),
        (None, {"job": JobFact("Failed", NOW, "DeadlineExceeded", pods=1)}, POD_WAIT + 1, Reason.CANARY_FAILED, "DeadlineExceeded"),
        ("", {"job": JobFact("Failed", NOW, "DeadlineExceeded")}, 60, Reason.CANARY_FAILED, "DeadlineExceeded"),
    ],
)
def test_a_job_without_evidence_counts_as_a_failure(
    seen: str | None, fields: dict[str, Any], seconds: float, reason: Reason, words: str
) -> None:
    snapshot = after(job(up(), 1, seen, **fields), {}, seconds)
    (slice_,) = build_status(snapshot, make_plan(snapshot))["slices"]
    assert slice_["canary"]["failures"] == 1 and slice_["canary"]["handoffReason"] == reason
    assert words in slice_["canary"]["handoffMessage"]


def test_the_end_of_a_pod_may_be_seen_after_the_end_of_its_job() -> None:
    snapshot = job(up(), 1, "", job=JobFact("Complete", NOW))
    plan = make_plan(snapshot)
    assert not plan.canaries and plan.verification[plan.rollout.slices[0].name].running
    assert "canary" not in build_status(snapshot, plan)["slices"][0]


def test_a_job_that_gets_no_pod_is_forbidden() -> None:
    snapshot = after(job(up(), 1), {}, POD_WAIT + 1)
    status = shown(snapshot, "HandoffVerified")
    assert status[:2] == ("False", "CanaryForbidden") and "describe job" in status[2]
    assert shown(job(up(), 1), "HandoffVerified")[:2] == ("Unknown", "NotYetRun")
    refused = replace(make_plan(up()), canary_refused="the API server takes no Job: quota")
    found = conditions(build_status(up(), refused))["HandoffVerified"]
    assert (found["status"], found["reason"]) == ("False", "CanaryForbidden") and "quota" in found["message"]


PULL = (ContainerFact("canary", waiting_reason="ImagePullBackOff", waiting_message="no basic auth credentials"),)
FULL = {"scheduled": False, "scheduling_reason": "Unschedulable", "scheduling_message": "0/2 nodes: 2 Insufficient cpu."}
GATED = {"scheduled": False, "scheduling_reason": "SchedulingGated"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"scheduled": True, "containers": PULL}, ["cannot be pulled", "no basic auth credentials", "imagePullSecrets"]),
        (FULL, ["no node for it: 0/2 nodes: 2 Insufficient cpu.", "nodeSelector and tolerations from spec.router.template.spec"]),
        (GATED, ["held by a scheduling gate"]),
    ],
)
@pytest.mark.parametrize("front", [False, True])
def test_a_canary_that_does_not_start_says_why(fields: dict[str, Any], words: list[str], front: bool) -> None:
    snapshot = job(up(front=front), 1, "")
    snapshot = replace(snapshot, pods=(*snapshot.pods[:-1], replace(snapshot.pods[-1], **{"containers": (), **fields})))
    assert shown(snapshot, "HandoffVerified")[:2] == ("Unknown", "NotYetRun"), "a moment is nothing to talk about"
    late = after(snapshot, {}, POD_WAIT + 1)
    status = shown(late, "HandoffVerified")
    assert status[:2] == ("False", "CanaryFailed") and all(word in status[2] for word in words), status
    assert "spec.verification: Advisory or Disabled" in status[2] and "Job chat-" in status[2]
    assert shown(late, "Ready")[:2] == ("False", "CanaryFailed") and fronts(make_plan(late)) == [front]
    if not front:
        assert shown(late, "Progressing")[:2] == ("False", "VerificationFailed")
    # The Job ends and takes its pod with it. What status says of the cause is what is left of it.
    told = build_status(late, make_plan(late))
    ending = after(job(up(front=front), 1, job=JobFact(pods=1)), told, 300)
    assert shown(ending, "HandoffVerified")[:2] == ("False", "CanaryFailed"), "its pod goes before the Job says that it is over"
    ended = job(up(front=front), 1, job=JobFact("Failed", NOW, "DeadlineExceeded", pods=1))
    later = after(ended, build_status(ending, make_plan(ending)), 301)
    (slice_,) = build_status(later, make_plan(later))["slices"]
    assert slice_["canary"]["handoffReason"] == "CanaryFailed" and words[0] in slice_["canary"]["handoffMessage"]


def test_a_canary_that_runs_is_not_blocked() -> None:
    snapshot = after(job(up(), 1, ""), {}, POD_WAIT + 60)
    assert shown(snapshot, "HandoffVerified")[:2] == ("Unknown", "NotYetRun")


def test_without_an_image_it_is_refused_by_name() -> None:
    snapshot = make_snapshot(REQUIRED)
    refusal = make_plan(replace(snapshot, images={**snapshot.images, "canary": ""})).refusal
    assert refusal is not None and refusal.reason is Reason.IMAGE_REQUIRED and refusal.field == "spec.verification"
    assert "images.canary" in refusal.accepted and "Disabled" in refusal.accepted


# --- rollout --------------------------------------------------------------------------------------------------------------


def beside(snapshot: Snapshot, old: Snapshot) -> Snapshot:
    """The new revision's world with the old one's pods and children in it."""
    return replace(
        snapshot,
        children=(*old.children, *snapshot.children),
        pods=(*old.pods, *snapshot.pods),
        revisions=(*old.revisions, *snapshot.revisions),
    )


def both(jobs: Sequence[Evidence] = ()) -> Snapshot:
    """A proven revision that serves, and a whole new one in the dark, with canaries that saw this."""
    old = job(up(front=True), 1, GOOD)
    old_status = build_status(old, make_plan(old))
    status: Mapping[str, Any] = old_status
    changes = {"engine": {"type": "vllm", "version": "0.32.0", "env": [{"name": "MARK", "value": "2"}]}}
    found = beside(up(changes), old)
    found = replace(found, status=status)
    for number, seen in enumerate(jobs, 1):
        found = replace(job(beside(up(changes), old), number, seen), status=status, now=NOW + timedelta(seconds=number))
        status = build_status(found, make_plan(found))
    return found


def test_the_next_revision_waits_for_its_own_proof() -> None:
    plan = make_plan(both())
    new, kept = plan.rollout.slices
    assert (new.front, kept.front, kept.keep_routers) == (False, True, True)
    assert [c.slice.name for c in plan.canaries] == [new.name]
    assert plan.rollout.reason is Reason.ROLLING_OUT and "dark until its canary" in plan.rollout.message


def test_a_proven_revision_takes_over() -> None:
    plan = make_plan(both([GOOD]))
    assert fronts(plan) == [True, True] and "join the front door" in plan.rollout.message


def test_a_revision_that_fails_leaves_the_old_one_serving() -> None:
    snapshot = both([BAD] * TRIES)
    plan = make_plan(snapshot)
    new, kept = plan.rollout.slices
    assert (new.front, kept.front, kept.keep_routers) == (False, True, True)
    status = conditions(build_status(snapshot, plan))
    assert (status["Progressing"]["status"], status["Progressing"]["reason"]) == ("False", "VerificationFailed")
    assert new.name in status["Progressing"]["message"] and "no byte" in status["Progressing"]["message"]
    assert status["Ready"]["status"] == "True", "the old revision serves, and was proven"


def test_recreate_waits_for_the_proof_too() -> None:
    snapshot = both()
    spec = snapshot.spec.model_copy(update={"rollout": snapshot.spec.rollout.model_copy(update={"type": "Recreate"})})
    plan = make_plan(replace(snapshot, spec=spec))
    assert not any(s.front for s in plan.rollout.slices if s.keep_routers)


# --- cleaning up ----------------------------------------------------------------------------------------------------------


def test_only_the_last_canary_of_a_slice_stays() -> None:
    snapshot = job(job(up(), 1, BAD), 2, GOOD)
    plan = make_plan(snapshot)
    gone = prune(snapshot, plan, render(snapshot, plan).keys)
    assert [d.name for d in gone if d.kind == "Job"] == [canary(plan.rollout.slices[0].name, 1)]
    off = replace(snapshot, spec=make_spec({"verification": "Disabled"}))
    plan = make_plan(off)
    assert len([d for d in prune(off, plan, render(off, plan).keys) if d.kind == "Job"]) == 2


def test_a_job_has_no_rights_and_fits_the_restricted_profile() -> None:
    snapshot = up({"engine": {"type": "vllm", "version": "0.32.0", "env": [KEY]}})
    bundle = render(snapshot, make_plan(snapshot))
    (made,) = bundle.canaries
    spec = made["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert spec["automountServiceAccountToken"] is False and spec["restartPolicy"] == "Never"
    assert spec["serviceAccountName"] == f"{NAME}-canary"
    assert not [m for m in manifests(bundle, "RoleBinding") if m["subjects"][0]["name"] == f"{NAME}-canary"]
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]} and spec["securityContext"]["runAsNonRoot"] is True
    assert container["image"] == "example.org/pd-operator:1" and container["args"] == ["canary"]
    assert container["env"][1]["valueFrom"] == KEY["valueFrom"], "the engines ask for their key"
    assert "secret" not in json.dumps(container["env"][0]).lower()
    assert made["spec"]["backoffLimit"] == 0
    assert len(made["metadata"]["name"]) + 6 <= 63


KEY = {"name": "VLLM_API_KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "engine"}}}
