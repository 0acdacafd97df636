"""Workers: key -> leader gate -> reconcile -> Result -> when to look again.

A replica that does not lead keeps its keys and looks again later, so that it can take over with nothing missing.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable

from pd_operator import logs
from pd_operator.controller.telemetry import Telemetry
from pd_operator.controller.workqueue import ShutDown, WorkQueue
from pd_operator.core.result import Done, Result, Terminal, Waiting
from pd_operator.kube.errors import ApiError, is_retryable
from pd_operator.kube.lease import LEASE_DURATION

Key = tuple[str, str]  # (namespace, name) of a PDDeployment
Reconcile = Callable[[Key], Awaitable[Result]]
SLOW = 1.0  # seconds; a slower reconcile is worth a log line
MAX_RETRY_AFTER = 60.0  # seconds

logger = logging.getLogger(__name__)


class Controller:
    """Runs `workers` workers over one queue."""

    def __init__(
        self,
        queue: WorkQueue[Key],
        reconcile: Reconcile,
        *,
        is_leader: Callable[[], bool],
        telemetry: Telemetry,
        workers: int,
        timeout: float,
        follower_delay: float = LEASE_DURATION,
    ) -> None:
        """`timeout`: seconds one reconcile may take; `follower_delay`: seconds a key of a follower waits."""
        self._queue = queue
        self._reconcile = reconcile
        self._is_leader = is_leader
        self._telemetry = telemetry
        self._workers = workers
        self._timeout = timeout
        self._follower_delay = follower_delay

    async def run(self) -> None:
        """Work until the queue is shut down and the running reconciles are through."""
        async with asyncio.TaskGroup() as group:
            for number in range(self._workers):
                group.create_task(self._work(), name=f"worker {number}")

    async def _work(self) -> None:
        while True:
            try:
                key = await self._queue.get()
            except ShutDown:
                return
            try:
                if self._is_leader():
                    await self._one(key)
                else:
                    self._queue.add_after(key, self._follower_delay * random.uniform(0.8, 1.2))
            finally:
                self._queue.done(key)

    async def _one(self, key: Key) -> None:
        started = time.monotonic()
        with logs.reconciling(key):
            name = "error"
            try:
                async with asyncio.timeout(self._timeout):
                    result = await self._reconcile(key)
                name = self._take(key, result)
            except Exception as exc:
                self._failed(key, exc, time.monotonic() - started)
            finally:
                seconds = time.monotonic() - started
                self._telemetry.reconciled(name, seconds)
                logger.log(logging.INFO if seconds > SLOW else logging.DEBUG, "reconciled in %.3f s: %s", seconds, name)

    def _take(self, key: Key, result: Result) -> str:
        """Schedule what the result asks for; its name."""
        self._queue.forget(key)
        match result:
            case Done(requeue_after=None):
                return "done"
            case Done(requeue_after=float() | int() as seconds):
                self._queue.add_after(key, seconds)
                return "done"
            case Waiting(reason=reason, requeue_after=seconds):
                logger.debug("waiting, again in %.0f s at the latest: %s", seconds, reason)
                self._queue.add_after(key, seconds)
                return "waiting"
            case Terminal(reason=reason):
                logger.debug("no retry before the object changes: %s", reason)
                return "terminal"
        raise TypeError(f"reconcile returned {result!r}; Done, Waiting or Terminal is required")

    def _failed(self, key: Key, exc: Exception, seconds: float) -> None:
        at_least = 0.0
        if isinstance(exc, ApiError) and exc.retry_after:
            at_least = min(exc.retry_after, MAX_RETRY_AFTER)
        wait = self._queue.retry(key, at_least)
        text = f"{type(exc).__name__}: {exc}" if str(exc) else f"{type(exc).__name__} after {seconds:.0f} s"
        # A traceback only for what may be a bug of ours: an outage of the API server would fill the log with them.
        logger.error(
            "reconcile failed (%d in a row), again in %.3f s: %s",
            self._queue.failures(key),
            wait,
            text,
            exc_info=None if is_retryable(exc) or isinstance(exc, ApiError) else exc,
        )
