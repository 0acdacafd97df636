"""Scaling on a real API server: who owns a pool's number, modes that change under it, bounds, an HPA, and a restart.

The Reconciler and the scaling loop run in this process, with the real law; nodes are fake, so their pods have no pages to read.
What the signals say is the test's, but where the stand-in's real pages are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from typing import Any, cast

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.inprocess import Process, Rig, Tap
from opsrunner.recording import Recording
from pd_operator.controller.loop import Key
from pd_operator.controller.scaling import ScalingLoop
from pd_operator.core.scaling.readings import Signal
from pd_operator.core.scaling.record import parse, replay
from pd_operator.kube.client import KubeClient
from pd_operator.kube.events import EventRecorder
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.load import Load, nothing
from pd_operator.signals.scrape import PodScrape
from pd_operator.signals.source import Source
from standin.local import Local, Running, handoff

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(180)

MAX = 6
SCALING: dict[str, Any] = {"mode": "Auto", "prefill": {"maxReplicas": MAX}, "decode": {"maxReplicas": MAX}}
QUIET = {
    "prompt_rate": 10_000.0, "request_rate": 5.0, "queued_tokens": 0.0, "prefill_rate": 10_000.0, "prefill_seconds": 0.5,
    "running": 100.0, "handoff_waiting": 0.0, "decode_starts": 5.0, "kv_tokens": 100_000.0, "kv_capacity": 250_000.0,
    "output_tokens": 300.0, "itl": 0.03, "prefill_latency": 0.1, "ttft": 0.3,
}  # fmt: skip


def decoding(requests: float) -> Load:
    """A load with so many requests in decode, of which one replica does 170."""
    changes = {"running": requests, "kv_tokens": requests * 1000}
    return Load(**{name: Signal.of(value) for name, value in {**QUIET, **changes}.items()})


class Told:
    """A source that says what the test says, of every object that scales."""

    def __init__(self, keys: Callable[[], list[Key]]) -> None:
        self.load, self._keys = decoding(100), keys

    async def read(self, now: float) -> Mapping[Key, Load]:
        return dict.fromkeys(self._keys(), self.load)

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class Live:
    """One object, its Reconciler and its scaling loop; time passes when the test says so."""

    def __init__(self, rig: Rig, api: Api, space: str, name: str) -> None:
        self.rig, self.api, self.key = rig, api, (space, name)
        self.now, self.lines = time.time(), list[str]()
        self.tap = Tap(rig.client)
        self.restart()

    def restart(self, source: Source | None = None) -> None:
        """A new process, which remembers nothing."""
        self.process = Process(self.rig.reconciler(self.tap), self.rig.stores)
        roster = self.process.reconciler.roster
        self.told = Told(lambda: [e.key for e in roster.entries()])
        self.source: Source = source or self.told
        client = cast(KubeClient, self.tap)
        self.loop = ScalingLoop(
            client, self.rig.stores, roster, self.source, EventRecorder(client, "scaling-live"),
            is_leader=lambda: True, enqueue=lambda key: None, log=self.lines.append, clock=lambda: self.now,
        )  # fmt: skip

    async def settle(self) -> None:
        """Reconcile until nothing is left to do."""
        await self.rig.drive(self.key, self.tap, process=self.process, timeout=60)

    async def passes(self, done: Callable[[], bool]) -> None:
        """Reconcile until `done`, where the object does not come to rest."""
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(done):
                await self.process.reconciler.reconcile(self.key)
                await asyncio.sleep(0.05)

    async def tick(self, load: Load | None = None, count: int = 1, settle: bool = True) -> None:
        """Scaling ticks of 15 s, each followed by what its writes bring about."""
        self.told.load = load or self.told.load
        for _ in range(count):
            await self.shown()
            await self.loop.once()
            self.now += 15
            if settle:
                await self.settle()

    async def shown(self) -> None:
        """Wait until the watch shows the pools as they are."""
        async with asyncio.timeout(20):
            for role in ("prefill", "decode"):
                version = int((await asyncio.to_thread(self.pool, role))["metadata"]["resourceVersion"])
                while True:
                    fact = self.rig.stores.children.get("PDPool", self.key[0], f"{self.key[1]}-{role}")
                    if fact is not None and int(fact.resource_version) >= version:
                        break
                    await asyncio.sleep(0.02)

    async def edit(self, **spec: Any) -> None:
        """Merge into the user's spec, and settle."""
        await asyncio.to_thread(self.api.merge, "PDDeployment", *self.key, {"spec": spec})
        await self.settle()

    def pool(self, role: str = "decode") -> Object:
        return self.api.must_get("PDPool", self.key[0], f"{self.key[1]}-{role}")

    def workload(self, role: str = "decode") -> Object:
        (found,) = (
            obj for (_, name), obj in state.children(self.api, *self.key, ("Deployment",)).items() if name.endswith(f"-{role}")
        )
        return found

    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of both pools, and replicas of both workloads."""
        pools = [self.pool(role)["spec"].get("replicas") for role in ("prefill", "decode")]
        return (*pools, *(self.workload(role)["spec"]["replicas"] for role in ("prefill", "decode")))  # type: ignore[return-value]

    def condition(self, type_: str, role: str = "decode") -> tuple[str, str]:
        found = waits.conditions(self.pool(role))[type_]
        return found["status"], found["reason"]


@contextlib.asynccontextmanager
async def live(cluster: Cluster, api: Api, space: str, name: str, **spec: Any) -> AsyncIterator[Live]:
    """An object that scales, up and running."""
    async with Rig(cluster.kubeconfig) as rig:
        await asyncio.to_thread(api.create, state.pdd(space, name, **{"scaling": SCALING, "router": {"replicas": 1}, **spec}))
        made = Live(rig, api, space, name)
        await made.settle()
        yield made


def owners(pool: Object) -> list[tuple[str, str]]:
    """Who owns spec.replicas: (manager, operation)."""
    entries = pool["metadata"]["managedFields"]
    return [
        (e["manager"], e["operation"])
        for e in entries
        if "f:replicas" in e.get("fieldsV1", {}).get("f:spec", {}) and e.get("subresource", "") in ("", "scale")
    ]


def assert_owners(pool: Object) -> None:
    """Somebody owns the number, and never an apply of ours: an apply that leaves it out would remove it."""
    assert owners(pool) and ("pd-operator", "Apply") not in owners(pool), owners(pool)


async def test_modes_never_move_the_number(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """Auto -> External -> Auto -> Advisory -> Static -> Auto, each under a number of its own; every count that ever was is told."""
    with Recording(api, space, "Deployment") as recording:
        async with live(kwok_cluster, api, space, "modes") as it:
            assert it.counts() == (1, 1, 1, 1)
            bounds = {k: it.pool()["spec"][k] for k in ("minReplicas", "maxReplicas")}
            assert bounds == {"minReplicas": 1, "maxReplicas": MAX}
            await it.tick(decoding(400), 2)
            assert it.counts() == (1, 3, 1, 3) and it.condition("ScalingActive") == ("True", "Deciding")
            assert_owners(it.pool())

            await it.edit(scaling={"mode": "External"})
            assert it.counts() == (1, 3, 1, 3) and it.condition("ScalingActive") == ("False", "External")
            kwok_cluster.kubectl("scale", "pdp/modes-decode", "-n", space, "--replicas=5")
            await it.tick(decoding(900), 2)
            assert it.counts() == (1, 5, 1, 5) and it.pool()["status"]["desiredReplicas"] == 6
            assert_owners(it.pool())

            await it.edit(scaling={"mode": "Auto"})
            await it.tick(decoding(700), 2)  # needs 5
            assert it.counts() == (1, 5, 1, 5)

            await it.edit(scaling={"mode": "Advisory"})
            await it.tick(decoding(1000), 2)
            assert it.counts() == (1, 5, 1, 5) and it.pool()["status"]["desiredReplicas"] == 6
            assert it.condition("ScalingActive") == ("False", "Advisory")

            await it.edit(scaling=None)
            assert it.counts() == (1, 5, 1, 5) and it.condition("ScalingActive") == ("False", "Static")
            assert set(it.pool()["spec"]) == {"role", "deploymentName", "replicas"}  # the bounds went with spec.scaling
            assert_owners(it.pool())
            await it.edit(decode={"replicas": 4})
            assert it.counts() == (1, 4, 1, 4)

            await it.edit(decode={"replicas": None}, scaling=SCALING)
            await it.tick(decoding(600))
            assert it.counts() == (1, 4, 1, 4)
            assert_owners(it.pool())
            waits.until("the watch", lambda: _history(recording, "decode")[-1:] == [4])
    assert _history(recording, "decode") == [1, 3, 5, 4] and _history(recording, "prefill") == [1]


def _history(recording: Recording, role: str) -> list[int]:
    """Replicas that Deployments of a role ever asked for, one after the other."""
    seen: list[int] = []
    for event in recording.events("Deployment"):
        if event.name.endswith(f"-{role}") and event.type != "DELETED":
            count = event.object["spec"]["replicas"]
            if seen[-1:] != [count]:
                seen.append(count)
    return seen


async def test_a_number_that_is_removed_comes_back(kwok_cluster: Cluster, api: Api, space: str) -> None:
    external = {**SCALING, "mode": "External", "decode": {"minReplicas": 2, "maxReplicas": MAX}}
    async with live(kwok_cluster, api, space, "nil", scaling=external) as it:
        assert it.counts() == (1, 2, 1, 2)
        kwok_cluster.kubectl("scale", "pdp/nil-decode", "-n", space, "--replicas=3")
        await it.passes(lambda: it.workload()["spec"]["replicas"] == 3)
        api.merge("PDPool", space, "nil-decode", {"spec": {"replicas": None}})
        await it.passes(lambda: it.pool()["spec"].get("replicas") == 3)
        assert api.must_get("PDPool", space, "nil-decode", "/scale")["spec"]["replicas"] == 3
        await it.settle()
        assert it.counts() == (1, 3, 1, 3)
        assert ("pd-operator", "Apply") not in owners(
            it.pool()
        )  # nobody owns it: the server keeps no owner of a scale from nothing
        assert api.delete("PDPool", space, "nil-decode")
        await it.passes(lambda: (api.get("PDPool", space, "nil-decode") or {"spec": {}})["spec"].get("replicas") == 3)
        await it.settle()
        assert it.counts() == (1, 3, 1, 3)


async def test_external_is_followed_within_the_bounds(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with live(kwok_cluster, api, space, "ext", scaling={**SCALING, "mode": "External", "maxGPUs": 8}) as it:
        kwok_cluster.kubectl("scale", "pdp/ext-decode", "-n", space, "--replicas=50")
        await it.passes(lambda: it.workload()["spec"]["replicas"] == MAX)
        await it.settle()
        assert it.counts() == (1, 50, 1, MAX) and it.condition("ScalingLimited") == ("True", "MaxReplicas")
        message = waits.conditions(it.pool())["ScalingLimited"]["message"]
        assert message == f"50 replicas are asked for: spec.scaling.decode.maxReplicas is {MAX}"
        scale = api.must_get("PDPool", space, "ext-decode", "/scale")
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (50, MAX)
        selected = api.list("Pod", space, scale["status"]["selector"])
        assert len(selected) == MAX  # one pod per replica, as an HPA counts them
        kwok_cluster.kubectl("scale", "pdp/ext-decode", "-n", space, "--replicas=2")
        await it.passes(lambda: it.workload()["spec"]["replicas"] == 2)
        await it.settle()
        assert it.condition("ScalingLimited") == ("False", "AsExpected")


async def test_a_real_hpa_moves_the_pool(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """The HPA controller reads and writes /scale of the PDPool. Without a metrics API it still enforces its minimum."""
    async with live(kwok_cluster, api, space, "hpa", scaling={**SCALING, "mode": "External"}) as it:
        target = {"apiVersion": "pdserve.dev/v1alpha1", "kind": "PDPool", "name": "hpa-decode"}
        metric = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}}
        spec = {"scaleTargetRef": target, "minReplicas": 3, "maxReplicas": 5, "metrics": [metric]}
        hpa = {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "decode"}, "spec": spec}
        kwok_cluster.apply(hpa, namespace=space)
        await it.passes(lambda: it.workload()["spec"]["replicas"] == 3)
        await it.settle()
        assert it.counts() == (1, 3, 1, 3)
        assert ("pd-operator", "Apply") not in owners(it.pool()) and any("controller-manager" in m for m, _ in owners(it.pool()))
        found = kwok_cluster.json("get", "hpa", "decode", "-n", space)["status"]
        able = {c["type"]: c["status"] for c in found["conditions"]}
        assert able["AbleToScale"] == "True" and found["desiredReplicas"] == 3
        kwok_cluster.kubectl("delete", "hpa", "decode", "-n", space)


async def test_unknown_signals_shrink_nothing(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with live(kwok_cluster, api, space, "dark") as it:
        await it.tick(decoding(400), 2)
        await it.tick(nothing("no page of pod x for 16 s"), 4)
        assert it.condition("ScalingActive")[0] == "False"
        assert "no page of pod x" in waits.conditions(it.pool())["ScalingActive"]["message"]
        before = list(it.tap.writes)
        await it.tick(count=130, settle=False)  # over half an hour
        await it.settle()
        assert it.counts() == (1, 3, 1, 3) and it.tap.writes == before
        await it.tick(decoding(700))
        assert it.counts() == (1, 5, 1, 5) and it.condition("ScalingActive") == ("True", "Deciding")


async def test_a_replica_that_finds_no_node_is_no_reason_to_ask_for_more(kwok_cluster: Cluster, api: Api, space: str) -> None:
    kwok_cluster.kubectl("label", "node", kwok_cluster.kwok_nodes[0], "example.org/only=this", "--overwrite")
    mine = {"pdserve.dev/role": "decode", "pdserve.dev/deployment": "full"}
    apart = {"labelSelector": {"matchLabels": mine}, "topologyKey": "example.org/only"}
    affinity = {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]}}
    pinned = {"nodeSelector": {"example.org/only": "this"}, "affinity": affinity}
    async with live(kwok_cluster, api, space, "full", decode={"template": {"spec": pinned}}) as it:
        await it.tick(decoding(300), settle=False)
        assert it.pool()["spec"]["replicas"] == 2
        key = it.process.stores.pods

        def blocked() -> bool:
            return any(p.scheduling_reason == "Unschedulable" for p in key.by_owner(space, "full"))

        await it.passes(blocked)
        for _ in range(5):
            await it.tick(decoding(900), settle=False)
            await it.process.reconciler.reconcile(it.key)
        assert it.counts() == (1, 2, 1, 2)
        assert it.condition("ScalingLimited") == ("True", "NoCapacity")
        assert it.condition("ScalingLimited", "prefill")[1] != "NoCapacity"


async def test_an_unchanged_world_is_not_written_and_a_restart_remembers(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with live(kwok_cluster, api, space, "calm") as it:
        await it.tick(decoding(400), 8)
        before = list(it.tap.writes)
        await it.tick(count=20)
        assert it.tap.writes == before
        last = parse(it.lines[-1])
        assert last.learned.prefill.throughput == pytest.approx(20_000.0, rel=1e-4)
        it.restart()
        await it.settle()
        writes = [w for w in it.tap.writes[len(before) :] if not w.startswith("apply ")]
        assert writes == []  # applies change nothing on the server; no status, no scale
        await it.tick(decoding(400), 2)
        after = parse(it.lines[-2])
        assert after.learned.prefill.throughput == pytest.approx(20_000.0, rel=1e-3)
        assert after.learned.decode.kv_per_request == 1000.0
        assert after.bounds == last.bounds  # with the lead times
        assert it.counts() == (1, 3, 1, 3)
        assert [d for line in it.lines for d in replay(line)] == []


async def test_pages_of_stand_ins_make_decode_rise(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """podScrape on real pages: what runs on the stand-in raises decode and leaves prefill alone."""
    with Local() as local:
        slow = {"STANDIN_DECODE_BASE_S": "0.05"}
        p, d = local.engine("kv_producer"), local.engine("kv_consumer", "--max-num-seqs", "2", **slow)
        idle = local.engine("kv_consumer")
        async with live(kwok_cluster, api, space, "pages", decode={"args": ["--max-num-seqs=2"]}) as it:
            source = PodScrape(lambda: _moved(it, p, d, idle), clock=lambda: it.now)
            it.restart(source)
            await it.settle()
            ends = [threading.Thread(target=_hold, args=(p, d, n), daemon=True) for n in range(2)]
            for end in ends:
                end.start()
            await asyncio.to_thread(waits.until, "two requests in decode", lambda: _running(d) == 2)
            for _ in range(3):
                it.now += 5
                await source.sweep()
            await it.tick()
            await source.close()
            # R is 2 of b 2: 2 / (0.85 x 2) = 1.18, more than 1.1
            assert it.counts() == (1, 2, 1, 2)
            assert parse(it.lines[-1]).decision.decode.inputs["R"] == 2.0
            for end in ends:
                end.join(30)


def _hold(p: Running, d: Running, n: int) -> None:
    """One request that decodes for as long as the test takes; it may be cut at the end."""
    with contextlib.suppress(Exception):
        handoff(p, d, prompt=f"{n} one two three four five", max_tokens=200)


def _running(engine: Running) -> float:
    lines = engine.client.page().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running"))


def _moved(it: Live, p: Running, d: Running, idle: Running) -> tuple[Deployment, ...]:
    """The fleet with the stand-ins' addresses: the first pod of a role is the busy one. Routers have no page here."""
    found = []
    for one in it.process.reconciler.roster.fleet():
        first: dict[str, str] = {}
        targets = []
        for target in one.targets:
            if target.side in ("prefill", "decode"):
                busy = p if target.side == "prefill" else d
                url = busy.url if first.setdefault(target.side, target.uid) == target.uid else idle.url
                targets.append(replace(target, url=f"{url}/metrics"))
        found.append(replace(one, targets=tuple(targets)))
    return tuple(found)
