"""KubeClient against a real API server."""

from __future__ import annotations

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
from kubernetes.aio.config import incluster_config

from cluster.handle import Cluster
from faults.objects import deployment, install_crds, pod, pool, service
from faults.proxy import Fault, FaultProxy
from pd_operator.kube import client as client_module
from pd_operator.kube.auth import NoCluster
from pd_operator.kube.client import FIELD_MANAGER, KubeClient
from pd_operator.kube.errors import ApiError, Conflict, Forbidden, Gone, Invalid, NotFound, NotLeading, Unauthorized, is_retryable


@pytest.fixture
async def through(proxy: FaultProxy) -> AsyncIterator[KubeClient]:
    made = await KubeClient.connect(str(proxy.kubeconfig), request_timeout=2)
    yield made
    await made.close()


async def test_get_apply_and_delete(client: KubeClient, namespace: str) -> None:
    assert await client.get("Service", namespace, "a") is None
    applied = await client.apply(service(namespace, "a"))
    got = await client.get("Service", namespace, "a")
    assert got is not None
    assert got["spec"]["ports"] == [{"name": "http", "port": 80, "protocol": "TCP", "targetPort": 80}]
    assert {entry["manager"] for entry in got["metadata"]["managedFields"]} == {FIELD_MANAGER}
    again = await client.apply(service(namespace, "a"))
    assert again["metadata"]["resourceVersion"] == applied["metadata"]["resourceVersion"]  # nothing changed, nothing written
    assert not await client.delete("Service", namespace, "a", uid="00000000-0000-0000-0000-000000000000")
    assert await client.get("Service", namespace, "a") is not None
    assert await client.delete("Service", namespace, "a", uid=got["metadata"]["uid"])
    assert not await client.delete("Service", namespace, "a", uid=got["metadata"]["uid"])


async def test_apply_removes_what_is_left_out_and_keeps_what_others_own(client: KubeClient, namespace: str) -> None:
    manifest = service(namespace, "a")
    manifest["metadata"]["labels"] = {"ours": "1", "gone": "1"}
    await client.apply(manifest)
    await client.merge("Service", namespace, "a", {"metadata": {"labels": {"theirs": "1"}}})
    manifest["metadata"]["labels"] = {"ours": "2"}
    applied = await client.apply(manifest)
    assert applied["metadata"]["labels"] == {"ours": "2", "theirs": "1"}


async def test_a_field_of_another_manager_is_taken_only_by_force(
    client: KubeClient, control_plane: Cluster, namespace: str
) -> None:
    await client.apply(service(namespace, "a"))
    theirs = service(namespace, "a")
    theirs["spec"]["selector"] = {"app": "other"}
    text = yaml.safe_dump(theirs)
    control_plane.kubectl("apply", "--server-side", "--force-conflicts", "--field-manager=them", "-f", "-", stdin=text)
    with pytest.raises(Conflict):
        await client.apply(service(namespace, "a"), force=False)
    applied = await client.apply(service(namespace, "a"))
    assert applied["spec"]["selector"] == {"app": "a"}


async def test_a_dry_run_writes_nothing(client: KubeClient, namespace: str) -> None:
    answer = await client.apply(service(namespace, "a"), dry_run=True)
    assert answer["spec"]["type"] == "ClusterIP"
    assert await client.get("Service", namespace, "a") is None


async def test_list_follows_pages_and_fills_in_the_kind(
    client: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE", 3)
    for number in range(8):
        await client.apply(service(namespace, f"s{number}"))
    await client.apply(
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"namespace": namespace, "name": "other"}, "data": {"a": "b"}}
    )
    items = await client.list("Service", namespace, "pdserve.dev/deployment=chat")
    assert [item["metadata"]["name"] for item in items] == [f"s{number}" for number in range(8)]
    assert {(item["apiVersion"], item["kind"]) for item in items} == {("v1", "Service")}
    assert await client.list("Service", namespace, "pdserve.dev/deployment=other") == []
    assert await client.list_keys("Service", namespace) == [(namespace, f"s{number}") for number in range(8)]


async def test_an_expired_continue_token_starts_the_list_anew(
    proxy: FaultProxy, through: KubeClient, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PAGE", 2)
    for number in range(5):
        await through.apply(service(namespace, f"s{number}"))
    proxy.add(Fault(path="services.*continue=", status=410))
    assert len(await through.list("Service", namespace)) == 5
    proxy.add(Fault(path="services.*continue=", status=410, times=10))
    with pytest.raises(Gone):
        await through.list("Service", namespace)


async def test_exists_never_reads_the_contents_of_a_secret(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "namespace": namespace,
            "name": "token",
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": "hunter2"},
        },
        "stringData": {"token": "hunter2"},
    }
    await through.apply(secret)
    found = await through.exists("Secret", namespace, "token")
    assert found is not None
    assert found["metadata"]["name"] == "token"
    assert found["metadata"]["uid"]
    assert "hunter2" not in json.dumps(found)
    assert base64.b64encode(b"hunter2").decode() not in json.dumps(found)
    accepts = [seen.headers["Accept"] for seen in proxy.seen if seen.method == "GET" and seen.path.endswith("/secrets/token")]
    assert accepts == ["application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"]
    assert await through.exists("Secret", namespace, "absent") is None


