"""Snapshot: all that one reconcile knows, taken at one instant. The plan depends on nothing else (invariant I2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.capabilities import Refusal, Upstream
from pd_operator.core.compatibility_model import Model
from pd_operator.core.evidence.watch import Evidence
from pd_operator.core.groups import rolling
from pd_operator.core.ledger import Room
from pd_operator.core.names import COMPONENT, DEPLOYMENT_KIND, GROUP_KIND, REVISION, ROLE, SLICE, WORKER, WORKLOADS, Role
from pd_operator.core.observed import AutoscalerFact, ChildFact, PodFact
from pd_operator.core.placement.capacity import ReplicaShape
from pd_operator.core.scaled import Scaled

ROUTER: Final = "router"


@dataclass(frozen=True, slots=True)
class Reference:
    """An object of the namespace that the spec names."""

    kind: str  # Secret, ConfigMap, PersistentVolumeClaim
    name: str
    field: str  # where the spec names it


@dataclass(frozen=True, slots=True)
class Install:
    """Settings of this install that change what is rendered."""

    name: str = "pd-operator"
    namespace: str = "pd-operator"
    pull_policy: str = "IfNotPresent"
    monitoring_namespace: str = "monitoring"  # whose pods may read LMCache's HTTP port


@dataclass(frozen=True, slots=True)
class StoredRevision:
    """A ControllerRevision of ours: the pod templates that were rendered when it was made."""

    name: str
    number: int
    pairing: str  # hash of class A
    roles: Mapping[str, str]  # role -> hash of class B
    templates: Mapping[str, Mapping[str, Any]]  # role -> pod template
    spec: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One PDDeployment and its world."""

    namespace: str
    name: str
    uid: str
    generation: int
    spec: PDDeploymentSpec
    now: datetime
    upstream: Upstream
    images: Mapping[str, str]  # engine, router, lmcache -> image; "" where none is known
    status: Mapping[str, Any] = field(default_factory=dict)
    children: tuple[ChildFact, ...] = ()  # only those whose controller owner is this object
    pods: tuple[PodFact, ...] = ()
    unshown: Mapping[str, str] = field(default_factory=dict)  # slice that we made and no watch has shown -> its site's annotation
    revisions: tuple[StoredRevision, ...] = ()
    missing: tuple[Reference, ...] = ()
    conflicts: tuple[str, ...] = ()  # "Service chat": objects with our names that are not ours
    install: Install = field(default_factory=Install)
    server_version: tuple[int, int] = (1, 29)
    missing_kinds: Mapping[str, str] = field(default_factory=dict)  # optional kind that nothing can be made of -> why
    # Of placement; empty when the spec names no topology key.
    shapes: Mapping[Role, ReplicaShape] = field(default_factory=dict)
    room: Room | None = None  # None: this install must not read nodes
    unseen: str = ""  # why node capacity says nothing about these pods; "" when it does
    autoscalers: tuple[AutoscalerFact, ...] = ()  # those that scale its PDPools or workloads, by name
    scaled: Scaled | None = None  # what the last scaling tick decided
    evidence: Evidence | None = None  # what the last look at the counters found; None: none was made yet
    model: Model | Refusal | None = None  # spec.model.configMapRef, or why it cannot be read; None: there is none, or it is missing

    def deployments(self) -> dict[str, dict[str, ChildFact]]:
        """Slice -> role (or router, coordinator) -> its workload, a Deployment or a LeaderWorkerSet."""
        found: dict[str, dict[str, ChildFact]] = {}
        for child in sorted(self.children, key=lambda c: (c.name, c.kind)):
            slice_ = child.labels.get(SLICE)
            if child.kind in WORKLOADS and slice_:
                parts, part = found.setdefault(slice_, {}), child.labels.get(ROLE) or child.labels.get(COMPONENT, "")
                parts[part] = self._rolling(parts[part], child) if part in parts else child
        return found

    def kind_of(self, role: str) -> str:
        """Kind of the workload that the spec asks for."""
        return GROUP_KIND if role in self.spec.roles and self.spec.roles[role].nodes > 1 else DEPLOYMENT_KIND

    def turning(self, slice_: str, role: str) -> bool:
        """Whether a role's pods are still of the kind of workload that the spec asked for before, and nothing has come for it."""
        child = self.deployments().get(slice_, {}).get(role)
        return child is not None and child.kind != self.kind_of(role)

    def _rolling(self, one: ChildFact, other: ChildFact) -> ChildFact:
        """Two workloads of one role of one slice: `nodes` went to 1 or from it, and one takes over."""
        wanted = self.kind_of(one.labels.get(ROLE, ""))
        return rolling(one, other) if one.kind == wanted else rolling(other, one)

    def pods_of(self, slice_: str, role: str) -> tuple[PodFact, ...]:
        """Pods of a role (or router, coordinator) of a slice, by name."""
        mine = (p for p in self.pods if p.labels.get(SLICE) == slice_ and (p.labels.get(ROLE) or p.labels.get(COMPONENT)) == role)
        return tuple(sorted(mine, key=lambda p: p.name))

    def engines_of(self, slice_: str, role: str) -> tuple[PodFact, ...]:
        """All pods of a role of a slice, by name: those that serve, one for each replica, and the workers of groups."""
        mine = (p for p in self.pods if p.labels.get(SLICE) == slice_ and role in (p.labels.get(ROLE), p.labels.get(WORKER)))
        return tuple(sorted(mine, key=lambda p: p.name))

    def child(self, kind: str, name: str) -> ChildFact | None:
        """A child by kind and name."""
        return next((c for c in self.children if c.kind == kind and c.name == name), None)

    def slices_seen(self) -> frozenset[str]:
        """Names of slices that something still carries."""
        made, pods = (c.labels.get(SLICE, "") for c in self.children), (p.labels.get(SLICE, "") for p in self.pods)
        return frozenset({*made, *pods, *self.unshown} - {""})

    def revision_of(self, slice_: str) -> str:
        """Pairing revision of an observed slice."""
        return next((c.labels.get(REVISION, "") for c in self.children if c.labels.get(SLICE) == slice_), "")
