"""A canary that cannot start, on a real scheduler, Job controller and quota: status has the cause, also when the Job is over."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.inprocess import Rig, Tap
from pd_operator.controller.reconcile import Reconciler
from pd_operator.core import verification
from pd_operator.render import canary

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(240)
LIMIT = 60.0  # seconds


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same waits, shorter."""
    monkeypatch.setattr(verification, "POD_WAIT", 2.0)
    monkeypatch.setattr(verification, "EVIDENCE_WAIT", 1.0)
    monkeypatch.setattr(canary, "DEADLINE", 10)


@pytest.fixture
def full(kwok_cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Call it to keep further pods off every node, until the test ends."""
    nodes = [node["metadata"]["name"] for node in kwok_cluster.json("get", "nodes")["items"]]

    def cordon() -> None:
        kwok_cluster.kubectl("cordon", *nodes)

    yield cordon
    kwok_cluster.kubectl("uncordon", *nodes)


async def until(reconciler: Reconciler, api: Api, key: tuple[str, str], what: str, test: Callable[[dict[str, Any]], Any]) -> Any:
    """Reconcile until the object passes the test."""
    deadline = time.monotonic() + LIMIT
    while True:
        await reconciler.reconcile(key)
        obj = api.must_get("PDDeployment", *key)
        if found := test(obj):
            return found
        assert time.monotonic() < deadline, f"waited {LIMIT:.0f} s for {what}\n{waits.describe(obj)}"
        await asyncio.sleep(0.3)


def verified(obj: dict[str, Any]) -> dict[str, Any]:
    return dict(waits.conditions(obj)["HandoffVerified"])


def ended(obj: dict[str, Any]) -> dict[str, Any]:
    return dict(obj["status"]["slices"][0].get("canary") or {})


async def test_no_node_for_a_canary(kwok_cluster: Cluster, api: Api, space: str, full: Callable[[], None]) -> None:
    key = space, "full"
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(*key))
        await rig.drive(key, Tap(rig.client))
        full()
        api.merge("PDDeployment", *key, {"spec": {"verification": "Required"}})
        reconciler = rig.reconciler()
        # A Job's age counts from a whole second: its pod may come after POD_WAIT, and first be missed.
        told = await until(reconciler, api, key, "a cause", lambda o: (c := verified(o))["reason"] == "CanaryFailed" and c)
        assert told["status"] == "False", told
        for words in ("does not start: pod full-", "no node for it: ", "spec.router.template.spec", "Advisory or Disabled"):
            assert words in told["message"], told
        # The Job is over, and its pod with it. The pod is no less the reason.
        over = await until(reconciler, api, key, "its end", ended)
        assert over["handoffReason"] == "CanaryFailed" and "no node for it" in over["handoffMessage"], over
        obj = api.must_get("PDDeployment", *key)
        assert obj["status"]["slices"][0]["state"] == "Serving", "what served before serves on"


async def test_a_quota_on_pods_of_a_canary(kwok_cluster: Cluster, api: Api, space: str) -> None:
    key = space, "quota"
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(*key))
        await rig.drive(key, Tap(rig.client))
        quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "no-more"}, "spec": {"hard": {"pods": "0"}}}
        kwok_cluster.apply(quota, namespace=space)
        shown = ("get", "resourcequota", "no-more", "-n", space, "-o", "jsonpath={.status.hard.pods}")
        waits.until("the quota to count", lambda: kwok_cluster.kubectl(*shown) == "0")
        try:
            api.merge("PDDeployment", *key, {"spec": {"verification": "Required"}})
            reconciler = rig.reconciler()
            told = await until(reconciler, api, key, "a cause", lambda o: (c := verified(o))["status"] == "False" and c)
            assert told["reason"] == "CanaryForbidden" and "describe job quota-" in told["message"], told
            over = await until(reconciler, api, key, "its end", ended)
            assert over["handoffReason"] == "CanaryForbidden", over
        finally:
            kwok_cluster.kubectl("delete", "resourcequota", "no-more", "-n", space)