async def test_status_is_applied_to_its_subresource_only(client: KubeClient, control_plane: Cluster, namespace: str) -> None:
    install_crds(control_plane)
    obj = deployment(namespace)
    control_plane.apply(obj)
    before = await client.get("PDDeployment", namespace, "chat")
    assert before is not None
    head = {key: obj[key] for key in ("apiVersion", "kind")} | {"metadata": {"namespace": namespace, "name": "chat"}}
    after = await client.apply_status(head | {"status": {"observedGeneration": before["metadata"]["generation"]}})
    assert after["status"]["observedGeneration"] == 1
    assert after["spec"] == before["spec"]
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    ours = [entry for entry in after["metadata"]["managedFields"] if entry["manager"] == FIELD_MANAGER]
    assert [entry["subresource"] for entry in ours] == ["status"]


async def test_replicas_of_a_created_pool_outlive_applies_without_them(
    client: KubeClient, control_plane: Cluster, namespace: str
) -> None:
    install_crds(control_plane)
    await client.create(pool(namespace, replicas=3))
    with pytest.raises(Conflict):
        await client.create(pool(namespace, replicas=5))
    applied = await client.apply(pool(namespace, minReplicas=1))
    assert applied["spec"]["replicas"] == 3
    await client.scale("PDPool", namespace, "chat-decode", 7)
    applied = await client.apply(pool(namespace, minReplicas=2))
    assert applied["spec"]["replicas"] == 7
    assert applied["spec"]["minReplicas"] == 2


async def test_replicas_that_were_applied_are_removed_by_an_apply_without_them(
    client: KubeClient, control_plane: Cluster, namespace: str
) -> None:
    """The trap that `create` avoids: if this ever fails, `create` is no longer needed."""
    install_crds(control_plane)
    await client.apply(pool(namespace, replicas=3))
    applied = await client.apply(pool(namespace))
    assert "replicas" not in applied["spec"]


async def test_errors_have_classes(client: KubeClient, control_plane: Cluster, namespace: str, tmp_path: Path) -> None:
    with pytest.raises(Invalid) as invalid:
        await client.apply(service(namespace, "a", port=99999))
    assert "spec.ports[0].port" in invalid.value.message
    assert not is_retryable(invalid.value)
    with pytest.raises(NotFound):
        await client.apply(service("no-such-namespace", "a"))
    nobody = control_plane.service_account_kubeconfig(namespace, "nobody", tmp_path / "nobody")
    weak = await KubeClient.connect(str(nobody))
    with pytest.raises(Forbidden):
        await weak.get("Service", namespace, "a")
    await weak.close()
    document = yaml.safe_load(nobody.read_text())
    document["users"][0]["user"]["token"] = "wrong"
    nobody.write_text(yaml.safe_dump(document))
    stranger = await KubeClient.connect(str(nobody))
    with pytest.raises(Unauthorized):
        await stranger.get("Service", namespace, "a")
    await stranger.close()


@pytest.mark.parametrize("status", [429, 500, 503, 504])
async def test_a_failing_server_is_a_retryable_error_and_is_not_retried_here(
    proxy: FaultProxy, through: KubeClient, namespace: str, status: int
) -> None:
    proxy.add(Fault(path="/services/a", status=status, headers={"Retry-After": "7"}))
    with pytest.raises(ApiError) as error:
        await through.get("Service", namespace, "a")
    assert error.value.status == status
    assert error.value.retry_after == 7
    assert is_retryable(error.value)
    assert proxy.count("GET", "/services/a") == 1


async def test_a_hanging_server_is_a_timeout(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    proxy.add(Fault(path="/services/a", delay=30))
    started = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError) as error:
        await through.get("Service", namespace, "a")
    assert asyncio.get_running_loop().time() - started < 4
    assert is_retryable(error.value)


