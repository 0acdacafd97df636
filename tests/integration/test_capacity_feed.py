"""The capacity feed on a real API server: what its field selector lets through, and what the ledger holds in the end."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from faults.objects import until
from pd_operator.controller.capacity import CapacityFeed
from pd_operator.core.ledger import Ledger
from pd_operator.kube.client import KubeClient

GPU, KEY = "nvidia.com/gpu", "example.org/feed"


@pytest.fixture
async def ledger(kubeconfig: Path) -> AsyncIterator[Ledger]:
    """One that follows the cluster."""
    client, made = await KubeClient.connect(str(kubeconfig)), Ledger()
    feed = CapacityFeed(client, made, lambda owner, after: None)
    tasks = [asyncio.create_task(reflector.run()) for reflector in feed.reflectors]
    try:
        async with asyncio.timeout(30):
            for reflector in feed.reflectors:
                await reflector.synced.wait()
        yield made
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await client.close()


async def test_the_ledger_follows_nodes_and_bound_pods(control_plane: Cluster, ledger: Ledger, namespace: str) -> None:
    """A pod counts from when it has a node until it has finished or is gone."""
    name = f"feed-{secrets.token_hex(3)}"
    rack = f"rack-{name}"

    def free() -> int | None:
        return ledger.index.room(KEY, rack).get(GPU, 0) if rack in ledger.index.domains(KEY) else None

    def pod(which: str, gpus: int, node: str = name) -> None:
        container = {"name": "c", "image": "example.org/x", "resources": {"limits": {GPU: gpus}}}
        spec = {"containers": [container], **({"nodeName": node} if node else {"nodeSelector": {"no": "such-node"}})}
        manifest = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": which, "namespace": namespace}, "spec": spec}
        control_plane.apply(manifest)

    def status(kind: str, which: str, value: dict[str, Any], *scope: str) -> None:
        patch = json.dumps({"status": value})
        control_plane.kubectl("patch", kind, which, *scope, "--subresource", "status", "--type", "merge", "-p", patch)

    control_plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": {KEY: rack}}}, namespace=None)
    try:
        status("node", name, {"allocatable": {GPU: "8", "pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]})
        await until("the node to be seen", lambda: free() == 8)
        pod("bound", 2)
        pod("another", 1)
        pod("waiting", 4, node="")
        await until("bound pods to count", lambda: free() == 5)
        status("pod", "bound", {"phase": "Succeeded"}, "-n", namespace)
        await until("a finished pod to count no more", lambda: free() == 7)
        control_plane.kubectl("delete", "pod", "another", "-n", namespace, "--grace-period=0", "--force")
        await until("a deleted pod to count no more", lambda: free() == 8)
        control_plane.kubectl("cordon", name)
        await until("the cordon to be seen", lambda: (n := ledger.index.node(name)) is not None and n.unschedulable)
    finally:
        control_plane.kubectl("delete", "node", name, "--ignore-not-found")
    await until("the node to be gone", lambda: free() is None)
