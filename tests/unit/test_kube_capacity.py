"""Raw nodes and pods -> what the ledger counts; and what the feed does with their changes."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from placing_world import GPU, OWNER, SHAPE, node, pinned

from pd_operator.controller.capacity import DEBOUNCE, RATE, CapacityFeed
from pd_operator.core.ledger import Ledger, Need
from pd_operator.core.observed import UsageFact
from pd_operator.core.placement.capacity import Taint
from pd_operator.kube.capacity import NodeDecoder, UsageDecoder

LABELS = {
    "app.kubernetes.io/managed-by": "pd-operator",
    "pdserve.dev/deployment": "chat",
    "pdserve.dev/slice": "s",
    "pdserve.dev/role": "decode",
}
POD: dict[str, Any] = {
    "metadata": {"namespace": "ns", "name": "p", "resourceVersion": "7", "labels": LABELS, "managedFields": [{"x": {}}]},
    "spec": {
        "nodeName": "n0",
        "containers": [{"name": "engine", "env": [], "resources": {"limits": {GPU: "2"}, "requests": {GPU: "2", "cpu": "1500m"}}}],
        "initContainers": [
            {"name": "lmcache", "restartPolicy": "Always", "resources": {"requests": {"memory": "1Gi"}}},
            {"name": "once", "resources": {"requests": {"memory": "3Gi"}}},
        ],
        "overhead": {"cpu": "250m"},
    },
}
NODE: dict[str, Any] = {
    "metadata": {"name": "n0", "resourceVersion": "8", "labels": {"rack": "a"}, "creationTimestamp": "2026-01-02T03:04:05Z"},
    "spec": {"unschedulable": True, "taints": [{"key": "gpu", "value": "yes", "effect": "NoSchedule", "timeAdded": None}]},
    "status": {
        "allocatable": {"cpu": "63500m", "memory": "1Ki", GPU: "8", "pods": "110"},
        "capacity": {"cpu": "64"},
        "conditions": [{"type": "MemoryPressure", "status": "False"}, {"type": "Ready", "status": "True"}],
        "images": [{"names": ["x"]}],
    },
}


def event(kind: str, obj: object) -> bytes:
    return json.dumps({"type": kind, "object": obj}).encode()


def test_a_bound_pod_of_ours() -> None:
    found = UsageDecoder().event(event("ADDED", POD))
    # the init step with the sidecar before it is the most memory that is asked for at once
    requests = {GPU: 2, "cpu": 1750, "memory": 4 * 2**30}
    assert found.item == UsageFact("ns", "p", "n0", requests, "chat", "s", "decode") and found.key == ("ns", "p")


def test_somebody_elses_pod_is_a_number_and_no_more() -> None:
    for labels in (
        {},
        {"app": "x"},
        {**LABELS, "app.kubernetes.io/managed-by": "other"},
        {k: v for k, v in LABELS.items() if "role" not in k},
    ):
        pod = {**POD, "metadata": {**POD["metadata"], "labels": labels}}
        found = UsageDecoder().event(event("ADDED", pod)).item
        assert found is not None and (found.deployment, found.slice, found.role) == ("", "", "")


def test_a_worker_of_a_group_is_ours_and_no_replica() -> None:
    labels = {k: v for k, v in LABELS.items() if "role" not in k} | {"pdserve.dev/worker": "decode"}
    found = UsageDecoder().event(event("ADDED", {**POD, "metadata": {**POD["metadata"], "labels": labels}})).item
    assert found is not None and (found.deployment, found.slice, found.role, found.worker) == ("chat", "s", "decode", True)


def test_equal_requests_are_one_object() -> None:
    decoder = UsageDecoder()
    page = decoder.page(json.dumps({"metadata": {"resourceVersion": "9"}, "items": [POD, POD]}).encode())
    (_, one), (_, two) = page.items
    assert one.requests is two.requests and page.version == "9"


def test_a_pod_that_ends_is_marked() -> None:
    pod = {**POD, "metadata": {**POD["metadata"], "deletionTimestamp": "2026-01-02T03:04:05Z"}}
    found = UsageDecoder().event(event("MODIFIED", pod)).item
    assert found is not None and found.deleting


@pytest.mark.parametrize("decoder", [UsageDecoder(), NodeDecoder()], ids=["pods", "nodes"])
def test_a_bookmark_holds_nothing_but_a_version(decoder: Any) -> None:
    """The server fills in what an empty object has: `containers` is null there (seen, 1.37)."""
    obj = {"metadata": {"resourceVersion": "99", "creationTimestamp": None}, "spec": {"containers": None}, "status": {}}
    found = decoder.event(event("BOOKMARK", obj))
    assert (found.type, found.version, found.key, found.item) == ("BOOKMARK", "99", None, None)


def test_a_pod_that_asks_for_nothing_is_one_pod() -> None:
    pod = {**POD, "spec": {"nodeName": "n0", "containers": [{"name": "c"}]}}
    found = UsageDecoder().event(event("ADDED", pod)).item
    assert found is not None and found.requests == {}


def test_a_node() -> None:
    found = NodeDecoder().event(event("ADDED", NODE)).item
    assert found is not None and found.created is not None
    node_ = found.capacity
    assert (node_.name, node_.labels, node_.unschedulable, node_.ready) == ("n0", {"rack": "a"}, True, True)
    assert node_.allocatable == {"cpu": 63500, "memory": 1024, GPU: 8, "pods": 110}
    assert node_.taints == (Taint("gpu", "yes", "NoSchedule"),)


@pytest.mark.parametrize("conditions", [[], [{"type": "Ready", "status": "False"}], [{"type": "Ready", "status": "Unknown"}]])
def test_a_node_that_does_not_say_so_is_not_ready(conditions: list[Any]) -> None:
    found = NodeDecoder().event(event("ADDED", {**NODE, "status": {**NODE["status"], "conditions": conditions}})).item
    assert found is not None and not found.capacity.ready


def test_a_heartbeat_changes_nothing() -> None:
    """Or each node would make those that wait look again every few minutes, for nothing."""
    beat = json.loads(json.dumps(NODE))
    beat["metadata"]["resourceVersion"] = "9"
    beat["status"]["conditions"][1]["lastHeartbeatTime"] = "2026-01-02T03:05:05Z"
    assert NodeDecoder().event(event("MODIFIED", beat)).item == NodeDecoder().event(event("ADDED", NODE)).item


# --- the feed -----------------------------------------------------------------------------------------------------------------


async def test_changes_wake_those_that_wait_and_those_on_the_node_once_a_second() -> None:
    ledger, woken = Ledger(), []
    feed = CapacityFeed(None, ledger, lambda owner, after: woken.append((owner, after)))  # type: ignore[arg-type]
    others = [("ns", f"w{n:03}") for n in range(3)]
    for owner in others:
        ledger.assume(owner, {("s", "decode"): Need(1, pinned("a"), (SHAPE,))})
    fact = node("n0", "a")
    for one in range(100):
        feed._node(None if not one else fact, fact)
    feed._pod(None, UsageFact("demo", "mine", "n0", SHAPE.requests, "chat", "s", "decode"))
    assert woken == []
    await asyncio.sleep(DEBOUNCE * 1.2)
    assert woken == [(owner, n / RATE) for n, owner in enumerate(sorted([OWNER, *others]))]
    assert ledger.index.room("example.org/rack", "a").get(GPU, 0) == 0


async def test_a_foreign_pod_wakes_nobody_when_nobody_waits() -> None:
    ledger, woken = Ledger(), []
    feed = CapacityFeed(None, ledger, lambda owner, after: woken.append(owner))  # type: ignore[arg-type]
    feed._pod(None, UsageFact("x", "guest", "n0", SHAPE.requests))
    await asyncio.sleep(DEBOUNCE * 1.2)
    assert woken == []
