"""I2, after a restart: the first list tells by managedFields whether a child is what we applied; then it is not written again."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner.api import Api
from pd_operator.core.names import APPLIED_HASH, MANAGED_BY, MANAGED_SELECTOR, MANAGER
from pd_operator.core.revision import manifest_hash
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


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    made = await KubeClient.connect(str(kubeconfig))
    yield made
    await made.close()


def hashed(namespace: str, body: Object) -> Object:
    """A Deployment as the operator sends it."""
    metadata: Object = {"name": "d", "namespace": namespace, "labels": {MANAGED_BY: MANAGER, "team": "a"}}
    plain = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, **copy.deepcopy(body)}
    return {**plain, "metadata": {**metadata, "annotations": {APPLIED_HASH: manifest_hash(plain)}}}


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


async def test_what_the_server_writes_in_another_form_is_not_taken_for_ours(
    control_plane: Cluster, client: KubeClient, namespace: str
) -> None:
    body = copy.deepcopy(BODY)
    body["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "0.5"
    await client.apply(hashed(namespace, body))
    assert not await listed(client, namespace)
