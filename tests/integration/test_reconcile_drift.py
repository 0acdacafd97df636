"""Whoever changes or deletes a child: it is put right at once; what others own in it stays."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator

pytest_plugins = ("opsrunner.fixtures",)


@pytest.fixture(scope="module")
def serving(api: Api, operator: Operator, space: str) -> Object:
    """An object that is Ready."""
    api.create(state.pdd(space, "chat", decode={"replicas": 2}, lmcache={"p2p": {"enabled": True}}))
    return waits.ready(api, space, "chat")


def names(obj: Object) -> dict[str, tuple[str, str]]:
    """A short word for each child that the tests change."""
    slice_ = obj["status"]["slices"][0]["name"]
    return {
        "decode": ("Deployment", f"{slice_}-decode"),
        "router": ("Deployment", f"{slice_}-router"),
        "coordinator": ("Deployment", f"{slice_}-coordinator"),
        "front": ("Service", "chat"),
        "slice": ("Service", slice_),
        "role": ("Role", "chat-router"),
        "binding": ("RoleBinding", "chat-router"),
        "budget": ("PodDisruptionBudget", "chat-decode"),
        "policy": ("NetworkPolicy", "chat-engine"),
        "account": ("ServiceAccount", "chat-engine"),
        "pool": ("PDPool", "chat-decode"),
    }


def until_equal(api: Api, space: str, wanted: dict[str, Any], obj: Object, what: str) -> float:
    """Wait until the children are again what they were; seconds it took."""
    begin = time.monotonic()
    last = [""]

    def equal() -> bool:
        last[0] = state.difference(wanted, state.normalised(state.children(api, space, "chat"), obj))
        return not last[0]

    waits.until(f"{what} to be repaired", equal, timeout=20, show=lambda: last[0])
    return time.monotonic() - begin


CHANGES: list[tuple[str, str, dict[str, Any]]] = [
    ("image", "decode", {"spec": {"template": {"spec": {"containers": [{"name": "engine", "image": "example.org/other:1"}]}}}}),
    (
        "template-label",
        "decode",
        {"spec": {"template": {"metadata": {"labels": {"pdserve.dev/role": "decode", "llm-d.ai/role": "x"}}}}},
    ),
    ("label", "decode", {"metadata": {"labels": {"pdserve.dev/slice": "other"}}}),
    ("owner-label", "decode", {"metadata": {"labels": {"pdserve.dev/deployment": "other"}}}),
    ("managed-by-label", "front", {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}}),
    ("no-label", "policy", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}}),
    ("replicas", "decode", {"spec": {"replicas": 5}}),
    ("router-replicas", "router", {"spec": {"replicas": 0}}),
    ("selector", "front", {"spec": {"selector": {"pdserve.dev/front": "other"}}}),
    ("selector-more", "slice", {"spec": {"selector": {"pdserve.dev/slice": "other"}}}),
    ("rules", "role", {"rules": [{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}]}),
    ("subjects", "binding", {"subjects": []}),
    ("budget", "budget", {"spec": {"maxUnavailable": 0}}),
    ("policy", "policy", {"spec": {"ingress": [{}]}}),
    ("token", "account", {"automountServiceAccountToken": True}),
    ("owner", "account", {"metadata": {"ownerReferences": None}}),
    ("pool-replicas", "pool", {"spec": {"replicas": 7}}),
]


@pytest.mark.parametrize(("what", "child", "patch"), CHANGES, ids=[change[0] for change in CHANGES])
def test_an_edited_child_is_put_right(
    api: Api, space: str, serving: Object, kwok_cluster: Cluster, what: str, child: str, patch: dict[str, Any]
) -> None:
    kind, name = names(serving)[child]
    before = state.children(api, space, "chat")
    wanted = state.normalised(before, serving)
    strategic = "strategic" if kind in {"Deployment", "Service"} else "merge"
    kwok_cluster.kubectl(
        "patch", kind.lower(), name, "-n", space, f"--type={strategic}", "-p", json.dumps(patch), "--field-manager=kubectl-edit"
    )
    took = until_equal(api, space, wanted, serving, f"{what} of {kind} {name}")
    print(f"{what}: repaired in {took:.2f} s")
    after = state.children(api, space, "chat")
    assert after[kind, name]["metadata"]["uid"] == before[kind, name]["metadata"]["uid"]  # mended, not made anew
    waits.ready(api, space, "chat")


DELETED = ["decode", "router", "coordinator", "front", "slice", "role", "binding", "budget", "policy", "account", "pool"]


@pytest.mark.parametrize("child", DELETED)
def test_a_deleted_child_is_made_again(api: Api, space: str, serving: Object, child: str) -> None:
    kind, name = names(serving)[child]
    before = state.children(api, space, "chat")
    wanted = state.normalised(before, serving)
    api.delete(kind, space, name)
    took = until_equal(api, space, wanted, serving, f"deleted {kind} {name}")
    print(f"{child}: made again in {took:.2f} s")
    waits.ready(api, space, "chat")


def test_a_deleted_revision_is_made_again(api: Api, space: str, serving: Object) -> None:
    ((kind, name),) = [key for key in state.children(api, space, "chat") if key[0] == "ControllerRevision"]
    wanted = state.normalised(state.children(api, space, "chat"), serving)
    pods = state.uids(state.pods(api, space, "chat"))
    api.delete(kind, space, name)
    until_equal(api, space, wanted, serving, "the ControllerRevision")
    assert state.uids(state.pods(api, space, "chat")) == pods


def test_a_child_deleted_right_after_it_was_made(api: Api, operator: Operator, space: str) -> None:
    """The operator must not take the deletion for a watch that is late."""
    api.create(state.pdd(space, "young"))
    obj = waits.ready(api, space, "young")
    slice_ = obj["status"]["slices"][0]["name"]
    for kind, name in (("Service", "young"), ("Deployment", f"{slice_}-decode"), ("PodDisruptionBudget", "young-router")):
        api.delete(kind, space, name)
        waits.until(f"{kind} {name} to be made again", lambda k=kind, n=name: api.get(k, space, n), timeout=20)
    api.delete("Service", space, "young")  # again: made a moment ago
    waits.until("Service young to be made again", lambda: api.get("Service", space, "young"), timeout=20)


def test_a_field_of_another_manager_survives(api: Api, space: str, serving: Object, operator: Operator) -> None:
    """What we do not set is not ours: a mesh's annotation, a cloud's label, another container, a Service's session affinity."""
    _, decode = names(serving)["decode"]
    container = {"name": "sidecar", "image": "example.org/sidecar:1"}
    theirs: list[Object] = [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"labels": {"cloud": "x"}, "annotations": {"mesh": "on"}},
            "spec": {"sessionAffinity": "ClientIP"},
        },
        {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": {"annotations": {"mesh": "on"}},
            "spec": {"template": {"spec": {"containers": [container]}}},
        },
        {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"annotations": {"iam": "role"}},
            "imagePullSecrets": [{"name": "pull"}],
        },
    ]
    for obj, name in zip(theirs, ("chat", decode, "chat-engine"), strict=True):
        obj["metadata"] |= {"name": name, "namespace": space}
        api.apply(obj, manager="somebody")
    waits.ready(api, space, "chat")

    def still_there() -> None:
        service = api.must_get("Service", space, "chat")
        assert service["spec"]["sessionAffinity"] == "ClientIP" and service["metadata"]["labels"]["cloud"] == "x"
        assert service["metadata"]["annotations"]["mesh"] == "on"
        deployment = api.must_get("Deployment", space, decode)
        assert [c["name"] for c in deployment["spec"]["template"]["spec"]["containers"]] == ["engine", "sidecar"]
        account = api.must_get("ServiceAccount", space, "chat-engine")
        assert account["imagePullSecrets"] == [{"name": "pull"}] and account["metadata"]["annotations"]["iam"] == "role"

    still_there()
    # Also when we write to the same objects: a drift of ours beside them, and an edit of the spec.
    api.merge("Service", space, "chat", {"spec": {"selector": {"pdserve.dev/front": "other"}}})
    api.merge("PDDeployment", space, "chat", {"spec": {"decode": {"replicas": 1}}})
    waits.until(
        "both to be written",
        lambda: (
            api.must_get("Service", space, "chat")["spec"]["selector"] == {"pdserve.dev/front": "chat"}
            and api.must_get("Deployment", space, decode)["spec"]["replicas"] == 1
        ),
    )
    still_there()
    waits.ready(api, space, "chat")
    quiet = state.versions(api, space, "chat")
    time.sleep(2)
    assert state.versions(api, space, "chat") == quiet, "a foreign field must not make us write again and again"


def test_two_managers_that_fight_do_not_make_us_spin(api: Api, operator: Operator, space: str) -> None:
    """Somebody who changes the same field ten times a second gets one answer each, not a storm."""
    api.create(state.pdd(space, "fight"))
    waits.ready(api, space, "fight")
    before = operator.calls().get(("apply", "Service", "200"), 0)
    for round_ in range(20):
        api.merge("Service", space, "fight", {"spec": {"selector": {"pdserve.dev/front": f"other{round_}"}}})
        time.sleep(0.1)
    waits.until(
        "the selector to be ours",
        lambda: api.must_get("Service", space, "fight")["spec"]["selector"] == {"pdserve.dev/front": "fight"},
    )
    assert operator.calls()["apply", "Service", "200"] - before <= 20 + 2
