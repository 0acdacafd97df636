"""Invariant I9: a crash after any write, a write that is refused, an answer that is lost, a watch that is behind: the same end.

Every case is an object of its own; they run side by side. The end is compared with that of an undisturbed run, field by
field, owners and field managers included.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state
from opsrunner.api import Api
from opsrunner.inprocess import Crash, Decide, Fault, Lagging, Rig, Run, Tap
from pd_operator.kube.errors import Conflict, Forbidden, Invalid

pytest_plugins = ("opsrunner.fixtures",)

WAVE = 10  # objects at once
MOST = 80  # writes of one run
SPEC: dict[str, Any] = {"lmcache": {"p2p": {"enabled": True}}, "decode": {"replicas": 2}, "router": {"replicas": 1}}
EDIT: dict[str, Any] = {"engine": {"args": ["--max-num-seqs=8"]}, "lmcache": None}  # the coordinator goes, too
NUMBERS = itertools.count(1)
REFUSALS: dict[str, Callable[[], Fault]] = {
    "409": lambda: Fault(Conflict(409, "Conflict", "refused by a test")),
    "422": lambda: Fault(Invalid(422, "Invalid", "refused by a test")),
    "403": lambda: Fault(Forbidden(403, "Forbidden", "refused by a test")),
    "lost": lambda: Fault(TimeoutError("the answer was lost"), performed=True),
}


@dataclass
class End:
    """Where a run ended."""

    run: Run
    faults: int
    children: dict[str, Any]
    status: dict[str, Any]
    pods: int


def undisturbed(number: int, verb: str, what: str) -> Fault | None:
    """No fault."""
    return None


def at(place: int, fault: Fault) -> Decide:
    """The write of this number breaks."""
    return lambda number, verb, what: fault if number == place else None


def each_once(make: Callable[[], Fault]) -> Decide:
    """Every write is refused the first time it is tried."""
    tried: set[str] = set()

    def decide(number: int, verb: str, what: str) -> Fault | None:
        known = f"{verb} {what}" in tried or verb == "create" and what.startswith("Event/")
        tried.add(f"{verb} {what}")
        return None if known else make()

    return decide


def storm(seed: int) -> Decide:
    """Three processes die: of what each has in flight then, any part is on the server."""
    chance = random.Random(seed)
    deaths = sorted(chance.sample(range(1, 40), 3))

    def decide(number: int, verb: str, what: str) -> Fault | None:
        if not deaths or number < deaths[0]:
            return None
        if chance.random() < 0.3:  # the last of those in flight
            deaths.pop(0)
            return Fault(Crash(f"seed {seed}"), performed=chance.random() < 0.5)
        return None if chance.random() < 0.5 else Fault(ConnectionResetError("cut off"), performed=chance.random() < 0.5)

    return decide


class Cases:
    """Makes an object for each case, and drives it to its end."""

    def __init__(self, rig: Rig, api: Api, space: str, edit: bool) -> None:
        self.rig, self.api, self.space, self.edit = rig, api, space, edit
        self._limit = asyncio.Semaphore(WAVE)

    async def end(self, decide: Decide, behind: int = 0) -> End:
        """Create an object under `decide`; or create it undisturbed, and edit it under `decide`."""
        name = f"kx{next(NUMBERS):03}q"
        key, now = (self.space, name), [undisturbed if self.edit else decide]
        tap = Tap(self.rig.client, lambda number, verb, what: now[0](number, verb, what))
        async with self._limit:
            await asyncio.to_thread(self.api.create, state.pdd(self.space, name, **SPEC))
            reconciler = self.rig.reconciler(tap)
            if self.edit:
                await self.rig.drive(key, tap, reconciler=reconciler)
                tap.writes.clear()
                now[0] = decide
                await asyncio.to_thread(self.api.merge, "PDDeployment", self.space, name, {"spec": EDIT})
            run = await self.rig.drive(key, tap, reconciler=None if behind else reconciler, behind=behind)
            return await asyncio.to_thread(self._read, name, run, tap.faults)

    def _read(self, name: str, run: Run, faults: int) -> End:
        obj = self.api.must_get("PDDeployment", self.space, name)
        children = state.normalised(state.children(self.api, self.space, name), obj)
        end = End(run, faults, children, state.settled_status(obj), len(state.pods(self.api, self.space, name)))
        self.api.delete("PDDeployment", self.space, name)
        return end

    async def compare(self, cases: dict[str, Coroutine[Any, Any, End]]) -> dict[str, End]:
        """Run all side by side; each end must be that of an undisturbed run."""
        ends = await asyncio.gather(self.end(undisturbed), *cases.values())
        baseline, found = ends[0], dict(zip(cases, ends[1:], strict=True))
        assert len(baseline.children) >= 16 and baseline.status["conditions"]["Ready"][0] == "True"
        for what, end in found.items():
            differs = state.difference(baseline.children, end.children) or state.difference(baseline.status, end.status)
            assert not differs, f"{what} ({end.run.crashes} crashes, {end.run.errors} errors): baseline, then this\n{differs}"
            assert end.pods == baseline.pods, what
        print(f"\n{len(found)} runs; undisturbed: {len(baseline.run.writes)} writes in {baseline.run.passes} passes")
        return found


@pytest.fixture(params=[False, True], ids=["create", "edit"])
def edit(request: pytest.FixtureRequest) -> bool:
    """Whether the faults come at the creation or at an edit of a pairing field."""
    return bool(request.param)


async def test_a_crash_after_every_write(kwok_cluster: Cluster, api: Api, space: str, edit: bool) -> None:
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space, edit)
        for first in range(1, MOST, WAVE):
            places = range(first, first + WAVE)
            ends = await cases.compare({f"crash after write {n}": cases.end(at(n, Fault(Crash(), performed=True))) for n in places})
            crashed = [end.run.crashes for end in ends.values()]
            if not all(crashed):  # beyond the last write
                break
            assert crashed == [1] * WAVE
        else:
            raise AssertionError(f"a run has more than {MOST} writes")
        assert first > WAVE, "fewer writes than there are children"


async def test_a_crash_before_every_write_of_one_process(kwok_cluster: Cluster, api: Api, space: str, edit: bool) -> None:
    """Each process does one write and dies: as many processes as writes."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space, edit)
        decide = lambda number, verb, what: Fault(Crash(), performed=True) if number <= 30 else None  # noqa: E731
        ends = await cases.compare({"thirty crashes in a row": cases.end(decide)})
        assert next(iter(ends.values())).run.crashes >= 16


