"""A PDDeployment among nodes: what placement sees, built from nodes, bound pods and workloads as the watches would."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

import builders
from builders import NAME, NAMESPACE, NOW

from pd_operator.core.ledger import Ledger
from pd_operator.core.names import (
    COMPONENT,
    DEPLOYMENT,
    GROUP_KIND,
    REVISION,
    ROLE,
    ROLES,
    SLICE,
    WORKER,
    Role,
    slice_labels,
    workload,
)
from pd_operator.core.observed import ChildFact, NodeFact, PodFact, UsageFact, WorkloadFact
from pd_operator.core.placement.capacity import NodeCapacity, PodShape
from pd_operator.core.placement.requests import replica_shape
from pd_operator.core.placing import Placing, place_slices, uncounted
from pd_operator.core.revision import pairing_hash
from pd_operator.core.sites import Kind, Site
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render.bundle import engine_templates, replica_specs

KEY = "example.org/rack"
GPU = "nvidia.com/gpu"
OWNER = (NAMESPACE, NAME)
RACK: dict[str, Any] = {"placement": {"transferDomain": {"topologyKey": KEY}}}
SHAPE = PodShape({GPU: 1})


def node(name: str, domain: str, gpus: int = 1, *, created: datetime | None = None, **fields: Any) -> NodeFact:
    """A node; domain "" has no label."""
    labels = {"kubernetes.io/hostname": name, **({KEY: domain} if domain else {})}
    allocatable = {GPU: gpus, "cpu": 64000, "memory": 2**39, "pods": 110}
    return NodeFact(NodeCapacity(name, labels, allocatable, **fields), created or NOW - timedelta(days=1))


def pinned(domain: str) -> Site:
    return Site(Kind.PINNED, KEY, domain)


@dataclass
class Slice:
    """A slice that exists: where its pods are (None = no node yet), of groups all pods with the leader first."""

    site: Site
    prefill: Sequence[str | None] = ()
    decode: Sequence[str | Sequence[str | None] | None] = ()
    index: int = 0
    front: bool = True
    ready: bool = True
    revision: str = ""
    waits_for: float = 0.0  # seconds that its unbound pods have been unschedulable; 0 = not tried yet
    pod_fields: Mapping[str, Any] = field(default_factory=dict)  # of unbound pods


@dataclass
class Racks:
    """The world of one test."""

    nodes: Sequence[NodeFact] = ()
    slices: Sequence[Slice] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)
    foreign: Mapping[str, int] = field(default_factory=dict)  # node -> GPUs that somebody else holds
    status: Mapping[str, Any] = field(default_factory=dict)
    observed: bool = True
    ledger: Ledger = field(default_factory=Ledger)

    def __post_init__(self) -> None:
        self.spec = builders.make_spec(builders.deep(RACK, self.changes))
        self.revision = pairing_hash(self.spec)
        self.children: list[ChildFact] = []
        self.pods: list[PodFact] = []
        for one in self.nodes:
            self.ledger.node(one.capacity.name, one)
        for name, gpus in self.foreign.items():
            self.ledger.pod(None, UsageFact("other", f"on-{name}", name, {GPU: gpus}))
        for one in self.slices:
            self._add(one)

    def name(self, index: int = 0) -> str:
        """Name of a slice of the current revision."""
        return f"{NAME}-{self.revision}-{index}"

    def snapshot(self, **fields: Any) -> Snapshot:
        """What one reconcile sees."""
        base = builders.make_snapshot(
            self.spec, children=tuple(self.children), pods=tuple(self.pods), status=dict(self.status), **fields
        )
        templates = engine_templates(base)
        return replace(
            base,
            shapes={role: replica_shape(role, replica_specs(base, templates, role)) for role in ROLES},
            room=self.ledger.room(OWNER, KEY) if self.observed else None,
            unseen=next(filter(None, map(uncounted, templates.values())), ""),
        )

    def place(self, **fields: Any) -> Placing:
        """The decision."""
        totals: dict[Role, int] = {role: self.spec.roles[role].replicas or 1 for role in ROLES}
        return place_slices(self.snapshot(**fields), self.revision, totals)

    def _add(self, one: Slice) -> None:
        revision = one.revision or self.revision
        name = f"{NAME}-{revision}-{one.index}"
        for role, where in (("prefill", one.prefill), ("decode", one.decode)):
            common = slice_labels(NAME, "engine", name, revision)
            groups = [(at,) if at is None or isinstance(at, str) else tuple(at) for at in where]
            for number, (leader, *workers) in enumerate(groups):
                self._pod(one, f"{workload(name, role)}-{number}", common | {ROLE: role}, leader)
                for index, at in enumerate(workers, 1):
                    self._pod(one, f"{workload(name, role)}-{number}-{index}", common | {WORKER: role}, at)
            ready = sum(all(group) for group in groups) if one.ready else 0
            self._workload(name, role, common | {ROLE: role}, len(where), ready, one.site, size=max(map(len, groups), default=1))
        labels = slice_labels(NAME, ROUTER, name, revision)
        self._workload(name, ROUTER, labels, 1, int(one.ready), Site(), {"pdserve.dev/front": NAME} if one.front else {})

    def _pod(self, one: Slice, name: str, labels: Mapping[str, str], at: str | None) -> None:
        since = {"scheduling_reason": "Unschedulable", "scheduling_message": f"0/9 nodes: Insufficient {GPU}."}
        since |= {"scheduling_since": NOW - timedelta(seconds=one.waits_for)} if one.waits_for else {}  # type: ignore[dict-item]
        unbound = {**(since if one.waits_for else {}), **one.pod_fields}
        fields: dict[str, Any] = {} if at else unbound
        self.pods.append(
            PodFact(
                NAMESPACE,
                name,
                f"uid-{name}",
                labels=labels,
                node=at or "",
                scheduled=at is not None,
                ready=at is not None and one.ready,
                **fields,
            )
        )
        if at:
            role, worker = labels.get(ROLE) or labels[WORKER], WORKER in labels
            self.ledger.pod(
                None, UsageFact(NAMESPACE, name, at, SHAPE.requests, labels[DEPLOYMENT], labels[SLICE], role, worker=worker)
            )

    def _workload(
        self,
        slice_: str,
        part: str,
        labels: Mapping[str, str],
        replicas: int,
        ready: int,
        site: Site,
        more: Mapping[str, str] | None = None,
        size: int = 1,
    ) -> None:
        fact = WorkloadFact(
            2,
            replicas,
            replicas,
            ready,
            replicas,
            ready,
            {**labels, **(more or {})},
            shapes=(SHAPE,) * size if site.encode() else (),
            size=size,
        )
        name = workload(slice_, part)
        child = ChildFact(
            "Deployment" if size == 1 else GROUP_KIND,
            NAMESPACE,
            name,
            f"uid-{name}",
            owner_uid=builders.UID,
            labels=labels,
            generation=2,
            workload=fact,
            site=site.encode(),
        )
        assert labels[COMPONENT] and labels[REVISION]
        self.children.append(child)
        self.ledger.child(OWNER, None, child)


def counts(placing: Placing) -> dict[str, tuple[str, int, int]]:
    """Slice -> (domain or kind, prefill, decode)."""
    return {t.name: (t.site.domain or t.site.kind.value, t.replicas["prefill"], t.replicas["decode"]) for t in placing.targets}
