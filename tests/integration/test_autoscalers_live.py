"""Two who write one number, on a real API server with the real HPA controller: the conflict is named, and no number flaps."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import waits
from opsrunner.api import Api, Object
from opsrunner.scaled import Live, decoding, live, owners

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(180)


def hpa(name: str, kind: str, target: str, least: int, most: int) -> Object:
    """Without a metrics API it enforces its bounds and no more."""
    version = "pdserve.dev/v1alpha1" if kind == "PDPool" else "apps/v1"
    metric = {"type": "Resource", "resource": {"name": "cpu", "target": {"type": "Utilization", "averageUtilization": 50}}}
    reference = {"apiVersion": version, "kind": kind, "name": target}
    spec = {"scaleTargetRef": reference, "minReplicas": least, "maxReplicas": most, "metrics": [metric]}
    return {"apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": name}, "spec": spec}


def active(it: Live, role: str = "decode") -> dict[str, Any]:
    found: dict[str, Any] = waits.conditions(it.pool(role))["ScalingActive"]
    return found


def reasons(api: Api, space: str) -> list[str]:
    return [f"{e['reason']} {e['note']}" for e in api.list("Event", space) if e["reason"] == "AutoscalerConflict"]


async def test_an_hpa_under_auto_and_a_second_hpa(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with live(kwok_cluster, api, space, "two") as it:
        await it.tick(decoding(400), 2)
        assert it.counts() == (1, 3, 1, 3)
        kwok_cluster.apply(hpa("first", "PDPool", "two-decode", 4, 5), namespace=space)
        await it.passes(lambda: active(it)["reason"] == "AutoscalerConflict" and it.workload()["spec"]["replicas"] == 4)
        assert active(it)["message"] == (
            "HPA first of this PDPool, and scaling.mode is Auto: the operator writes no number; remove one of them"
        )
        assert active(it, "prefill")["reason"] == "Deciding"
        await it.tick(decoding(1000), 4)
        assert it.counts() == (1, 4, 1, 4) and it.pool()["status"]["desiredReplicas"] == 6  # it yields, and says what it would do
        assert [r for r in reasons(api, space) if "HPA first of this PDPool" in r]

        await it.edit(scaling={"mode": "External"})
        assert active(it)["reason"] == "External"
        kwok_cluster.apply(hpa("second", "PDPool", "two-decode", 2, 6), namespace=space)
        await it.passes(lambda: active(it)["reason"] == "AutoscalerConflict")
        assert active(it)["message"] == "HPAs first, second write the number in turn: keep one"
        kwok_cluster.kubectl("delete", "hpa", "first", "second", "-n", space)
        await it.passes(lambda: active(it)["reason"] == "External")

        await it.edit(scaling={"mode": "Auto"})
        await it.tick(decoding(1000), 2)  # the wheel is the operator's again, from the number that there is
        assert it.counts() == (1, 6, 1, 6) and active(it)["reason"] == "Deciding"
        assert [m for m, _ in owners(it.pool())] == ["pd-operator"]


async def test_an_hpa_on_a_workload_of_a_slice(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with live(kwok_cluster, api, space, "child") as it:
        name = it.workload()["metadata"]["name"]
        kwok_cluster.apply(hpa("wrong", "Deployment", name, 3, 5), namespace=space)
        await it.passes(lambda: active(it)["reason"] == "AutoscalerConflict")
        assert active(it)["message"].startswith(f"HPA wrong scales Deployment {name}, whose replicas the operator writes")
        kwok_cluster.kubectl("delete", "hpa", "wrong", "-n", space)
        await it.passes(lambda: active(it)["reason"] != "AutoscalerConflict")
        await it.settle()
        assert it.counts() == (1, 1, 1, 1)
