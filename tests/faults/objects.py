"""Small objects and a client for the tests of the Kubernetes layer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from cluster.handle import Cluster

CRDS = Path(__file__).parents[2] / "crds"
LABELS = {"app.kubernetes.io/managed-by": "pd-operator", "pdserve.dev/deployment": "chat"}
RESOURCES = {"limits": {"nvidia.com/gpu": 1}}


def install_crds(cluster: Cluster) -> None:
    """Both CRDs, waited for."""
    documents = [yaml.safe_load(path.read_text()) for path in sorted(CRDS.glob("*.yaml"))]
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(documents))
    cluster.established(*(document["metadata"]["name"] for document in documents))


def deployment(namespace: str, name: str = "chat") -> dict[str, Any]:
    """The minimal PDDeployment."""
    return {
        "apiVersion": "pdserve.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"namespace": namespace, "name": name},
        "spec": {
            "model": {"uri": "hf://org/model"},
            "engine": {"type": "vllm", "version": "0.32.0"},
            "prefill": {"resources": RESOURCES},
            "decode": {"resources": RESOURCES},
        },
    }


def pool(namespace: str, name: str = "chat-decode", **spec: Any) -> dict[str, Any]:
    """A PDPool."""
    return {
        "apiVersion": "pdserve.dev/v1alpha1",
        "kind": "PDPool",
        "metadata": {"namespace": namespace, "name": name, "labels": LABELS},
        "spec": {"role": "decode", "deploymentName": "chat", **spec},
    }


def service(namespace: str, name: str, port: int = 80) -> dict[str, Any]:
    """A Service that carries our labels."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"namespace": namespace, "name": name, "labels": LABELS},
        "spec": {"ports": [{"name": "http", "port": port, "protocol": "TCP"}], "selector": {"app": name}},
    }


def pod(namespace: str, name: str, **labels: str) -> dict[str, Any]:
    """A pod that carries our labels; without nodes it stays Pending."""
    container = {"name": "engine", "image": "localhost/none", "resources": {}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"namespace": namespace, "name": name, "labels": LABELS | labels, "annotations": {"smg.ai/kv-connector": "x"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


async def until(what: str, condition: Callable[[], object], seconds: float = 60.0) -> None:
    """Wait for a condition.

    Raises:
        AssertionError: it did not become true in time.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s: {what}"
        await asyncio.sleep(0.02)
