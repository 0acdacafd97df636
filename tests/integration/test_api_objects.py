"""What the CRDs do beyond refusing: /scale, immutable fields, status as written, columns, names."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from kubernetes import client

import manifests
from cluster.handle import Cluster, KubectlError
from manifests.server import Server, install_crds
from pd_operator.api.crdgen import CATEGORY
from pd_operator.api.types import GROUP, VERSION, PDDeploymentSpec

CONDITION = {
    "lastTransitionTime": "2026-11-29T10:00:00Z",
    "message": "serving",
    "observedGeneration": 1,
    "reason": "Ready",
    "status": "True",
}
STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "controller": "pd-operator",
    "currentRevision": "1a2b3c4d",
    "updatedRevision": "1a2b3c4d",
    "url": "http://chat.default.svc",
    "servingSlices": 1,
    "bottleneck": "Unknown",
    "roles": [
        {
            "name": "prefill",
            "ready": "1/2",
            "desiredReplicas": 2,
            "replicas": 2,
            "readyReplicas": 1,
            "updatedReplicas": 2,
            "gpus": 2,
        },
        {
            "name": "decode",
            "ready": "3/3",
            "desiredReplicas": 3,
            "replicas": 3,
            "readyReplicas": 3,
            "verifiedReplicas": 0,
            "gpus": 3,
        },
    ],
    "slices": [
        {
            "name": "chat-1a2b3c4d-0",
            "revision": "1a2b3c4d",
            "domain": "",
            "prefill": 1,
            "decode": 3,
            "state": "Serving",
            "weight": 100,
        }
    ],
    "handoff": {"fallbackRequests": 0, "expired": 0, "lastVerified": "2026-11-29T10:00:00Z"},
    "attainment": {"ttft": "99.1%", "itl": "97.0%", "goodputMin": "96.1%", "goodputMax": "97.0%", "window": "5m", "age": "15s"},
    "backpressure": {
        "rejectedAt": "router",
        "code": "429",
        "keptFor": "30s",
        "freedBy": "decode",
        "notEnforced": ["queue bound on prefill"],
    },
    "conditions": [{"type": "Accepted", **CONDITION}, {"type": "Ready", **CONDITION}],
}
POOL_STATUS: dict[str, Any] = {
    "observedGeneration": 1,
    "replicas": 2,
    "readyReplicas": 1,
    "startingReplicas": 1,
    "desiredReplicas": 2,
    "selector": "pdserve.dev/deployment=chat,pdserve.dev/role=prefill",
    "lastDecision": {
        "time": "2026-11-29T10:00:00Z",
        "fromReplicas": 1,
        "toReplicas": 2,
        "reason": "Demand",
        "inputs": {"lambda": "3.2/s"},
    },
    "learned": {"throughput": 12000, "leadTime": "95s"},
    "conditions": [{"type": "ScalingActive", **CONDITION}],
}


@pytest.fixture(scope="module")
def server(control_plane: Cluster) -> Server:
    install_crds(control_plane)
    return Server(control_plane.kubeconfig)


def apply(cluster: Cluster, namespace: str, manifest: dict[str, Any], *options: str) -> None:
    """Server-side apply, as the operator does it."""
    arguments = ("apply", "-n", namespace, "--server-side", "--field-manager=pd-operator", *options, "-f", "-")
    cluster.kubectl(*arguments, stdin=yaml.safe_dump(manifest))


def with_status(manifest: dict[str, Any], status: dict[str, Any]) -> dict[str, Any]:
    """The object as a status write carries it: no spec."""
    return {**{key: value for key, value in manifest.items() if key != "spec"}, "status": status}


def test_status_comes_back_as_written(server: Server, control_plane: Cluster, namespace: str) -> None:
    """Nothing is pruned and no default is filled in, so that an unchanged status compares equal and is not written again."""
    for manifest, status in ((manifests.minimal(), STATUS), (manifests.pool(), POOL_STATUS)):
        apply(control_plane, namespace, manifest)
        apply(control_plane, namespace, with_status(manifest, status), "--subresource=status")
        kind, name = manifest["kind"].lower(), manifest["metadata"]["name"]
        assert control_plane.json("get", kind, name, "-n", namespace)["status"] == status


def test_status_with_an_unknown_field_is_refused(server: Server, control_plane: Cluster, namespace: str) -> None:
    manifest = manifests.minimal()
    apply(control_plane, namespace, manifest)
    with pytest.raises(KubectlError, match=r"status\.phase"):
        apply(control_plane, namespace, with_status(manifest, {"phase": "Running"}), "--subresource=status")


def test_columns(server: Server, control_plane: Cluster, namespace: str) -> None:
    for manifest, status in ((manifests.minimal(), STATUS), (manifests.pool(), POOL_STATUS)):
        apply(control_plane, namespace, manifest)
        apply(control_plane, namespace, with_status(manifest, status), "--subresource=status")
    head, row = control_plane.kubectl("get", "pdd", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "PREFILL", "DECODE", "SLICES", "READY", "REASON", "BOTTLENECK", "AGE"]
    assert row.split()[:7] == ["chat", "1/2", "3/3", "1", "True", "Ready", "Unknown"]
    head, row = control_plane.kubectl("get", "pdd", "-n", namespace, "-o", "wide").splitlines()
    assert head.split()[-3:] == ["MODEL", "REVISION", "URL"]
    assert row.split()[-3:] == ["hf://meta-llama/Llama-3.1-8B-Instruct", "1a2b3c4d", "http://chat.default.svc"]
    head, row = control_plane.kubectl("get", "pdp", "-n", namespace).splitlines()
    assert head.split() == ["NAME", "ROLE", "REPLICAS", "CURRENT", "READY", "SCALING", "REASON", "AGE"]
    assert row.split()[:7] == ["chat-prefill", "prefill", "1", "2", "1", "True", "Ready"]
    both = control_plane.kubectl("get", CATEGORY, "-n", namespace, "-o", "name").split()
    assert both == ["pddeployment.pdserve.dev/chat", "pdpool.pdserve.dev/chat-prefill"]


def test_scale_keeps_the_number_when_the_operator_applies_without_it(
    server: Server, control_plane: Cluster, namespace: str
) -> None:
    apply(control_plane, namespace, manifests.pool())
    apply(control_plane, namespace, with_status(manifests.pool(), POOL_STATUS), "--subresource=status")
    control_plane.kubectl("scale", "pdp/chat-prefill", "--replicas=5", "-n", namespace)
    without = copy.deepcopy(manifests.pool())
    del without["spec"]["replicas"]
    apply(control_plane, namespace, without)
    scale = server.objects.get_namespaced_custom_object_scale(GROUP, VERSION, namespace, "pdpools", "chat-prefill")
    assert scale["spec"] == {"replicas": 5}
    assert scale["status"] == {"replicas": 2, "selector": "pdserve.dev/deployment=chat,pdserve.dev/role=prefill"}


def test_scale_without_replicas_does_not_answer(server: Server, control_plane: Cluster, namespace: str) -> None:
    """Why the operator writes the first number in every mode."""
    without = manifests.pool()
    del without["spec"]["replicas"]
    apply(control_plane, namespace, without)
    stored = control_plane.json("get", "pdp", "chat-prefill", "-n", namespace)
    assert "replicas" not in stored["spec"]
    with pytest.raises(client.ApiException) as refused:
        server.objects.get_namespaced_custom_object_scale(GROUP, VERSION, namespace, "pdpools", "chat-prefill")
    assert refused.value.status == 500


@pytest.mark.parametrize(("field", "value"), [("role", "decode"), ("deploymentName", "talk")])
def test_identity_of_a_pool_is_immutable(server: Server, control_plane: Cluster, namespace: str, field: str, value: str) -> None:
    apply(control_plane, namespace, manifests.pool())
    changed = manifests.merge(manifests.pool(), {"spec": {field: value}})
    with pytest.raises(KubectlError, match=f"{field} is immutable; it is part of the name of the object"):
        apply(control_plane, namespace, changed, "--force-conflicts")


def test_null_and_whole_floats_never_reach_the_models(server: Server) -> None:
    """The models refuse both, strictly; the server drops or defaults null, and stores 3.0 as 3."""
    manifest = manifests.minimal()
    manifest["spec"]["prefill"] |= {"replicas": None, "args": None, "nodes": 1.0}
    code, made = server.create(manifest)
    assert code == 201, made
    assert "replicas" not in made["spec"]["prefill"]
    assert made["spec"]["prefill"]["args"] == []
    assert isinstance(made["spec"]["prefill"]["nodes"], int)
    PDDeploymentSpec.model_validate(made["spec"], strict=True)


def test_the_longest_arguments_fit_the_servers_budget_for_rules(server: Server) -> None:
    """The estimate is checked when the CRD is applied; this is what evaluating the rules really costs at every bound at once."""
    manifest = manifests.minimal()
    for name in ("engine", "prefill", "decode", "router"):
        manifest["spec"].setdefault(name, {})["args"] = ["--a" + "=" * 4093] * 64
    code, made = server.create(manifest)
    assert code == 201, made["message"][:1000]
