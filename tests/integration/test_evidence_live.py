"""Evidence on a real API server, with the pages of real stand-in engines: what is told, when nothing is written, and a restart.

The Reconciler and the look at the evidence run in this process; nodes are fake, so the pages are those of engines on loopback.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, cast

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.inprocess import Process, Rig, Tap
from pd_operator.controller.evidence import EvidenceLoop
from pd_operator.core.names import ABOUT, CANARY
from pd_operator.kube.client import KubeClient
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.scrape import PodScrape
from standin.local import Local, Running, handoff

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(180)
PROMPT = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen"


class Live:
    """One Static object, its Reconciler, and the look at the pages of one prefill and one decode engine."""

    def __init__(self, rig: Rig, api: Api, space: str, name: str, prefill: Running, decode: Running) -> None:
        self.rig, self.api, self.key = rig, api, (space, name)
        self.engines = {"prefill": prefill, "decode": decode}
        self.now, self.asked = time.time(), 0
        self.tap = Tap(rig.client)
        self.enqueued = 0
        self.broken = False  # nothing is handed over, as with smg without its annotation: both engines get the plain request
        self.restart()

    def restart(self) -> None:
        """A new process, which remembers nothing."""
        self.process = Process(self.rig.reconciler(self.tap), self.rig.stores)
        self.source = PodScrape(self._fleet, clock=lambda: self.now)
        self.loop = EvidenceLoop(
            cast(KubeClient, self.tap), self.rig.stores, self.process.reconciler.roster, self.source,
            is_leader=lambda: True, enqueue=self._enqueue, clock=lambda: self.now,
        )  # fmt: skip

    def _enqueue(self, key: tuple[str, str]) -> None:
        self.enqueued += 1

    def _fleet(self) -> tuple[Deployment, ...]:
        """What the operator would read, with the engines' addresses; routers have no page here."""
        return tuple(
            replace(
                one,
                targets=tuple(
                    replace(t, url=f"{self.engines[t.side].url}/metrics", every=1) for t in one.targets if t.side in self.engines
                ),
            )
            for one in self.process.reconciler.roster.fleet()
        )

    async def settle(self) -> None:
        await self.rig.drive(self.key, self.tap, process=self.process, timeout=60)

    async def tick(self, requests: int = 0) -> None:
        """Requests through both engines, then a look, and what it brings about."""
        for _ in range(requests):
            self.asked += 1
            request = {"prompt": f"{self.asked} {PROMPT}", "max_tokens": 3}
            if self.broken:
                await asyncio.to_thread(self.engines["prefill"].client.json, "POST", "/v1/completions", request)
                await asyncio.to_thread(self.engines["decode"].client.json, "POST", "/v1/completions", request)
            else:
                await asyncio.to_thread(handoff, self.engines["prefill"], self.engines["decode"], **request)
        self.now += 15
        await self.source.sweep()
        before = self.enqueued
        await self.loop.once()
        if self.enqueued > before:
            await self.settle()

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.must_get("PDDeployment", *self.key)["status"]
        return found

    def degraded(self) -> tuple[str, str]:
        found = waits.conditions({"status": self.status()})["Degraded"]
        return found["status"], found["reason"]


def prove(cluster: Cluster, api: Api, space: str, name: str) -> None:
    """Write what a canary that proved the slice leaves in status: no container runs on a fake node, so none can prove anything."""
    (slice_,) = api.must_get("PDDeployment", space, name)["status"]["slices"]
    newest = max(api.list("Job", space, f"pdserve.dev/deployment={name}"), key=lambda job: int(job["metadata"]["labels"][CANARY]))
    labels, at = newest["metadata"]["labels"], newest["metadata"]["creationTimestamp"]
    number, about = int(labels[CANARY]), labels[ABOUT]
    verified = {"at": at, "canary": number, "evidence": "0" * 16, "about": about, "handoff": "seen"}
    canary = {"number": number, "at": at, "about": about, "failures": 0, "handoffReason": "Verified", "handoffMessage": "seen"}
    status = {"status": {"slices": [{**slice_, "verified": verified, "canary": canary}]}}
    cluster.kubectl("patch", "pdd", name, "-n", space, "--subresource=status", "--type=merge", "-p", json.dumps(status))


@contextlib.asynccontextmanager
async def live(cluster: Cluster, api: Api, space: str, name: str, **spec: Any) -> AsyncIterator[Live]:
    """A Static object that serves, and its engines."""
    with Local() as local:
        prefill, decode = local.engine("kv_producer"), local.engine("kv_consumer")
        async with Rig(cluster.kubeconfig) as rig:
            spec = {"router": {"replicas": 1}, "verification": "Advisory", **spec}
            await asyncio.to_thread(api.create, state.pdd(space, name, **spec))
            made = Live(rig, api, space, name, prefill, decode)
            await made.settle()
            if spec["verification"] != "Disabled":
                await asyncio.to_thread(prove, cluster, api, space, name)
            yield made
            await made.source.close()


async def test_real_pages_prove_accuse_and_clear_and_an_unchanged_world_is_not_written(
    kwok_cluster: Cluster, api: Api, space: str
) -> None:
    slo = {"ttft": "5s", "itl": "500ms"}
    async with live(kwok_cluster, api, space, "proof", slo=slo, backpressure={"maxQueueTime": "7s"}) as it:
        for _ in range(4):
            await it.tick(requests=3)
        status = it.status()
        assert [role["verifiedReplicas"] for role in status["roles"]] == [1, 1]
        assert status["handoff"]["fallbackRequests"] == 0 and status["handoff"]["lastVerified"]
        assert it.degraded() == ("False", "AsExpected")
        assert status["attainment"]["ttft"] == status["attainment"]["itl"] == "100.0%"
        assert "7s" in status["backpressure"]["rejectedAt"] and status["backpressure"]["scaleOutP50"]

        before = list(it.tap.writes)
        for _ in range(6):
            await it.tick(requests=3)
        assert it.tap.writes == before  # nothing to tell: nothing is written, not even the time of the last proof

        it.broken = True
        for _ in range(5):
            await it.tick(requests=3)
        assert it.degraded() == ("True", "SilentFallback")
        status = it.status()
        assert status["handoff"]["fallbackRequests"] >= 9 and [r["verifiedReplicas"] for r in status["roles"]] == [0, 0]
        (found,) = status["handoff"]["findings"]
        assert found["reason"] == "SilentFallback" and "decode computed" in found["message"]

        told = it.status()
        it.restart()  # another process: it remembers nothing but what status says
        await it.settle()
        assert it.status() == told
        await it.tick()
        assert it.degraded() == ("True", "SilentFallback")
        it.broken = False
        for _ in range(4):
            await it.tick(requests=3)
        assert it.degraded() == ("False", "AsExpected")
        assert it.status()["handoff"]["fallbackRequests"] == told["handoff"]["fallbackRequests"]


async def test_what_is_disabled_is_not_looked_at(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with live(kwok_cluster, api, space, "off", verification="Disabled") as it:
        await it.tick(requests=2)
        assert "handoff" not in it.status() and it.enqueued == 0
