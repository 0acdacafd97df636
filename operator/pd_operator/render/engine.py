"""Pod templates and workload of a role: the engine, and its LMCache server as a native sidecar."""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from typing import Any, Final

from pd_operator.api.types import EnvVar, LMCacheSpec
from pd_operator.core.names import (
    DEPLOYMENT,
    DEPLOYMENT_KIND,
    GROUP_KIND,
    LLMD_ROLE,
    MODEL,
    REVISION,
    ROLE,
    ROLES,
    SITE,
    SLICE,
    Role,
    service_account,
    slice_labels,
    slice_name,
    workload,
)
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.snapshot import Snapshot
from pd_operator.render import group, objects, site
from pd_operator.render.model import Model, locate
from pd_operator.render.router import engine_api_key
from pd_operator.render.template import merge, merge_env
from pd_operator.upstream import lmcache, smg, vllm, vllm_nodes

SHARED_MEMORY: Final = Decimal(2 * 1024**3)  # bytes; 64 MiB, the default, is fatal at start-up with tensor parallelism


def worker_key(role: Role) -> str:
    """Name of a role's worker template among the templates of a revision."""
    return f"{role}-worker"


def pod_templates(snapshot: Snapshot, revision: str) -> dict[str, dict[str, Any]]:
    """Pod templates of both roles in slice 0 of a revision, of the pods that serve and of the workers of groups. Frozen in the
    ControllerRevision."""
    found: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        found[role] = pod_template(snapshot, role, revision)
        if snapshot.spec.roles[role].nodes > 1:
            name = slice_name(snapshot.name, revision)
            found[role], found[worker_key(role)] = group.templates(found[role], role, name, snapshot.server_version)
    return found


