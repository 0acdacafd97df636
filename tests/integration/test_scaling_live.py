"""Scaling on a real API server: who owns a pool's number, modes that change under it, bounds, an HPA, and a restart.

The Reconciler and the scaling loop run in this process, with the real law; nodes are fake, so their pods have no pages to read.
What the signals say is the test's, but where the stand-in's real pages are read.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from dataclasses import replace

import pytest

from cluster.handle import Cluster
from opsrunner import waits
from opsrunner.api import Api
from opsrunner.recording import Recording
from opsrunner.scaled import MAX, SCALING, Live, assert_owners, decoding, history, live, owners
from pd_operator.core.scaling.record import parse, replay
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.load import nothing
from pd_operator.signals.scrape import PodScrape
from standin.local import Local, Running, handoff

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(180)


async def test_modes_never_move_the_number(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """Auto -> External -> Auto -> Advisory -> Static -> Auto, each under a number of its own; every count that ever was is told."""
    with Recording(api, space, "Deployment") as recording:
        async with live(kwok_cluster, api, space, "modes") as it:
            assert it.counts() == (1, 1, 1, 1)
            bounds = {k: it.pool()["spec"][k] for k in ("minReplicas", "maxReplicas")}
            assert bounds == {"minReplicas": 1, "maxReplicas": MAX}
            await it.tick(decoding(400), 2)
            assert it.counts() == (1, 3, 1, 3) and it.condition("ScalingActive") == ("True", "Deciding")
            assert owners(it.pool()) == [("pd-operator", "Update")]

            await it.edit(scaling={"mode": "External"})
            assert it.counts() == (1, 3, 1, 3) and it.condition("ScalingActive") == ("False", "External")
            kwok_cluster.kubectl("scale", "pdp/modes-decode", "-n", space, "--replicas=5")
            await it.tick(decoding(900), 2)
            assert it.counts() == (1, 5, 1, 5) and it.pool()["status"]["desiredReplicas"] == 6
            assert owners(it.pool()) == [("kubectl", "Update")]

            await it.edit(scaling={"mode": "Auto"})
            await it.tick(decoding(700), 2)  # needs 5
            assert it.counts() == (1, 5, 1, 5)

            await it.edit(scaling={"mode": "Advisory"})
            await it.tick(decoding(1000), 2)
            assert it.counts() == (1, 5, 1, 5) and it.pool()["status"]["desiredReplicas"] == 6
            assert it.condition("ScalingActive") == ("False", "Advisory")
            assert owners(it.pool()) == [("kubectl", "Update")]

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
            waits.until("the watch", lambda: history(recording, "modes", "decode")[-1:] == [4])
    assert history(recording, "modes", "decode") == [1, 3, 5, 4] and history(recording, "modes", "prefill") == [1]


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
        # Decode is full and cannot grow, so prompts queue: prefill for them would only hold more KV.
        for queue in (0, 0, 0, 200_000, 1_000_000, 2_000_000, 4_000_000, 8_000_000):
            await it.tick(decoding(200, handoff_waiting=100, queued_tokens=queue), settle=False)
            await it.process.reconciler.reconcile(it.key)
        assert it.counts() == (1, 2, 1, 2)
        assert it.condition("ScalingLimited") == ("True", "NoCapacity")
        assert it.condition("ScalingLimited", "prefill") == ("True", "GatedByDecode")
        assert parse(it.lines[-1]).decision.prefill.wanted > 2


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
