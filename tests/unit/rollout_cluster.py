"""A small cluster for rollouts: Deployments that roll their pods, a scheduler that counts GPUs, routers that see engines.

It behaves as Kubernetes does where a plan depends on it: status lags behind spec by a tick, a deleted Deployment leaves pods
that end later, a terminating pod holds its GPU, a router is ready when its own selectors find a ready prefill and a ready decode.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import builders

from pd_operator.core.names import APPLIED_HASH, COMPONENT, ROLE, ROLES, SLICE
from pd_operator.core.observed import ChildFact, ContainerFact, PodFact, WorkloadFact
from pd_operator.core.snapshot import ROUTER
from pd_operator.kube.routes import route

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
class Cluster:
    """All objects of one namespace."""

    gpus: int = 1000
    broken: set[str] = field(default_factory=set)  # engine arguments whose pods never get ready
    deployments: dict[str, Deployment] = field(default_factory=dict)
    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)  # all else that was applied
    pods: list[Pod] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def tick(self, times: int = 1) -> None:
        """Let the cluster work for a while."""
        for _ in range(times):
            self._collect()
            for name, d in list(self.deployments.items()):
                d.observed = d.generation
                self._roll(name, d)
            self._schedule()
            self._start()
            self.check()

    def check(self) -> None:
        """What must hold after every tick."""

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
        if spec.get("paused"):  # no pod of another template; the number goes on
            for _ in range(wanted - len(pods) if pods else 0):
                self.pods.append(Pod(f"{name}-{next(self.numbers)}", name, pods[0].template))
            for p in sorted(pods, key=lambda p: p.ready)[: max(0, len(pods) - wanted)]:
                self._end(p)
            return
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
        return [p for p in self.pods if matches(selector, p.labels)]

    def endpoints(self) -> list[Pod]:
        """Ready pods behind the front Service."""
        service = self.objects.get(("Service", builders.NAME))
        if service is None:
            return []
        return [p for p in self.pods if p.ready and p.ending is None and matches(service["spec"]["selector"], p.labels)]

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
            paused=bool(spec.get("paused")),
        )

    def child(self, d: Deployment) -> ChildFact:
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

    def other(self, kind: str, name: str, obj: Mapping[str, Any]) -> ChildFact:
        meta = obj["metadata"]
        replicas = obj["spec"].get("replicas") if kind == "PDPool" else None
        return ChildFact(
            kind,
            meta["namespace"],
            name,
            f"uid-{name}",
            owner_uid=builders.UID,
            labels=meta["labels"],
            replicas=replicas,
            route=route(obj) if kind == "HTTPRoute" else None,
        )

    def pod(self, p: Pod) -> PodFact:
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

    def rolled(self, d: Deployment) -> bool:
        fact = self._workload(d)
        return fact.observed_generation == d.generation and fact.ready == fact.updated == fact.replicas == fact.spec_replicas != 0


def matches(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
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