async def test_a_connection_closed_while_idle_is_tried_once_more(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    proxy.add(Fault(method="PATCH", path="/services/a", drop=True))
    await through.apply(service(namespace, "a"))
    assert proxy.count("PATCH", "/services/a") == 2
    proxy.add(Fault(method="PATCH", path="/services/a", drop=True, times=2))
    with pytest.raises(aiohttp.ClientError) as error:
        await through.apply(service(namespace, "a"))
    assert is_retryable(error.value)


async def test_calls_are_counted_by_verb_kind_and_code(proxy: FaultProxy, namespace: str) -> None:
    calls: list[tuple[str, str, str]] = []
    client = await KubeClient.connect(str(proxy.kubeconfig), on_call=lambda verb, kind, code, _: calls.append((verb, kind, code)))
    try:
        await client.apply(service(namespace, "a"))
        await client.get("Service", namespace, "b")
        proxy.add(Fault(path="/services/a", drop=True, times=4))
        with pytest.raises(aiohttp.ClientError):
            await client.get("Service", namespace, "a")
    finally:
        await client.close()
    assert calls == [("apply", "Service", "201"), ("get", "Service", "404"), ("get", "Service", "error")]


async def test_the_fence_stops_writes_but_not_reads_nor_the_lease(client: KubeClient, namespace: str) -> None:
    client.may_write = lambda: False
    for write in (
        client.apply(service(namespace, "a")),
        client.apply_status(service(namespace, "a")),
        client.create(pod(namespace, "a")),
        client.scale("PDPool", namespace, "a", 1),
        client.merge("Service", namespace, "a", {}),
        client.delete("Service", namespace, "a", uid="x"),
    ):
        with pytest.raises(NotLeading):
            await write
    assert await client.get("Service", namespace, "a") is None
    lease: dict[str, Any] = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {"holderIdentity": "x"}}
    await client.create(lease | {"metadata": {"namespace": namespace, "name": "l"}})


async def test_a_rotated_token_file_is_read_again(
    control_plane: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_operator.kube.auth.TOKEN_PERIOD", 0.0)
    path = control_plane.service_account_kubeconfig(namespace, "rotating", tmp_path / "kubeconfig")
    document = yaml.safe_load(path.read_text())
    token = document["users"][0]["user"].pop("token")
    document["users"][0]["user"]["tokenFile"] = str(tmp_path / "token")
    path.write_text(yaml.safe_dump(document))
    (tmp_path / "token").write_text("stale")
    client = await KubeClient.connect(str(path))
    try:
        with pytest.raises(Unauthorized):
            await client.get("Service", namespace, "a")
        (tmp_path / "token").write_text(token)
        with pytest.raises(Forbidden):  # known, but without rights
            await client.get("Service", namespace, "a")
    finally:
        await client.close()


async def test_server_version_and_served_kinds(client: KubeClient, control_plane: Cluster) -> None:
    install_crds(control_plane)
    assert (1, 29) <= await client.server_version() < (2, 0)
    assert await client.served("PDDeployment", None)
    found = control_plane.json("version")["serverVersion"]
    assert await client.server_version() == (int(found["major"]), int(re.sub(r"\D", "", found["minor"])))


async def test_without_credentials_the_error_names_the_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCluster, match=r"KUBECONFIG, the service account, .*\.kube/config"):
        await KubeClient.connect()
    with pytest.raises(NoCluster, match="missing"):
        await KubeClient.connect(str(tmp_path / "missing"))


async def test_a_projected_token_in_the_pod_is_read_again(
    control_plane: Cluster, namespace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a pod: host and port from the environment, token and CA from files that the kubelet replaces."""
    document = yaml.safe_load(control_plane.service_account_kubeconfig(namespace, "pod", tmp_path / "kubeconfig").read_text())
    server = document["clusters"][0]["cluster"]
    host, port = server["server"].removeprefix("https://").split(":")
    (tmp_path / "ca.crt").write_bytes(base64.b64decode(server["certificate-authority-data"]))
    (tmp_path / "token").write_text("stale")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", port)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    original = incluster_config.InClusterConfigLoader.__init__

    def impatient(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self._token_refresh_period = timedelta(0)  # a minute otherwise

    monkeypatch.setattr(incluster_config.InClusterConfigLoader, "__init__", impatient)
    client = await KubeClient.connect()
    session = await client.new_session(lambda request, response: None)
    path = f"/api/v1/namespaces/{namespace}/services/a"
    try:
        with pytest.raises(Unauthorized):
            await client.get("Service", namespace, "a")
        async with session.get(client.host + path) as response:
            assert response.status == 401
        (tmp_path / "token").write_text(document["users"][0]["user"]["token"])
        with pytest.raises(Forbidden):  # known, but without rights
            await client.get("Service", namespace, "a")
        async with session.get(client.host + path) as response:  # kopf's session lives as long as the process
            assert response.status == 403
    finally:
        await session.close()
        await client.close()
