"""Invariant I9: a crash after any write, a write that is refused, an answer that is lost, a watch that is behind: the same end.

Every case is an object of its own in a namespace of its own; they run side by side. The end is compared with that of an
undisturbed run, field by field, owners and field managers included.
"""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state
from opsrunner.api import Api
from opsrunner.inprocess import Crash, Decide, Fault, Rig, Run, Tap
from pd_operator.kube.errors import Conflict, Forbidden, Invalid

pytest_plugins = ("opsrunner.fixtures",)

WAVE = 10  # objects at once
SPEC: dict[str, Any] = {"lmcache": {"p2p": {"enabled": True}}, "decode": {"replicas": 2}, "router": {"replicas": 1}}
EDIT: dict[str, Any] = {"engine": {"args": ["--max-num-seqs=8"]}, "lmcache": None}  # the coordinator goes, too
MESSAGE = "refused by a test"
REFUSALS: dict[str, Callable[[], Fault]] = {
    "409": lambda: Fault(Conflict(409, "Conflict", MESSAGE)),
    "422": lambda: Fault(Invalid(422, "Invalid", MESSAGE)),
    "403": lambda: Fault(Forbidden(403, "Forbidden", MESSAGE)),
    "lost": lambda: Fault(TimeoutError("the answer was lost"), performed=True),
}


@dataclass
class End:
    """Where a run ended."""

    run: Run
    children: dict[str, Any]
    status: dict[str, Any]
    pods: int


class Cases:
    """Makes an object for each case, drives it, and compares."""

    def __init__(self, rig: Rig, api: Api, *, edit: bool) -> None:
        self.rig = rig
        self.api = api
        self.edit = edit
        self.made: list[str] = []

    async def end(self, decide: Decide, *, behind: int = 0) -> End:
        """Create an object (or create it undisturbed and edit it) under `decide`, and return its end."""
        namespace = f"i9-{secrets.token_hex(5)}"
        self.made.append(namespace)
        await asyncio.to_thread(self.api.create, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
        await asyncio.to_thread(self.api.create, state.pdd(namespace, "chat", **SPEC))
        key = (namespace, "chat")
        tap = Tap(self.rig.client, lambda number, verb, what: self.decide(tap, number, verb, what))
        self.decided = decide
        tap_decide: list[Decide] = [lambda number, verb, what: None] if self.edit else [decide]
        tap = Tap(self.rig.client, lambda number, verb, what: tap_decide[0](number, verb, what))
        reconciler = None if behind else self.rig.reconciler(tap)
        if self.edit:
            await self.rig.drive(key, tap, reconciler=reconciler)
            tap.writes.clear()
            tap_decide[0] = decide
            await asyncio.to_thread(self.api.merge, "PDDeployment", namespace, "chat", {"spec": EDIT})
        run = await self.rig.drive(key, tap, reconciler=reconciler, behind=behind)
        return await asyncio.to_thread(self._read, namespace, run)

    def _read(self, namespace: str, run: Run) -> End:
        obj = self.api.must_get("PDDeployment", namespace, "chat")
        children = state.normalised(state.children(self.api, namespace, "chat"), obj)
        return End(run, children, state.settled_status(obj), len(state.pods(self.api, namespace, "chat")))


def assert_same(end: End, baseline: End, what: str) -> None:
    """Both ends are equal."""
    found = state.difference(baseline.children, end.children) or state.difference(baseline.status, end.status)
    assert not found and end.pods == baseline.pods, f"{what}: {end.run.crashes} crashes, {end.run.errors} errors\n{found}"


async def side_by_side(cases: list[tuple[str, Awaitable[End]]], baseline: End) -> list[End]:
    """Run all, WAVE at once, and compare each."""
    limit = asyncio.Semaphore(WAVE)

    async def one(what: str, case: Awaitable[End]) -> End:
        async with limit:
            end = await case
        assert_same(end, baseline, what)
        return end

    return list(await asyncio.gather(*(one(what, case) for what, case in cases)))
