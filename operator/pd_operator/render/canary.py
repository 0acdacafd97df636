"""Job of a slice's canary: the operator's image with another command, no token, no rights, the restricted profile.

A Job's template cannot be changed, and it names the pods of the moment: it is created once and never applied again.
"""

from __future__ import annotations

from typing import Any, Final

from pd_operator.core.canary_case import DEADLINE, KEY_VARIABLE, VARIABLE, Case, Engine
from pd_operator.core.names import ABOUT, CANARY, Role, base_labels, canary, service_account, slice_labels
from pd_operator.core.observed import PodFact
from pd_operator.core.plan import Canary
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render import objects
from pd_operator.render.router import engine_api_key
from pd_operator.render.template import merge
from pd_operator.upstream import catalog, lmcache, vllm

COMPONENT: Final = "canary"
BORROWED: Final = ("nodeSelector", "tolerations", "imagePullSecrets")  # of the router's template: it stands where the router may
MOST_ENGINES: Final = 64  # of a role: more say nothing new, and the case has to fit into an environment variable


def job(snapshot: Snapshot, plan: Canary) -> objects.Manifest:
    """The Job. One try: the operator decides about another one, from what this one saw."""
    slice_ = plan.slice
    numbered = {CANARY: str(plan.number), ABOUT: plan.about}
    labels = slice_labels(snapshot.name, COMPONENT, slice_.name, slice_.revision) | numbered
    key = engine_api_key(snapshot)
    env: list[dict[str, Any]] = [{"name": VARIABLE, "value": _case(snapshot, plan).model_dump_json(exclude_defaults=True)}]
    env += [{"name": KEY_VARIABLE, "valueFrom": dict(key)}] if key is not None else []
    container = objects.container(
        COMPONENT,
        snapshot.images["canary"],
        snapshot,
        command=["pd-operator"],
        args=["canary"],
        env=env,
        resources={"requests": {"cpu": "50m", "memory": "96Mi"}, "limits": {"memory": "256Mi"}},
        volumeMounts=[{"name": "tmp", "mountPath": "/tmp"}],
    )
    pod = {
        "serviceAccountName": service_account(snapshot.name, COMPONENT),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
        "securityContext": dict(objects.POD_SECURITY),
        "containers": [container],
        "volumes": [{"name": "tmp", "emptyDir": {}}],
    }
    theirs = snapshot.spec.router.template.get("spec") or {}
    template = {"metadata": {"labels": labels}, "spec": merge(pod, {k: theirs[k] for k in BORROWED if k in theirs})}
    body = {"backoffLimit": 0, "activeDeadlineSeconds": DEADLINE, "template": template}
    return objects.manifest("batch/v1", "Job", snapshot, canary(slice_.name, plan.number), labels, spec=body)


def account(snapshot: Snapshot) -> objects.Manifest:
    """Its ServiceAccount: no token, no Role."""
    name = service_account(snapshot.name, COMPONENT)
    body = {"automountServiceAccountToken": False}
    return objects.manifest("v1", "ServiceAccount", snapshot, name, base_labels(snapshot.name, COMPONENT), **body)


def _case(snapshot: Snapshot, plan: Canary) -> Case:
    spec, slice_ = snapshot.spec, plan.slice
    port = catalog.router(spec).METRICS_PORT
    return Case(
        mark=f"pdd-canary-{slice_.name}-{plan.number}",
        url=f"http://{slice_.name}.{snapshot.namespace}.svc",
        model=spec.model.name or snapshot.name,
        engine=spec.engine.type,
        engine_version=spec.engine.version,
        router=spec.router.type,
        router_version=catalog.router_version(spec),
        cache_version=spec.lmcache.version if spec.lmcache else "",
        chunk=spec.lmcache.chunk_size if spec.lmcache else 0,
        p2p=spec.lmcache.p2p.enabled if spec.lmcache else False,
        dark=plan.dark,
        prefill=_engines(snapshot, slice_.name, "prefill"),
        decode=_engines(snapshot, slice_.name, "decode"),
        routers=tuple(f"http://{_host(p)}:{port}" for p in _ready(snapshot, slice_.name, ROUTER)),
    )


def _engines(snapshot: Snapshot, slice_: str, role: Role) -> tuple[Engine, ...]:
    cached = snapshot.spec.lmcache is not None
    return tuple(
        Engine(
            pod=p.name,
            url=f"http://{_host(p)}:{vllm.PORT}",
            cache=f"http://{_host(p)}:{lmcache.HTTP_PORT}" if cached else "",
        )
        for p in _ready(snapshot, slice_, role)[:MOST_ENGINES]
    )


def _ready(snapshot: Snapshot, slice_: str, part: str) -> list[PodFact]:
    return [p for p in snapshot.pods_of(slice_, part) if p.ready and not p.deleting and p.ip]


def _host(pod: PodFact) -> str:
    return f"[{pod.ip}]" if ":" in pod.ip else pod.ip
