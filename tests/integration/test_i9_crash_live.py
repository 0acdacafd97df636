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

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.inprocess import Crash, Decide, Fault, Lagging, Rig, Run, Tap
from pd_operator.kube.errors import ApiError, Conflict, Forbidden, Invalid

pytest_plugins = ("opsrunner.fixtures",)

WAVE = 12  # objects at once
SPEC: dict[str, Any] = {"lmcache": {"p2p": {"enabled": True}}, "router": {"replicas": 1}}
EDIT: dict[str, Any] = {"engine": {"args": ["--max-num-seqs=8"]}, "lmcache": None}  # the coordinator goes, too
MOST = 22  # more than the objects that a creation writes
MOST_OF_EDIT = 17  # likewise of the edit
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


@dataclass
class Case:
    """Both ends of one object: made under faults, then edited under the same kind of faults."""

    made: End
    edited: End | None


def undisturbed(number: int, verb: str, what: str) -> Fault | None:
    """No fault."""
    return None


def at(place: int, make: Callable[[], Fault]) -> Decide:
    """The write of this number breaks, status not counted."""
    seen = itertools.count(1)
    return lambda number, verb, what: make() if verb != "apply_status" and next(seen) == place else None


def until(place: int, make: Callable[[], Fault]) -> Decide:
    """Every write up to this one breaks."""
    return lambda number, verb, what: make() if number <= place else None


def crash() -> Fault:
    """The process dies right after the write."""
    return Fault(Crash(), performed=True)


def each_once(make: Callable[[], Fault]) -> Decide:
    """Every write is refused the first time it is tried."""
    tried: set[str] = set()

    def decide(number: int, verb: str, what: str) -> Fault | None:
        known = f"{verb} {what}" in tried
        tried.add(f"{verb} {what}")
        return None if known else make()

    return decide


def pools_unanswered(number: int, verb: str, what: str) -> Fault | None:
    """Every write of a pool's status is made, and no answer comes."""
    unheard = verb == "apply_status" and what.startswith("PDPool/")
    return Fault(TimeoutError("the answer was lost"), performed=True) if unheard else None


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
    """Makes an object for each case, and drives it to its ends."""

    def __init__(self, rig: Rig, api: Api, space: str) -> None:
        self.rig, self.api, self.space = rig, api, space
        self._limit = asyncio.Semaphore(WAVE)

    async def case(self, faults: Callable[[], Decide], behind: int = 0, edit: bool = True) -> Case:
        """Create an object under faults, and then edit a pairing field under fresh ones of the same kind."""
        name = f"kx{next(NUMBERS):03}q"
        async with self._limit:
            await asyncio.to_thread(self.api.create, state.pdd(self.space, name, **SPEC))
            made = await self._end(name, faults(), behind, None)
            edited = None
            if edit:
                await asyncio.to_thread(self.api.merge, "PDDeployment", self.space, name, {"spec": EDIT})
                edited = await self._end(name, faults(), behind, made.run)
            await asyncio.to_thread(self.api.delete, "PDDeployment", self.space, name)
        return Case(made, edited)

    async def _end(self, name: str, decide: Decide, behind: int, before: Run | None) -> End:
        tap = Tap(self.rig.client, decide) if before is None else before.tap.again(decide)
        run = await self.rig.drive((self.space, name), tap, process=before and before.process, behind=behind)
        return await asyncio.to_thread(self._read, name, run, tap.faults)

    def _read(self, name: str, run: Run, faults: int) -> End:
        obj = self.api.must_get("PDDeployment", self.space, name)
        children = state.children(self.api, self.space, name)
        wanted = sum(child["spec"]["replicas"] for (kind, _), child in children.items() if kind == "Deployment")
        # Kubernetes may still be at the pods of a Deployment that is gone.
        waits.until(f"{wanted} pods of {name}", lambda: len(state.pods(self.api, self.space, name)) == wanted)
        return End(run, faults, state.normalised(children, obj), state.settled_status(obj))

    async def compare(self, cases: dict[str, Coroutine[Any, Any, Case]]) -> dict[str, Case]:
        """Run all side by side; each end must be that of an undisturbed run."""
        baseline, *rest = await asyncio.gather(self.case(lambda: undisturbed), *cases.values())
        found = dict(zip(cases, rest, strict=True))
        assert baseline.edited and (len(baseline.made.children), len(baseline.edited.children)) == (18, 17)
        for what, case in found.items():
            assert_same(baseline.made, case.made, f"created, {what}")
            if case.edited:
                assert_same(baseline.edited, case.edited, f"edited, {what}")
        counts = [f"{len(end.run.writes)} writes in {end.run.passes} passes" for end in (baseline.made, baseline.edited)]
        print(f"\n{len(found)} cases; undisturbed: create {counts[0]}, edit {counts[1]}")
        return found


