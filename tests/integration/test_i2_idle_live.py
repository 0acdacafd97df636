"""Invariant I2: while nothing changes nothing is written but the Lease; then one edit is acted upon at once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import chart, state, waits
from opsrunner.api import Api
from opsrunner.calls import CallLog
from opsrunner.process import Operator
from opsrunner.spaces import namespaces
from pd_operator.controller.watch import CHILD_KINDS

pytest_plugins = ("opsrunner.fixtures",)

COUNT = 20
IDLE = 60.0  # seconds
SETTLE = 5.0  # seconds after the last object is Ready
RELIST = {"list", "watch"}  # of a reflector whose stream brought nothing for 70 s: a kind without objects has no bookmark at first
AT_ONCE = 5.0  # seconds from an edit to its effect; a quiet machine takes a twentieth of that


@dataclass(frozen=True)
class Idle:
    """The operator with COUNT objects that are Ready, and its calls."""

    operator: Operator
    spaces: list[str]
    calls: CallLog

    @property
    def reconciles(self) -> float:
        """Passes so far."""
        return self.operator.metric("pd_operator_reconcile_total")


KINDS: list[dict[str, Any]] = [
    {"decode": {"resources": {"limits": {"cpu": "0.1", "memory": "1024Mi"}}}},
    {"lmcache": {}},
    {"lmcache": {"p2p": {"enabled": True}}},
    {"router": {"type": "vllm-router", "replicas": 1}},
]


@pytest.fixture(scope="module")
def idle(kwok_cluster: Cluster, api: Api, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Idle]:
    """All kinds of objects: with and without LMCache, P2P, vllm-router."""
    folder = Path(tmp_path_factory.mktemp("idle"))
    with (
        namespaces(kwok_cluster, "i2-idle", 3) as (home, *spaces),
        chart.install(kwok_cluster, home, folder, "namespaced", spaces) as install,
        Operator(install.kubeconfig, [], home=home, folder=folder, settings=install.environment()) as operator,
    ):
        made = Idle(operator, spaces, CallLog(kwok_cluster, install.user))
        begin, mark = time.monotonic(), made.calls.mark()
        for number in range(COUNT):
            spec = {"router": {"replicas": 1}} | KINDS[number % 4]
            api.create(state.pdd(spaces[number % 2], f"chat{number:02}", **spec))
        for number in range(COUNT):
            waits.ready(api, spaces[number % 2], f"chat{number:02}", timeout=180)
        print(f"\n{COUNT} objects Ready after {time.monotonic() - begin:.1f} s")
        # Looks at the counters tell each object's evidence once: that nothing was proven, since these pods have no pages.
        for number in range(COUNT):
            waits.looked(api, spaces[number % 2], f"chat{number:02}")
        total, passes = sum(made.calls.count(mark).values()), made.reconciles
        print(f"{total} API calls, {total / COUNT:.1f} an object; {passes:.0f} reconciles, {total / passes:.1f} calls each")
        time.sleep(SETTLE)
        yield made


def versions(idle: Idle, api: Api) -> dict[str, str]:
    """resourceVersion of every object of ours."""
    found = {}
    for space in idle.spaces:
        for kind in ("PDDeployment", *CHILD_KINDS):
            found |= {f"{space} {kind} {o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in api.list(kind, space)}
    return found


def test_an_unchanged_world_costs_no_write(idle: Idle, api: Api) -> None:
    before, passes = versions(idle, api), idle.reconciles
    begin = idle.calls.mark()
    time.sleep(IDLE)
    end = idle.calls.mark()
    passes = idle.reconciles - passes
    print(f"\n{IDLE:.0f} s with {COUNT} objects: {dict(idle.calls.count(begin, end))}, {passes:.0f} reconciles")
    assert idle.calls.writes(begin, end) == {}
    assert IDLE / 4 <= idle.calls.leases(begin, end) <= IDLE / 2 + 2  # renewed every 2 s
    assert versions(idle, api) == before


def test_a_nudge_costs_one_read(idle: Idle, api: Api) -> None:
    """A reconcile of an object that is as it should be: the live GET and nothing else."""
    for number in range(3):
        passes, begin = idle.reconciles, idle.calls.mark()
        api.merge("PDDeployment", idle.spaces[0], "chat00", {"metadata": {"annotations": {"example.org/nudge": f"{number}"}}})
        waits.until("the reconcile", lambda before=passes: idle.reconciles > before, timeout=20)
        time.sleep(0.5)
        calls = idle.calls.count(begin)
        print(f"\na reconcile without a change: {dict(calls)}")
        assert calls["get", "pddeployments"] == 1
        if not {verb for verb, _ in calls} & RELIST:
            break
        time.sleep(5)  # a stream was silent for too long just now; a reconcile that lists does so each time
    assert calls == {("get", "pddeployments"): 1}


def test_then_one_edit_is_acted_upon_at_once(idle: Idle, api: Api) -> None:
    space, name = idle.spaces[0], "chat00"
    router = next(n for kind, n in state.children(api, space, name, ("Deployment",)) if n.endswith("-router"))
    mark, passes, begin = idle.calls.mark(), idle.reconciles, time.monotonic()
    api.merge("PDDeployment", space, name, {"spec": {"router": {"replicas": 2}}})
    waits.until("the edit to reach the Deployment", lambda: api.must_get("Deployment", space, router)["spec"]["replicas"] == 2)
    took = time.monotonic() - begin
    waits.ready(api, space, name)
    time.sleep(1)
    calls = idle.calls.count(mark)
    print(f"\nacted upon after {took:.3f} s; {idle.reconciles - passes:.0f} reconciles, calls: {dict(calls)}")
    assert took < AT_ONCE
    # One Deployment is written once; status follows what the Deployment controller says, in a few steps.
    assert calls["patch", "deployments"] == 1
    acted = {call: number for call, number in calls.items() if call[0] not in RELIST}
    assert sum(acted.values()) <= 30
    assert {call[1] for call in acted} <= {"pddeployments", "pddeployments/status", "deployments", "events", "pdpools/status"}


def test_a_restart_changes_nothing(idle: Idle, api: Api) -> None:
    """The next process finds in its first list that every child is what was applied or created, and writes none of them: also where
    the server stores quantities in another form. Each object is looked at once, and once more when its evidence was."""
    before = versions(idle, api)
    assert idle.operator.stop() == 0
    mark = idle.calls.mark()
    idle.operator.start()
    waits.until("all objects to be looked at", lambda: idle.reconciles >= COUNT, timeout=120)
    waits.until("the queue to be empty", lambda: idle.operator.metric("pd_operator_workqueue_depth") == 0, timeout=120)
    time.sleep(2)
    writes = idle.calls.writes(mark)
    passes = idle.reconciles
    made = sum(idle.calls.count(mark).values())
    print(f"\na restart with {COUNT} objects: {made} calls in {passes:.0f} reconciles; writes: {writes}")
    assert versions(idle, api) == before
    assert writes == {}
    assert idle.calls.count(mark)["get", "pddeployments"] <= 2 * COUNT
