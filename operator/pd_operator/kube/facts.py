"""Raw JSON of the API server -> the facts of `core/observed.py`.

Pods are many and change often, so they go through a slim model (`kube/pages.py`). Children are few and are hashed whole, so they
become a dict first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any

from pydantic import Field

from pd_operator.core.names import APPLIED_HASH, COMPONENT, DEPLOYMENT_KIND, GROUP_KIND, REVISION_COMPONENT, SITE
from pd_operator.core.observed import ChildFact, ContainerFact, JobFact, PodFact, WorkloadFact
from pd_operator.core.placement.requests import group_shapes, pod_shape
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.owned import intact
from pd_operator.kube.pages import Event, Meta, Page, Slim, SlimDecoder, Thing, by_namespace
from pd_operator.kube.routes import route
from pd_operator.kube.store import Key

KEPT_ANNOTATIONS = ("pdserve.dev/", "smg.ai/")


class _Owner(Slim):
    uid: str = ""
    controller: bool = False


class _Meta(Meta):
    uid: str = ""
    annotations: dict[str, str] = Field(default={})
    owner_references: tuple[_Owner, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None


class _Terminated(Slim):
    exit_code: int = 0
    reason: str = ""
    message: str = ""


class _Waiting(Slim):
    reason: str = ""
    message: str = ""


class _State(Slim):
    waiting: _Waiting | None = None
    terminated: _Terminated | None = None


class _Container(Slim):
    name: str = ""
    ready: bool = False
    started: bool | None = None
    restart_count: int = 0
    state: _State = _State()
    last_state: _State = _State()


class _Condition(Slim):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""
    last_transition_time: datetime | None = None


class _PodSpec(Slim):
    node_name: str = ""


class _PodStatus(Slim):
    phase: str = "Pending"
    pod_ip: str = Field(default="", alias="podIP")
    nominated_node_name: str = ""
    conditions: tuple[_Condition, ...] = ()
    init_container_statuses: tuple[_Container, ...] = ()
    container_statuses: tuple[_Container, ...] = ()


class _Pod(Thing):
    metadata: _Meta = _Meta()
    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


def _container(raw: _Container) -> ContainerFact:
    ended = raw.state.terminated or raw.last_state.terminated
    waiting = raw.state.waiting
    return ContainerFact(
        name=raw.name,
        ready=raw.ready,
        started=bool(raw.started),
        restarts=raw.restart_count,
        waiting_reason=waiting.reason if waiting else "",
        waiting_message=waiting.message if waiting else "",
        exit_code=ended.exit_code if ended else None,
        exit_reason=ended.reason if ended else "",
        exit_message=ended.message if ended else "",
    )


def _pod(raw: _Pod) -> PodFact:
    meta, status = raw.metadata, raw.status
    conditions = {condition.type: condition for condition in status.conditions}
    ready = conditions.get("Ready", _Condition())
    scheduled = conditions.get("PodScheduled", _Condition())
    return PodFact(
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        labels=meta.labels,
        annotations={key: value for key, value in meta.annotations.items() if key.startswith(KEPT_ANNOTATIONS)},
        owner_uid=next((owner.uid for owner in meta.owner_references if owner.controller), ""),
        created=meta.creation_timestamp,
        deleting=meta.deletion_timestamp is not None,
        phase=status.phase,
        node=raw.spec.node_name,
        ip=status.pod_ip,
        ready=ready.status == "True",
        ready_since=ready.last_transition_time if ready.status == "True" else None,
        scheduled=scheduled.status == "True",
        scheduling_reason=scheduled.reason,
        scheduling_message=scheduled.message,
        scheduling_since=scheduled.last_transition_time,
        nominated=status.nominated_node_name,
        grace_ends=meta.deletion_timestamp,
        containers=tuple(_container(item) for item in (*status.init_container_statuses, *status.container_statuses)),
    )


class PodDecoder(SlimDecoder[_Pod, PodFact]):
    """Pods, keyed by (namespace, name)."""

    def __init__(self) -> None:
        super().__init__(_Pod, by_namespace, _pod)


class ChildDecoder:
    """Children of one kind, keyed by (kind, namespace, name)."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def page(self, raw: bytes) -> Page[ChildFact]:
        """See Decoder."""
        page = json.loads(raw)
        return Page(
            page["metadata"]["resourceVersion"],
            page["metadata"].get("continue", ""),
            [(self._key(obj), self._listed(obj)) for obj in page["items"] or ()],
        )

    def event(self, raw: bytes) -> Event[ChildFact]:
        """See Decoder."""
        event = json.loads(raw)
        obj = event["object"]
        version = obj.get("metadata", {}).get("resourceVersion", "")
        if event["type"] in {"BOOKMARK", "ERROR"}:
            return Event(event["type"], version)
        return Event(event["type"], version, self._key(obj), child(self._kind, obj))

    def _listed(self, obj: Mapping[str, Any]) -> ChildFact:
        """Of a list it is known whether anybody changed it, and a PDPool's status: a new process asks that of all of them, and
        neither reads each one nor writes any for it."""
        known = intact(self._kind, KINDS[self._kind].api_version, obj)
        return replace(child(self._kind, obj), intact=known, status=obj.get("status", {}) if self._kind == "PDPool" else None)

    def _key(self, obj: Mapping[str, Any]) -> Key:
        return (self._kind, obj["metadata"].get("namespace", ""), obj["metadata"]["name"])


