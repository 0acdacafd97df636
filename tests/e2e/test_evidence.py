"""What breaks while it serves has its name in minutes, on real pods with real routers; ordinary life has none.

Several objects at once, each with load of its own: one is left in peace but for restarts, deletions and a scale-up, and the others
are each broken in a way that no status code shows. Every version of all of them is watched: nothing is accused for a moment only.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections import Counter
from contextlib import suppress
from typing import Any

import pytest

from cluster.handle import Cluster
from pd_operator.render.template import merge
from served import Served
from served.light import cached
from served.versions import Versions, watching
from served.watched import NAMED, Object, asking, fast
from traffic import Load

__all__ = ["fast"]  # a fixture
SOAK = float(os.environ.get("PDD_SOAK_MINUTES", "2"))
LIMIT_S = 900 + 60 * SOAK
pytestmark = pytest.mark.timeout(LIMIT_S)
ONE = {"router": {"replicas": 1}, "verification": "Required"}
SPECS: dict[str, dict[str, Any]] = {
    # Chunks of 64 tokens: a prompt of the load is one at least.
    "calm": {**ONE, **cached(prefill={"replicas": 2}, decode={"replicas": 2}), "router": {"replicas": 2}},
    "silent": ONE,
    "dying": {**ONE, "router": {"replicas": 1, "type": "vllm-router"}},
    "lease": ONE,
    "cache": {**ONE, "lmcache": {"l1Size": "64Mi"}, "prefill": {"replicas": 2}},  # else the pair is lost with the pod's readiness
}

DISTURBANCES = ("decode pod deleted", "prefill engine crashes", "prefill scaled up", "prefill scaled down", "prefill pod deleted")


async def disturb(calm: Object, minutes: float) -> list[str]:
    """Ordinary life: pods deleted, engines that crash, scale-ups. Returns what was done."""
    done: list[str] = []
    end = asyncio.get_running_loop().time() + 60 * minutes
    while asyncio.get_running_loop().time() < end:
        for what in DISTURBANCES:
            role = what.split()[0]
            pods = await asyncio.to_thread(calm.pods, role)
            if "scaled" in what:
                count = 3 if "up" in what else 2
                await asyncio.to_thread(calm.apply, **merge(SPECS["calm"], {"prefill": {"replicas": count}}))
            elif "deleted" in what:
                name = pods[0]["metadata"]["name"]
                await asyncio.to_thread(calm.cluster.kubectl, "delete", "pod", name, "-n", calm.namespace, "--wait=false")
            else:
                url = f"/api/v1/namespaces/{calm.namespace}/pods/{pods[-1]['metadata']['name']}:8000/proxy/standin/fault"
                with suppress(Exception):  # it ends before it answers
                    await asyncio.to_thread(calm.cluster.kubectl, "create", "--raw", url, "-f", "-", stdin='{"crash": true}')
            done.append(what)
            await asyncio.sleep(24)
            if asyncio.get_running_loop().time() > end:
                break
    return done


async def test_each_cause_has_its_name_and_ordinary_life_has_none(fast: Cluster, served: Served) -> None:
    objects = {name: Object(fast, served.namespace, name) for name in SPECS}
    for name, one in objects.items():
        one.apply(**SPECS[name])
    for one in objects.values():
        await asyncio.to_thread(one.ready)
    loads = {name: one.load(tokens=4) for name, one in objects.items()}
    async with watching(fast, served.namespace, LIMIT_S) as versions, asking(loads):
        for one in objects.values():  # both roles are proven by traffic alone
            wanted = [SPECS[one.name].get(role, {}).get("replicas", 1) for role in ("prefill", "decode")]
            await asyncio.to_thread(one.until, f"{one.name}: verified replicas", lambda o=one, w=wanted: o.verified() == w, NAMED)
            assert one.degraded()[:2] == ("False", "AsExpected"), one.degraded()
        life = asyncio.create_task(disturb(objects["calm"], SOAK))

        (pod,) = objects["silent"].pods("prefill")
        fast.kubectl("annotate", "pod", pod["metadata"]["name"], "-n", served.namespace, "smg.ai/kv-connector-")
        objects["dying"].fault("prefill", refuse_transfer=True)
        objects["lease"].fault("prefill", expire_leases=True)
        stop = asyncio.Event()
        victim = objects["cache"].pods("prefill")[0]["metadata"]["name"]
        killing = asyncio.create_task(objects["cache"].keep_down(victim, "lmcache", stop))

        told = {}
        for name, reason in REASONS.items():
            told[name] = await asyncio.to_thread(objects[name].named, reason)
            print(f"\n{name}: {told[name]}")
            if name == "cache":  # named first: it goes up for a moment with each restart, and is not to be accused twice
                stop.set()
                await killing
        _check(objects, loads, told, victim)

        fast.kubectl("annotate", "pod", pod["metadata"]["name"], "-n", served.namespace, "smg.ai/kv-connector=NixlConnector")
        objects["dying"].fault("prefill", refuse_transfer=False)
        objects["lease"].fault("prefill", expire_leases=False)
        for name in REASONS:
            await asyncio.to_thread(objects[name].named, "AsExpected", NAMED + 120)
        done = await life
        await asyncio.to_thread(objects["calm"].ready)
    _calm(objects["calm"], versions, loads["calm"], done)
    for name, reason in REASONS.items():
        notes = objects[name].accusations()
        assert len(notes) == 1, (name, reason, notes)  # named once: it does not flap
        assert len(versions.falls(name, "HandoffVerified")) <= 1, (name, versions.states(name, "HandoffVerified"))
    assert versions.falls("silent", "HandoffVerified") == [("False", "SilentFallback")], "the watch shows what is taken back"


REASONS = {"cache": "CacheDown", "silent": "SilentFallback", "dying": "ReplicaNotTransferring", "lease": "LeaseExpired"}


def _calm(calm: Object, versions: Versions, load: Load, done: list[str]) -> None:
    """Ordinary life: in no version was it accused, or its proof taken back. Prints what there was of it (docs/verification.md)."""
    degraded = versions.states("calm", "Degraded")
    fell = {type_: versions.falls("calm", type_) for type_ in ("HandoffVerified", "OffloadVerified")}
    what = {"minutes": SOAK, "disturbances": Counter(done), "requests": load.summary(), "versions": len(versions.seen["calm"])}
    print(f"\n{json.dumps({**what, 'degraded': degraded, 'fell': fell})}")
    assert fell == {"HandoffVerified": [], "OffloadVerified": []}
    for type_ in fell:
        assert versions.states("calm", type_)[-1] == ("True", "Verified"), (type_, versions.states("calm", type_))
    assert degraded == [("False", "AsExpected")] and calm.accusations() == []


def _check(objects: dict[str, Object], loads: dict[str, Load], told: dict[str, str], victim: str) -> None:
    """Messages name the pod and the next step; nobody was answered with an error; a fallback is no transfer."""
    pods = {name: {r: o.pods(r)[0]["metadata"]["name"] for r in ("prefill", "decode")} for name, o in objects.items()}
    assert pods["silent"]["decode"] in told["silent"] and "smg.ai/kv-connector" in told["silent"]
    assert pods["dying"]["decode"] in told["dying"] and "failed" in told["dying"]
    assert pods["lease"]["prefill"] in told["lease"] and "leaseDuration" in told["lease"]
    assert victim in told["cache"] and "lmcache" in told["cache"]
    for name in ("silent", "dying", "lease"):
        assert not loads[name].failed, f"{name}: {loads[name].summary()}"
    status = objects["silent"].object()["status"]
    assert status["handoff"]["fallbackRequests"] >= 5
    assert [role["verifiedReplicas"] for role in status["roles"]] == [0, 0]
    assert [role["readyReplicas"] for role in status["roles"]] == [1, 1]
    moved = objects["silent"].total("decode", "vllm:nixl_bytes_transferred_count")
    asked = objects["silent"].total("decode", 'vllm:request_success_total{finished_reason="length"}')
    assert asked - moved >= 5
