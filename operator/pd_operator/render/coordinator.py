"""LMCache coordinator of a slice, with P2P. One per slice: it must not join the caches of two revisions (invariant I3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_operator.api.types import LMCacheSpec
from pd_operator.core.names import COMPONENT, COORDINATOR, DEPLOYMENT, SLICE, service_account, slice_labels, workload
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.snapshot import Snapshot
from pd_operator.render import objects
from pd_operator.render.template import merge, merge_env
from pd_operator.upstream import lmcache

BORROWED = ("volumes", "nodeSelector", "tolerations", "imagePullSecrets")


def manifests(snapshot: Snapshot, slice_: SlicePlan, spec: LMCacheSpec) -> list[objects.Manifest]:
    """Service and Deployment. Its registry is in memory, so there is exactly one: Recreate, never two at once."""
    labels = slice_labels(snapshot.name, COORDINATOR, slice_.name, slice_.revision)
    selector = {DEPLOYMENT: snapshot.name, SLICE: slice_.name, COMPONENT: COORDINATOR}
    name = workload(slice_.name, COORDINATOR)
    pod: dict[str, Any] = {
        "serviceAccountName": service_account(snapshot.name, "engine"),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "shareProcessNamespace": True,  # as PID 1 it would ignore SIGTERM until its handler is set
        "terminationGracePeriodSeconds": 30,
        "securityContext": dict(objects.POD_SECURITY),
        "containers": [_container(snapshot, spec)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    body = {
        "replicas": 1,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 2,
        "template": {"metadata": {"labels": labels}, "spec": merge(pod, _borrowed(snapshot.spec.prefill.template))},
    }
    port = {"name": "http", "port": lmcache.COORDINATOR_PORT, "targetPort": "http", "protocol": "TCP"}
    service = {"type": "ClusterIP", "selector": selector, "ports": [port]}
    return [
        objects.manifest("v1", "Service", snapshot, name, labels, spec=service),
        objects.manifest("apps/v1", "Deployment", snapshot, name, labels, spec=body),
    ]


def _borrowed(template: Mapping[str, Any]) -> dict[str, Any]:
    """What the coordinator takes from prefill's template, since it runs the same program as the `lmcache` container there."""
    pod = template.get("spec") or {}
    taken = {key: pod[key] for key in BORROWED if key in pod}
    for server in pod.get("initContainers") or []:
        if server.get("name") == "lmcache":
            mine = {key: server[key] for key in ("env", "envFrom", "volumeMounts") if key in server}
            taken["containers"] = [{"name": COORDINATOR, **mine}]
    return taken


def _container(snapshot: Snapshot, spec: LMCacheSpec) -> dict[str, Any]:
    owned, defaults = lmcache.environment(spec)
    return objects.container(
        COORDINATOR,
        snapshot.images["lmcache"],
        snapshot,
        command=list(lmcache.COMMAND),
        args=lmcache.coordinator_arguments(spec),
        env=merge_env(owned, defaults),
        ports=[{"name": "http", "containerPort": lmcache.COORDINATOR_PORT, "protocol": "TCP"}],
        resources={"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
        **lmcache.coordinator_probes(),
    )
