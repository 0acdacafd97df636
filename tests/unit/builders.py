"""Snapshots, children and pods for tests of the pure core: everything has a default, a test names what it is about."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.names import (
    COMPONENT,
    DEPLOYMENT,
    FRONT,
    GROUP_KIND,
    REVISION,
    ROLE,
    ROLES,
    SLICE,
    slice_labels,
    slice_name,
    workload,
)
from pd_operator.core.observed import ChildFact, ContainerFact, PodFact, WorkloadFact
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.revision import pairing_hash
from pd_operator.core.snapshot import ROUTER, Snapshot, StoredRevision
from pd_operator.render.bundle import Bundle, render
from pd_operator.upstream import catalog

ROOT = Path(__file__).resolve().parents[2]
NAME, NAMESPACE, UID = "chat", "demo", "0000-chat"
NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
GPU = {"limits": {"nvidia.com/gpu": 1}}
MINIMAL: dict[str, Any] = {
    "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
    "engine": {"type": "vllm", "version": "0.32.0"},
    "prefill": {"resources": GPU},
    "decode": {"resources": GPU},
    "verification": "Disabled",  # most tests are not about canaries; the default is in test_i5_verification
}
IMAGES = {"vllm": "vllm/vllm-openai:v{}", "smg": "lightseekorg/smg:{}", "vllm-router": "vllm/vllm-router:v{}"}


def deep(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of `base` with `changes` laid over it; None takes a key away, lists are replaced."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        if value is None:
            merged.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = deep(merged[key], value)
        else:
            merged[key] = copy.deepcopy(value)
    return merged


def nested(path: str, value: Any) -> dict[str, Any]:
    """`a.b`, 1 -> {"a": {"b": 1}}."""
    for part in reversed(path.split(".")):
        value = {part: value}
    return dict(value)


def make_spec(changes: Mapping[str, Any] | None = None, **more: Any) -> PDDeploymentSpec:
    """The minimal spec with changes, by top-level field."""
    return PDDeploymentSpec.model_validate(deep(deep(MINIMAL, changes or {}), more))


def images(spec: PDDeploymentSpec) -> dict[str, str]:
    """What the install's image table and the spec give together."""
    engine = spec.engine.image or IMAGES.get(spec.engine.type, "").format(spec.engine.version)
    router = spec.router.image or IMAGES.get(spec.router.type, "").format(catalog.router_version(spec))
    server = (spec.lmcache.image or engine) if spec.lmcache else ""
    return {"engine": engine, "router": router, "lmcache": server, "canary": "example.org/pd-operator:1"}


def make_snapshot(spec: PDDeploymentSpec | Mapping[str, Any] | None = None, **fields: Any) -> Snapshot:
    """A world in which nothing exists yet; `spec` may be changes to the minimal one."""
    if not isinstance(spec, PDDeploymentSpec):
        spec = make_spec(spec)
    given = {"upstream": catalog.upstream(spec), "images": images(spec), "generation": 1, "server_version": (1, 37), **fields}
    return Snapshot(namespace=NAMESPACE, name=NAME, uid=UID, spec=spec, now=NOW, **given)


def rendered(spec: PDDeploymentSpec | Mapping[str, Any] | None = None, **fields: Any) -> tuple[Snapshot, Plan, Bundle]:
    """Snapshot, plan and manifests of a spec that is accepted."""
    snapshot = make_snapshot(spec, **fields)
    plan = make_plan(snapshot)
    assert plan.refusal is None, plan.refusal
    return snapshot, plan, render(snapshot, plan)


def manifests(bundle: Bundle, kind: str = "") -> Iterator[dict[str, Any]]:
    """All manifests, or those of one kind."""
    return (m for stage in bundle.stages for m in stage if not kind or m["kind"] == kind)


def by_name(bundle: Bundle) -> dict[tuple[str, str], dict[str, Any]]:
    """(kind, name) -> manifest."""
    return {(m["kind"], m["metadata"]["name"]): m for m in manifests(bundle)}


def pod_specs(bundle: Bundle) -> dict[str, dict[str, Any]]:
    """Name of the workload -> its pod template; NAME-worker for the workers of a LeaderWorkerSet."""
    found = {m["metadata"]["name"]: m["spec"]["template"] for m in manifests(bundle, "Deployment")}
    for group in manifests(bundle, GROUP_KIND):
        name, template = group["metadata"]["name"], group["spec"]["leaderWorkerTemplate"]
        found |= {name: template["leaderTemplate"], f"{name}-worker": template["workerTemplate"]}
    return found


