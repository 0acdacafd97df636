"""Replicas that start slowly or never, on a real API server and scheduler: no cascade, and no other role runs away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.inprocess import Rig
from opsrunner.recording import Recording
from opsrunner.scaled import SCALING, Live, decoding, history
from pd_operator.core.scaling.record import parse

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(180)
GATE = "example.org/slow"


def gated(api: Api, space: str, name: str) -> list[str]:
    """Decode pods that wait for the test."""
    pods = state.pods(api, space, name, role="decode")
    return [p["metadata"]["name"] for p in pods if p["spec"].get("schedulingGates")]


def release(api: Api, space: str, names: list[str]) -> None:
    for name in names:
        api.merge("Pod", space, name, {"spec": {"schedulingGates": None}})


async def test_a_start_slower_than_many_ticks_orders_once(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """2 -> 3, not 2 -> 4 -> 8: what was ordered counts, however long it takes to be ready."""
    slow: dict[str, Any] = {"template": {"spec": {"schedulingGates": [{"name": GATE}]}}}
    with Recording(api, space, "Deployment") as recording:
        async with Rig(kwok_cluster.kubeconfig) as rig:
            made = {"scaling": SCALING, "router": {"replicas": 1}, "decode": slow}
            await asyncio.to_thread(api.create, state.pdd(space, "cold", **made))
            it = Live(rig, api, space, "cold")
            await it.passes(lambda: len(gated(api, space, "cold")) == 1)
            release(api, space, gated(api, space, "cold"))
            await it.settle()
            await it.tick(decoding(300), settle=False)
            await it.passes(lambda: len(gated(api, space, "cold")) == 1)
            release(api, space, gated(api, space, "cold"))
            await it.settle()
            assert it.counts() == (1, 2, 1, 2)

            await it.tick(decoding(460), settle=False)  # needs 2.7
            await it.passes(lambda: len(gated(api, space, "cold")) == 1)
            for _ in range(20):  # five minutes in which nothing gets ready
                await it.tick(decoding(460), settle=False)
                await it.process.reconciler.reconcile(it.key)
            last = parse(it.lines[-1])
            assert (last.readings.decode.ready, last.readings.decode.starting) == (2, 1)
            assert it.counts() == (1, 3, 1, 3) and len(gated(api, space, "cold")) == 1
            release(api, space, gated(api, space, "cold"))
            await it.settle()
            await it.tick(decoding(460), 2)
            assert it.counts() == (1, 3, 1, 3)
            waits.until("the watch", lambda: history(recording, "cold", "decode")[-1:] == [3])
    assert history(recording, "cold", "decode") == [1, 2, 3] and history(recording, "cold", "prefill") == [1]
