"""Keys reach the reconciler: from our two kinds through kopf, from children and pods through reflectors, from the resync."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from faults.objects import deployment, pod, pool, service, until
from faults.proxy import FOREVER, Fault, FaultProxy
from faults.runtime import Notes, leading, probe, running, settings
from pd_operator.controller.watch import CHILD_KINDS, OPTIONAL_KINDS, OUR_KINDS
from pd_operator.core.result import Done, Result
from pd_operator.kube.client import KubeClient
from pd_operator.kube.kinds import KINDS

pytestmark = pytest.mark.usefixtures("our_kinds")
PDDS = "pddeployments"


async def test_an_object_and_everything_that_belongs_to_it_reach_the_reconciler(
    client: KubeClient, kubeconfig: Path, namespace: str
) -> None:
    await client.create(deployment(namespace, "old"))
    notes = Notes()
    async with running(kubeconfig, notes, settings(namespace)) as (manager, _):
        await leading(manager)
        await until("what existed is reconciled", lambda: (namespace, "old") in notes.calls)
        assert manager.stores.deployments == {(namespace, "old")}

        async def expect(what: str, change: Any) -> None:
            await asyncio.sleep(0.3)
            notes.calls.clear()
            await change
            await until(f"{what} is reconciled", lambda: (namespace, "chat") in notes.calls, 5)

        await expect("a new object", client.create(deployment(namespace)))
        await expect("an edit", client.merge("PDDeployment", namespace, "chat", {"spec": {"suspend": True}}))
        await expect("a child", client.apply(service(namespace, "chat")))
        await expect("a child's edit", client.apply(service(namespace, "chat", port=81)))
        await expect("a pod", client.create(pod(namespace, "p")))
        await expect("a pool", client.create(pool(namespace, replicas=1)))
        await expect("a pool's scale", client.scale("PDPool", namespace, "chat-decode", 2))
        await expect(
            "a child's end", client.delete("Service", namespace, "chat", uid=await uid(client, "Service", namespace, "chat"))
        )
        await expect(
            "the end", client.delete("PDDeployment", namespace, "chat", uid=await uid(client, "PDDeployment", namespace, "chat"))
        )
        assert manager.stores.deployments == {(namespace, "old")}


async def uid(client: KubeClient, kind: str, namespace: str, name: str) -> str:
    found = await client.get(kind, namespace, name)
    assert found is not None
    return str(found["metadata"]["uid"])


async def test_nothing_is_written_to_the_users_object(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    """No finalizer, no annotation, not one write but the Lease (invariant I1)."""
    notes = Notes()
    await client.create(deployment(namespace, "before"))
    async with running(proxy.kubeconfig, notes, settings(namespace)) as (manager, _):
        await leading(manager)
        await client.create(deployment(namespace))
        await client.merge("PDDeployment", namespace, "chat", {"spec": {"suspend": True}})
        await client.create(pool(namespace, replicas=1))
        await until("they are reconciled", lambda: {(namespace, "chat"), (namespace, "before")} <= set(notes.calls))
        await asyncio.sleep(3)  # kopf's idle workers end
        for name in ("chat", "before"):
            found = await client.get("PDDeployment", namespace, name)
            assert found is not None
            assert "finalizers" not in found["metadata"]
            assert "annotations" not in found["metadata"]
            assert {entry["manager"] for entry in found["metadata"]["managedFields"]} == {"pd-operator"}  # our create above
        gone = await uid(client, "PDDeployment", namespace, "chat")
        await client.delete("PDDeployment", namespace, "chat", uid=gone)
        assert await client.get("PDDeployment", namespace, "chat") is None
    writes = {(seen.method, seen.path.split("?")[0]) for seen in proxy.seen if seen.method != "GET"}
    assert {path for _, path in writes} <= {
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases",
        f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/pd-operator",
    }


async def test_no_reconcile_before_everything_was_listed(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    """A plan from half a world deletes the other half."""
    await client.create(deployment(namespace))
    gate = asyncio.Event()
    slow = proxy.add(Fault(path="/networkpolicies", gate=gate))
    notes = Notes()
    async with running(proxy.kubeconfig, notes, settings(namespace), synced=False) as (manager, _):
        await until("the slow list was asked for", lambda: slow.used)
        await leading(manager)
        await asyncio.sleep(1)
        assert notes.calls == []
        status, body = await probe(manager, "/readyz")
        assert status == 503
        assert body["problems"][0]["check"] == "synced"
        assert f"NetworkPolicy/{namespace}" in body["problems"][0]["message"]
        assert (await probe(manager, "/healthz"))[0] == 200
        gate.set()
        await until("then it is reconciled", lambda: notes.calls, 60)
        assert (await probe(manager, "/readyz"))[0] == 200


async def test_events_are_coalesced(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    """kopf delivers each event by itself; reconciles must not follow one by one."""

    async def slow(key: tuple[str, str]) -> Result:
        await asyncio.sleep(1.0)
        return Done()

    for number in range(10):
        await client.create(deployment(namespace, f"d{number}"))
    notes = Notes(slow)
    async with running(kubeconfig, notes, settings(namespace, workers=10)) as (manager, _):
        await leading(manager)
        await until("all are reconciled once", lambda: len(set(notes.calls)) == 10)
        notes.calls.clear()
        writers = asyncio.Semaphore(5)

        async def edit(number: int) -> None:
            async with writers:
                body = {"metadata": {"annotations": {"n": str(number)}}}
                await client.merge("PDDeployment", namespace, f"d{number % 10}", body)

        started = time.monotonic()
        await asyncio.gather(*(edit(number) for number in range(300)))
        await until("the queue is empty", lambda: not len(manager.queue) and not manager.queue.longest_running())
        # At most one reconcile per key and second, however many events there were.
        assert 10 <= len(notes.calls) <= min(10 * (time.monotonic() - started + 1), 200)
        assert len(set(notes.calls)) == 10


async def test_an_event_that_a_watch_lost_is_found_by_the_resync(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    notes = Notes()
    async with running(proxy.kubeconfig, notes, settings(namespace, resync_seconds=2)) as (manager, _):
        await leading(manager)
        proxy.freeze(f"{PDDS}.*watch")
        await asyncio.sleep(0.5)
        await client.create(deployment(namespace))
        await until("the resync finds it", lambda: (namespace, "chat") in notes.calls, 6)
        assert manager.stores.deployments == {(namespace, "chat")}


async def test_a_410_of_kopfs_watch_is_survived(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    await client.create(deployment(namespace, "gone"))
    notes = Notes()
    async with running(proxy.kubeconfig, notes, settings(namespace, resync_seconds=3600)) as (manager, task):
        await leading(manager)
        await until("it is reconciled", lambda: notes.calls)
        proxy.freeze(f"{PDDS}.*watch")
        await client.delete("PDDeployment", namespace, "gone", uid=await uid(client, "PDDeployment", namespace, "gone"))
        await client.create(deployment(namespace))
        await asyncio.sleep(0.5)
        assert (namespace, "chat") not in notes.calls
        await proxy.expire(f"{PDDS}.*watch")
        await until("the new object is found", lambda: (namespace, "chat") in notes.calls, 60)
        count = notes.calls.count((namespace, "chat"))  # before the edit: its event may be handled before the answer is read
        await client.merge("PDDeployment", namespace, "chat", {"spec": {"suspend": True}})
        await until("and followed", lambda: notes.calls.count((namespace, "chat")) > count, 60)
        assert not task.done()


async def test_only_the_named_namespaces_are_served(
    client: KubeClient, kubeconfig: Path, control_plane: Cluster, namespace: str
) -> None:
    other, foreign = f"{namespace}-b", f"{namespace}-c"
    for name in (other, foreign):
        control_plane.kubectl("create", "namespace", name)
    try:
        notes = Notes()
        async with running(kubeconfig, notes, settings(namespace, watch_namespaces=[namespace, other])) as (manager, _):
            await leading(manager)
            for name in (namespace, other, foreign):
                await client.create(deployment(name))
            await until("both are served", lambda: {(namespace, "chat"), (other, "chat")} <= set(notes.calls))
            await client.apply(service(foreign, "chat"))
            await asyncio.sleep(1)
            assert all(key[0] != foreign for key in notes.calls)
            assert f"PDDeployment/{other} (kopf)" in manager.stream_ages()
    finally:
        control_plane.kubectl("delete", "namespace", other, foreign, "--wait=false")


async def test_the_whole_cluster_is_served_when_no_namespace_is_named(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    notes = Notes()
    async with running(kubeconfig, notes, settings(namespace, watch_namespaces=[])) as (manager, _):
        await leading(manager)
        await client.create(deployment(namespace))
        await client.apply(service(namespace, "chat"))
        await until("it is reconciled", lambda: (namespace, "chat") in notes.calls)
        ours = {f"{kind} (kopf)" for kind in OUR_KINDS}
        others = {"HorizontalPodAutoscaler", "Pod", "Node (capacity)", "Pod (capacity)"}
        assert set(manager.stream_ages()) == {*CHILD_KINDS, *OPTIONAL_KINDS, *ours, *others}


async def test_metrics_tell_what_happens(client: KubeClient, kubeconfig: Path, namespace: str) -> None:
    await client.create(deployment(namespace))

    async def fail_once(key: tuple[str, str]) -> Result:
        if len(notes.calls) == 1:
            raise TimeoutError("once")
        return Done()

    notes = Notes(fail_once)
    async with running(kubeconfig, notes, settings(namespace)) as (manager, _):
        await leading(manager)
        await until("it is reconciled again", lambda: len(notes.calls) >= 2)
        await asyncio.sleep(0.1)
        status, text = await probe(manager, "/metrics")
    assert status == 200
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(lines['pd_operator_reconcile_total{result="error"}']) == 1
    assert float(lines['pd_operator_reconcile_total{result="done"}']) >= 1
    assert float(lines["pd_operator_leader"]) == 1
    assert float(lines["pd_operator_workqueue_depth"]) == 0
    assert float(lines["pd_operator_workqueue_retries_total"]) == 1
    assert float(lines[f'pd_operator_stream_age_seconds{{kind="Pod/{namespace}"}}']) < 60
    assert float(lines[f'pd_operator_stream_age_seconds{{kind="PDPool/{namespace} (kopf)"}}']) < 60
    assert float(lines['pd_operator_api_requests_total{code="201",kind="Lease",verb="create"}']) == 1
    assert float(lines['pd_operator_api_requests_total{code="200",kind="Pod",verb="list"}']) == 1
    assert float(lines["pd_operator_loop_lag_seconds"]) < 5
    assert any(name.startswith("pd_operator_build_info") for name in lines)
    assert "process_resident_memory_bytes" in lines


async def test_a_silent_watch_and_a_waiting_key_are_named_by_readyz(client: KubeClient, proxy: FaultProxy, namespace: str) -> None:
    blocked = asyncio.Event()

    async def hang(key: tuple[str, str]) -> Result:
        await blocked.wait()
        return Done()

    notes = Notes(hang)
    chosen = settings(namespace, workers=1, max_key_age_seconds=0.5)
    object.__setattr__(chosen, "max_stream_age_seconds", 2.0)  # below what users may set
    proxy.add(Fault(path="/roles.*watch", silent_after=0, times=FOREVER))
    async with running(proxy.kubeconfig, notes, chosen) as (manager, _):
        await leading(manager)
        for name in ("a", "b"):
            await client.create(deployment(namespace, name))
        await asyncio.sleep(2.5)
        status, body = await probe(manager, "/readyz")
        assert status == 503
        problems = {problem["check"]: problem for problem in body["problems"]}
        assert any(f"the watch of Role/{namespace} is silent" in problem["message"] for problem in body["problems"])
        assert problems["streamAge"]["limit"] == 2.0
        assert problems["oldestKey"]["value"] > problems["oldestKey"]["limit"] == 0.5
        assert (await probe(manager, "/healthz"))[0] == 200, json.dumps(body)
        blocked.set()


async def test_reading_needs_no_more_than_these_rights(
    client: KubeClient, control_plane: Cluster, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    """In namespaced mode: nothing cluster-wide, nothing written but the Lease, no request refused."""
    weak = control_plane.service_account_kubeconfig(namespace, "operator", tmp_path / "weak")
    by_group: dict[str, list[str]] = {}
    for kind in (*CHILD_KINDS, *OPTIONAL_KINDS, "PDDeployment", "Pod", "HorizontalPodAutoscaler"):
        by_group.setdefault(KINDS[kind].group, []).append(KINDS[kind].plural)
    rules = [{"apiGroups": [group], "resources": plurals, "verbs": ["list", "watch"]} for group, plurals in by_group.items()]
    rules.append({"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "create", "update"]})
    rbac = "rbac.authorization.k8s.io"
    control_plane.apply(
        {"apiVersion": f"{rbac}/v1", "kind": "Role", "metadata": {"name": "operator"}, "rules": rules},
        {
            "apiVersion": f"{rbac}/v1",
            "kind": "RoleBinding",
            "metadata": {"name": "operator"},
            "roleRef": {"apiGroup": rbac, "kind": "Role", "name": "operator"},
            "subjects": [{"kind": "ServiceAccount", "name": "operator", "namespace": namespace}],
        },
        namespace=namespace,
    )
    notes = Notes()
    async with FaultProxy(weak, tmp_path) as proxy, running(proxy.kubeconfig, notes, settings(namespace)) as (manager, _):
        await leading(manager)
        await client.create(deployment(namespace))
        await client.apply(service(namespace, "chat"))
        await until("it is reconciled", lambda: (namespace, "chat") in notes.calls)
        assert [seen.path for seen in proxy.seen if seen.status in {401, 403}] == []
