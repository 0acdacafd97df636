"""Runs the manager inside a test, around a reconciler that only notes what it was asked to do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from faults.objects import until
from pd_operator.core.result import Done, Result
from pd_operator.kube.client import KubeClient
from pd_operator.kube.lease import LeaseTiming
from pd_operator.kube.reflector import Timing
from pd_operator.kube.store import Stores
from pd_operator.manager import Manager
from pd_operator.settings import Settings

LEASE = LeaseTiming(lease_duration=12.0, renew_deadline=8.0, retry_period=0.5, give_up_after=5.0)
WATCH = Timing(give_up_after=2.0, backoff_base=0.05, backoff_cap=0.5)
Key = tuple[str, str]


class Notes:
    """A reconciler. `then` is awaited in each reconcile and may raise or return a Result."""

    def __init__(self, then: Callable[[Key], Awaitable[Result]] | None = None) -> None:
        self.calls: list[Key] = []
        self.at: list[float] = []
        self.client: KubeClient | None = None
        self.stores: Stores | None = None
        self._then = then

    def __call__(self, client: KubeClient, stores: Stores, *_: Any) -> Notes:
        """The factory that the manager calls."""
        self.client, self.stores = client, stores
        return self

    async def reconcile(self, key: Key) -> Result:
        """See Reconciler."""
        self.calls.append(key)
        self.at.append(time.monotonic())
        return await self._then(key) if self._then else Done()


def settings(namespace: str, **values: Any) -> Settings:
    """Settings of a run that watches one namespace and listens on any free port."""
    base = {"namespace": namespace, "identity": "test", "watch_namespaces": [namespace], "http_host": "127.0.0.1", "http_port": 0}
    return Settings.model_validate(base | values)


@asynccontextmanager
async def running(
    kubeconfig: Path, notes: Notes, chosen: Settings, *, synced: bool = True, watch: Timing = WATCH
) -> AsyncIterator[tuple[Manager, asyncio.Task[int]]]:
    """A manager that runs; ended at the end. With `synced`, waits until the workers work."""
    manager = Manager(chosen, notes, kubeconfig=str(kubeconfig), lease_timing=LEASE, watch_timing=watch)
    task = asyncio.create_task(manager.run())
    try:
        if synced:
            await until("the manager works", lambda: manager.synced or task.done(), 20)
            assert not task.done(), "the manager ended"
        yield manager, task
    finally:
        manager.stopping.set()
        await asyncio.wait([task], timeout=15)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise AssertionError("the manager did not stop within 15 s")


async def leading(manager: Manager) -> None:
    """Wait until it leads."""
    await asyncio.wait_for(manager.elector.led.wait(), 15)


async def probe(manager: Manager, path: str) -> tuple[int, Any]:
    """Status and body of /healthz, /readyz (JSON) or /metrics (text)."""
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{manager.health.port}{path}") as response:
        body = await response.text()
        return response.status, body if path == "/metrics" else await response.json()
