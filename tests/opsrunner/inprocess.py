"""The real Reconciler in this process, on a real API server, with writes that fail where a test wants it and a watch that lags.

A process that dies is a Reconciler that is thrown away together with all that it remembers; its writes up to that point are
on the server, the others are not. What it had in flight may be in any combination.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from opsrunner.process import IMAGES
from pd_operator.controller.reconcile import Reconciler
from pd_operator.controller.watch import child_reflectors
from pd_operator.core.result import Done
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.store import Stores
from pd_operator.settings import Settings

WRITES = ("create", "apply", "apply_status", "replace", "merge", "scale", "delete")
STEP = 0.03  # seconds between two passes when nothing was seen
PASSES = 2000  # of one drive


class Crash(Exception):
    """The process died."""


@dataclass(frozen=True)
class Fault:
    """What becomes of a write: `error` is raised, after the write was `performed` or instead of it."""

    error: Exception
    performed: bool = False


Decide = Callable[[int, str, str], Fault | None]  # number of the write from 1, verb, kind/name


def name_of(verb: str, arguments: tuple[Any, ...]) -> str:
    """Kind/name that a write is about."""
    first = arguments[0]
    return f"{first['kind']}/{first['metadata'].get('name')}" if isinstance(first, dict) else f"{first}/{arguments[2]}"


class Tap:
    """A KubeClient between the Reconciler and the real one: counts writes (but events) and lets `decide` break them."""

    def __init__(self, client: KubeClient, decide: Decide = lambda number, verb, what: None) -> None:
        self._client = client
        self._decide = decide
        self.writes: list[str] = []
        self.faults = 0
        self.dead = False

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._client, name)
        if name not in WRITES:
            return real

        async def write(*arguments: Any, **options: Any) -> Any:
            what = name_of(name, arguments)
            if self.dead:
                raise Crash(f"{name} {what}: the process is dead")
            if "Event/" in what:  # best effort, and no part of the state that a crash leaves
                return await real(*arguments, **options)
            self.writes.append(f"{name} {what}")
            fault = self._decide(len(self.writes), name, what)
            if fault is None:
                return await real(*arguments, **options)
            self.faults += 1
            self.dead = self.dead or isinstance(fault.error, Crash)
            if fault.performed:
                await real(*arguments, **options)
            raise fault.error

        return write

    def revive(self) -> None:
        """The next process: its writes are counted on."""
        self.dead = False

    def again(self, decide: Decide) -> Tap:
        """The same client under another rule, counting from one."""
        self._decide, self.writes, self.faults = decide, [], 0
        return self


@dataclass
class Process:
    """A Reconciler and what it sees."""

    reconciler: Reconciler
    stores: Stores


@dataclass
class Run:
    """What happened while one object was driven to its end, and the process that ended it."""

    tap: Tap
    process: Process
    passes: int = 0
    crashes: int = 0
    errors: int = 0
    writes: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Rig:
    """An async context: one client and cluster-wide reflectors that feed stores, shared by many Reconcilers."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self.stores = Stores()
        self.settings = Settings.model_validate({"images": IMAGES})

    async def __aenter__(self) -> Rig:
        self.client = await KubeClient.connect(str(self._kubeconfig))
        reflectors = child_reflectors(self.client, self.stores, (None,), lambda owner: None)
        self._tasks = [asyncio.create_task(reflector.run()) for reflector in reflectors]
        async with asyncio.timeout(60):
            for reflector in reflectors:
                await reflector.synced.wait()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()

    def reconciler(self, tap: Tap | None = None, stores: Stores | None = None) -> Reconciler:
        """A new one, that remembers nothing."""
        client: Any = tap or self.client
        return Reconciler(client, stores or self.stores, self.settings, EventRecorder(client, "in-process"))

    async def drive(
        self, key: tuple[str, str], tap: Tap, *, process: Process | None = None, behind: int = 0, timeout: float = 120.0
    ) -> Run:
        """Reconcile until the object is Ready and up to date and further passes write nothing.

        Args:
            process: that of an earlier run, with what it remembers; a new one by default.
            behind: the stores show what was there at every `behind`-th pass.

        Raises:
            TimeoutError: it did not come to an end; the last result is in the message.
        """
        process = process or self._process(key, tap, behind)
        run, begin = Run(tap, process), time.monotonic()
        last: object = None
        calm = 0
        for number in range(PASSES):
            if isinstance(run.process.stores, Lagging) and number % behind == 0:
                run.process.stores.catch_up()
            writes = len(tap.writes)
            seen = self._shown(key)
            try:
                last = await run.process.reconciler.reconcile(key)
            except Crash:
                run.crashes += 1
                tap.revive()
                run.process = self._process(key, tap, behind)
                last = "crashed"
            except (ApiError, TimeoutError, ConnectionError) as error:
                run.errors += 1
                last = error
            run.passes += 1
            calm = calm + 1 if isinstance(last, Done) and len(tap.writes) == writes else 0
            if calm > max(2, behind):
                break
            if time.monotonic() - begin > timeout:
                raise TimeoutError(f"waited {timeout:.0f} s for {key} to settle: {last}; writes: {tap.writes[-5:]}")
            await self._changed(key, seen)
        run.writes, run.seconds = list(tap.writes), time.monotonic() - begin
        return run

    def _process(self, key: tuple[str, str], tap: Tap, behind: int) -> Process:
        """A process that starts now: it has listed the world."""
        stores = Lagging(self.stores, key) if behind else self.stores
        if isinstance(stores, Lagging):
            stores.catch_up()
        return Process(self.reconciler(tap, stores), stores)

    def _shown(self, key: tuple[str, str]) -> list[int]:
        """Changes with everything that the watches show of one object: each event makes a new fact."""
        return [id(fact) for facts in (self.stores.children, self.stores.pods) for fact in facts.by_owner(*key)]

    async def _changed(self, key: tuple[str, str], seen: list[int]) -> None:
        """Wait for a change of the object's world, at most a moment."""
        deadline = time.monotonic() + 5 * STEP
        while self._shown(key) == seen and time.monotonic() < deadline:
            await asyncio.sleep(STEP)


class Lagging(Stores):
    """Stores of one object that show what was there at the last `catch_up`."""

    def __init__(self, live: Stores, key: tuple[str, str]) -> None:
        super().__init__()
        self._live = live
        self._key = key

    def catch_up(self) -> None:
        """See what the watches have shown so far."""
        children, pods = self._live.children.by_owner(*self._key), self._live.pods.by_owner(*self._key)
        self.children.replace("all", {(c.kind, c.namespace, c.name): c for c in children})
        self.pods.replace("all", {(p.namespace, p.name): p for p in pods})
