"""Raw bytes become facts: nothing is invented, nothing that decisions need is lost."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from typing import Any

import pytest

from pd_operator.core.observed import ChildFact, ContainerFact, PodFact
from pd_operator.kube.facts import ChildDecoder, PodDecoder, child, digest, error_of

LABELS = {"app.kubernetes.io/managed-by": "pd-operator", "pdserve.dev/deployment": "chat"}
POD: dict[str, Any] = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {
        "namespace": "ns",
        "name": "p",
        "uid": "u1",
        "resourceVersion": "7",
        "labels": LABELS,
        "annotations": {"smg.ai/kv-connector": "NixlConnector", "pdserve.dev/applied-hash": "ab", "secret/of-somebody": "x"},
        "creationTimestamp": "2026-01-02T03:04:05Z",
        "deletionTimestamp": "2026-01-02T04:04:05Z",
        "ownerReferences": [{"uid": "other"}, {"uid": "rs", "controller": True}],
        "managedFields": [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}],
    },
    "spec": {"nodeName": "n0", "containers": [{"name": "engine", "env": [{"name": "A", "value": "b"}]}]},
    "status": {
        "phase": "Running",
        "podIP": "10.0.0.1",
        "conditions": [
            {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
            {"type": "PodScheduled", "status": "True", "lastTransitionTime": "2026-01-02T03:04:06Z"},
        ],
        "initContainerStatuses": [{"name": "lmcache", "ready": True, "started": True, "restartCount": 0, "state": {"running": {}}}],
        "containerStatuses": [
            {
                "name": "engine",
                "ready": False,
                "started": False,
                "restartCount": 3,
                "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 40s"}},
                "lastState": {"terminated": {"exitCode": 137, "reason": "OOMKilled", "message": "killed"}},
            }
        ],
    },
}
FACT = PodFact(
    namespace="ns",
    name="p",
    uid="u1",
    labels=LABELS,
    annotations={"smg.ai/kv-connector": "NixlConnector", "pdserve.dev/applied-hash": "ab"},
    owner_uid="rs",
    created=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    deleting=True,
    phase="Running",
    node="n0",
    ip="10.0.0.1",
    ready=False,
    scheduled=True,
    scheduling_since=datetime(2026, 1, 2, 3, 4, 6, tzinfo=UTC),
    grace_ends=datetime(2026, 1, 2, 4, 4, 5, tzinfo=UTC),
    containers=(
        ContainerFact("lmcache", ready=True, started=True),
        ContainerFact(
            "engine",
            restarts=3,
            waiting_reason="CrashLoopBackOff",
            waiting_message="back-off 40s",
            exit_code=137,
            exit_reason="OOMKilled",
            exit_message="killed",
        ),
    ),
)


def line(kind: str, obj: dict[str, Any]) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode()


def test_a_pod() -> None:
    event = PodDecoder().event(line("MODIFIED", POD))
    assert (event.type, event.version, event.key, event.item) == ("MODIFIED", "7", ("ns", "p"), FACT)
    page = PodDecoder().page(json.dumps({"metadata": {"resourceVersion": "9", "continue": "t"}, "items": [POD]}).encode())
    assert (page.version, page.token, page.items) == ("9", "t", [(("ns", "p"), FACT)])


def test_a_pod_that_was_just_created_has_defaults() -> None:
    event = PodDecoder().event(line("ADDED", {"metadata": {"namespace": "ns", "name": "p", "uid": "u"}, "spec": {}, "status": {}}))
    assert event.item == PodFact(namespace="ns", name="p", uid="u")


def test_a_pod_that_waits_for_a_node() -> None:
    obj = POD | {
        "status": {
            "conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available"}
            ]
        }
    }
    fact = PodDecoder().event(line("ADDED", obj)).item
    assert fact is not None
    assert (fact.scheduled, fact.scheduling_reason, fact.scheduling_message) == (False, "Unschedulable", "0/3 nodes are available")


def test_equal_pods_give_equal_facts_whatever_else_changed() -> None:
    """The store keeps silent about changes that no decision reads."""
    other = json.loads(json.dumps(POD))
    other["metadata"]["resourceVersion"] = "8"
    other["metadata"]["managedFields"] = []
    other["status"]["hostIP"] = "1.2.3.4"
    assert PodDecoder().event(line("MODIFIED", other)).item == FACT


@pytest.mark.parametrize("decoder", [PodDecoder(), ChildDecoder("Service")])
def test_bookmarks_and_errors_carry_no_object(decoder: PodDecoder | ChildDecoder) -> None:
    bookmark = decoder.event(line("BOOKMARK", {"kind": "X", "metadata": {"resourceVersion": "12", "creationTimestamp": None}}))
    assert (bookmark.type, bookmark.version, bookmark.key, bookmark.item) == ("BOOKMARK", "12", None, None)
    raw = line("ERROR", {"kind": "Status", "metadata": {}, "code": 410, "reason": "Expired", "message": "too old"})
    error = decoder.event(raw)
    assert (error.type, error.version, error.key) == ("ERROR", "", None)
    assert error_of(raw) == (410, "Expired", "too old")


@pytest.mark.parametrize("decoder", [PodDecoder(), ChildDecoder("Service")])
@pytest.mark.parametrize("raw", [b"", b"<html>", b"[]", b"{}", b'{"items": []}', b'{"metadata": {}, "items": 3}'])
def test_what_is_no_list_is_an_error(decoder: PodDecoder | ChildDecoder, raw: bytes) -> None:
    with pytest.raises((ValueError, KeyError, TypeError)):
        decoder.page(raw)


def test_an_empty_list_may_say_null() -> None:
    """Metadata-only and some typed lists do."""
    raw = b'{"metadata": {"resourceVersion": "3"}, "items": null}'
    assert PodDecoder().page(raw).items == ChildDecoder("Role").page(raw).items == []


def test_a_deployment() -> None:
    obj = {
        "metadata": {
            "namespace": "ns",
            "name": "d",
            "uid": "u",
            "generation": 4,
            "resourceVersion": "11",
            "labels": LABELS,
            "annotations": {"pdserve.dev/applied-hash": "cafe"},
            "ownerReferences": [{"uid": "pdd", "controller": True}],
            "creationTimestamp": "2026-01-02T03:04:05Z",
        },
        "spec": {"replicas": 2, "template": {"metadata": {"labels": {"a": "b"}}}},
        "status": {"observedGeneration": 3, "replicas": 3, "readyReplicas": 1, "updatedReplicas": 2, "availableReplicas": 1},
    }
    fact = child("Deployment", obj)
    assert (fact.kind, fact.namespace, fact.name, fact.uid, fact.owner_uid) == ("Deployment", "ns", "d", "u", "pdd")
    assert (fact.applied_hash, fact.generation, fact.resource_version, fact.deleting) == ("cafe", 4, "11", False)
    assert fact.workload is not None
    assert (fact.workload.observed_generation, fact.workload.spec_replicas, fact.workload.replicas) == (3, 2, 3)
    assert (fact.workload.ready, fact.workload.updated, fact.workload.available) == (1, 2, 1)
    assert fact.workload.template_labels == {"a": "b"}
    assert fact.created == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_a_leader_worker_set() -> None:
    """Its counts are of groups; its shapes are those of the leader and of the workers."""

    def template(gpus: int, **labels: str) -> dict[str, Any]:
        limits = {"nvidia.com/gpu": gpus}
        return {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "engine", "resources": {"limits": limits}}]}}

    obj = {
        "metadata": {"namespace": "ns", "name": "g", "uid": "u", "generation": 4, "annotations": {"pdserve.dev/site": "x"}},
        "spec": {
            "replicas": 2,
            "rolloutStrategy": {"rollingUpdateConfiguration": {"partition": 2}},
            "leaderWorkerTemplate": {"size": 3, "leaderTemplate": template(1, a="b"), "workerTemplate": template(8)},
        },
        "status": {"observedGeneration": 3, "replicas": 3, "readyReplicas": 1, "updatedReplicas": 2},
    }
    fact = child("LeaderWorkerSet", obj)
    assert fact.workload is not None and fact.workload.template_labels == {"a": "b"}
    assert (fact.workload.observed_generation, fact.workload.spec_replicas, fact.workload.size) == (
        3,
        2,
        3,
    ) and fact.workload.paused
    assert (fact.workload.replicas, fact.workload.ready, fact.workload.updated, fact.workload.available) == (3, 1, 2, 1)
    assert [shape.requests["nvidia.com/gpu"] for shape in fact.workload.shapes] == [1, 8, 8]
    bare = child("LeaderWorkerSet", {**obj, "metadata": {**obj["metadata"], "annotations": {}}})  # type: ignore[dict-item]
    assert bare.workload is not None and bare.workload.shapes == ()


def service(**changes: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": "ns", "name": "s", "uid": "u", "labels": LABELS, "ownerReferences": [{"uid": "o"}]},
        "spec": {"ports": [{"port": 80}]},
        "status": {},
    } | changes


@pytest.mark.parametrize(
    ("same", "changes"),
    [
        (True, {"status": {"loadBalancer": {}}}),
        (True, {"apiVersion": None}),  # items of a list have neither
        (True, {"metadata": service()["metadata"] | {"resourceVersion": "9", "managedFields": [], "annotations": {"a": "b"}}}),
        (False, {"spec": {"ports": [{"port": 81}]}}),
        (False, {"metadata": service()["metadata"] | {"labels": LABELS | {"x": "y"}}}),
        (False, {"metadata": service()["metadata"] | {"ownerReferences": []}}),
        (False, {"extra": 1}),
    ],
)  # fmt: skip
def test_the_digest_tells_whether_somebody_changed_what_we_applied(same: bool, changes: dict[str, Any]) -> None:
    assert (digest("Service", service(**changes)) == digest("Service", service())) is same


def test_the_replicas_of_a_pool_are_not_ours_and_not_in_the_digest() -> None:
    one = service(spec={"role": "decode", "replicas": 1})
    two = service(spec={"role": "decode", "replicas": 2})
    assert digest("PDPool", one) == digest("PDPool", two)
    assert child("PDPool", two).replicas == 2
    assert digest("PDPool", one) != digest("PDPool", service(spec={"role": "prefill", "replicas": 1}))


def test_a_route_keeps_where_it_leads_and_what_gateways_say() -> None:
    def parent(name: str, *conditions: tuple[str, str, int], **reference: str) -> dict[str, Any]:
        said = [{"type": t, "status": s, "reason": "Why", "message": "so", "observedGeneration": g} for t, s, g in conditions]
        return {"parentRef": {"name": name, **reference}, "controllerName": "example.org/gw", "conditions": said}

    parents = [
        parent("yes", ("Accepted", "True", 3), ("ResolvedRefs", "True", 3)),
        parent("no", ("Accepted", "False", 3), ("ResolvedRefs", "False", 3), namespace="infra", sectionName="https"),
        parent("blind", ("Accepted", "True", 3), ("ResolvedRefs", "False", 3), kind="Mesh"),
        parent("late", ("Accepted", "False", 2)),  # about an older generation
        parent("silent", ("ResolvedRefs", "True", 3)),
    ]
    rules = [{"backendRefs": [{"name": "b", "weight": 60}, {"name": "a", "weight": 40}]}, {"backendRefs": [{"name": "c"}]}, {}]
    obj = {
        "metadata": {"namespace": "ns", "name": "r", "uid": "u", "generation": 3},
        "spec": {"rules": rules},
        "status": {"parents": parents},
    }
    found = child("HTTPRoute", obj).route
    assert found is not None and found.backends == (("a", 40), ("b", 60), ("c", 1))
    assert [(p.name, p.controller, p.refusal) for p in found.parents] == [
        ("Gateway yes", "example.org/gw", ""),
        ("Gateway infra/no, https", "example.org/gw", "Accepted is False, Why: so"),
        ("Mesh blind", "example.org/gw", "ResolvedRefs is False, Why: so"),
    ]
    assert child("Service", service()).route is None


def test_a_revision_keeps_its_data() -> None:
    labels = {"app.kubernetes.io/component": "revision"}
    meta = {"namespace": "ns", "name": "r", "uid": "u"}
    obj = {"metadata": meta | {"labels": labels}, "data": {"b": 1, "a": [2]}, "revision": 3}
    assert json.loads(child("ControllerRevision", obj).data) == {"data": {"a": [2], "b": 1}, "revision": 3}
    assert child("Service", service()).data == b""
    theirs = {**obj, "metadata": meta | {"labels": {"app.kubernetes.io/component": "engine"}}}  # of a StatefulSet of leaders
    assert child("ControllerRevision", theirs).data == b""


def test_facts_are_frozen() -> None:
    with pytest.raises(AttributeError):
        FACT.phase = "x"  # type: ignore[misc]
    assert not hasattr(ChildFact, "__dict__") or "__slots__" in vars(ChildFact)


def test_two_thousand_pods_are_parsed_in_seconds() -> None:
    """A guard of the order of magnitude: the client's typed models take ten times as long."""
    page = json.dumps({"metadata": {"resourceVersion": "9"}, "items": [POD] * 2000}).encode()
    started = time.process_time()
    PodDecoder().page(page)
    assert time.process_time() - started < 2
