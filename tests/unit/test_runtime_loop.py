"""Workers: what each result, error and lost leadership leads to."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from faults.objects import until
from pd_operator.controller.loop import Controller, Key
from pd_operator.controller.telemetry import Telemetry
from pd_operator.controller.workqueue import WorkQueue
from pd_operator.core.result import Done, Result, Terminal, Waiting
from pd_operator.kube.errors import ApiError, Invalid
from pd_operator.logs import JsonFormatter
from pd_operator.manager import GARBAGE, run_process

A: Key = ("ns", "a")


class Run:
    """A controller whose reconcile calls the next of a list of steps."""

    def __init__(self, *steps: Result | Exception | Callable[[], Awaitable[Result]], **options: float) -> None:
        self.queue: WorkQueue[Key] = WorkQueue(base_delay=options.pop("base_delay", 0.01))
        self.telemetry = Telemetry()
        self.leader = True
        self.calls: list[Key] = []
        self._steps = list(steps)
        self.controller = Controller(
            self.queue,
            self._reconcile,
            is_leader=lambda: self.leader,
            telemetry=self.telemetry,
            workers=int(options.pop("workers", 2)),
            timeout=options.pop("timeout", 5.0),
            follower_delay=options.pop("follower_delay", 0.2),
        )

    async def _reconcile(self, key: Key) -> Result:
        self.calls.append(key)
        step = self._steps[min(len(self.calls), len(self._steps)) - 1]
        if isinstance(step, Exception):
            raise step
        return await step() if callable(step) else step

    def count(self, result: str) -> float:
        return self.telemetry.registry.get_sample_value("pd_operator_reconcile_total", {"result": result}) or 0.0


@asynccontextmanager
async def running(run: Run) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(run.controller.run())
    yield task
    run.queue.shutdown()
    await asyncio.wait_for(task, 5)


async def test_done_is_the_end_until_the_next_event() -> None:
    run = Run(Done())
    async with running(run):
        run.queue.add(A)
        await until("it ran", lambda: run.count("done") == 1)
        await asyncio.sleep(0.1)
        assert run.calls == [A]
        assert run.queue.delayed() == 0


@pytest.mark.parametrize(("result", "name"), [(Done(0.1), "done"), (Waiting("for the weather", 0.1), "waiting")])
async def test_a_result_that_asks_for_it_comes_again(result: Result, name: str) -> None:
    run = Run(result, Done())
    async with running(run):
        run.queue.add(A)
        await until("it came again", lambda: len(run.calls) == 2)
        assert run.count(name) >= 1


async def test_terminal_waits_for_the_user() -> None:
    run = Run(Terminal("the model is missing"))
    async with running(run):
        run.queue.add(A)
        await until("it ran", lambda: run.count("terminal") == 1)
        assert run.queue.delayed() == 0


async def test_only_errors_back_off_and_success_ends_it() -> None:
    run = Run(TimeoutError(), ApiError(500, "x", "y"), RuntimeError("bug"), Done())
    async with running(run):
        run.queue.add(A)
        await until("it succeeded", lambda: run.count("done") == 1)
        assert run.count("error") == 3
        assert run.queue.failures(A) == 0


async def test_waiting_after_errors_forgets_them() -> None:
    run = Run(TimeoutError(), Waiting("x", 60))
    async with running(run):
        run.queue.add(A)
        await until("it waits", lambda: run.count("waiting") == 1)
        assert run.queue.failures(A) == 0


async def test_the_servers_retry_after_is_obeyed() -> None:
    run = Run(ApiError(429, "TooManyRequests", "", 0.5), Done())
    async with running(run):
        run.queue.add(A)
        started = time.monotonic()
        await until("it succeeded", lambda: run.count("done") == 1)
        assert time.monotonic() - started >= 0.5


async def test_a_reconcile_that_takes_too_long_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    async def hang() -> Result:
        await asyncio.sleep(60)
        return Done()

    run = Run(hang, Done(), timeout=0.1)
    async with running(run):
        run.queue.add(A)
        await until("it was cut and came again", lambda: run.count("done") == 1)
        assert run.count("error") == 1
    assert "TimeoutError after 0 s" in caplog.text


async def test_a_wrong_result_is_an_error(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(None, Done())  # type: ignore[arg-type]
    async with running(run):
        run.queue.add(A)
        await until("it came again", lambda: run.count("done") == 1)
    assert "Done, Waiting or Terminal is required" in caplog.text


async def test_a_follower_keeps_its_keys_until_it_leads() -> None:
    run = Run(Done())
    run.leader = False
    async with running(run):
        began = time.monotonic()
        for number in range(20):
            run.queue.add(("ns", str(number)))
        await asyncio.sleep(0.3)
        assert run.calls == []
        assert len(run.queue) + run.queue.delayed() == 20
        assert run.queue.oldest_age() < time.monotonic() - began - 0.1  # none has waited for a worker all that time
        run.leader = True
        await until("all are reconciled", lambda: len(set(run.calls)) == 20)


async def test_one_key_never_runs_twice_at_once_and_others_run_beside_it() -> None:
    active: set[int] = set()
    seen: list[int] = []

    async def slow() -> Result:
        me = len(run.calls)
        active.add(me)
        seen.append(len(active))
        await asyncio.sleep(0.05)
        active.discard(me)
        return Done()

    run = Run(slow, workers=4)
    async with running(run):
        run.queue.add(A)
        await asyncio.sleep(0.01)
        for _ in range(5):
            run.queue.add(A)
        await until("twice, one after the other", lambda: run.count("done") == 2)
        assert seen == [1, 1]
        seen.clear()
        for number in range(4):
            run.queue.add(("ns", str(number)))
        await until("all ran", lambda: run.count("done") == 6)
        assert max(seen) == 4


async def test_shutdown_lets_running_work_end_and_starts_no_more() -> None:
    async def slow() -> Result:
        await asyncio.sleep(0.2)
        return Done()

    run = Run(slow, workers=1)
    task = asyncio.create_task(run.controller.run())
    run.queue.add(A)
    run.queue.add(("ns", "b"))
    await asyncio.sleep(0.05)
    run.queue.shutdown()
    await asyncio.wait_for(task, 2)
    assert run.calls == [A]
    assert run.count("done") == 1


async def test_log_lines_carry_the_key_and_one_id_per_reconcile(caplog: pytest.LogCaptureFixture) -> None:
    lines: list[dict[str, str]] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    handler = Keep()
    handler.setFormatter(JsonFormatter())
    logger = logging.getLogger("test.loop")
    logger.addHandler(handler)

    async def speak() -> Result:
        logger.warning("one")
        await asyncio.sleep(0.01)
        await asyncio.create_task(whisper())
        return Done()

    async def whisper() -> None:
        logger.warning("two")

    run = Run(speak)
    try:
        async with running(run):
            run.queue.add(A)
            run.queue.add(("ns", "b"))
            await until("both ran", lambda: run.count("done") == 2)
        logger.warning("outside")
    finally:
        logger.removeHandler(handler)
    by_key = {key: [line for line in lines if line.get("key") == key] for key in ("ns/a", "ns/b")}
    for found in by_key.values():
        assert [line["msg"] for line in found] == ["one", "two"]
        assert len({line["reconcile_id"] for line in found}) == 1
    assert by_key["ns/a"][0]["reconcile_id"] != by_key["ns/b"][0]["reconcile_id"]
    assert "key" not in lines[-1]


async def test_a_traceback_is_logged_for_bugs_only(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Invalid(422, "Invalid", "spec.x: wrong"), ZeroDivisionError("bug"), Done())
    async with running(run):
        run.queue.add(A)
        await until("it succeeded", lambda: run.count("done") == 1)
    records = [record for record in caplog.records if "reconcile failed" in record.getMessage()]
    assert [bool(record.exc_info) for record in records] == [False, True]
    assert "Invalid: 422 Invalid: spec.x: wrong" in records[0].getMessage()


def test_the_operator_looks_for_cycles_less_often_than_python() -> None:
    """A tick of a large fleet makes many containers and no cycle; tests/bench/tick.py has what the looks cost."""
    before = gc.get_threshold()

    async def operator() -> int:
        return gc.get_threshold()[0]

    gc.set_threshold(700, 10, 10)  # Python's own; an earlier test may have run an operator in this process
    try:
        assert run_process(operator) == GARBAGE > 700
    finally:
        gc.set_threshold(*before)
        asyncio.set_event_loop(None)