def pod_template(snapshot: Snapshot, role: Role, revision: str) -> dict[str, Any]:
    """Template of the pods that serve, one for each replica, the user's template laid over it."""
    spec, name = snapshot.spec, slice_name(snapshot.name, revision)
    model = locate(spec.model.uri, snapshot.install.pull_policy)
    labels = slice_labels(snapshot.name, "engine", name, revision) | {ROLE: role, LLMD_ROLE: role}
    pod: dict[str, Any] = {
        "serviceAccountName": service_account(snapshot.name, "engine"),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service called vllm would set VLLM_PORT to a URL, which vLLM refuses (vllm/envs.py)
        "terminationGracePeriodSeconds": vllm.grace_period(role, spec.handoff, spec.rollout.drain_timeout),
        "securityContext": dict(objects.POD_SECURITY),
        "topologySpreadConstraints": objects.spread({SLICE: name, ROLE: role}),
        "containers": [_engine(snapshot, role, model, name)],
        "volumes": [
            {"name": "tmp", "emptyDir": {}},
            {"name": "cache", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
            *model.volumes,
        ],
    }
    if spec.lmcache is not None:
        servers = vllm_nodes.cache_servers(spec.roles[role], workload(name, role))
        pod["initContainers"] = [_server(snapshot, spec.lmcache, name, bool(servers))]
    named = {MODEL: spec.model.name or snapshot.name} if engine_api_key(snapshot) is not None else {}
    ours = {"metadata": {"labels": labels, "annotations": dict(smg.ENGINE_ANNOTATIONS) | named}, "spec": pod}
    return merge(ours, spec.roles[role].template)


def manifest(
    snapshot: Snapshot, role: Role, slice_: SlicePlan, replicas: int, templates: Mapping[str, Mapping[str, Any]]
) -> objects.Manifest | None:
    """Workload of a role of a slice. Within its slice a role rolls by itself when only its own pods changed (class B).

    None while `rollout.paused` holds back a workload of another kind, which would begin to take over.

    `templates` are those of the revision, as `pod_templates` makes them.
    """
    if snapshot.spec.rollout.paused and snapshot.turning(slice_.name, role):
        return None
    if snapshot.kind_of(role) == GROUP_KIND:
        made = group.manifest(snapshot, role, slice_, replicas, templates[role], templates[worker_key(role)])
    else:
        made = _deployment(snapshot, role, slice_, replicas, templates[role])
    where = slice_.site.encode()
    return {**made, "metadata": {**made["metadata"], "annotations": {SITE: where}}} if where else made


def _deployment(snapshot: Snapshot, role: Role, slice_: SlicePlan, replicas: int, template: Mapping[str, Any]) -> objects.Manifest:
    name, revision = slice_.name, slice_.revision
    rollout = snapshot.spec.rollout
    strategy: dict[str, Any] = {"type": "Recreate"}
    if rollout.type == "RollingUpdate":
        strategy = {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": rollout.max_surge, "maxUnavailable": rollout.max_unavailable},
        }
    labels = slice_labels(snapshot.name, "engine", name, revision) | {ROLE: role}
    body = {
        "replicas": replicas,
        "selector": {"matchLabels": {DEPLOYMENT: snapshot.name, SLICE: name, REVISION: revision, ROLE: role}},
        "strategy": strategy,
        "progressDeadlineSeconds": rollout.progress_deadline_seconds,
        "revisionHistoryLimit": 2,
        **_paused(snapshot, workload(name, role)),
        "template": site.template_of(template, snapshot, slice_, role),
    }
    return objects.manifest("apps/v1", DEPLOYMENT_KIND, snapshot, workload(name, role), labels, spec=body)


def _paused(snapshot: Snapshot, name: str) -> dict[str, bool]:
    """`paused` of a Deployment that has pods: one without would never get any, for a paused one makes no ReplicaSet."""
    child = snapshot.child("Deployment", name)
    return {"paused": True} if snapshot.spec.rollout.paused and child and child.workload and child.workload.replicas else {}


def _engine(snapshot: Snapshot, role: Role, model: Model, slice_: str) -> dict[str, Any]:
    spec, mine = snapshot.spec, snapshot.spec.roles[role]
    owned, defaults = vllm.environment(spec.handoff)
    servers = vllm_nodes.cache_servers(mine, workload(slice_, role)) if spec.lmcache is not None else []
    owned = [*owned, vllm_nodes.leader_name(worker=False)] if servers else owned
    arguments = vllm.arguments(
        model.path,
        spec.model.name or snapshot.name,
        role,
        spec.handoff,
        spec.lmcache,
        mine.parallelism,
        spec.rollout.drain_timeout,
        [*spec.engine.args, *mine.args],
        mine.nodes,
        servers,
    )
    return objects.container(
        "engine",
        snapshot.images["engine"],
        snapshot,
        command=list(vllm.COMMAND),
        args=arguments,
        env=merge_env(owned, defaults, _env(spec.engine.env), _env(mine.env)),
        ports=[
            {"name": "http", "containerPort": vllm.PORT, "protocol": "TCP"},
            {"name": "nixl-side", "containerPort": vllm.SIDE_CHANNEL_PORT, "protocol": "TCP"},
        ],
        resources=mine.resources.model_dump(by_alias=True, exclude_none=True, mode="json"),
        lifecycle={"preStop": {"sleep": {"seconds": vllm.PRE_STOP}}},
        volumeMounts=[
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "cache", "mountPath": "/cache"},
            {"name": "shm", "mountPath": "/dev/shm"},
            *model.mounts,
        ],
        **vllm.probes(),
    )


def _server(snapshot: Snapshot, spec: LMCacheSpec, slice_: str, shared: bool) -> dict[str, Any]:
    owned, defaults = lmcache.environment(spec)
    ports = [{"name": "lmc-http", "containerPort": lmcache.HTTP_PORT, "protocol": "TCP"}]
    if spec.p2p.enabled or shared:
        ports.append({"name": "lmc-data", "containerPort": lmcache.DATA_PORT, "protocol": "TCP"})
    if spec.p2p.enabled:
        ports.append({"name": "lmc-p2p", "containerPort": lmcache.P2P_PORT, "protocol": "TCP"})
    return objects.container(
        "lmcache",
        snapshot.images["lmcache"],
        snapshot,
        restartPolicy="Always",  # a native sidecar: up before the engine, down after it
        command=list(lmcache.COMMAND),
        args=lmcache.server_arguments(spec, f"http://{slice_}-coordinator:{lmcache.COORDINATOR_PORT}", shared),
        env=merge_env(owned, defaults),
        ports=ports,
        resources=lmcache.resources(spec, SHARED_MEMORY),
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}, {"name": "shm", "mountPath": "/dev/shm"}],
        **lmcache.probes(spec),
    )


def _env(env: list[EnvVar]) -> list[dict[str, Any]]:
    return [var.model_dump(by_alias=True, exclude_none=True) for var in env]
