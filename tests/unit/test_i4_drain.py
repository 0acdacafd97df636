"""I4: a replica is not ended while decode still pulls from it, up to the declared bound: the sums of the grace periods."""

from __future__ import annotations

from typing import Any

import pytest
from builders import containers, pod_specs, rendered

from pd_operator.api.scalars import seconds
from pd_operator.upstream import catalog, smg, vllm, vllm_router

CASES: list[dict[str, Any]] = [
    {},
    {"handoff": {"leaseDuration": "30s"}, "rollout": {"drainTimeout": "1s"}},
    {"handoff": {"leaseDuration": "1h"}, "rollout": {"drainTimeout": "24h"}},
    {"handoff": {"leaseDuration": "45.5s"}, "rollout": {"drainTimeout": "1m30s"}},
    {"lmcache": {"p2p": {"enabled": True}}},
]


def engines(changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    _, _, bundle = rendered(changes)
    return {name.rsplit("-", 1)[1]: pod for name, pod in pod_specs(bundle).items() if "engine" in containers(pod)}


def after(args: list[str], flag: str) -> str:
    return args[args.index(flag) + 1]


@pytest.mark.parametrize("changes", CASES)
def test_the_grace_period_covers_each_step_of_a_drain(changes: dict[str, Any]) -> None:
    for role, pod in engines(changes).items():
        engine = containers(pod)["engine"]
        pre_stop = engine["lifecycle"]["preStop"]["sleep"]["seconds"]
        timeout = int(after(engine["args"], "--shutdown-timeout"))
        assert pod["spec"]["terminationGracePeriodSeconds"] == pre_stop + timeout + vllm.GRACE_MARGIN >= 8 + timeout + 10, role
        assert pre_stop >= vllm.DISCOVERY_LAG + 5  # routers must have dropped the pod before the engine refuses


@pytest.mark.parametrize("changes", CASES)
def test_prefill_outlives_every_lease_and_decode_gets_its_drain_timeout(changes: dict[str, Any]) -> None:
    pods = engines(changes)
    lease = seconds(changes.get("handoff", {}).get("leaseDuration", "30s"))
    drain = seconds(changes.get("rollout", {}).get("drainTimeout", "120s"))
    timeouts = {role: int(after(containers(pod)["engine"]["args"], "--shutdown-timeout")) for role, pod in pods.items()}
    assert timeouts["prefill"] >= lease + 5
    assert drain <= timeouts["decode"] < drain + 1


def test_the_cache_server_outlives_the_engine() -> None:
    """A native sidecar ends after the containers; its own hooks would only delay that."""
    for pod in engines({"lmcache": {}}).values():
        server = containers(pod)["lmcache"]
        assert server["restartPolicy"] == "Always" and "lifecycle" not in server
        assert [c["name"] for c in pod["spec"]["initContainers"]] == ["lmcache"]


@pytest.mark.parametrize("module", [smg, vllm_router])
def test_a_router_is_given_more_time_than_it_takes(module: Any) -> None:
    assert module.GRACE_PERIOD > module.PRE_STOP + smg.SHUTDOWN_GRACE + 5


@pytest.mark.parametrize(("kind", "sleeps"), [("smg", False), ("vllm-router", True)])
def test_routers_wait_for_the_endpoint_to_go_only_where_they_close_at_once(kind: str, sleeps: bool) -> None:
    snapshot, _, bundle = rendered({"router": {"type": kind}})
    pod = next(p for n, p in pod_specs(bundle).items() if n.endswith("-router"))
    hook = containers(pod)["router"].get("lifecycle")
    assert hook == ({"preStop": {"sleep": {"seconds": catalog.router(snapshot.spec).PRE_STOP}}} if sleeps else None)
    assert pod["spec"]["terminationGracePeriodSeconds"] == catalog.router(snapshot.spec).GRACE_PERIOD


def test_budgets_take_one_pod_at_a_time_and_never_hold_a_broken_one() -> None:
    _, _, bundle = rendered({"prefill": {"replicas": 4}})
    budgets = [m for stage in bundle.stages for m in stage if m["kind"] == "PodDisruptionBudget"]
    assert {b["metadata"]["name"] for b in budgets} == {"chat-prefill", "chat-decode", "chat-router"}
    for budget in budgets:
        assert budget["spec"]["maxUnavailable"] == 1 and budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_router_pods_are_replaced_only_by_ready_ones() -> None:
    _, _, bundle = rendered()
    router = next(
        m for stage in bundle.stages for m in stage if m["metadata"]["name"].endswith("-router") and m["kind"] == "Deployment"
    )
    assert router["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
