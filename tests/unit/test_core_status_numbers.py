"""Status: the numbers, the pools, and when a condition counts as turned."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import builders
from builders import NOW, deployment, make_snapshot, pod, revision_of, serving, whole_slice
from test_core_status import REV, SLICE, status_of

from pd_operator.api import conditions as api
from pd_operator.api.conditions import Condition, Reason, Type, merge
from pd_operator.api.crdgen import deployment_crd
from pd_operator.api.pool import PDPoolStatus
from pd_operator.core.names import FRONT, ROLES
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import ROUTER
from pd_operator.core.status import build_pool_status


def test_roles_count_all_slices_and_updated_ones_apart() -> None:
    old_children, old_pods = whole_slice(REV, front=True, replicas=3)
    changes = {
        "engine": {"args": ["--new"]},
        "prefill": {"replicas": 3, "resources": {"limits": {"nvidia.com/gpu": 2}}},
        "decode": {"replicas": 3},
    }
    new = revision_of(changes)
    children = (*old_children, deployment(new, "prefill", replicas=3, ready=1))
    status = status_of(make_snapshot(changes, children=children, pods=old_pods))
    prefill, decode = status["roles"]
    assert prefill == {
        "name": "prefill",
        "ready": "4/3",
        "desiredReplicas": 3,
        "replicas": 6,
        "readyReplicas": 4,
        "updatedReplicas": 3,
        "verifiedReplicas": 0,
        "gpus": 12,
    }
    assert (decode["replicas"], decode["updatedReplicas"], decode["gpus"]) == (3, 0, 3)
    assert {s["name"]: (s["prefill"], s["decode"]) for s in status["slices"]} == {f"chat-{new}-0": (1, 0), SLICE: (3, 3)}


def test_head_of_the_status() -> None:
    status = status_of(serving(generation=4))
    assert {k: status[k] for k in ("observedGeneration", "controller", "url", "servingSlices", "bottleneck")} == {
        "observedGeneration": 4,
        "controller": "pd-operator",
        "url": "http://chat.demo.svc",
        "servingSlices": 1,
        "bottleneck": "Unknown",
    }
    assert status["currentRevision"] == status["updatedRevision"] == REV


def test_the_current_revision_is_the_one_that_answers() -> None:
    base = serving()
    changes = {"engine": {"args": ["--new"]}}
    status = status_of(make_snapshot(changes, children=base.children, pods=base.pods))
    assert (status["currentRevision"], status["updatedRevision"]) == (REV, revision_of(changes))


def test_every_column_of_kubectl_get_has_a_value() -> None:
    obj = {
        "metadata": {"creationTimestamp": "2026-01-02T03:04:05Z"},
        "spec": builders.MINIMAL,
        "status": status_of(serving()),
    }
    for column in deployment_crd()["spec"]["versions"][0]["additionalPrinterColumns"]:
        assert look_up(obj, column["jsonPath"]) not in (None, ""), column["name"]


def look_up(obj: Any, path: str) -> Any:
    """A JSONPath as columns use it: .a.b and .a[?(@.name=="x")].b."""
    for part in path.replace("[?(@.", "|").replace('")]', "").lstrip(".").split("."):
        name, _, condition = part.partition("|")
        obj = obj.get(name)
        if condition:
            key, value = condition.split('=="')
            obj = next((item for item in obj if item[key] == value), {})
        if obj is None:
            return None
    return obj


def test_pool_status() -> None:
    base = serving({"decode": {"replicas": 4}}, replicas=4)
    children = tuple(
        deployment(c.labels["pdserve.dev/revision"], "decode", replicas=4, ready=3) if "decode" in c.name else c
        for c in base.children
    )
    snapshot = replace(base, children=children)
    status = build_pool_status(snapshot, make_plan(snapshot), "decode", {}, 2)
    assert PDPoolStatus.model_validate(status).model_dump(by_alias=True, exclude_unset=True) == status
    assert {k: status[k] for k in ("replicas", "readyReplicas", "startingReplicas", "desiredReplicas", "observedGeneration")} == {
        "replicas": 4,
        "readyReplicas": 3,
        "startingReplicas": 1,
        "desiredReplicas": 4,
        "observedGeneration": 2,
    }
    again = build_pool_status(replace(snapshot, now=NOW + timedelta(hours=1)), make_plan(snapshot), "decode", status, 2)
    assert again == status  # nothing changed, nothing to write


def test_the_selector_of_a_pool_matches_one_pod_of_each_replica_in_every_revision() -> None:
    selector = build_pool_status(serving(), make_plan(serving()), "prefill", {}, 1)["selector"]
    wanted = dict(part.split("=") for part in selector.split(","))
    for revision in (REV, "0badcafe"):
        matched = [p for p in (pod(revision, part) for part in (*ROLES, ROUTER)) if wanted.items() <= p.labels.items()]
        assert [p.name for p in matched] == [f"chat-{revision}-0-prefill-0"]


# --- merging --------------------------------------------------------------------------------------------------------------


def test_the_transition_time_moves_with_the_status_alone() -> None:
    first = merge([], [Condition(Type.READY, "False", Reason.STARTING, "a")], 1, NOW)
    later = NOW + timedelta(minutes=5)
    same = merge(first, [Condition(Type.READY, "False", Reason.CRASH_LOOP, "b")], 2, later)
    turned = merge(same, [Condition(Type.READY, "True", Reason.READY)], 2, later)
    assert first[0]["lastTransitionTime"] == same[0]["lastTransitionTime"] == "2026-01-02T03:04:05Z"
    assert same[0]["reason"] == "CrashLoop" and same[0]["observedGeneration"] == 2
    assert turned[0]["lastTransitionTime"] == "2026-01-02T03:09:05Z"


def test_messages_are_bounded_and_types_sorted() -> None:
    wanted = [Condition(t, "False", Reason.STARTING, "x" * 5000) for t in (Type.READY, Type.ACCEPTED)]
    merged = merge([], wanted, 1, NOW)
    assert [c["type"] for c in merged] == ["Accepted", "Ready"]
    assert {len(c["message"]) for c in merged} == {api.MAX_MESSAGE}


def test_a_status_of_an_unchanged_world_is_the_same_an_hour_later() -> None:
    snapshot = serving()
    first = status_of(snapshot)
    assert status_of(replace(snapshot, status=first, now=NOW + timedelta(hours=1))) == first


def test_front_label_is_what_the_front_service_selects() -> None:
    _, _, bundle = builders.rendered()
    front = builders.by_name(bundle)["Service", "chat"]
    assert front["spec"]["selector"] == {FRONT: "chat"}
