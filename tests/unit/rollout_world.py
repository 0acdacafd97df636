"""A small world for rollouts: Deployments that roll their pods, a scheduler that counts GPUs, routers that see engines.

It behaves as Kubernetes does where the plan depends on it: status lags behind spec by a tick, a deleted Deployment leaves pods
that end later, a terminating pod holds its GPU, a router is ready when its own selectors find a ready prefill and a ready decode.
Each write is checked against what must hold at every step; what does not is kept in `broken_rules`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import builders
from builders import kstatus

from pd_operator.api.conditions import Reason
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.names import APPLIED_HASH, COMPONENT, FRONT, REVISION, ROLE, ROLES, SLICE
from pd_operator.core.observed import ChildFact, ContainerFact, PodFact, WorkloadFact
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.prune import Deletion, prune
from pd_operator.core.rollout import State
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status
from pd_operator.render.bundle import render

START = 2  # ticks from binding to Ready
GRACE = 2  # ticks that a pod takes to end
GPU = "nvidia.com/gpu"


@dataclass
class Pod:
    """A pod of the world."""

    name: str
    deployment: str
    template: Mapping[str, Any]
    bound: bool = False
    age: int = 0  # ticks since it was bound
    ready: bool = False
    ending: int | None = None  # ticks left

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.template["metadata"]["labels"])

    @property
    def gpus(self) -> int:
        limits = (c.get("resources", {}).get("limits", {}) for c in self.template["spec"]["containers"])
        return sum(int(limit.get(GPU, 0)) for limit in limits)


@dataclass
class Deployment:
    """A Deployment of the world."""

    manifest: Mapping[str, Any]
    uid: str
    generation: int = 1
    observed: int = 0

    @property
    def slice(self) -> str:
        return str(self.manifest["metadata"]["labels"][SLICE])

    @property
    def part(self) -> str:
        labels = self.manifest["metadata"]["labels"]
        return str(labels.get(ROLE) or labels[COMPONENT])


@dataclass
class World:
    """One PDDeployment and all that follows from it."""

    gpus: int = 1000
    changes: dict[str, Any] = field(default_factory=dict)  # to the minimal spec
    broken: set[str] = field(default_factory=set)  # engine arguments whose pods never get ready
    deployments: dict[str, Deployment] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # all else that was applied
    pods: list[Pod] = field(default_factory=list)
    broken_rules: list[str] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, str]] = field(default_factory=list)  # slices of each plan, without repetitions
    generation: int = 1
    plan: Plan = field(init=False)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

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
        children = [self._child(d) for d in self.deployments.values()]
        children += [self._other(kind, name, obj) for (kind, name), obj in self.objects.items()]
        revisions = [builders.stored(obj) for (kind, _), obj in self.objects.items() if kind == "ControllerRevision"]
        return builders.make_snapshot(
            _spec(json.dumps(self.changes)),
            children=tuple(children),
            pods=tuple(self._pod(p) for p in self.pods),
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
            writes += [lambda r=r: self._scale(r) for r in ROLES if plan.pools[r].scale]
            writes += [lambda d=d: self._delete(d) for d in prune(snapshot, plan, bundle.keys)]
        done = 0
        for write in writes:
            if crash_after is not None and done >= crash_after:
                return done
            done += write()
        if any(d.generation != d.observed for d in self.deployments.values()) and plan.rollout.reason is Reason.UPDATED:
            plan = replace(plan, rollout=replace(plan.rollout, reason=Reason.ROLLING_OUT))  # as controller/reconcile.py does
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
            if fronted and len(parts) >= 3 and all(self._settled(d) for d in parts):
                return True
        return False

    def _settled(self, d: Deployment) -> bool:
        fact = self._workload(d)
        return fact.observed_generation == d.generation and fact.ready == fact.updated == fact.replicas == fact.spec_replicas != 0

    def _check_status(self) -> None:
        ready = next(c for c in self.status["conditions"] if c["type"] == "Ready")
        if ready["status"] == "True" and not self.endpoints():
            self.broken_rules.append("Ready is True, and no ready router carries the front label")
        if kstatus({"metadata": {"generation": self.generation}, "status": self.status}) == "Current" and not self._current():
            self.broken_rules.append(f"the status says that all is done: {self.plan.rollout.message}")

    def _current(self) -> bool:
        """Whether the cluster has done what the spec asks for: all Deployments rolled, none of another revision."""
        rolled = all(d.observed == d.generation and self._settled(d) for d in self.deployments.values())
        return rolled and {d.slice for d in self.deployments.values()} == {f"{builders.NAME}-{self.plan.revision}-0"}

    def _check_revisions(self) -> None:
        running = {p.labels[REVISION] for p in self.pods if p.gpus and p.ending is None}
        if len(running) > 2:
            self.broken_rules.append(f"engines of three revisions run: {sorted(running)}")

    def check_selectors(self) -> None:
        """No selector of ours but the front door's and the budgets' matches pods of two revisions (invariant I3)."""
        for name, d in self.deployments.items():
            chosen = d.manifest["spec"]["selector"]["matchLabels"]
            strangers = [p.name for p in self.pods if _matches(chosen, p.labels) and p.deployment != name]
            if strangers:
                self.broken_rules.append(f"{name} selects pods of others: {strangers}")
        for router in (p for p in self.pods if p.labels[COMPONENT] == ROUTER):
            seen = {p.labels[REVISION] for role in ROLES for p in self.discovered(router, role)}
            if seen - {router.labels[REVISION]}:
                self.broken_rules.append(f"{router.name} sees engines of {sorted(seen)}")

    # --- the cluster ------------------------------------------------------------------------------------------------------

    def tick(self, times: int = 1) -> None:
        """Let the cluster work for a while."""
        for _ in range(times):
            self._collect()
            for name, d in list(self.deployments.items()):
                d.observed = d.generation
                self._roll(name, d)
            self._schedule()
            self._start()
            self.check_selectors()
            self._check_revisions()

    def lose(self, number: int) -> None:
        """A node takes a pod with it."""
        if self.pods:
            lost = self.pods[number % len(self.pods)]
            if lost.ending is None:
                self._end(lost)

    def _collect(self) -> None:
        for p in self.pods:
            if p.ending is not None:
                p.ending -= 1
            elif p.deployment not in self.deployments:
                self._end(p)
        self.pods = [p for p in self.pods if p.ending is None or p.ending > 0]

    def _end(self, p: Pod) -> None:
        p.ending, p.ready = GRACE, False

    def _live(self, name: str) -> list[Pod]:
        return [p for p in self.pods if p.deployment == name and p.ending is None]

    def _roll(self, name: str, d: Deployment) -> None:
        spec, wanted = d.manifest["spec"], int(d.manifest["spec"]["replicas"])
        pods = self._live(name)
        new = [p for p in pods if p.template == spec["template"]]
        old = [p for p in pods if p.template != spec["template"]]
        if spec["strategy"]["type"] == "Recreate" and old:
            for p in old:
                self._end(p)
            return
        if spec["strategy"]["type"] == "Recreate" and any(
            p.deployment == name and p.template != spec["template"] for p in self.pods
        ):
            return
        surge, unavailable = _bounds(spec["strategy"], wanted)
        for _ in range(min(wanted - len(new), wanted + (surge if old else 0) - len(pods))):
            self.pods.append(Pod(f"{name}-{next(self.numbers)}", name, spec["template"]))
        for p in sorted(old, key=lambda p: p.ready):
            ready = sum(q.ready for q in self._live(name)) - p.ready
            if ready >= wanted - unavailable and (not p.ready or len(self._live(name)) > wanted - unavailable):
                self._end(p)
        for p in sorted(new, key=lambda p: p.ready)[: max(0, len(new) - wanted)]:
            self._end(p)

    def _schedule(self) -> None:
        free = self.gpus - sum(p.gpus for p in self.pods if p.bound)
        for p in self.pods:
            if not p.bound and p.ending is None and p.gpus <= free:
                p.bound, free = True, free - p.gpus

    def _start(self) -> None:
        for p in self.pods:
            if not p.bound or p.ending is not None:
                continue
            p.age += 1
            if p.labels[COMPONENT] == "engine":
                p.ready = p.age >= START and not self._broken(p)
        for p in self.pods:
            if p.bound and p.ending is None and p.labels[COMPONENT] == ROUTER:
                p.ready = p.age >= START and all(any(e.ready for e in self.discovered(p, role)) for role in ROLES)

    def _broken(self, p: Pod) -> bool:
        return any(arg in self.broken for arg in p.template["spec"]["containers"][0]["args"])

    def discovered(self, router: Pod, role: str) -> list[Pod]:
        """Engines that a router's own arguments select."""
        args = router.template["spec"]["containers"][0]["args"]
        words = itertools.takewhile(lambda a: not a.startswith("--"), args[args.index(f"--{role}-selector") + 1 :])
        selector = dict(word.split("=", 1) for word in words)
        return [p for p in self.pods if _matches(selector, p.labels)]

    def endpoints(self) -> list[Pod]:
        """Ready pods behind the front Service."""
        service = self.objects.get(("Service", builders.NAME))
        if service is None:
            return []
        return [p for p in self.pods if p.ready and p.ending is None and _matches(service["spec"]["selector"], p.labels)]

    # --- facts ------------------------------------------------------------------------------------------------------------

    def _workload(self, d: Deployment) -> WorkloadFact:
        pods = self._live(d.manifest["metadata"]["name"])
        spec = d.manifest["spec"]
        ready = sum(p.ready for p in pods)
        return WorkloadFact(
            observed_generation=d.observed,
            spec_replicas=spec["replicas"],
            replicas=len(pods),
            ready=ready,
            updated=sum(p.template == spec["template"] for p in pods),
            available=ready,
            template_labels=spec["template"]["metadata"]["labels"],
        )

    def _child(self, d: Deployment) -> ChildFact:
        meta = d.manifest["metadata"]
        return ChildFact(
            "Deployment",
            meta["namespace"],
            meta["name"],
            d.uid,
            owner_uid=builders.UID,
            labels=meta["labels"],
            applied_hash=meta["annotations"][APPLIED_HASH],
            generation=d.generation,
            workload=self._workload(d),
        )

    def _other(self, kind: str, name: str, obj: Mapping[str, Any]) -> ChildFact:
        meta = obj["metadata"]
        replicas = obj["spec"].get("replicas") if kind == "PDPool" else None
        return ChildFact(
            kind, meta["namespace"], name, f"uid-{name}", owner_uid=builders.UID, labels=meta["labels"], replicas=replicas
        )

    def _pod(self, p: Pod) -> PodFact:
        main = p.template["spec"]["containers"][0]["name"]
        crashed = p.labels[COMPONENT] == "engine" and self._broken(p) and p.age >= START
        container = ContainerFact(
            main, ready=p.ready, started=p.age >= START, restarts=5 * crashed, waiting_reason="CrashLoopBackOff" if crashed else ""
        )
        pending = not p.bound and p.ending is None
        return PodFact(
            builders.NAMESPACE,
            p.name,
            f"uid-{p.name}",
            labels=p.labels,
            deleting=p.ending is not None,
            node="n0" if p.bound else "",
            ready=p.ready,
            scheduled=p.bound,
            scheduling_reason="Unschedulable" if pending else "",
            scheduling_message=f"0/2 nodes are available: 2 Insufficient {GPU}." if pending else "",
            containers=(container,) if p.bound else (),
        )

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


def _matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def _bounds(strategy: Mapping[str, Any], wanted: int) -> tuple[int, int]:
    """(maxSurge, maxUnavailable) as the Deployment controller computes them: up and down, never both 0."""
    rolling = strategy.get("rollingUpdate", {})
    surge, unavailable = (
        _share(rolling.get(key, 0), wanted, up) for key, up in (("maxSurge", math.ceil), ("maxUnavailable", math.floor))
    )
    return surge, unavailable if surge or unavailable else 1


def _share(value: int | str, wanted: int, rounded: Callable[[float], int]) -> int:
    return rounded(int(value[:-1]) * wanted / 100) if isinstance(value, str) else value
