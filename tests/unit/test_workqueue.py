"""The workqueue keeps client-go's promises: once waiting, never twice at once, again after a late add, bounded retries."""

from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.controller.workqueue import BASE_DELAY, MAX_DELAY, ShutDown, TokenBucket, WorkQueue, backoff

SOON = 30.0  # seconds within which what is ready must come


async def get(queue: WorkQueue[str]) -> str:
    return await asyncio.wait_for(queue.get(), SOON)


async def nothing(queue: WorkQueue[str], seconds: float = 0.05) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(queue.get(), seconds)


async def test_a_key_added_many_times_comes_once() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for _ in range(1000):
        queue.add("a")
    assert len(queue) == 1
    assert await get(queue) == "a"
    queue.done("a")
    await nothing(queue)


async def test_a_key_added_while_worked_on_comes_again_once_and_only_afterwards() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    await get(queue)
    queue.add("a")
    queue.add("a")
    await nothing(queue)
    queue.done("a")
    assert await get(queue) == "a"
    queue.done("a")
    await nothing(queue)


async def test_keys_come_in_the_order_they_became_ready() -> None:
    queue: WorkQueue[str] = WorkQueue()
    for key in "abcab":
        queue.add(key)
    assert [await get(queue) for _ in range(3)] == ["a", "b", "c"]


async def test_add_after_waits_and_the_earliest_time_counts() -> None:
    queue: WorkQueue[str] = WorkQueue()
    loop = asyncio.get_running_loop()
    queue.add_after("late", 300)
    queue.add_after("a", 60)
    queue.add_after("a", 0.4)
    started = loop.time()
    queue.add_after("a", 0.1)  # earlier: counts
    queue.add_after("a", 0.2)  # later: ignored
    assert await get(queue) == "a"
    assert 0.09 <= loop.time() - started < SOON
    queue.done("a")
    await nothing(queue, 0.5)  # the entries for 0.2 and 0.4 are no second and third visit
    assert queue.delayed() == 1
    queue.shutdown()


async def test_a_look_now_is_also_the_one_that_was_asked_for_later() -> None:
    """News comes in bursts, and what was told before a key is worked on is seen by that work; what is told during it is not."""
    queue: WorkQueue[str] = WorkQueue()
    queue.add_after("a", 0.05)
    queue.add("a")
    assert await get(queue) == "a"
    assert queue.delayed() == 0
    queue.done("a")
    await nothing(queue, 0.1)
    queue.add("a")
    await get(queue)
    queue.add_after("a", 0.05)
    queue.done("a")
    assert await get(queue) == "a"


async def test_add_after_of_a_waiting_key_is_no_second_visit() -> None:
    queue: WorkQueue[str] = WorkQueue()
    queue.add("a")
    queue.add_after("a", 0.02)
    await asyncio.sleep(0.05)
    assert len(queue) == 1


async def test_retries_wait_longer_each_time_and_forget_starts_anew() -> None:
    queue: WorkQueue[str] = WorkQueue(base_delay=0.01, max_delay=0.1)
    waits = [queue.retry("a") for _ in range(8)]
    for n, wait in enumerate(waits):
        whole = min(0.1, 0.01 * 2**n)
        assert whole / 2 <= wait <= whole
    assert queue.failures("a") == 8
    queue.forget("a")
    assert queue.retry("a") <= 0.01


async def test_a_retry_waits_as_long_as_the_server_asks() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.retry("a", at_least=7.0) == 7.0


async def test_the_retries_of_all_keys_share_a_token_bucket() -> None:
    queue: WorkQueue[int] = WorkQueue(base_delay=0.001, rate=10, burst=5)
    waits = [queue.retry(n) for n in range(25)]
    assert max(waits[:5]) <= 0.001
    assert waits[24] == pytest.approx(2.0, abs=0.1)  # 20 above the burst, 10 a second
    queue.shutdown()


async def test_adds_do_not_take_tokens() -> None:
    queue: WorkQueue[int] = WorkQueue(rate=0.001, burst=1)
    for n in range(1000):
        queue.add(n)
    assert len(queue) == 1000


@pytest.mark.parametrize("failures", [1, 2, 5, 14, 15, 40, 10_000])
def test_backoff_stays_within_its_bounds(failures: int) -> None:
    whole = min(MAX_DELAY, BASE_DELAY * 2.0 ** min(failures - 1, 32))
    assert backoff(failures, jitter=lambda: 0.0) == pytest.approx(whole / 2)
    assert backoff(failures, jitter=lambda: 1.0) == pytest.approx(whole)


