"""The world of rollouts, with nodes in transfer domains and a scheduler that honours the affinities that we render.

Everything that placement knows is derived anew from what is there before each pass, as after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from random import Random
from typing import Any

import builders
from builders import NAMESPACE, NOW
from placing_world import GPU, KEY, OWNER, RACK, node
from rollout_cluster import Deployment, Pod, matches
from rollout_world import World

from pd_operator.api.conditions import Reason
from pd_operator.core.ledger import Ledger
from pd_operator.core.names import COMPONENT, FRONT, ROLE, ROLES, SITE, SLICE
from pd_operator.core.observed import ChildFact, NodeFact, PodFact, UsageFact
from pd_operator.core.placement.requests import pod_shape, replica_shape
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render.bundle import engine_templates
from pd_operator.render.site import FIELD, HOSTNAME

TICK = 20.0  # seconds


@dataclass
class PlacedWorld(World):
    """One PDDeployment on nodes; `racks` is node -> (domain, GPUs)."""

    racks: dict[str, tuple[str, int]] = field(default_factory=dict)
    guests: dict[str, int] = field(default_factory=dict)  # node -> GPUs that foreign pods hold
    at: dict[str, str] = field(default_factory=dict)  # pod -> node
    waits: dict[str, float] = field(default_factory=dict)  # pod -> when the scheduler first found no node
    random: Random = field(default_factory=lambda: Random(1))
    clock: float = 0.0
    required: bool = True

    def __post_init__(self) -> None:
        self.changes = builders.deep(RACK, self.changes)

    # --- the cluster ------------------------------------------------------------------------------------------------------

    def tick(self, times: int = 1) -> None:
        """See Cluster.tick."""
        for _ in range(times):
            self.clock += TICK
            super().tick()

    def free(self, name: str) -> int:
        """GPUs of a node that nobody holds."""
        held = sum(p.gpus for p in self.pods if self.at.get(p.name) == name)
        return self.racks[name][1] - self.guests.get(name, 0) - held

    def _collect(self) -> None:
        for p in self.pods:
            if self.at.get(p.name, "") not in self.racks and p.bound and p.gpus and p.ending is None:
                self._end(p)  # its node is gone
        super()._collect()
        alive = {p.name for p in self.pods}
        self.at = {name: n for name, n in self.at.items() if name in alive}

    def _schedule(self) -> None:
        for p in self.pods:
            if p.bound or p.ending is not None:
                continue
            if not p.gpus:
                p.bound = True
                continue
            fits = [n for n in sorted(self.racks) if self.free(n) >= p.gpus and self._admits(p, n)]
            if fits:
                self.at[p.name], p.bound = self.random.choice(fits), True
                self.waits.pop(p.name, None)
            else:
                self.waits.setdefault(p.name, self.clock)

    def _admits(self, p: Pod, name: str) -> bool:
        """Required node affinity and required pod affinity, with kube-scheduler's exception for the first pod of a series."""
        affinity = p.template["spec"].get("affinity", {})
        labels = {KEY: self.racks[name][0], HOSTNAME: name}
        for term in affinity.get("nodeAffinity", {}).get(FIELD, {}).get("nodeSelectorTerms", []):
            for e in term["matchExpressions"]:
                if (labels[e["key"]] in e["values"]) is not (e["operator"] == "In"):
                    return False
        for term in affinity.get("podAffinity", {}).get(FIELD, []):
            wanted = term["labelSelector"]["matchLabels"]
            there = {self.racks[n][0] for q in self.pods if (n := self.at.get(q.name)) in self.racks and matches(wanted, q.labels)}
            if (labels[KEY] not in there) if there else not matches(wanted, p.labels):
                return False
        return True

    def check(self) -> None:
        """Also: a slice's engines are in one domain (invariant I3), and no node holds more than it has."""
        super().check()
        where: dict[str, set[str]] = {}
        for p in self.pods:
            if p.gpus and p.ending is None and (n := self.at.get(p.name)) in self.racks:
                where.setdefault(p.labels[SLICE], set()).add(self.racks[n][0])
        if self.required:
            self.broken_rules += [f"{slice_} is in {sorted(d)}" for slice_, d in where.items() if len(d) > 1]

    # --- the operator -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What the operator sees, all of it derived from what is there."""
        base = replace(super().snapshot(), now=NOW + timedelta(seconds=self.clock))
        ledger = Ledger()
        for name, (domain, gpus) in self.racks.items():
            ledger.node(name, self._node(name, domain, gpus))
            if self.guests.get(name):
                ledger.pod(None, UsageFact("guests", name, name, {GPU: self.guests[name]}))
        for p in self.pods:
            if p.gpus and p.bound:
                mine = (builders.NAME, p.labels[SLICE], p.labels[ROLE])
                ledger.pod(None, UsageFact(NAMESPACE, p.name, self.at[p.name], {GPU: p.gpus}, *mine, p.ending is not None))
        for child in base.children:
            ledger.child(OWNER, None, child)
        templates = engine_templates(base)
        shapes = {role: replica_shape(role, [templates[role]["spec"]]) for role in ROLES}
        return replace(base, shapes=shapes, room=ledger.room(OWNER, KEY))

    def _node(self, name: str, domain: str, gpus: int) -> NodeFact:
        return node(name, domain, gpus)

    def child(self, d: Deployment) -> ChildFact:
        """With the site, as the watch shows it."""
        site = d.manifest["metadata"]["annotations"].get(SITE, "")
        base = super().child(d)
        if not site or base.workload is None:
            return base
        return replace(
            base, site=site, workload=replace(base.workload, shapes=(pod_shape(d.manifest["spec"]["template"]["spec"]),))
        )

    def pod(self, p: Pod) -> PodFact:
        """With its node and the scheduler's clock."""
        since = NOW + timedelta(seconds=self.waits[p.name]) if p.name in self.waits else None
        found = replace(super().pod(p), node=self.at.get(p.name, "n0") if p.bound else "", scheduling_since=since)
        return found if since or p.bound else replace(found, scheduling_reason="", scheduling_message="")

    def _check_deletion(self, gone: Deployment) -> None:
        if gone.part in ROLES:
            super()._check_deletion(gone)
            return
        if gone.part != ROUTER or FRONT not in gone.manifest["spec"]["template"]["metadata"]["labels"]:
            return
        engines = [p for p in self.pods if p.labels[SLICE] == gone.slice and p.labels[COMPONENT] == "engine" and p.ready]
        serves = {p.labels[ROLE] for p in engines} == set(ROLES)
        spec = builders.make_spec(self.changes)
        if not serves or spec.suspend or spec.rollout.type == "Recreate" or self._other_complete(gone.slice):
            return
        if self.plan.rollout.reason is not Reason.NO_CAPACITY_FOR_PAIR:
            self.broken_rules.append(f"{gone.slice} served and was ended: {self.plan.rollout.message}")

    def _other_complete(self, slice_: str) -> bool:
        """Or another slice that serves, with more ready pairs."""
        return super()._other_complete(slice_) or any(
            self._fronted(other) and self._effective(other) > self._effective(slice_)
            for other in {d.slice for d in self.deployments.values()} - {slice_}
        )

    def _fronted(self, slice_: str) -> bool:
        return any(p.ready and FRONT in p.labels and p.labels[SLICE] == slice_ for p in self.pods)

    def _effective(self, slice_: str) -> int:
        ready = [sum(p.ready for p in self.pods if p.labels[SLICE] == slice_ and p.labels.get(ROLE) == role) for role in ROLES]
        p, d = (self.changes.get(role, {}).get("replicas", 1) for role in ROLES)
        return min(ready[0] * d, ready[1] * p)

    def _current(self) -> bool:
        rolled = all(d.observed == d.generation and self.rolled(d) for d in self.deployments.values())
        return rolled and {d.manifest["metadata"]["labels"]["pdserve.dev/revision"] for d in self.deployments.values()} == {
            self.plan.revision
        }

    # --- for tests --------------------------------------------------------------------------------------------------------

    def domains(self) -> dict[str, list[str]]:
        """Slice -> domains of its engine pods, one entry a pod."""
        found: dict[str, list[str]] = {}
        for p in self.pods:
            if p.gpus and p.ending is None:
                found.setdefault(p.labels[SLICE], []).append(self.racks[self.at[p.name]][0] if p.bound else "-")
        return {slice_: sorted(d) for slice_, d in sorted(found.items())}

    def apply_all(self, changes: Mapping[str, Any]) -> None:
        """An edit, then quiet."""
        self.edit(changes)
        self.settle()