def containers(template: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Containers of a pod template by name, sidecars included."""
    spec = template["spec"]
    return {c["name"]: c for c in [*spec.get("initContainers", []), *spec["containers"]]}


def stored(manifest: Mapping[str, Any]) -> StoredRevision:
    """What the operator reads back from a ControllerRevision that it wrote."""
    data = manifest["data"]
    return StoredRevision(
        manifest["metadata"]["name"], manifest["revision"], data["pairing"], data["roles"], data["templates"], data["spec"]
    )


def deployment(
    revision: str,
    role: str,
    *,
    replicas: int = 1,
    ready: int | None = None,
    updated: int | None = None,
    front: bool = False,
    settled: bool = True,
    name: str = NAME,
    **fields: Any,
) -> ChildFact:
    """A Deployment of a slice; `ready` and `updated` default to all, `settled=False` means that its status is of an older spec."""
    slice_ = slice_name(name, revision)
    component = "engine" if role in ROLES else role
    labels = slice_labels(name, component, slice_, revision) | ({ROLE: role} if role in ROLES else {})
    counted = replicas if ready is None else ready
    fact = WorkloadFact(
        observed_generation=2 if settled else 1,
        spec_replicas=replicas,
        replicas=replicas,
        ready=counted,
        updated=replicas if updated is None else updated,
        available=counted,
        template_labels=labels | ({FRONT: name} if front else {}),
    )
    child = workload(slice_, role)
    base = ChildFact(
        "Deployment",
        NAMESPACE,
        child,
        f"uid-{child}",
        owner_uid=UID,
        labels=labels,
        generation=2,
        workload=fact,
        resource_version="1",
    )
    return replace(base, **fields)


def pod(revision: str, role: str, number: int = 0, *, ready: bool = True, front: bool = False, **fields: Any) -> PodFact:
    """A pod of a slice: scheduled, with its main container as ready as the pod."""
    slice_ = slice_name(NAME, revision)
    labels = {DEPLOYMENT: NAME, SLICE: slice_, REVISION: revision, COMPONENT: "engine" if role in ROLES else role}
    labels |= {ROLE: role} if role in ROLES else {}
    labels |= {FRONT: NAME} if front else {}
    main = ContainerFact("engine" if role in ROLES else role, ready=ready, started=True)
    name = f"{workload(slice_, role)}-{number}"
    base = PodFact(NAMESPACE, name, f"uid-{name}", labels=labels, phase="Running", node="n0", ready=ready, scheduled=True)
    return replace(base, **{"containers": (main,), **fields})


def unschedulable(revision: str, role: str, number: int = 0, message: str = "") -> PodFact:
    """A pod that the scheduler finds no node for."""
    message = message or "0/2 nodes are available: 2 Insufficient nvidia.com/gpu. preemption: 0/2 nodes are available."
    return pod(
        revision,
        role,
        number,
        ready=False,
        scheduled=False,
        node="",
        phase="Pending",
        containers=(),
        scheduling_reason="Unschedulable",
        scheduling_message=message,
    )


def whole_slice(
    revision: str, *, front: bool, replicas: int = 1, routers: int = 2
) -> tuple[tuple[ChildFact, ...], tuple[PodFact, ...]]:
    """Children and pods of a slice in which everything is ready."""
    children = [deployment(revision, role, replicas=replicas) for role in ROLES]
    children.append(deployment(revision, ROUTER, replicas=routers, front=front))
    pods = [pod(revision, role, n) for role in ROLES for n in range(replicas)]
    pods += [pod(revision, ROUTER, n, front=front) for n in range(routers)]
    return tuple(children), tuple(pods)


def revision_of(changes: Mapping[str, Any] | None = None) -> str:
    """Pairing revision of the minimal spec with changes."""
    return pairing_hash(make_spec(changes))


def templates_of(changes: Mapping[str, Any] | None = None, number: int = 1) -> StoredRevision:
    """The stored revision that a spec leaves behind."""
    _, _, bundle = rendered(changes)
    return replace(stored(next(manifests(bundle, "ControllerRevision"))), number=number)


def serving(changes: Mapping[str, Any] | None = None, replicas: int = 1, **fields: Any) -> Snapshot:
    """The minimal spec with changes, up and serving."""
    spec = make_spec(changes)
    children, pods = whole_slice(pairing_hash(spec), front=True, replicas=replicas, routers=spec.router.replicas)
    return make_snapshot(spec, **{"children": children, "pods": pods, "revisions": (templates_of(changes),), **fields})


def model_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Every path of a model down to what is no model of ours: `lmcache`, `lmcache.p2p`, `lmcache.p2p.enabled`."""
    for name, field in model.model_fields.items():
        path = f"{prefix}{field.alias or name}"
        yield path
        union = isinstance(field.annotation, UnionType)
        for inner in get_args(field.annotation) if union else [field.annotation]:
            if isinstance(inner, type) and issubclass(inner, BaseModel):
                yield from model_paths(inner, f"{path}.")


# A value for each leaf of the schema that differs from its default and from the minimal spec, with what it needs beside it.
# tests that walk the schema fail when a field is missing here.
BOUNDS = {"maxReplicas": 4}
SCALING = {"prefill": BOUNDS, "decode": BOUNDS}
OTHER: dict[str, Any] = {
    "suspend": True,
    "model.uri": "hf://org/another",
    "model.name": "another",
    "model.configMapRef.name": "config",
    "engine.type": "sglang",
    "engine.version": "0.33.0",
    "engine.image": "example.org/engine:1",
    "engine.args": ["--enforce-eager"],
    "engine.env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
    "handoff.onFailure": "Fail",
    "handoff.leaseDuration": "45s",
    **{
        f"{role}.{path}": value
        for role in ROLES
        for path, value in {
            "replicas": 3,
            "parallelism.tensor": 2,
            "parallelism.pipeline": 2,
            "parallelism.data": 2,
            "parallelism.expert": True,
            "nodes": 2,
            "resources.limits": {"nvidia.com/gpu": 2},
            "resources.requests": {"cpu": 2},
            "args": ["--enforce-eager"],
            "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
            "template": {"spec": {"priorityClassName": "high"}},
        }.items()
    },
    "lmcache.version": "0.5.6",
    "lmcache.image": "example.org/lmcache:1",
    "lmcache.l1Size": "1Gi",
    "lmcache.chunkSize": 64,
    "lmcache.transfer": "Server",
    "lmcache.p2p.enabled": True,
    "router.type": "vllm-router",
    "router.version": "1.12.0",
    "router.image": "example.org/router:1",
    "router.replicas": 3,
    "router.args": ["--policy=random"],
    "router.template": {"spec": {"priorityClassName": "high"}},
    "gateway.parentRefs": [{"name": "public"}],
    "gateway.hostnames": ["chat.example.org"],
    "placement.transferDomain.topologyKey": "topology.kubernetes.io/zone",
    "placement.transferDomain.mode": "Preferred",
    "placement.maxDomains": 2,
    "placement.schedulingTimeout": "20m",
    "slo.ttft": "2s",
    "slo.ttftPerThousandTokens": "100ms",
    "slo.itl": "50ms",
    "slo.percentile": 90,
    "scaling.mode": "Advisory",
    "scaling.maxGPUs": 8,
    "scaling.priority": 1,
    "scaling.headroomPercent": 80,
    **{f"scaling.{role}.{path}": value for role in ROLES for path, value in {"minReplicas": 2, "maxReplicas": 8}.items()},
    "backpressure.maxQueueTime": "1s",
    "rollout.type": "Recreate",
    "rollout.maxSurge": 1,
    "rollout.maxUnavailable": 0,
    "rollout.paused": True,
    "rollout.restartID": "again",
    "rollout.progressDeadlineSeconds": 60,
    "rollout.drainTimeout": "60s",
    "verification": "Required",
}
ONE_VALUE = frozenset({"handoff.connector"})  # fields of which the schema knows one value only


def other(path: str) -> dict[str, Any]:
    """The smallest changes to the minimal spec that set a leaf to another value."""
    changes = nested(path, OTHER[path])
    return deep({"scaling": SCALING}, changes) if path.startswith("scaling.") else changes


def leaves() -> list[str]:
    """Paths of the schema below which there is nothing."""
    paths = list(model_paths(PDDeploymentSpec))
    return [p for p in paths if not any(q.startswith(f"{p}.") for q in paths)]


def conditions(status: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Type -> condition."""
    return {c["type"]: c for c in status["conditions"]}


def kstatus(obj: Mapping[str, Any]) -> str:
    """What sigs.k8s.io/cli-utils pkg/kstatus makes of an object of a kind that it does not know: InProgress, Failed or Current."""
    status = obj.get("status", {})
    if "observedGeneration" in status and status["observedGeneration"] != obj["metadata"]["generation"]:
        return "InProgress"
    found = {c["type"]: c["status"] for c in status.get("conditions", [])}
    if found.get("Reconciling") == "True":
        return "InProgress"
    if found.get("Stalled") == "True":
        return "Failed"
    return "Current" if found.get("Ready", "True") == "True" else "InProgress"
