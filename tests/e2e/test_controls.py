"""Negative controls on slices that a canary had proven: each way of breaking has its own reason in minutes, says what to do next,
takes Ready back where nothing is handed over or stored any more, and goes away when it is mended.

docs/verification.md has the table of all controls.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.handle import Cluster
from demo import chat
from served import Served
from served.light import CPU, cached
from served.watched import NAMED, Object, asking, fast

__all__ = ["fast"]  # a fixture
pytestmark = pytest.mark.timeout(1500)
MENDED = NAMED + 120.0
ONE: dict[str, Any] = {"prefill": CPU, "decode": CPU, "verification": "Required", "router": {"replicas": 1}}
SPECS: dict[str, dict[str, Any]] = {
    "refuses": ONE,  # transfers die after the proof
    "lies": ONE,  # the router says nixl, and nothing moves
    "pair": ONE,  # a role goes away
    "errors": ONE,  # an engine that is alive answers each request with 500
    "stale": ONE,  # prefill comes back at its address, and decode holds on to what it knew of the one before
    "killed": ONE,  # prefill dies in the midst of a handoff
    "caches": {**ONE, **cached(lmcache={"p2p": {"enabled": True}})},  # coordinator killed; no stores
}
# name -> (reason of Degraded, condition that it takes back, its reason, words of the message of Degraded)
CONTROLS: dict[str, tuple[str, str, str, list[str]]] = {
    # First, and mended when it was seen: the kubelet ends an engine that is unhealthy for five minutes, and the next one is not.
    "pair": ("PairLost", "DecodeReady", "Starting", ["no ready decode replica", "DecodeReady"]),
    "refuses": ("ReplicaNotTransferring", "HandoffVerified", "TransferFailed", ["transfers from prefill failed", "logs"]),
    "lies": ("SilentFallback", "HandoffVerified", "SilentFallback", ["computed", "smg.ai/kv-connector"]),
    "errors": ("BrokenPath", "HandoffVerified", "TransferFailed", ["all answered with a server error", "logs"]),
    "stale": ("ReplicaNotTransferring", "HandoffVerified", "TransferFailed", ["transfers from prefill failed", "delete the pod"]),
    "caches": ("CacheDown", "OffloadVerified", "NotSubmitting", ["coordinator has no ready pod", "describe pods"]),
}
MODE = 'smg_pd_kv_connector_mode_total{mode="nixl"}'
TRANSFERS = "vllm:nixl_bytes_transferred_count"


def moved(one: Object) -> tuple[float, float]:
    """(requests that the router counts as handed over, transfers that ended on decode)."""
    said = sum(chat.total(one.metrics(pod, 29000), MODE) for pod in one.pods("router"))
    return said, one.total("decode", TRANSFERS)


def dies_in_a_handoff(one: Object) -> None:
    """Prefill ended when decode read from it: decode computed that prompt, a fallback, and one death accuses nobody."""
    one.until("the fallback in status", lambda: one.object()["status"]["handoff"]["fallbackRequests"] >= 1, NAMED)
    assert one.total("decode", "vllm:nixl_num_failed_transfers_total") == 1
    (pod,) = one.pods("prefill")
    assert [c["restartCount"] for c in pod["status"]["containerStatuses"]] == [1], "the same pod, at the same address"
    done = one.total("decode", TRANSFERS)  # smg takes it back a minute later
    one.until("handoffs from the engine that came back", lambda: one.total("decode", TRANSFERS) >= done + 10, NAMED)
    assert one.degraded()[:2] == ("False", "AsExpected") and not one.accusations(), one.degraded()
    assert one.condition("HandoffVerified")["status"] == "True" and one.condition("Ready")["status"] == "True"


def check(one: Object) -> None:
    """The reason, what to do next, and what it takes back."""
    reason, type_, why, words = CONTROLS[one.name]
    told = one.named(reason)
    print(f"\n{one.name}: {told}")
    assert "Next: " in told and all(word in told for word in words), (one.name, told)
    found = one.until(f"{one.name}: {type_} False", lambda: (c := one.condition(type_)).get("status") == "False" and c, NAMED)
    assert found["reason"] == why, (one.name, found)
    ready = one.condition("Ready")
    assert ready["status"] == "False" and (ready["reason"] == why or one.name == "pair"), (one.name, ready)
    assert [pod for pod in one.pods("router") if "pdserve.dev/front" in pod["metadata"]["labels"]], "it is not made dark for that"


async def test_each_way_of_breaking_has_its_reason_and_goes_away_when_mended(fast: Cluster, served: Served) -> None:
    objects = {name: Object(fast, served.namespace, name) for name in SPECS}
    for name, one in objects.items():
        one.apply(**SPECS[name])
    for one in objects.values():
        await asyncio.to_thread(one.ready, 420.0)
    stop = asyncio.Event()
    async with asking({name: one.load(tokens=4) for name, one in objects.items()}):
        for one in objects.values():
            await asyncio.to_thread(one.until, f"{one.name}: verified", lambda o=one: o.verified() == [1, 1], NAMED)
            assert one.degraded()[:2] == ("False", "AsExpected"), one.degraded()

        said, done = moved(objects["lies"])
        objects["refuses"].fault("prefill", refuse_transfer=True)
        objects["lies"].fault("prefill", no_transfer=True)
        objects["pair"].fault("decode", unhealthy=True)
        objects["errors"].fault("decode", error_status=500)
        objects["stale"].fault("decode", stale_peers=True)
        objects["stale"].crash("prefill")
        objects["killed"].fault("prefill", die_in_transfer=True)
        objects["caches"].fault("prefill", no_store=True)
        labels = "pdserve.dev/deployment=caches,app.kubernetes.io/component=coordinator"
        (coordinator,) = fast.json("get", "pods", "-n", served.namespace, "-l", labels)["items"]
        victim = coordinator["metadata"]["name"]
        killing = asyncio.create_task(objects["caches"].keep_down(victim, "coordinator", stop, "coordinator"))
        for name in CONTROLS:
            await asyncio.to_thread(check, objects[name])
            if name == "pair":
                objects["pair"].fault("decode", unhealthy=False)
        await asyncio.to_thread(dies_in_a_handoff, objects["killed"])
        after = moved(objects["lies"])
        assert after[0] >= said + 5 and after[1] <= done + 5, "the router's counter says nixl while nothing moves"
        findings = {f["reason"]: f for f in objects["caches"].object()["status"]["handoff"]["findings"]}
        (prefill,) = objects["caches"].pods("prefill")
        assert (
            findings["NotSubmitting"]["subject"] == prefill["metadata"]["name"] and "Next: " in findings["NotSubmitting"]["message"]
        )

        stop.set()
        await killing
        objects["refuses"].fault("prefill", refuse_transfer=False)
        objects["lies"].fault("prefill", no_transfer=False)
        objects["errors"].fault("decode", error_status=0)
        objects["caches"].fault("prefill", no_store=False)
        poisoned = objects["stale"].pods("decode")[0]["metadata"]["name"]  # as the message says
        fast.kubectl("delete", "pod", victim, poisoned, "-n", served.namespace, "--grace-period=1")
        for name, (_, type_, *_) in CONTROLS.items():
            one = objects[name]
            await asyncio.to_thread(one.named, "AsExpected", MENDED)
            await asyncio.to_thread(one.ready, MENDED)
            assert one.condition(type_)["status"] == "True", (name, one.condition(type_))
