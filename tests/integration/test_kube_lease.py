"""Leader election against a real API server: one leader, a quick hand-over, and an end of writes before anybody else may write."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from faults.objects import until
from faults.proxy import FOREVER, Fault, FaultProxy
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import Conflict
from pd_operator.kube.lease import LeaseElector, LeaseLost, LeaseTiming, LeaseUnavailable

QUICK = LeaseTiming(lease_duration=5.0, renew_deadline=3.5, retry_period=0.4, give_up_after=1.5)
LEASES = "/leases"


@pytest.fixture
async def through(proxy: FaultProxy) -> AsyncIterator[KubeClient]:
    made = await KubeClient.connect(str(proxy.kubeconfig), request_timeout=30)
    yield made
    await made.close()


@asynccontextmanager
async def running(elector: LeaseElector) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(elector.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def spec(client: KubeClient, namespace: str) -> dict[str, Any]:
    found = await client.get("Lease", namespace, "pd-operator")
    assert found is not None
    result: dict[str, Any] = found["spec"]
    return result


async def written(client: KubeClient, namespace: str, **fields: Any) -> None:
    """Somebody else's write, or one of ours whose answer nobody read."""
    found = await client.get("Lease", namespace, "pd-operator")
    assert found is not None
    await client.replace({**found, "spec": {**found["spec"], **fields}})


def elector(client: KubeClient, namespace: str, name: str, timing: LeaseTiming = QUICK) -> LeaseElector:
    return LeaseElector(client, namespace, "pd-operator", name, timing=timing)


async def test_two_candidates_one_leader_and_a_hand_over_on_release(client: KubeClient, namespace: str) -> None:
    first, second = elector(client, namespace, "a"), elector(client, namespace, "b")
    async with running(first) as first_task:
        await asyncio.wait_for(first.led.wait(), 10)
        async with running(second):
            await hand_over(client, namespace, first, first_task, second)


async def hand_over(
    client: KubeClient, namespace: str, first: LeaseElector, first_task: asyncio.Task[None], second: LeaseElector
) -> None:
    await asyncio.sleep(1.5 * QUICK.lease_duration)
    assert (first.is_leader(), second.is_leader()) == (True, False)  # renewals keep it
    assert (await spec(client, namespace))["holderIdentity"] == "a"
    first_task.cancel()
    await asyncio.gather(first_task, return_exceptions=True)
    await first.release()
    assert not first.is_leader()
    started = time.monotonic()
    await asyncio.wait_for(second.led.wait(), 5)
    assert time.monotonic() - started < 2.5  # at the next look, not after the lease's duration
    found = await spec(client, namespace)
    assert (found["holderIdentity"], found["leaseTransitions"]) == ("b", 1)


async def test_a_dead_leader_is_followed_after_its_lease_and_not_before(client: KubeClient, namespace: str) -> None:
    dead, heir = elector(client, namespace, "dead"), elector(client, namespace, "heir")
    async with running(dead) as task:
        await asyncio.wait_for(dead.led.wait(), 5)
        task.cancel()  # no release: the process was killed
        died = time.monotonic()
    async with running(heir):
        await asyncio.wait_for(heir.led.wait(), 10)
    assert QUICK.lease_duration - 0.5 < time.monotonic() - died < QUICK.lease_duration + 2.5


async def test_a_leader_that_cannot_renew_stops_before_another_may_lead(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str
) -> None:
    cut, other = elector(through, namespace, "cut"), elector(client, namespace, "other")
    async with running(cut) as task:
        await asyncio.wait_for(cut.led.wait(), 5)
        async with running(other):
            proxy.add(Fault(path=LEASES, times=FOREVER, drop=True))
            overlap = 0
            while not other.is_leader():
                await asyncio.sleep(0.02)
                overlap += cut.is_leader() and other.is_leader()
            assert overlap == 0
            assert task.done()
            with pytest.raises(LeaseLost, match="not renewed for 4 s"):
                task.result()


