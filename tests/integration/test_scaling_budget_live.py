"""One budget for two objects, on a real API server and scheduler. A namespace of its own: whatever holds pods here counts."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import waits
from opsrunner.api import Api, Object
from opsrunner.scaled import SCALING, Live, decoding, live
from pd_operator.core.scaling.shared import Budget

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(180)


async def test_one_budget_for_two_objects(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """GPUs are on paper here: engines ask for one each, and the nodes have 128."""
    one = {"resources": {"limits": {"nvidia.com/gpu": "1", "cpu": "100m"}}}
    async with live(kwok_cluster, api, space, "low", prefill=one, decode=one) as it:
        it.restart(budgets=[Budget("team", 8, frozenset({space}))])
        await it.settle()
        await it.tick(decoding(800), 2)
        assert it.counts() == (1, 5, 1, 5), it.lines[-1]  # 6 of 8
        other = {"router": {"replicas": 1}, "prefill": one, "decode": one, "scaling": {**SCALING, "priority": 7}}
        second = Live(it.rig, api, space, "high")
        second.process, second.loop, second.told, second.tap = it.process, it.loop, it.told, it.tap
        await asyncio.to_thread(api.create, _named(it, "high", other))
        await second.settle()
        used: list[int] = []
        for _ in range(16):  # four minutes; a step down a minute, and the GPUs of what drains are not taken before it is gone
            await second.tick(decoding(800))
            it.now = second.now
            await it.settle()
            used.append(sum(it.counts()[2:]) + sum(second.counts()[2:]))
        assert max(used) <= 8, used
        assert second.counts() == (1, 5, 1, 5) and it.counts() == (1, 1, 1, 1)
        status = waits.conditions(it.pool())["ScalingLimited"]
        assert (status["status"], status["reason"]) == ("True", "MaxGPUs")
        assert f"budget team has 8 GPUs; {space}/high (priority 7) holds 6" in status["message"]


def _named(it: Live, name: str, spec: dict[str, Any]) -> Object:
    found = it.api.must_get("PDDeployment", *it.key)
    return {k: found[k] for k in ("apiVersion", "kind")} | {
        "metadata": {"name": name, "namespace": it.key[0]},
        "spec": {**found["spec"], **spec},
    }
