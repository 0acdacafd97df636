"""Router Deployment of a slice: its discovery is limited to the slice, so a handoff cannot leave it (invariant I3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pd_operator.core.names import (
    COMPONENT,
    DEPLOYMENT,
    FRONT,
    REVISION,
    ROLE,
    SLICE,
    Role,
    service_account,
    slice_labels,
    workload,
)
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render import objects
from pd_operator.render.template import merge
from pd_operator.upstream import backpressure, catalog, vllm


def deployment(snapshot: Snapshot, slice_: SlicePlan) -> objects.Manifest:
    """Router of a slice; the front label stands in its pod template while the slice serves, so the flip rolls its pods.

    A new router pod is Ready only when it sees a healthy prefill and a healthy decode; old ones go after that.
    """
    program = catalog.router(snapshot.spec)
    labels = slice_labels(snapshot.name, ROUTER, slice_.name, slice_.revision)
    selector = {DEPLOYMENT: snapshot.name, SLICE: slice_.name, COMPONENT: ROUTER}
    front = {FRONT: snapshot.name} if slice_.front else {}
    pod: dict[str, Any] = {
        "serviceAccountName": service_account(snapshot.name, ROUTER),
        "automountServiceAccountToken": True,  # it lists and watches the pods of its slice
        "enableServiceLinks": False,
        # As PID 1 a router that is still starting ignores SIGTERM (it has no handler yet) and then stays for its whole grace.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": program.GRACE_PERIOD,
        "securityContext": dict(objects.POD_SECURITY),
        "topologySpreadConstraints": objects.spread(selector),
        "containers": [_container(snapshot, slice_)],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    template = merge({"metadata": {"labels": labels | front}, "spec": pod}, snapshot.spec.router.template)
    body = {
        "replicas": snapshot.spec.router.replicas,
        "selector": {"matchLabels": selector},
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
        "progressDeadlineSeconds": snapshot.spec.rollout.progress_deadline_seconds,
        "revisionHistoryLimit": 2,
        "template": template,
    }
    return objects.manifest("apps/v1", "Deployment", snapshot, workload(slice_.name, ROUTER), labels, spec=body)


def discovery(snapshot: Snapshot, slice_: SlicePlan, role: Role) -> dict[str, str]:
    """Labels by which the router finds the engines of one role: those of this slice only."""
    return {DEPLOYMENT: snapshot.name, SLICE: slice_.name, REVISION: slice_.revision, ROLE: role}


def _container(snapshot: Snapshot, slice_: SlicePlan) -> dict[str, Any]:
    program, spec = catalog.router(snapshot.spec), snapshot.spec
    prefill, decode = (discovery(snapshot, slice_, role) for role in ("prefill", "decode"))
    hook = {"lifecycle": {"preStop": {"sleep": {"seconds": program.PRE_STOP}}}} if program.PRE_STOP else {}
    return objects.container(
        ROUTER,
        snapshot.images["router"],
        snapshot,
        command=list(program.COMMAND),
        args=program.arguments(snapshot.namespace, prefill, decode, vllm.PORT, spec.router.args, _defaults(snapshot)),
        env=program.environment(engine_api_key(snapshot)),
        ports=[
            {"name": "http", "containerPort": program.PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": program.METRICS_PORT, "protocol": "TCP"},
        ],
        resources={"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
        **hook,
        **program.probes(),
    )


def _defaults(snapshot: Snapshot) -> list[tuple[str, ...]]:
    """Limits that the revision asks for; routers of an older one are rendered from its own spec, so no edit changes them.

    And what the router needs where the engines ask for a key.
    """
    spec = snapshot.spec
    keyed = catalog.router(spec).keyed() if engine_api_key(snapshot) is not None else []
    arguments = [*spec.engine.args, *spec.prefill.args]
    return [*backpressure.router_limits(spec.router.type, spec.backpressure.max_queue_time, arguments), *keyed]


def engine_api_key(snapshot: Snapshot) -> Mapping[str, Any] | None:
    """Source of the engines' API key, when they have one (their routers and canaries need it)."""
    spec = snapshot.spec
    env = [*spec.decode.env, *spec.prefill.env, *spec.engine.env]
    return next((var.value_from for var in env if var.name == "VLLM_API_KEY"), None)