def test_token_bucket_fills_up_to_its_burst() -> None:
    bucket = TokenBucket(rate=2, burst=3, now=0)
    assert [bucket.reserve(0) for _ in range(5)] == [0, 0, 0, 0.5, 1.0]
    assert bucket.reserve(1000) == 0
    assert [bucket.reserve(1000) for _ in range(3)] == [0, 0, 0.5]


async def test_shutdown_ends_waiting_and_later_gets() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = [asyncio.create_task(queue.get()) for _ in range(3)]
    await asyncio.sleep(0)
    queue.shutdown()
    for task in waiting:
        with pytest.raises(ShutDown):
            await asyncio.wait_for(task, SOON)
    queue.add("a")
    with pytest.raises(ShutDown):
        await queue.get()


async def test_a_cancelled_getter_does_not_swallow_a_key() -> None:
    queue: WorkQueue[str] = WorkQueue()
    first = asyncio.create_task(queue.get())
    second = asyncio.create_task(queue.get())
    await asyncio.sleep(0)
    queue.add("a")  # wakes the first
    first.cancel()
    assert await asyncio.wait_for(second, SOON) == "a"


async def test_ages_tell_how_long_keys_wait_and_run() -> None:
    queue: WorkQueue[str] = WorkQueue()
    assert queue.oldest_age() == queue.longest_running() == 0
    queue.add("a")
    queue.add_after("b", 60)  # not ready: does not count
    await asyncio.sleep(0.05)
    assert 0.04 < queue.oldest_age() < SOON
    await get(queue)
    assert queue.oldest_age() == 0
    await asyncio.sleep(0.05)
    assert 0.04 < queue.longest_running() < SOON
    queue.done("a")
    assert queue.longest_running() == 0
    queue.shutdown()


async def test_ten_thousand_events_on_200_keys_become_few_reconciles() -> None:
    """kopf delivers every event of an object one by one since 1.42; the queue must coalesce them."""
    queue: WorkQueue[int] = WorkQueue()
    reconciles = 0

    async def worker() -> None:
        nonlocal reconciles
        while True:
            try:
                key = await queue.get()
            except ShutDown:
                return
            await asyncio.sleep(0.02)
            reconciles += 1
            queue.done(key)

    workers = [asyncio.create_task(worker()) for _ in range(20)]
    for n in range(10_000):
        queue.add(n % 200)
        if n % 500 == 0:
            await asyncio.sleep(0.005)
    while len(queue) or queue.longest_running():
        await asyncio.sleep(0.02)
    queue.shutdown()
    await asyncio.gather(*workers)
    assert 200 <= reconciles <= 1000


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_no_key_is_lost_and_none_runs_twice_at_once(seed: int, workers: int) -> None:
    """Random adds, failures and delays: after the last add of a key there is always one more complete visit."""

    async def scenario() -> None:
        rng = random.Random(seed)
        queue: WorkQueue[int] = WorkQueue(base_delay=0.0005, max_delay=0.002)
        running: set[int] = set()
        version = dict.fromkeys(range(8), 0)
        seen = dict(version)

        async def worker() -> None:
            while True:
                try:
                    key = await queue.get()
                except ShutDown:
                    return
                assert key not in running
                running.add(key)
                observed = version[key]
                await asyncio.sleep(rng.random() * 0.001)
                running.discard(key)
                if rng.random() < 0.2:
                    queue.retry(key)
                else:
                    queue.forget(key)
                    seen[key] = observed
                queue.done(key)

        tasks = [asyncio.create_task(worker()) for _ in range(workers)]
        for _ in range(200):
            key = rng.randrange(8)
            version[key] += 1
            if rng.random() < 0.5:
                queue.add(key)
            else:
                queue.add_after(key, rng.random() * 0.003)
            if rng.random() < 0.3:
                await asyncio.sleep(rng.random() * 0.001)
        deadline = asyncio.get_running_loop().time() + 10
        while len(queue) or queue.delayed() or queue.longest_running():
            assert asyncio.get_running_loop().time() < deadline, "the queue did not empty within 10 s"
            await asyncio.sleep(0.001)
        queue.shutdown()
        await asyncio.gather(*tasks)
        assert seen == version

    asyncio.run(scenario())
