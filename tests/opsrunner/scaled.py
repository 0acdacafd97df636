"""A PDDeployment that scales on a real API server: its Reconciler and its scaling loop in this process, with the real law.

Nodes are fake, so pods have no pages to read: what the signals say is the test's, and time passes when the test says so.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, cast

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.inprocess import Process, Rig, Tap
from opsrunner.recording import Recording
from pd_operator.controller.loop import Key
from pd_operator.controller.scaling import ScalingLoop
from pd_operator.core.scaling.readings import Signal
from pd_operator.core.scaling.shared import Budget
from pd_operator.kube.client import KubeClient
from pd_operator.kube.events import EventRecorder
from pd_operator.signals.load import Load
from pd_operator.signals.source import Source

MAX = 6
SCALING: dict[str, Any] = {"mode": "Auto", "prefill": {"maxReplicas": MAX}, "decode": {"maxReplicas": MAX}}
QUIET = {
    "prompt_rate": 10_000.0, "request_rate": 5.0, "queued_tokens": 0.0, "prefill_rate": 10_000.0, "prefill_seconds": 0.5,
    "running": 100.0, "handoff_waiting": 0.0, "decode_starts": 5.0, "kv_tokens": 100_000.0, "kv_capacity": 250_000.0,
    "output_tokens": 300.0, "itl": 0.03, "prefill_latency": 0.1, "ttft": 0.3,
}  # fmt: skip


def decoding(requests: float, **changes: float) -> Load:
    """A load with so many requests in decode, of which one replica does 170."""
    changes = {"running": requests, "kv_tokens": requests * 1000, **changes}
    return Load(**{name: Signal.of(value) for name, value in {**QUIET, **changes}.items()})


class Told:
    """A source that says what the test says, of every object that scales."""

    def __init__(self, keys: Callable[[], list[Key]]) -> None:
        self.load, self._keys = decoding(100), keys

    async def read(self, now: float) -> Mapping[Key, Load]:
        return dict.fromkeys(self._keys(), self.load)

    async def run(self) -> None: ...

    async def close(self) -> None: ...


class Live:
    """One object, its Reconciler and its scaling loop; time passes when the test says so."""

    def __init__(self, rig: Rig, api: Api, space: str, name: str) -> None:
        self.rig, self.api, self.key = rig, api, (space, name)
        self.now, self.lines = time.time(), list[str]()
        self.tap = Tap(rig.client)
        self.restart()

    def restart(self, source: Source | None = None, budgets: Sequence[Budget] = ()) -> None:
        """A new process, which remembers nothing."""
        self.process = Process(self.rig.reconciler(self.tap), self.rig.stores)
        roster = self.process.reconciler.roster
        self.told = Told(lambda: [e.key for e in roster.entries()])
        self.source: Source = source or self.told
        client = cast(KubeClient, self.tap)
        self.loop = ScalingLoop(
            client, self.rig.stores, roster, self.source, EventRecorder(client, "scaling-live"),
            is_leader=lambda: True, enqueue=lambda key: None, log=self.lines.append, clock=lambda: self.now, budgets=budgets,
        )  # fmt: skip

    async def settle(self) -> None:
        """Reconcile until nothing is left to do."""
        await self.rig.drive(self.key, self.tap, process=self.process, timeout=60)

    async def passes(self, done: Callable[[], bool]) -> None:
        """Reconcile until `done`, where the object does not come to rest."""
        async with asyncio.timeout(60):
            while not await asyncio.to_thread(done):
                await self.process.reconciler.reconcile(self.key)
                await asyncio.sleep(0.05)

    async def tick(self, load: Load | None = None, count: int = 1, settle: bool = True) -> None:
        """Scaling ticks of 15 s, each followed by what its writes bring about."""
        self.told.load = load or self.told.load
        for _ in range(count):
            await self.shown()
            await self.loop.once()
            self.now += 15
            if settle:
                await self.settle()

    async def shown(self) -> None:
        """Wait until the watch shows the pools as they are."""
        async with asyncio.timeout(20):
            for role in ("prefill", "decode"):
                version = int((await asyncio.to_thread(self.pool, role))["metadata"]["resourceVersion"])
                while True:
                    fact = self.rig.stores.children.get("PDPool", self.key[0], f"{self.key[1]}-{role}")
                    if fact is not None and int(fact.resource_version) >= version:
                        break
                    await asyncio.sleep(0.02)

    async def edit(self, **spec: Any) -> None:
        """Merge into the user's spec, and settle."""
        await asyncio.to_thread(self.api.merge, "PDDeployment", *self.key, {"spec": spec})
        await self.settle()

    def pool(self, role: str = "decode") -> Object:
        return self.api.must_get("PDPool", self.key[0], f"{self.key[1]}-{role}")

    def workload(self, role: str = "decode") -> Object:
        (found,) = (
            obj for (_, name), obj in state.children(self.api, *self.key, ("Deployment",)).items() if name.endswith(f"-{role}")
        )
        return found

    def counts(self) -> tuple[int, int, int, int]:
        """Numbers of both pools, and replicas of both workloads."""
        pools = [self.pool(role)["spec"].get("replicas") for role in ("prefill", "decode")]
        return (*pools, *(self.workload(role)["spec"]["replicas"] for role in ("prefill", "decode")))  # type: ignore[return-value]

    def condition(self, type_: str, role: str = "decode") -> tuple[str, str]:
        found = waits.conditions(self.pool(role))[type_]
        return found["status"], found["reason"]


@contextlib.asynccontextmanager
async def live(cluster: Cluster, api: Api, space: str, name: str, **spec: Any) -> AsyncIterator[Live]:
    """An object that scales, up and running."""
    async with Rig(cluster.kubeconfig) as rig:
        await asyncio.to_thread(api.create, state.pdd(space, name, **{"scaling": SCALING, "router": {"replicas": 1}, **spec}))
        made = Live(rig, api, space, name)
        await made.settle()
        yield made


def owners(pool: Object) -> list[tuple[str, str]]:
    """Who owns spec.replicas: (manager, operation)."""
    entries = pool["metadata"]["managedFields"]
    return [
        (e["manager"], e["operation"])
        for e in entries
        if "f:replicas" in e.get("fieldsV1", {}).get("f:spec", {}) and e.get("subresource", "") in ("", "scale")
    ]


def assert_owners(pool: Object) -> None:
    """Somebody owns the number, and never an apply of ours: an apply that leaves it out would remove it."""
    assert owners(pool) and ("pd-operator", "Apply") not in owners(pool), owners(pool)


def history(recording: Recording, name: str, role: str) -> list[int]:
    """Replicas that Deployments of a role of one object ever asked for, one after the other."""
    seen: list[int] = []
    for event in recording.events("Deployment"):
        if event.name.startswith(f"{name}-") and event.name.endswith(f"-{role}") and event.type != "DELETED":
            count = event.object["spec"]["replicas"]
            if seen[-1:] != [count]:
                seen.append(count)
    return seen
