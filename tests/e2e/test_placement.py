"""Two real nodes as two transfer domains: real kubelets, the real scheduler, a real router, stand-in engines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from served import Served

KEY = "example.org/rack"
RACKS = {"n0": "rack-a", "n1": "rack-b"}
GPU = "nvidia.com/gpu"  # 8 on each node


@pytest.fixture
def racks(served: Served) -> Iterator[Served]:
    """Each node is a transfer domain."""
    for node, rack in RACKS.items():
        served.cluster.kubectl("label", "node", node, f"{KEY}={rack}", "--overwrite")
    yield served
    for node in RACKS:
        served.cluster.kubectl("label", "node", node, f"{KEY}-")


def spec(gpus: int, mode: str) -> dict[str, Any]:
    """One prefill and one decode with so many GPUs each."""
    role = {"resources": {"limits": {GPU: gpus}}}
    domain = {"topologyKey": KEY, "mode": mode}
    return {"prefill": role, "decode": role, "router": {"replicas": 1}, "placement": {"transferDomain": domain}}


def where(served: Served) -> dict[str, str]:
    """Role -> node of its pod, "" while it has none."""
    return {role: pod["spec"].get("nodeName", "") for role in ("prefill", "decode") for pod in served.pods(role)}


def apart(served: Served) -> bool:
    """Whether there is one slice only, each of its roles on a node of its own, and Placed says that handoffs cross domains."""
    placed = served.condition("Placed")
    bound = (placed["status"], placed["reason"]) == ("True", "Bound") and "different transfer domains" in placed["message"]
    nodes = sorted(pod["spec"].get("nodeName", "") for role in ("prefill", "decode") for pod in served.pods(role))
    return bound and nodes == sorted(RACKS) and len(served.object()["status"]["slices"]) == 1


async def served_all(served: Served) -> None:
    """Requests whose state went from prefill to decode."""
    load = served.load()
    await load.burst(20, concurrency=4)
    assert not load.failed, load.summary()
    assert served.total("decode", "vllm:nixl_bytes_transferred_count") >= 20


async def test_both_roles_are_on_one_node(racks: Served) -> None:
    """Each takes half of a node: the scheduler alone would spread them."""
    racks.apply(**spec(4, "Required"))
    status = racks.ready()["status"]
    nodes = where(racks)
    assert set(nodes) == {"prefill", "decode"} and len({*nodes.values()}) == 1
    rack = RACKS[nodes["prefill"]]
    assert [s["domain"] for s in status["slices"]] == [rack]
    placed = racks.condition("Placed")
    assert (placed["status"], placed["reason"]) == ("True", "Bound") and placed["message"].endswith(f"transfer domain {rack}")
    await served_all(racks)


async def test_room_for_one_role_a_node(racks: Served) -> None:
    """Required: nothing starts, and what is missing is named. Preferred: it runs, and says that handoffs cross domains."""
    racks.apply(**spec(5, "Required"))
    racks.until("NoCapacity", lambda: racks.condition("Placed").get("reason") == "NoCapacity")
    racks.until("pods that an autoscaler can see", lambda: set(where(racks)) == {"prefill", "decode"})
    time.sleep(5)
    assert where(racks) == {"prefill": "", "decode": ""}
    message = racks.condition("Placed")["message"]
    assert racks.condition("Placed")["status"] == "False"
    assert GPU in message and all(f"{rack}: " in message for rack in RACKS.values()), message
    racks.apply(**spec(5, "Preferred"))
    racks.ready()
    racks.until("only the new slice, over both racks, and a condition that says so", lambda: apart(racks))
    await served_all(racks)
