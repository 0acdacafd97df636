"""Pool: runs a function on many items in spawned processes. A process that dies or takes too long costs its item, not the run."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
POLL = 1.0  # seconds between looks at the clock
STARTUP = 300.0  # seconds that a process may take to import what it runs, on a busy machine
READY = "ready"


@dataclass(frozen=True, slots=True)
class Done(Generic[Item, Answer]):
    """What came of one item: an answer, or the reason why there is none."""

    item: Item
    answer: Answer | None
    error: str | None
    seconds: float


@dataclass(slots=True)
class _Worker(Generic[Item]):
    process: SpawnProcess
    pipe: Connection
    item: Item | None = None
    since: float = 0.0
    ready: bool = False


def run(
    function: Callable[[Item], Answer], items: Sequence[Item], *, jobs: int, limit: float, deadline: float | None = None
) -> Iterator[Done[Item, Answer]]:
    """Yield what came of each item, in the order of finishing.

    `function` must be importable (spawn). An item that takes over `limit` seconds is given up. After `deadline` (time.monotonic)
    nothing new begins; items that did not begin are not yielded. Leaving the iterator ends the processes.
    """
    waiting = list(reversed(items))
    workers: list[_Worker[Item]] = []
    try:
        while True:
            late = deadline is not None and time.monotonic() > deadline
            while waiting and not late and len(workers) < jobs:
                workers.append(_start(function))
                _give(workers[-1], waiting.pop())
            busy = [worker for worker in workers if worker.item is not None]
            if not busy:
                return
            ready = wait([worker.pipe for worker in busy], timeout=POLL)
            for worker in busy:
                done: Done[Item, Answer] | None = _collect(worker, limit, readable=worker.pipe in ready)
                if done is None:
                    continue
                if worker.item is not None or not worker.process.is_alive():
                    workers.remove(worker)
                    _stop(worker)
                elif waiting and not (deadline is not None and time.monotonic() > deadline):
                    _give(worker, waiting.pop())
                yield done
    finally:
        for worker in workers:
            _stop(worker)


def _start(function: Callable[[Item], Answer]) -> _Worker[Item]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(function, theirs), daemon=True)
    process.start()
    theirs.close()
    return _Worker(process, ours)


def _give(worker: _Worker[Item], item: Item) -> None:
    worker.item, worker.since = item, time.monotonic()
    worker.pipe.send(item)


def _collect(worker: _Worker[Item], limit: float, *, readable: bool) -> Done[Item, Answer] | None:
    """What a busy worker has to say, None while it works. A worker that is lost keeps its item."""
    item, seconds = worker.item, time.monotonic() - worker.since
    assert item is not None
    limit = limit if worker.ready else STARTUP
    if readable:
        try:
            message = worker.pipe.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(timeout=5)
            return Done(item, None, f"the process ended with exit code {worker.process.exitcode} (memory?)", seconds)
        if message == READY:
            worker.ready, worker.since = True, time.monotonic()
            return None
        worker.item = None
        answer, error = message
        return Done(item, answer, error, seconds)
    if seconds > limit:
        return Done(item, None, f"took more than the limit of {limit:.0f} s", seconds)
    return None


def _stop(worker: _Worker[Item]) -> None:
    worker.pipe.close()
    if worker.item is not None:
        worker.process.kill()
    worker.process.join(timeout=5)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join(timeout=5)


def _serve(function: Callable[[Item], Answer], pipe: Connection) -> None:
    """The worker's loop: ends when the pipe closes. An item's time begins when the imports are done."""
    pipe.send(READY)
    while True:
        try:
            item = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            message: tuple[Answer | None, str | None] = (function(item), None)
        except KeyboardInterrupt:
            return
        except Exception as exc:  # any failure of a cell is a result, with its name
            message = (None, f"{type(exc).__name__}: {exc}")
        pipe.send(message)