async def test_a_hanging_renewal_does_not_outlive_the_deadline(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    """The client's own timeout (30 s) is longer than the lease: the deadline must cut the request."""
    one = elector(through, namespace, "one")
    async with running(one) as task:
        await asyncio.wait_for(one.led.wait(), 5)
        proxy.add(Fault(path=LEASES, times=FOREVER, delay=60))
        started = time.monotonic()
        with pytest.raises(LeaseLost):
            await asyncio.wait_for(task, 10)
        assert time.monotonic() - started < QUICK.renew_deadline + QUICK.retry_period + 0.5
        assert not one.is_leader()


async def test_a_blocked_event_loop_does_not_lead(client: KubeClient, namespace: str) -> None:
    one = elector(client, namespace, "one")
    async with running(one):
        await asyncio.wait_for(one.led.wait(), 5)
        assert one.is_leader()
        time.sleep(QUICK.renew_deadline + 0.2)
        assert not one.is_leader()  # although nothing has run that could have noticed


async def test_a_stolen_lease_ends_the_leader(client: KubeClient, namespace: str) -> None:
    one = elector(client, namespace, "one")
    async with running(one) as task:
        await asyncio.wait_for(one.led.wait(), 5)
        for _ in range(5):  # the leader writes too: try until we were faster
            found = await client.get("Lease", namespace, "pd-operator")
            assert found is not None
            found["spec"]["holderIdentity"] = "thief"
            with contextlib.suppress(Conflict):
                await client.replace(found)
                break
        else:
            pytest.fail("the leader was faster five times")
        with pytest.raises(LeaseLost, match="taken by 'thief'"):
            await asyncio.wait_for(task, 5)


async def test_a_renewal_whose_answer_was_lost_is_no_loss(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str
) -> None:
    one = elector(through, namespace, "one")
    async with running(one) as task:
        await asyncio.wait_for(one.led.wait(), 5)
        proxy.add(Fault(method="PUT", path=LEASES, status=409))
        proxy.add(Fault(method="PUT", path=LEASES, status=500))
        await asyncio.sleep(3 * QUICK.renew_deadline)
        assert one.is_leader()
        assert not task.done()


async def test_a_follower_without_rights_gives_up(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    proxy.add(Fault(path=LEASES, status=403, times=FOREVER))
    one = elector(through, namespace, "one")
    with pytest.raises(LeaseUnavailable, match=r"limit 2 s.*403"):
        await asyncio.wait_for(one.run(), 10)


async def test_release_is_bounded_and_never_raises(proxy: FaultProxy, through: KubeClient, namespace: str) -> None:
    one = elector(through, namespace, "one")
    async with running(one):
        await asyncio.wait_for(one.led.wait(), 5)
    proxy.add(Fault(path=LEASES, delay=60))
    started = time.monotonic()
    await one.release()
    assert time.monotonic() - started < 3
    never = elector(through, namespace, "never")
    await never.release()  # it never led: nothing to do


async def test_a_renewal_whose_answer_was_cut_off_does_not_keep_the_lease(client: KubeClient, namespace: str) -> None:
    """`run` is cancelled at any moment, that of a renewal too: then the lease is newer than what we know of it."""
    one = elector(client, namespace, "one")
    async with running(one):
        await asyncio.wait_for(one.led.wait(), 5)
    await written(client, namespace, leaseDurationSeconds=7)
    await one.release()
    assert (await spec(client, namespace))["holderIdentity"] == ""


async def test_a_renewal_that_arrives_during_the_release_does_not_keep_the_lease(
    client: KubeClient, proxy: FaultProxy, through: KubeClient, namespace: str
) -> None:
    one = elector(through, namespace, "one")
    async with running(one):
        await asyncio.wait_for(one.led.wait(), 5)
    late = proxy.add(Fault(method="PUT", path=LEASES, delay=0.5))
    release = asyncio.create_task(one.release())
    await until("the release is written", lambda: late.used)
    await written(client, namespace, leaseDurationSeconds=7)
    await release
    assert (await spec(client, namespace))["holderIdentity"] == ""


async def test_a_lease_that_somebody_took_is_not_released(client: KubeClient, namespace: str) -> None:
    one = elector(client, namespace, "one")
    async with running(one):
        await asyncio.wait_for(one.led.wait(), 5)
    await written(client, namespace, holderIdentity="other")
    await one.release()
    assert (await spec(client, namespace))["holderIdentity"] == "other"


async def test_many_candidates_race_for_a_fresh_lease(client: KubeClient, namespace: str) -> None:
    candidates = [elector(client, namespace, f"c{number}") for number in range(8)]
    tasks = [asyncio.create_task(candidate.run()) for candidate in candidates]
    try:
        await until("somebody leads", lambda: any(candidate.is_leader() for candidate in candidates))
        for _ in range(100):
            assert sum(candidate.is_leader() for candidate in candidates) == 1
            await asyncio.sleep(0.02)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def test_timings_must_leave_room() -> None:
    with pytest.raises(ValueError, match="retry_period < renew_deadline < lease_duration"):
        LeaseTiming(lease_duration=10, renew_deadline=10, retry_period=2)
    assert (LeaseTiming().lease_duration, LeaseTiming().renew_deadline, LeaseTiming().retry_period) == (15, 10, 2)
