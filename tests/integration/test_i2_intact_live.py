"""I2, after a restart: the first list tells by managedFields whether a child is what we applied; then it is not written again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner.api import Api
from pd_operator.api.types import API_VERSION
from pd_operator.core.names import APPLIED_HASH, MANAGED_BY, MANAGED_SELECTOR, MANAGER
from pd_operator.core.revision import applied_hash
from pd_operator.core.stored_form import stored_quantity
from pd_operator.kube.client import KubeClient
from pd_operator.kube.facts import ChildDecoder
from pd_operator.kube.kinds import KINDS

Object = dict[str, Any]
CONTAINER = {
    "name": "engine",
    "image": "example.org/x",
    "args": ["--a", "1"],
    "env": [
        {"name": "A", "value": "1"},
        {"name": "B", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
    ],
    "ports": [{"name": "http", "containerPort": 8000}],
    "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
    "securityContext": {"capabilities": {"drop": ["ALL"]}},
    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
}
BODY: Object = {
    "spec": {
        "replicas": 0,
        "selector": {"matchLabels": {"app": "x"}},
        "template": {
            "metadata": {"labels": {"app": "x"}},
            "spec": {"containers": [CONTAINER], "volumes": [{"name": "tmp", "emptyDir": {}}], "terminationGracePeriodSeconds": 5},
        },
    }
}


def hashed(namespace: str, body: Object) -> Object:
    """A Deployment as the operator sends it."""
    metadata: Object = {"name": "d", "namespace": namespace, "labels": {MANAGED_BY: MANAGER, "team": "a"}}
    plain = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, **copy.deepcopy(body)}
    return {**plain, "metadata": {**metadata, "annotations": {APPLIED_HASH: applied_hash(plain)}}}


async def listed(client: KubeClient, namespace: str) -> bool:
    """What a new process would find."""
    raw = await client.list_page(KINDS["Deployment"], namespace, MANAGED_SELECTOR)
    ((_, fact),) = ChildDecoder("Deployment").page(raw).items
    return fact.intact


def engine(change: Callable[[Object], None]) -> Object:
    """A patch of the container list, which a merge patch replaces whole."""
    container = copy.deepcopy(CONTAINER)
    change(container)
    return {"spec": {"template": {"spec": {"containers": [container]}}}}


CHANGES: dict[str, tuple[Object, bool]] = {
    "somebody scales it": ({"spec": {"replicas": 3}}, False),
    "an argument is added": (engine(lambda c: c.update(args=["--a", "1", "--b"])), False),
    "a variable is removed": (engine(lambda c: c["env"].pop()), False),
    "a limit is raised": (engine(lambda c: c["resources"]["limits"].update(cpu="2")), False),
    "a field of ours is removed": ({"spec": {"template": {"spec": {"terminationGracePeriodSeconds": None}}}}, False),
    "a label of ours is changed": ({"metadata": {"labels": {"team": "b"}}}, False),
    "a label of ours is removed": ({"metadata": {"labels": {"team": None}}}, False),
    "the hash is edited": ({"metadata": {"annotations": {APPLIED_HASH: "0"}}}, False),
    "a label of theirs is added": ({"metadata": {"labels": {"theirs": "x"}}}, True),
    "a sidecar's variable is added": (engine(lambda c: c["env"].append({"name": "C", "value": "3"})), True),
    "a field that we leave alone is set": ({"spec": {"minReadySeconds": 3}}, True),
}


@pytest.mark.parametrize(("patch", "intact"), CHANGES.values(), ids=CHANGES)
async def test_a_change_is_seen(control_plane: Cluster, client: KubeClient, namespace: str, patch: Object, intact: bool) -> None:
    await client.apply(hashed(namespace, BODY))
    assert await listed(client, namespace)
    Api(control_plane.kubeconfig).merge("Deployment", namespace, "d", patch, manager="somebody")
    assert await listed(client, namespace) is intact


QUANTITIES = (1, 8, "1", "0.5", "0.1", "100m", "1000m", "1500m", 2000, "2000", "1000k", "0.25Gi", "0.1Gi", "1024Mi", "4608Mi",
              "1.5Gi", "1536Ki", "2048", "1Ki", "500Mi", "1000Mi", "2Gi", "1Ti", "0.5Ki", "1023Ki", "100M", "3G", 0.5, "1.0", "0",
              "1e3", "12E", "0.0001", "1.50")  # fmt: skip


async def test_what_the_server_writes_in_another_form_is_known(control_plane: Cluster, client: KubeClient, namespace: str) -> None:
    """Quantities as people write them, and an empty value: a new process finds what the old one sent."""
    body = copy.deepcopy(BODY)
    pod = body["spec"]["template"]["spec"]
    pod["containers"] = [{"name": f"c{n}", "image": "example.org/x", "resources": {"limits": {"memory": q}}}
                         for n, q in enumerate(QUANTITIES)]  # fmt: skip
    pod["containers"][0] |= {
        "resources": {"limits": {"nvidia.com/gpu": 1, "cpu": "0.5"}, "requests": {"cpu": "0.50"}},
        "env": [
            {"name": "EMPTY", "value": ""},
            {"name": "A", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu", "divisor": "1000m"}}},
        ],
    }
    pod["volumes"] = [{"name": "tmp", "emptyDir": {"sizeLimit": "2048Mi"}}]
    pod["nodeSelector"] = {"limits": "1024Mi"}
    await client.apply(hashed(namespace, body))
    stored = await client.get("Deployment", namespace, "d")
    assert stored is not None
    found = [c["resources"]["limits"].get("memory") for c in stored["spec"]["template"]["spec"]["containers"]]
    assert found[1:] == [stored_quantity(q) for q in QUANTITIES[1:]]
    assert await listed(client, namespace)


async def test_a_pool_that_was_created_and_never_applied_is_known(
    control_plane: Cluster, client: KubeClient, namespace: str
) -> None:
    """Its number is written through /scale, and its status is applied: neither says that its manifest was changed."""
    metadata: Object = {"name": "chat-decode", "namespace": namespace, "labels": {MANAGED_BY: MANAGER}}
    plain: Object = {"apiVersion": API_VERSION, "kind": "PDPool", "metadata": metadata}
    plain["spec"] = {"deploymentName": "chat", "role": "decode"}
    annotated = {**plain, "metadata": {**metadata, "annotations": {APPLIED_HASH: applied_hash(plain)}}}

    async def known() -> bool:
        ((_, fact),) = ChildDecoder("PDPool").page(await client.list_page(KINDS["PDPool"], namespace, "")).items
        return fact.intact

    await client.create({**annotated, "spec": {**plain["spec"], "replicas": 2}})
    assert await known()
    await client.scale("PDPool", namespace, "chat-decode", 3)
    await client.apply_status({**plain, "metadata": {"name": "chat-decode", "namespace": namespace}, "status": {"replicas": 1}})
    assert await known()
    api, labels = Api(control_plane.kubeconfig), {MANAGED_BY: MANAGER, "x": "y"}
    api.merge("PDPool", namespace, "chat-decode", {"metadata": {"labels": labels}}, manager="somebody")
    assert await known()
    await client.apply(annotated)
    assert await known()
    api.merge("PDPool", namespace, "chat-decode", {"metadata": {"labels": {MANAGED_BY: None}}}, manager="somebody")
    assert not await known()