def assert_same(baseline: End, end: End, what: str) -> None:
    """Both ends are equal, and good."""
    assert baseline.status["conditions"]["Ready"][0] == "True"
    differs = state.difference(baseline.children, end.children) or state.difference(baseline.status, end.status)
    assert not differs, f"{what} ({end.run.crashes} crashes, {end.run.errors} errors): undisturbed, then this\n{differs}"


async def test_a_crash_after_every_write(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """Of all writes of objects; after those of status, see the test below."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space)
        places = {n: cases.case(lambda n=n: at(n, crash), edit=n < MOST_OF_EDIT) for n in range(1, MOST)}
        found = await cases.compare({f"crash after write {n}": case for n, case in places.items()})
        for end in ("made", "edited"):
            crashed = [there.run.crashes for case in found.values() if (there := getattr(case, end))]
            assert crashed == sorted(crashed, reverse=True), "a run without a crash has fewer writes than one with"
            assert 12 <= sum(crashed) < len(crashed), f"{sum(crashed)} writes met a crash: raise MOST"
            print(f"{end}: a crash after each of {sum(crashed)} writes")


async def test_many_crashes(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """As many processes as writes, and deaths in the middle of a stage."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space)
        storms = {f"storm {seed}": cases.case(lambda seed=seed: storm(seed)) for seed in range(4)}
        others = {
            "each process does one write": cases.case(lambda: until(30, crash)),
            "pools unanswered": cases.case(
                lambda: pools_unanswered
            ),  # their counts rise in a rollout and come back to what they were
        }
        found = await cases.compare(others | storms)
        unanswered = found["pools unanswered"].edited
        assert unanswered and unanswered.faults >= 2  # up, and down again
        assert found["each process does one write"].made.run.crashes >= 18


async def test_every_write_refused_once(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space)
        found = await cases.compare({name: cases.case(lambda make=make: each_once(make)) for name, make in REFUSALS.items()})
        for name, case in found.items():
            assert case.edited and case.made.faults >= 18 and case.edited.faults >= 10, (name, case)


async def test_a_watch_that_is_behind(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """The stores show the world as it was several passes ago, also to a process that has forgotten its own writes."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        cases = Cases(rig, api, space)
        late = {f"behind by {n}": cases.case(lambda: undisturbed, n) for n in (2, 7)}
        await cases.compare(late | {f"behind by 4, crash at {n}": cases.case(lambda n=n: at(n, crash), 4) for n in (5,)})


async def test_a_frozen_watch_makes_us_wait_and_not_write_again(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """Expectations: what we wrote and the watch has not shown is neither written again, nor made twice, nor deleted."""
    async with Rig(kwok_cluster.kubeconfig) as rig:
        api.create(state.pdd(space, "frozen", **SPEC))
        stores, tap = Lagging(rig.stores, (space, "frozen")), Tap(rig.client)
        reconciler = rig.reconciler(tap, stores)
        for _ in range(5):
            await reconciler.reconcile((space, "frozen"))
            await asyncio.sleep(0.2)
        children = [write for write in tap.writes if not write.startswith("apply_status")]
        assert len(children) == len(set(children)) == 18, children
        assert not [write for write in tap.writes if write.startswith("delete")]
        assert [write for write in tap.writes if write.startswith("apply_status")] == ["apply_status PDDeployment/frozen"]
        assert (await rig.drive((space, "frozen"), tap)).crashes == 0


async def test_an_api_server_that_takes_no_job_is_told_and_asked_again(kwok_cluster: Cluster, api: Api, space: str) -> None:
    """A webhook that nobody answers makes the server answer 500: status says it, instead of errors that only the log has."""
    key = space, "hooked"
    down = ApiError(500, "InternalError", "failed calling webhook jobs.example.org: connection refused")
    async with Rig(kwok_cluster.kubeconfig) as rig:
        tap = Tap(rig.client, lambda number, verb, what: Fault(down) if what.startswith("Job/") else None)
        reconciler = rig.reconciler(tap)
        api.create(state.pdd(*key, verification="Required"))

        async def until_told(status: str, reason: str) -> dict[str, Any]:
            for _ in range(60):
                await reconciler.reconcile(key)
                obj = api.must_get("PDDeployment", *key)
                if waits.has(obj, "HandoffVerified", status, reason):
                    return obj
                await asyncio.sleep(0.5)
            raise AssertionError(waits.describe(obj))

        obj = await until_told("False", "CanaryForbidden")
        ready = waits.conditions(obj)["Ready"]
        assert (ready["status"], ready["reason"]) == ("False", "CanaryForbidden"), ready
        assert "failed calling webhook" in ready["message"] and "spec.verification: Advisory or Disabled" in ready["message"]
        tap.again(lambda number, verb, what: None)
        await until_told("Unknown", "NotYetRun")
        assert api.list("Job", space, "pdserve.dev/deployment=hooked")
