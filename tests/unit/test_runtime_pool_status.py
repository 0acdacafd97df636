"""The shell of a PDPool's status: what is remembered of it is what the server has."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import builders
import pytest

from pd_operator.controller.reconcile import Reconciler
from pd_operator.core.names import pool
from pd_operator.core.observed import ChildFact
from pd_operator.core.plan import make_plan
from pd_operator.core.snapshot import Snapshot
from pd_operator.kube.store import Stores
from pd_operator.settings import Settings

NAME = pool("chat", "decode")
POOL = ChildFact("PDPool", "demo", NAME, "uid-pool", generation=1, replicas=1)


class Server:
    """The one object that is written here, and how often it was read. With `unheard` a write is made and its answer lost."""

    def __init__(self) -> None:
        self.status: dict[str, Any] = {}
        self.reads = self.writes = 0
        self.unheard = False

    async def get(self, kind: str, namespace: str, name: str) -> dict[str, Any]:
        assert (kind, namespace, name) == ("PDPool", "demo", NAME)
        self.reads += 1
        return {"status": self.status}

    async def apply_status(self, obj: dict[str, Any]) -> None:
        self.writes += 1
        self.status = obj["status"]
        if self.unheard:
            raise TimeoutError("the answer was lost")


def passing(server: Server, made: Reconciler, snapshot: Snapshot, fact: ChildFact = POOL) -> None:
    asyncio.run(made._write_pool(snapshot, make_plan(snapshot), "decode", fact))


def worlds() -> tuple[Snapshot, Snapshot]:
    """At rest with one decode replica, and in the middle of a rollout, when two revisions have one each."""
    rest = builders.serving()
    return rest, replace(rest, children=(*rest.children, builders.deployment("0ddba11", "decode")))


def test_a_count_that_comes_back_after_a_lost_answer_is_written() -> None:
    """What was remembered was 1, the server was told 2, and the next pass sees 1 again: nothing would ever tell it so."""
    server = Server()
    made = Reconciler(server, Stores(), Settings(), None)  # type: ignore[arg-type]  # only the pool's status is asked for
    rest, rolling = worlds()
    passing(server, made, rest)
    assert (server.status["replicas"], server.reads, server.writes) == (1, 1, 1)
    server.unheard = True
    with pytest.raises(TimeoutError):
        passing(server, made, rolling)
    assert server.status["replicas"] == 2
    server.unheard = False
    passing(server, made, rest)
    assert (server.status["replicas"], server.reads, server.writes) == (1, 2, 3)


def test_an_answer_that_came_is_remembered() -> None:
    """One read for as long as the process lives."""
    server = Server()
    made = Reconciler(server, Stores(), Settings(), None)  # type: ignore[arg-type]
    for world in (*worlds(), *worlds()):
        passing(server, made, world)
        passing(server, made, world)
    assert (server.reads, server.writes) == (1, 4)


def test_after_a_start_the_list_says_what_the_status_is() -> None:
    """A thousand objects have two thousand PDPools: none is read by itself, and none that is right is written."""
    server, (rest, rolling) = Server(), worlds()
    passing(server, Reconciler(server, Stores(), Settings(), None), rest)  # type: ignore[arg-type]
    listed = replace(POOL, status=dict(server.status))
    made = Reconciler(server, Stores(), Settings(), None)  # type: ignore[arg-type]
    server.reads = server.writes = 0
    passing(server, made, rest, listed)
    assert (server.reads, server.writes) == (0, 0)
    passing(server, made, rolling, listed)
    assert (server.status["replicas"], server.reads, server.writes) == (2, 0, 1)


def test_what_the_list_said_does_not_count_after_a_lost_answer() -> None:
    server, (rest, rolling) = Server(), worlds()
    passing(server, Reconciler(server, Stores(), Settings(), None), rest)  # type: ignore[arg-type]
    listed = replace(POOL, status=dict(server.status))
    made = Reconciler(server, Stores(), Settings(), None)  # type: ignore[arg-type]
    server.unheard = True
    with pytest.raises(TimeoutError):
        passing(server, made, rolling, listed)
    server.unheard = False
    passing(server, made, rest, listed)
    assert server.status["replicas"] == 1, "the list said 1, and the server was told 2 since"