async def test_refused_writes(kwok_cluster: Cluster, api: Api, space: str, edit: bool) -> None:
    """Every write refused once, by each kind of refusal in turn; and each write alone."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space, edit)
        all_of_them = {f"each write once: {name}": cases.end(each_once(make)) for name, make in REFUSALS.items()}
        kinds = list(REFUSALS.items())
        single = {f"write {n}: {kinds[n % 4][0]}": cases.end(at(n, kinds[n % 4][1]())) for n in range(1, 25)}
        ends = await cases.compare(all_of_them | single)
        assert all(ends[name].faults >= 16 for name in all_of_them) or edit
        assert all(end.faults for end in ends.values())


async def test_storms_of_crashes(kwok_cluster: Cluster, api: Api, space: str, edit: bool) -> None:
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space, edit)
        await cases.compare({f"seed {seed}": cases.end(storm(seed)) for seed in range(10)})


async def test_a_watch_that_is_behind(kwok_cluster: Cluster, api: Api, space: str, edit: bool) -> None:
    """The stores show the world as it was several passes ago, with and without a process that has forgotten its own writes."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space, edit)
        crash = {f"behind by {n}, crash at {n * 4}": cases.end(at(n * 4, Fault(Crash(), performed=True)), n) for n in (2, 4)}
        await cases.compare({f"behind by {n}": cases.end(undisturbed, n) for n in (2, 5, 9)} | crash)


async def test_a_frozen_watch_makes_us_wait_and_not_write_again(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """Expectations: what we wrote and the watch has not shown is neither written again, nor made twice, nor deleted."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(space, "frozen", **SPEC))
        stores, tap = Lagging(rig.stores, (space, "frozen")), Tap(rig.client)
        reconciler = rig.reconciler(tap, stores)
        for _ in range(5):
            await reconciler.reconcile((space, "frozen"))
            await asyncio.sleep(0.2)
        children = [write for write in tap.writes if not write.startswith(("apply_status", "create Event"))]
        assert len(children) == len(set(children)) == 18, children
        assert not [write for write in tap.writes if write.startswith("delete")]
        status = [write for write in tap.writes if write.startswith("apply_status")]
        assert status == ["apply_status PDDeployment/frozen"]
        assert (await rig.drive((space, "frozen"), tap, reconciler=rig.reconciler(tap))).crashes == 0
