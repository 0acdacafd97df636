"""Pods go while streams run: with two of each no request is lost with smg; what the others lose is measured and printed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from cluster.handle import KubectlError
from served import Served
from served.served import READY_LIMIT_S
from traffic import Load, steady

STREAMS = 50
STREAM_TOKENS = 400  # about 12 s at 30 ms a step
SLOW_STEP = {"name": "STANDIN_DECODE_BASE_S", "value": "0.03"}


def _pair(served: Served, router: str, replicas: int) -> Load:
    served.apply(
        engine={"env": [SLOW_STEP]},
        prefill={"replicas": replicas},
        decode={"replicas": replicas},
        router={"type": router, "replicas": 2},
    )
    served.ready()
    served.until("both routers", lambda: "2 of 2" in served.condition("RouterReady").get("message", ""))
    return served.load(tokens=8)


async def _delete_one_of_each(served: Served, load: Load) -> None:
    """50 streams and new requests while one prefill and one decode pod are deleted, until their replacements are Ready."""
    async with steady(load, streams=STREAMS, stream_tokens=STREAM_TOKENS):
        await asyncio.sleep(2)
        victims = {role: served.pods(role)[0]["metadata"]["name"] for role in ("prefill", "decode")}
        for victim in victims.values():
            served.cluster.kubectl("delete", "pod", victim, "-n", served.namespace, "--wait=false")
        for role, victim in victims.items():
            await asyncio.to_thread(_replaced, served, role, victim, 2)
        await asyncio.to_thread(served.ready)
        await asyncio.to_thread(_all_there, served)


def _replaced(served: Served, role: str, victim: str, replicas: int) -> None:
    """Status may still tell of the time before the deletion; pods do not, and nor do routers asked themselves."""

    def complete() -> bool:
        others = [pod for pod in served.ready_pods(role) if pod["metadata"]["name"] != victim]
        return len(others) == replicas and all(_sees_both(served, pod) for pod in served.pods("router"))

    served.until(f"{replicas} ready {role} pods without {victim}, and routers that see them", complete, READY_LIMIT_S)


def _sees_both(served: Served, router: dict[str, Any]) -> bool:
    """Whether a router has a healthy engine of each role now."""
    try:
        served.metrics(router, 30000, "readiness")
    except KubectlError:
        return False
    return True


def _all_there(served: Served) -> None:
    def complete() -> bool:
        roles = served.object()["status"]["roles"]
        return all(role["readyReplicas"] == role["desiredReplicas"] for role in roles)

    served.until("all replicas ready", complete)


def _drain(served: Served, node: str) -> None:
    served.cluster.kubectl(
        "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", f"--pod-selector=pdserve.dev/deployment={served.name}",
        "--timeout=240s", timeout=250,
    )  # fmt: skip


async def test_smg_loses_nothing_when_pods_are_deleted_and_a_node_is_drained(served: Served) -> None:
    load = _pair(served, "smg", 2)
    await _delete_one_of_each(served, load)
    assert not load.failed, load.summary()
    print(f"deletion: {load.summary()}")

    load = served.load(tokens=8)
    try:
        async with steady(load, streams=STREAMS, stream_tokens=STREAM_TOKENS):
            await asyncio.sleep(2)
            await asyncio.to_thread(_drain, served, "n1")
            await asyncio.to_thread(_all_there, served)
    finally:
        served.cluster.kubectl("uncordon", "n1")
    assert not load.failed, load.summary()
    assert {pod["spec"]["nodeName"] for pod in served.pods()} == {"n0"}
    print(f"node drain: {load.summary()}")


async def test_vllm_router_cuts_no_stream_and_its_losses_are_counted(served: Served) -> None:
    load = _pair(served, "vllm-router", 2)
    await _delete_one_of_each(served, load)
    streams = [answer for answer in load.answers if answer.tokens == STREAM_TOKENS]
    print(f"vllm-router, deletion of one of two prefill and one of two decode: {load.summary()}")
    assert len(streams) == STREAMS, load.summary()
    # It retries nothing: a request that was on its way to the pod may fail; that must stay the exception.
    assert len(load.failed) <= len(load.answers) // 20, load.summary()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_one_replica_leaves_a_gap_that_ends(served: Served, role: str) -> None:
    """Replacing the only prefill or decode pod: refused or 503 for a while, never a hang, and running streams complete."""
    load = _pair(served, "smg", 1)
    async with steady(load, streams=4, stream_tokens=STREAM_TOKENS, workers=2):
        await asyncio.sleep(2)
        victim = served.pods(role)[0]["metadata"]["name"]
        begin = time.monotonic()
        served.cluster.kubectl("delete", "pod", victim, "-n", served.namespace, "--wait=false")
        await asyncio.to_thread(_replaced, served, role, victim, 1)
        await asyncio.to_thread(_all_there, served)
        await asyncio.to_thread(served.ready)
        gap = time.monotonic() - begin
    streams = [answer for answer in load.answers if answer.tokens == STREAM_TOKENS]
    assert len(streams) == 4, load.summary()
    for answer in load.failed:
        assert "503" in answer.problem or "Cannot connect" in answer.problem, load.summary()
    again = served.load(tokens=8)
    await again.burst(10, concurrency=2)
    assert not again.failed, again.summary()
    print(f"one {role} replaced: Ready again {gap:.1f} s after the deletion; {load.summary()}")
