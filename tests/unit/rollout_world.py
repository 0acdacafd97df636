"""The operator's plan at work in a small cluster, with a user who edits.

Each write is checked against what must hold at every step; what does not is kept in `broken_rules`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import builders
from builders import kstatus
from rollout_cluster import Cluster, Deployment, matches

from pd_operator.api.conditions import Reason
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.kept import Scaling
from pd_operator.core.names import COMPONENT, FRONT, REVISION, ROLES, SLICE
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.prune import Deletion, prune
from pd_operator.core.rollout import State
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status
from pd_operator.kube.routes import route
from pd_operator.render.bundle import render


@dataclass
class World(Cluster):
    """One PDDeployment and all that follows from it."""

    changes: dict[str, Any] = field(default_factory=dict)  # to the minimal spec
    broken_rules: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, str]] = field(default_factory=list)  # slices of each plan, without repetitions
    generation: int = 1
    plan: Plan = field(init=False)

    # --- the user ---------------------------------------------------------------------------------------------------------

    def edit(self, changes: Mapping[str, Any]) -> None:
        """Lay changes over the spec."""
        self.changes = builders.deep(self.changes, changes)
        self.generation += 1

    def pairing_edit(self, value: int) -> None:
        """An edit of class A; equal values give equal revisions."""
        self.edit({"engine": {"args": [f"--max-num-seqs={value}"]}})

    def revision(self, value: int) -> str:
        """Revision of `pairing_edit(value)` in the present spec."""
        return builders.revision_of(builders.deep(self.changes, {"engine": {"args": [f"--max-num-seqs={value}"]}}))

    # --- the operator -----------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """What the operator sees."""
        children = [self.child(d) for d in self.deployments.values()]
        children += [self.other(kind, name, obj) for (kind, name), obj in self.objects.items()]
        revisions = [builders.stored(obj) for (kind, _), obj in self.objects.items() if kind == "ControllerRevision"]
        return builders.make_snapshot(
            _spec(json.dumps(self.changes)),
            children=tuple(children),
            pods=tuple(self.pod(p) for p in self.pods),
            revisions=tuple(revisions),
            status=self.status,
            generation=self.generation,
        )

    def reconcile(self, crash_after: int | None = None) -> int:
        """One pass, cut off after so many writes; returns how many changed something."""
        snapshot = self.snapshot()
        self.plan = plan = make_plan(snapshot)
        if not self.steps or self.steps[-1] != self.slices():
            self.steps.append(self.slices())
        writes: list[Callable[[], int]] = []
        if plan.refusal is None:
            bundle = render(snapshot, plan)
            plan = replace(plan, renderer_changed=bundle.renderer_changed)
            writes += [lambda m=m: self._apply(m) for stage in bundle.stages for m in stage]
            writes += [lambda s=s: self._number(s) for s in plan.scalings]
            writes += [lambda r=r: self._scale(r) for r in ROLES if plan.pools[r].scale]
            writes += [lambda d=d: self._delete(d) for d in prune(snapshot, plan, bundle.keys)]
        done = 0
        for write in writes:
            if crash_after is not None and done >= crash_after:
                return done
            done += write()
        if any(d.generation != d.observed for d in self.deployments.values()) and plan.rollout.reason is Reason.UPDATED:
            plan = replace(plan, rollout=replace(plan.rollout, reason=Reason.ROLLING_OUT))  # as controller/reconcile.py does
        self._check_route()
        self.status = build_status(snapshot, plan)
        self._check_status()
        return done

    def _apply(self, manifest: dict[str, Any]) -> int:
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind == "Deployment":
            return self._apply_deployment(name, manifest)
        old = self.objects.get((kind, name))
        if kind == "PDPool" and old and "replicas" not in manifest["spec"]:
            manifest = {**manifest, "spec": {**manifest["spec"], "replicas": old["spec"]["replicas"]}}
            manifest["metadata"] = old["metadata"]  # its hash changes with the first number, once
        self.objects[kind, name] = manifest
        return int(old != manifest)

    def _apply_deployment(self, name: str, manifest: dict[str, Any]) -> int:
        old = self.deployments.get(name)
        if old is None:
            self.deployments[name] = Deployment(manifest, f"uid-{name}-{next(self.numbers)}")
            return 1
        if old.manifest == manifest:
            return 0
        if old.manifest["spec"]["selector"] != manifest["spec"]["selector"]:
            self.broken_rules.append(f"the selector of {name} changed: the server refuses that")
        old.generation += old.manifest["spec"] != manifest["spec"]
        old.manifest = manifest
        return 1

    def _number(self, scaling: Scaling) -> int:
        """A merge patch of `spec.replicas`."""
        found = self.deployments[scaling.name]
        found.manifest = {**found.manifest, "spec": {**found.manifest["spec"], "replicas": scaling.replicas}}
        found.generation += 1
        return 1

    def _scale(self, role: str) -> int:
        pool = self.objects["PDPool", f"{builders.NAME}-{role}"]
        self.objects["PDPool", f"{builders.NAME}-{role}"] = {
            **pool,
            "spec": {**pool["spec"], "replicas": self.plan.pools[role].number},  # type: ignore[index]
        }
        return 1

    def _delete(self, deletion: Deletion) -> int:
        if deletion.kind != "Deployment":
            return int(self.objects.pop((deletion.kind, deletion.name), None) is not None)
        gone = self.deployments[deletion.name]
        self._check_deletion(gone)
        del self.deployments[deletion.name]
        return 1

    # --- what must hold at every step -------------------------------------------------------------------------------------

    def _check_deletion(self, gone: Deployment) -> None:
        if gone.part in ROLES:
            routers = [d for d in self.deployments.values() if d.slice == gone.slice and d.part == ROUTER]
            routers += [p for p in self.pods if p.labels[SLICE] == gone.slice and p.labels[COMPONENT] == ROUTER]  # type: ignore[misc]
            if routers:
                self.broken_rules.append(f"{gone.manifest['metadata']['name']} deleted while routers of its slice exist")
            return
        if gone.part != ROUTER or FRONT not in gone.manifest["spec"]["template"]["metadata"]["labels"]:
            return
        if gone.slice in self.backends():
            self.broken_rules.append(f"the routers of {gone.slice} end while the route leads to it")
        spec = builders.make_spec(self.changes)
        if spec.suspend or spec.rollout.type == "Recreate" or self._other_complete(gone.slice):
            return
        name = gone.manifest["metadata"]["name"]
        if self.plan.rollout.reason is not Reason.NO_CAPACITY_FOR_PAIR:
            self.broken_rules.append(f"{name} deleted before another slice was complete: {self.plan.rollout.message}")
        target = self.plan.target
        rest = {p.labels[SLICE] for p in self.pods if p.gpus} - {gone.slice, target.name if target else ""}
        if rest:
            self.broken_rules.append(f"{name} deleted for want of room while {sorted(rest)} still hold some")

    def _other_complete(self, slice_: str) -> bool:
        """Whether another slice has everything ready, its fronted routers too."""
        for other in {d.slice for d in self.deployments.values()} - {slice_}:
            parts = [d for d in self.deployments.values() if d.slice == other]
            fronted = any(p.ready and FRONT in p.labels and p.labels[SLICE] == other for p in self.pods)
            if fronted and len(parts) >= 3 and all(self.rolled(d) for d in parts):
                return True
        return False

    def _check_status(self) -> None:
        ready = next(c for c in self.status["conditions"] if c["type"] == "Ready")
        if ready["status"] == "True" and not self.endpoints():
            self.broken_rules.append("Ready is True, and no ready router carries the front label")
        if kstatus({"metadata": {"generation": self.generation}, "status": self.status}) == "Current" and not self._current():
            self.broken_rules.append(f"the status says that all is done: {self.plan.rollout.message}")

    def _current(self) -> bool:
        """Whether the cluster has done what the spec asks for: all Deployments rolled, none of another revision."""
        rolled = all(d.observed == d.generation and self.rolled(d) for d in self.deployments.values())
        return rolled and {d.slice for d in self.deployments.values()} == {f"{builders.NAME}-{self.plan.revision}-0"}

    def backends(self) -> dict[str, int]:
        """Where the HTTPRoute leads; empty without one."""
        found = self.objects.get(("HTTPRoute", builders.NAME))
        return dict(route(found).backends) if found else {}

    def _check_route(self) -> None:
        """Weights add up, and right after a pass only slices that answer have any."""
        led = self.backends()
        if self.changes.get("gateway") and self.plan.refusal is None:
            stay = {s.name for s in self.plan.rollout.slices if s.state is not State.REMOVING}
            lit = {p.labels[SLICE] for p in self.pods if p.ready and FRONT in p.labels and p.ending is None} & stay
            if sum(led.values()) != 100 or not set(led) <= (lit or {builders.NAME}):
                self.broken_rules.append(f"the route leads to {led}, and {sorted(lit)} serve")

    def check(self) -> None:
        """See Cluster.check."""
        self.check_selectors()
        self._check_revisions()

    def _check_revisions(self) -> None:
        running = {p.labels[REVISION] for p in self.pods if p.gpus and p.ending is None}
        if len(running) > 2:
            self.broken_rules.append(f"engines of three revisions run: {sorted(running)}")

    def check_selectors(self) -> None:
        """No selector of ours but the front door's and the budgets' matches pods of two revisions (invariant I3)."""
        for name, d in self.deployments.items():
            chosen = d.manifest["spec"]["selector"]["matchLabels"]
            strangers = [p.name for p in self.pods if matches(chosen, p.labels) and p.deployment != name]
            if strangers:
                self.broken_rules.append(f"{name} selects pods of others: {strangers}")
        for router in (p for p in self.pods if p.labels[COMPONENT] == ROUTER):
            seen = {p.labels[REVISION] for role in ROLES for p in self.discovered(router, role)}
            if seen - {router.labels[REVISION]}:
                self.broken_rules.append(f"{router.name} sees engines of {sorted(seen)}")

    # --- for tests --------------------------------------------------------------------------------------------------------

    def slices(self) -> dict[str, str]:
        """Revision -> state, as the last plan had it."""
        return {s.revision: s.state.value for s in self.plan.rollout.slices}

    def run(self, until: Callable[[World], bool], limit: int = 200) -> list[dict[str, str]]:
        """Reconcile and tick until something holds; returns the slices seen on the way, without repetitions."""
        self.steps = []
        for _ in range(limit):
            self.reconcile()
            if until(self):
                return self.steps
            self.tick()
        raise AssertionError(f"not reached within {limit} ticks: {json.dumps(self.steps[-3:])}; {self.plan.rollout.message}")

    def settle(self) -> list[dict[str, str]]:
        """Run until one slice serves, everything else is gone, and a pass writes nothing."""
        return self.run(lambda w: w.settled())

    def settled(self) -> bool:
        """Whether nothing is left to do."""
        left = [p for p in self.pods if p.ending is not None or p.deployment not in self.deployments]
        idle = self.reconcile() == 0 and not left
        return idle and list(self.slices().values()) == [State.SERVING.value] and self.plan.rollout.reason is Reason.UPDATED


@cache
def _spec(changes: str) -> PDDeploymentSpec:
    return builders.make_spec(json.loads(changes))
