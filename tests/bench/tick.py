"""The whole scaling tick of many PDDeployments: real stores, roster, loop, law and source; no write, since the numbers are right.

What `_reading` and `_deciding` of bench.signals leave out is in it: the fleet out of the pods that the watches showed, counts of
replicas, lead times, budgets, and what status would tell.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.controller.roster import Entry, Roster
from pd_operator.controller.scaling import ScalingLoop
from pd_operator.core.names import COMPONENT, DEPLOYMENT, ROLE, ROLES, SLICE, pool
from pd_operator.core.observed import ChildFact, ContainerFact, PodFact
from pd_operator.core.scaled import Missing
from pd_operator.kube.client import KubeClient
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.store import Stores
from pd_operator.manager import GARBAGE
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.source import Source
from served import chat

SCALING = {"mode": "Auto", "prefill": {"minReplicas": 4, "maxReplicas": 4}, "decode": {"minReplicas": 4, "maxReplicas": 4}}
SPEC = PDDeploymentSpec.model_validate(chat(scaling=SCALING)["spec"])
OLD = datetime.now(UTC) - timedelta(hours=1)


class NoServer:
    """The API server as far as a tick that changes nothing asks it."""

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        """A PDPool that has learned nothing."""
        return {"status": {}}


@dataclass
class World:
    """What the watches and the reconciles of these deployments have left."""

    stores: Stores = field(default_factory=Stores)

    def __post_init__(self) -> None:
        self.roster = Roster(self.stores)

    def take(self, deployments: Iterable[Deployment]) -> None:
        """The same deployments, as pods and PDPools."""
        for one in deployments:
            slices = frozenset(t.slice for t in one.targets)
            missing = {role: Missing() for role in ROLES}
            self.roster._entries[one.key] = Entry(one.key, f"uid-{one.name}", SPEC, slices, False, missing)
            for role in ROLES:
                key = ("PDPool", one.namespace, pool(one.name, role))
                self.stores.children.put("pools", key, ChildFact(*key, f"uid-{key[2]}", replicas=4))
            for t in one.targets:
                part = {COMPONENT: "router"} if t.side == "router" else {COMPONENT: "engine", ROLE: t.side}
                labels = {DEPLOYMENT: one.name, SLICE: t.slice, **part}
                where = {"created": OLD, "ready": True, "ready_since": OLD + timedelta(seconds=50), "ip": "10.0.0.7", "node": "n"}
                engine = ContainerFact("router" if t.side == "router" else "engine", ready=True)
                pod = PodFact(t.namespace, t.pod, t.uid, labels, phase="Running", containers=(engine,), **where)
                self.stores.pods.put("pods", (t.namespace, t.pod), pod)

    def fleet(self) -> tuple[Deployment, ...]:
        """The pages to read."""
        return self.roster.fleet()


async def cpu(world: World, source: Source, ticks: int = 3) -> float:
    """CPU seconds of the cheapest tick but the first, which recalls what status says."""
    client = cast(KubeClient, NoServer())
    loop = ScalingLoop(
        client, world.stores, world.roster, source, EventRecorder(client, "bench"),
        is_leader=lambda: True, enqueue=lambda _: None, read_limit=300.0,
    )  # fmt: skip
    found = []
    gc.set_threshold(GARBAGE, *gc.get_threshold()[1:])  # as the operator's
    for _ in range(ticks):
        begin = time.process_time()
        await loop.once()
        found.append(time.process_time() - begin)
    assert all(world.roster.scaled(e.key, e.uid) is not None for e in world.roster.entries())
    return min(found[1:])