def digest(kind: str, obj: Mapping[str, Any]) -> str:
    """16 hex of SHA-256 over what the server shows, without status, metadata but labels, ownerReferences and our site.

    Equal digests mean that nobody changed what we apply: timestamps, managedFields and resourceVersion are left out, and
    so are a PDPool's `replicas`, which belong to /scale.
    """
    meta = obj.get("metadata", {})
    body = {key: value for key, value in obj.items() if key not in {"status", "metadata", "apiVersion", "kind"}}
    if kind == "PDPool":
        body["spec"] = {key: value for key, value in body.get("spec", {}).items() if key != "replicas"}
    body["metadata"] = [meta.get("labels"), meta.get("ownerReferences")]
    site = (meta.get("annotations") or {}).get(SITE)
    if site:
        body["metadata"].append(site)
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def child(kind: str, obj: Mapping[str, Any]) -> ChildFact:
    """The fact of one child object, from a list, a watch or the answer to an apply."""
    meta = obj["metadata"]
    owners, labels = meta.get("ownerReferences") or (), meta.get("labels") or {}
    site = (meta.get("annotations") or {}).get(SITE, "")
    return ChildFact(
        kind=kind,
        namespace=meta.get("namespace", ""),
        name=meta["name"],
        uid=meta["uid"],
        owner_uid=next((owner["uid"] for owner in owners if owner.get("controller")), ""),
        labels=labels,
        applied_hash=(meta.get("annotations") or {}).get(APPLIED_HASH, ""),
        generation=meta.get("generation", 0),
        resource_version=meta.get("resourceVersion", ""),
        digest=digest(kind, obj),
        deleting="deletionTimestamp" in meta,
        workload=WORKLOAD[kind](obj, site) if kind in WORKLOAD else None,
        route=route(obj) if kind == "HTTPRoute" else None,
        job=_job(obj) if kind == "Job" else None,
        replicas=(obj.get("spec") or {}).get("replicas") if kind == "PDPool" else None,
        created=_time(meta.get("creationTimestamp")),
        site=site,
        # Those of a StatefulSet (of the leaders of a LeaderWorkerSet) bear the labels of its pods, ours among them.
        data=_revision(obj) if kind == "ControllerRevision" and labels.get(COMPONENT) == REVISION_COMPONENT else b"",
    )


def _workload(obj: Mapping[str, Any], site: str) -> WorkloadFact:
    spec, status = obj.get("spec", {}), obj.get("status", {})
    return WorkloadFact(
        observed_generation=status.get("observedGeneration", 0),
        spec_replicas=spec.get("replicas"),
        replicas=status.get("replicas", 0),
        ready=status.get("readyReplicas", 0),
        updated=status.get("updatedReplicas", 0),
        available=status.get("availableReplicas", 0),
        template_labels=spec.get("template", {}).get("metadata", {}).get("labels") or {},
        failure=next(
            (c.get("message", "") for c in status.get("conditions", ()) if c["type"] == "ReplicaFailure" and c["status"] == "True"),
            "",
        ),
        late=any(
            c["type"] == "Progressing" and c.get("reason") == "ProgressDeadlineExceeded" for c in status.get("conditions", ())
        ),
        paused=bool(spec.get("paused")),
        shapes=(pod_shape(spec.get("template", {}).get("spec", {})),) if site else (),
    )


def _job(obj: Mapping[str, Any]) -> JobFact:
    """`Failed` comes after its pods are gone or done; `FailureTarget` before that says nothing yet."""
    status = obj.get("status", {})
    conditions = status.get("conditions") or ()
    ended: Mapping[str, Any] = next((c for c in conditions if c["type"] in ("Complete", "Failed") and c["status"] == "True"), {})
    pods = sum(int(status.get(count) or 0) for count in ("active", "succeeded", "failed"))
    return JobFact(ended.get("type", ""), _time(ended.get("lastTransitionTime")), ended.get("message", ""), pods)


def _group_workload(obj: Mapping[str, Any], site: str) -> WorkloadFact:
    """A LeaderWorkerSet: its counts are of groups, and a group counts as ready when all of its pods are (pkg/controllers of LWS
    0.9.0, updateConditions). It has no count of its own of those that are available, and no minReadySeconds."""
    spec, status = obj.get("spec", {}), obj.get("status", {})
    template, strategy = spec.get("leaderWorkerTemplate", {}), spec.get("rolloutStrategy", {})
    size, ready = template.get("size", 1), status.get("readyReplicas", 0)
    worker = template.get("workerTemplate", {})
    leader = template.get("leaderTemplate") or worker
    return WorkloadFact(
        observed_generation=status.get("observedGeneration", 0),
        spec_replicas=spec.get("replicas"),
        replicas=status.get("replicas", 0),
        ready=ready,
        updated=status.get("updatedReplicas", 0),
        available=ready,
        paused=bool(strategy.get("rollingUpdateConfiguration", {}).get("partition")),
        template_labels=leader.get("metadata", {}).get("labels") or {},
        shapes=group_shapes(leader.get("spec", {}), worker.get("spec", {}), size) if site else (),
        size=size,
    )


WORKLOAD: Mapping[str, Callable[[Mapping[str, Any], str], WorkloadFact]] = {
    DEPLOYMENT_KIND: _workload,
    GROUP_KIND: _group_workload,
}


def _revision(obj: Mapping[str, Any]) -> bytes:
    kept = {"revision": obj.get("revision", 0), "data": obj.get("data")}
    return json.dumps(kept, sort_keys=True, separators=(",", ":")).encode()


def _time(value: str | None) -> datetime | None:
    return datetime.fromisoformat(value) if value else None


def error_of(raw: bytes) -> tuple[int, str, str]:
    """(code, reason, message) of the Status inside an ERROR line."""
    status = json.loads(raw).get("object", {})
    return int(status.get("code") or 500), str(status.get("reason", "")), str(status.get("message", ""))
