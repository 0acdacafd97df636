"""What the reflectors keep of an object: small, frozen, free of any client type.

A pod of 20 KiB JSON becomes about half a KiB. `kube/facts.py` parses raw objects into these; everything else in the
operator sees only them, so a decision can be replayed from a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from pd_operator.core.placement.capacity import NodeCapacity, PodShape

LOST_AFTER = 120.0  # seconds after the end of its grace period; a kubelet that lives needs a few


@dataclass(frozen=True, slots=True)
class ContainerFact:
    """One container (or native sidecar) of a pod, from `status.(init)containerStatuses`."""

    name: str
    ready: bool = False
    started: bool = False
    restarts: int = 0
    waiting_reason: str = ""  # ImagePullBackOff, CrashLoopBackOff, CreateContainerConfigError, ...
    waiting_message: str = ""
    exit_code: int | None = None  # of the last termination (state.terminated, else lastState.terminated)
    exit_reason: str = ""  # OOMKilled, Error, ...
    exit_message: str = ""


@dataclass(frozen=True, slots=True)
class PodFact:
    """A pod of ours."""

    namespace: str
    name: str
    uid: str
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)  # only keys under pdserve.dev/ and smg.ai/
    owner_uid: str = ""  # of the controller owner (a ReplicaSet for Deployments)
    created: datetime | None = None
    deleting: bool = False
    phase: str = "Pending"
    node: str = ""
    ip: str = ""
    ready: bool = False  # condition Ready
    ready_since: datetime | None = None  # its lastTransitionTime, while it is True
    scheduled: bool = False  # condition PodScheduled
    scheduling_reason: str = ""  # Unschedulable, SchedulingGated
    scheduling_message: str = ""
    scheduling_since: datetime | None = None  # lastTransitionTime of PodScheduled
    nominated: str = ""  # node that is being made, or emptied, for it
    grace_ends: datetime | None = None  # deletionTimestamp: when its grace period ends
    containers: tuple[ContainerFact, ...] = ()  # init containers first

    def lost(self, now: datetime) -> bool:
        """Whether it should have ended long ago: its node is dead, and nobody is left to say that it has ended."""
        return self.grace_ends is not None and (now - self.grace_ends).total_seconds() > LOST_AFTER


@dataclass(frozen=True, slots=True)
class AutoscalerFact:
    """A HorizontalPodAutoscaler, of whomever."""

    namespace: str
    name: str
    group: str  # API group of what it scales
    kind: str
    target: str  # its name
    scaled_object: str = ""  # of KEDA, that made it


@dataclass(frozen=True, slots=True)
class UsageFact:
    """What one bound pod of the cluster takes, and whose it is when it is an engine of ours."""

    namespace: str
    name: str
    node: str
    requests: Mapping[str, int]  # core/placement/requests.py
    deployment: str = ""  # name of the PDDeployment, in the pod's namespace; "" = not ours
    slice: str = ""
    role: str = ""
    deleting: bool = False
    worker: bool = False  # not the pod of its replica that serves


@dataclass(frozen=True, slots=True)
class NodeFact:
    """A node: what placement reads of it."""

    capacity: NodeCapacity
    created: datetime | None = None


@dataclass(frozen=True, slots=True)
class WorkloadFact:
    """The part of a Deployment, or of a LeaderWorkerSet, that decisions read. A replica of the latter is a group of pods."""

    observed_generation: int = 0
    spec_replicas: int | None = None
    replicas: int = 0
    ready: int = 0
    updated: int = 0
    available: int = 0
    template_labels: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""  # message of the condition ReplicaFailure: why pods cannot be created
    late: bool = False  # condition Progressing: its controller saw no progress for progressDeadlineSeconds
    paused: bool = False  # spec.paused: a changed template rolls no pod
    shapes: tuple[PodShape, ...] = ()  # of the pods of one replica, the one that serves first; for engines that have a site
    size: int = 1  # pods of one replica


@dataclass(frozen=True, slots=True)
class ParentFact:
    """What the controller of one gateway says of the present generation of a route."""

    name: str  # "Gateway infra/public, https"
    controller: str
    refusal: str = ""  # its condition Accepted or ResolvedRefs that is False, in words; "" = it takes the route


@dataclass(frozen=True, slots=True)
class RouteFact:
    """The part of an HTTPRoute that decisions read."""

    backends: tuple[tuple[str, int], ...] = ()  # (Service, weight), sorted
    parents: tuple[ParentFact, ...] = ()  # those whose controllers have looked


@dataclass(frozen=True, slots=True)
class JobFact:
    """How a Job stands."""

    ended: str = ""  # Complete or Failed, "" while it runs
    ended_at: datetime | None = None
    message: str = ""  # of that condition
    pods: int = 0  # that it ever had


@dataclass(frozen=True, slots=True)
class ChildFact:
    """An object that we apply.

    `digest` is a hash of the whole object but `status` and `metadata` (metadata.labels and ownerReferences are in), as
    the server shows it: equal digests mean that nobody changed it since we applied it.
    """

    kind: str
    namespace: str
    name: str
    uid: str
    owner_uid: str = ""  # of the controller owner reference
    labels: Mapping[str, str] = field(default_factory=dict)
    applied_hash: str = ""  # annotation pdserve.dev/applied-hash
    generation: int = 0
    resource_version: str = ""
    digest: str = ""
    intact: bool = field(
        default=False, compare=False
    )  # a list showed that it is what the hash says: nobody changed what we applied
    deleting: bool = False
    workload: WorkloadFact | None = None  # of the kinds in names.WORKLOADS
    route: RouteFact | None = None  # HTTPRoutes only
    job: JobFact | None = None  # Jobs only
    replicas: int | None = None  # PDPool: spec.replicas
    status: dict[str, Any] | None = field(default=None, compare=False)  # PDPool, from a list: its status then
    site: str = ""  # annotation pdserve.dev/site
    created: datetime | None = None
    data: bytes = b""  # ControllerRevision: its `data` and `revision` as JSON bytes {"revision": N, "data": {...}}; else empty
