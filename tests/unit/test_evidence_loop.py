"""The look at the evidence with a real roster and real stores: who is looked at, what is told, and what a failure leaves alone."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from builders import NOW, make_snapshot, serving
from prometheus_client import CollectorRegistry, generate_latest
from test_core_status import SLICE, status_of

from pd_operator.api.crdgen import deployment_crd
from pd_operator.api.status import PDDeploymentStatus
from pd_operator.controller.evidence import EvidenceLoop
from pd_operator.controller.evidence_metrics import EvidenceMetrics
from pd_operator.controller.loop import Key
from pd_operator.controller.roster import Roster
from pd_operator.core.evidence.counters import Counters
from pd_operator.core.names import COMPONENT, COORDINATOR, ROLE
from pd_operator.core.names import SLICE as SLICE_LABEL
from pd_operator.core.observed import ContainerFact
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import Snapshot
from pd_operator.kube.client import KubeClient
from pd_operator.kube.store import Stores

KEY = ("demo", "chat")


class World:
    """One object that is Static and serves, the pages of its two engines, and its status on the server."""

    def __init__(self, **spec: Any) -> None:
        self.snapshot: Snapshot = serving({"verification": "Advisory", **spec})
        self.stores, self.now = Stores(), NOW.timestamp()
        self.status: dict[str, Any] = {}
        self.fault = ""
        self.enqueued: list[Key] = []
        self.values = {
            "prefill": {"ended": 0.0},
            "decode": dict.fromkeys(("transfers", "failed_transfers", "prompts", "computed", "received"), 0.0),
        }
        for one in self.snapshot.pods:
            self.stores.pods.put("pods", (one.namespace, one.name), one)
        self.restart()

    def restart(self) -> None:
        self.roster = Roster(self.stores)
        self.roster.put(self.snapshot, make_plan(self.snapshot))
        self.loop = EvidenceLoop(
            cast(KubeClient, self), self.stores, self.roster, self, is_leader=lambda: True,
            enqueue=self.enqueued.append, clock=lambda: self.now, read_limit=0.05,
        )  # fmt: skip

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        return {"status": self.status}

    async def counters(self, now: float) -> Mapping[Key, tuple[Counters, ...]]:
        if self.fault == "hang":
            await asyncio.sleep(3600)
        if self.fault == "raise":
            raise RuntimeError("a bug")
        pages = [
            Counters(t.pod, t.uid, t.slice, t.side, self.now - 1, dict(self.values[t.side]), ready=t.ready)
            for d in self.roster.fleet()
            for t in d.targets
            if t.side in ("prefill", "decode")
        ]
        return {KEY: tuple(pages)}

    def tick(self, count: int = 1, **decode: float) -> None:
        for _ in range(count):
            self.now += 15
            for name, value in decode.items():
                self.values["decode"][name] += value
            asyncio.run(self.loop.once())

    def told(self) -> dict[str, Any]:
        """What a reconcile would write now; it is then on the server."""
        found = self.roster.evidence(KEY, self.snapshot.uid)
        self.status = status_of(replace(self.snapshot, evidence=found, status=self.status))
        return self.status

    def condition(self) -> dict[str, Any]:
        return next(c for c in self.told()["conditions"] if c["type"] == "Degraded")


def ips(world: World) -> World:
    for n, one in enumerate(world.snapshot.pods):
        world.stores.pods.put("pods", (one.namespace, one.name), replace(one, ip=f"10.0.0.{n}"))
    return world


GOOD = {"transfers": 4.0, "prompts": 4.0, "received": 400.0}
ALONE = {"prompts": 4.0, "computed": 400.0}


def test_a_static_object_is_looked_at_and_told() -> None:
    world = ips(World())
    world.tick(3, **GOOD)
    status = world.told()
    assert [r["verifiedReplicas"] for r in status["roles"]] == [0, 1]  # prefill shows no request that ended
    assert status["handoff"]["fallbackRequests"] == 0 and status["handoff"]["lastVerified"].startswith("2026-01-02T03:0")
    assert world.condition()["status"] == "False"
    world.tick(6, **ALONE)
    found = world.condition()
    assert (found["status"], found["reason"]) == ("True", "SilentFallback") and f"slice {SLICE}" in found["message"]
    assert world.told()["roles"][1]["verifiedReplicas"] == 0
    PDDeploymentStatus.model_validate(world.status)
    world.tick(6, **GOOD)
    assert world.condition()["reason"] == "AsExpected"
    assert world.told()["handoff"]["fallbackRequests"] == 24 and "findings" not in world.status["handoff"]


def test_a_reconcile_is_asked_for_when_there_is_something_to_tell() -> None:
    world = ips(World())
    world.tick(1)
    assert world.enqueued == [KEY]
    world.tick(20, **GOOD)
    asked = len(world.enqueued)
    assert asked == 2  # the first proof
    world.tick(20, **GOOD)
    assert len(world.enqueued) == asked  # 5 minutes later: lastVerified stands for 10
    world.tick(4, **ALONE)
    assert len(world.enqueued) > asked


def test_status_does_not_change_while_nothing_does() -> None:
    world = ips(World())
    world.tick(5, **GOOD)
    before = world.told()
    world.tick(20, **GOOD)
    assert world.told() == before


def test_a_restart_tells_what_was_told_until_counters_say_otherwise() -> None:
    world = ips(World())
    world.tick(8, **ALONE)
    before = world.told()
    assert world.condition()["reason"] == "SilentFallback"
    world.restart()
    assert world.told() == before  # no look was made yet
    world.tick(2)
    assert world.told() == before
    world.tick(6, **GOOD)
    assert world.condition()["reason"] == "AsExpected"


def test_pages_that_cannot_be_read_accuse_nobody_and_clear_nothing() -> None:
    for fault in ("hang", "raise"):
        world = ips(World())
        world.tick(8, **ALONE)
        before = world.condition()
        world.fault = fault
        world.tick(3, **GOOD)
        assert world.condition() == before
        world.fault = ""
        world.tick(3, **GOOD)
        assert world.condition()["reason"] == "AsExpected"


def test_who_is_looked_at() -> None:
    assert World(verification="Disabled").roster.watched() == []
    assert World(suspend=True).roster.watched() == []
    scaling = {"mode": "External", "prefill": {"maxReplicas": 2}, "decode": {"maxReplicas": 2}}
    world = World(scaling=scaling, verification="Disabled")
    assert world.roster.watched() == [] and len(world.roster.entries()) == 1
    world = World()
    refused = make_snapshot({"router": {"type": "dynamo"}})
    world.roster.put(refused, make_plan(refused))
    assert len(world.roster.watched()) == 1  # what serves goes on, so it is still looked at
    world.roster.forget(KEY)
    assert world.roster.watched() == []


def test_the_pages_of_caches_are_read_and_seldom_ones_are() -> None:
    world = World(lmcache={})
    servers = (ContainerFact("lmcache", ready=False), ContainerFact("engine", ready=True))
    for n, one in enumerate(world.snapshot.pods):
        mine = replace(one, ip=f"10.0.0.{n}", containers=servers)
        world.stores.pods.put("pods", (one.namespace, one.name), mine)
    (found,) = world.roster.fleet()
    pages = {(t.side, t.url.rsplit(":", 1)[1]): (t.running, t.every) for t in found.targets}
    assert pages[("cache", "8080/metrics")] == (False, 3) and pages[("decode", "8000/metrics")] == (True, 3)
    assert ("router", "29000/metrics") in pages and sum(t.side == "cache" for t in found.targets) == 2
    assert not found.scales


def test_metrics() -> None:
    world = ips(World())
    world.tick(3, **GOOD)
    world.tick(6, **ALONE)
    registry = CollectorRegistry()
    registry.register(EvidenceMetrics(world.roster))
    page = generate_latest(registry).decode()
    own = 'name="chat",namespace="demo"'
    assert f"pd_operator_handoff_fallback_total{{{own}}} 24.0" in page
    assert f"pd_operator_handoff_transfers_total{{{own}}} 8.0" in page
    assert f'pd_operator_handoff_findings{{{own},reason="SilentFallback"}} 1.0' in page
    assert f'pd_operator_handoff_verified_replicas{{{own},role="decode"}} 0.0' in page
    world.roster.forget(KEY)
    assert own not in generate_latest(registry).decode()


def test_the_crd_knows_what_is_told() -> None:
    version = deployment_crd()["spec"]["versions"][0]
    handoff = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]["handoff"]["properties"]
    assert {"fallbackRequests", "expired", "lastVerified", "unverified", "findings"} <= set(handoff)


def test_a_coordinator_that_lost_its_pod_is_told() -> None:
    world = ips(World(lmcache={"p2p": {"enabled": True}}))
    engine = world.snapshot.pods[0]
    labels = {**engine.labels, COMPONENT: COORDINATOR}
    labels.pop(ROLE)
    pod = replace(engine, name="coordinator", uid="uid-coordinator", labels=labels, containers=())
    for ready, ticks in ((True, 2), (False, 4)):
        world.stores.pods.put("pods", (pod.namespace, pod.name), replace(pod, ready=ready))
        world.tick(ticks, **GOOD)
        assert world.condition()["reason"] == "AsExpected"
    world.tick(1, **GOOD)
    found = world.condition()
    assert found["reason"] == "CacheDown" and f"{engine.labels[SLICE_LABEL]}-coordinator: " in found["message"], found
    world.restart()
    world.tick(1, **GOOD)
    assert world.condition()["reason"] == "CacheDown"
    world.stores.pods.put("pods", (pod.namespace, pod.name), replace(pod, ready=True))
    world.tick(1, **GOOD)
    assert world.condition()["reason"] == "AsExpected"
