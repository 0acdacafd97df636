"""Nodes that die under running slices: one Node object goes, another node falls silent and its pods stay Terminating for ever.

Both take minutes in which nothing happens, so they begin together and early, and what comes of them is looked at last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest

from cluster.handle import Cluster
from cluster.kwok import DOMAIN_LABEL, MANAGED, FakeNodes
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.domains import POOL, Pool, pool
from opsrunner.process import Operator
from pd_operator.core.names import COMPONENT


@dataclass
class Deaths:
    """Two pools, each with a slice in n-d0 and room for another one elsewhere."""

    gone: Pool  # n-0 is deleted
    silent: Pool  # n-0 has no kubelet any more
    slices: dict[str, str]  # by PDDeployment, before
    at: float  # time.monotonic() of the deaths


@pytest.fixture(scope="package")
def deaths(plane: Cluster, api: Api, space: str, operator: Operator) -> Iterator[Deaths]:
    with ExitStack() as stack:
        gone, silent = (stack.enter_context(pool(plane, api, space, name)) for name in ("gone", "silent"))
        gone.add("n", 4, per_domain=2, gpus=1)
        gone.pdd("gone", spec={"router": {"template": {"spec": {"nodeSelector": {POOL: "gone"}}}}})  # not on the hand-made node
        hand = _hand_made(silent)
        silent.add("n", 3, per_domain=1, gpus=1)
        _domains(silent, {"n-0": "n-d0", "n-1": "spare", "n-2": "spare"})  # of two that fit the first by name is taken
        silent.pdd("silent")
        waits.until("the pods of both", lambda: all(len(p.engines(p.name)) == 2 for p in (gone, silent)))
        _run(plane, waits.until("an engine on the hand-made node", lambda: _on(api, space, hand, "engine")))
        _route_through(plane, api, space, hand)
        for each in (gone, silent):
            each.ready(each.name)
        slices = {p.name: next(iter(p.places(p.name))) for p in (gone, silent)}
        assert {d for _, d in gone.places("gone")[slices["gone"]]} == {gone.node("n-d0")}
        assert {d for _, d in silent.places("silent")[slices["silent"]]} == {silent.node("n-d0")}
        _fill(plane, hand, len(_on(api, space, hand)))
        plane.kubectl("delete", "node", gone.node("n-0"), "--wait=false")
        for pod in _on(api, space, hand):  # as an eviction would; its kubelet is not there to end them
            plane.kubectl("delete", "pod", pod["metadata"]["name"], "-n", space, "--grace-period=1", "--wait=false")
        yield Deaths(gone, silent, slices, time.monotonic())
        plane.kubectl("delete", "pods", "-n", space, f"--field-selector=spec.nodeName={hand}", "--force", "--grace-period=0")


def _hand_made(silent: Pool) -> str:
    """A node that says it is ready and that no kubelet, fake or real, looks after."""
    (node,) = FakeNodes(1, prefix=silent.node("hand"), gpus=1, labels={POOL: silent.name}).manifests()
    node["metadata"]["annotations"].pop(MANAGED)
    node["metadata"]["labels"][DOMAIN_LABEL] = silent.node("n-d0")
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    node["status"]["conditions"] = [
        {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": now, "lastTransitionTime": now}
    ]
    silent.api.create(node)
    name = silent.known(node)
    waits.until("the hand-made node", lambda: name in silent.ready_nodes())
    return name


def _domains(silent: Pool, domains: dict[str, str]) -> None:
    for node, domain in domains.items():
        label = {DOMAIN_LABEL: silent.node(domain)}
        silent.known(silent.api.merge("Node", None, silent.node(node), {"metadata": {"labels": label}}))


def _on(api: Api, space: str, node: str, component: str = "") -> list[Object]:
    pods = api.list("Pod", space, f"{COMPONENT}={component}" if component else "")
    return [p for p in pods if p["spec"].get("nodeName") == node]


def _fill(plane: Cluster, node: str, pods: int) -> None:
    """It holds the pods that it has and takes no more: it says for 40 s yet that it is ready, and nobody would run a new router."""
    amounts = {"pods": str(pods)}
    status = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    plane.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", status)


def _run(plane: Cluster, pods: list[Object]) -> None:
    """Be the kubelet of the hand-made node: its pods run and are ready."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    types = ("PodScheduled", "ContainersReady", "Ready")
    conditions = [{"type": type_, "status": "True", "lastTransitionTime": now} for type_ in types]
    status = json.dumps({"status": {"phase": "Running", "podIP": "10.252.0.1", "conditions": conditions}})
    for pod in pods:
        name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
        plane.kubectl("patch", "pod", name, "-n", space, "--subresource=status", "--type=merge", "-p", status)


def _route_through(plane: Cluster, api: Api, space: str, hand: str) -> None:
    """Its router runs on the hand-made node."""
    others = [n["metadata"]["name"] for n in api.list("Node", None) if n["metadata"]["name"] != hand]
    plane.kubectl("cordon", *others)
    for router in state.pods(api, space, "silent", component="router"):
        if router["spec"].get("nodeName") != hand:
            plane.kubectl("delete", "pod", router["metadata"]["name"], "-n", space, "--grace-period=0", "--force")

    def moved() -> list[Object]:
        return _on(api, space, hand, "router")

    waits.until("the router on the hand-made node", moved)
    plane.kubectl("uncordon", *others)
    _run(plane, moved())
