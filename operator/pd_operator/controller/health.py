"""/healthz, /readyz and /metrics.

A probe answers 503 with the list of what is wrong, each with its value and limit. Liveness fails only for what a restart
mends (a blocked event loop, a worker that never returns); everything outside the process is readiness.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST

LAG_PERIOD = 0.5  # seconds between two looks at the event loop


@dataclass(frozen=True, slots=True)
class Problem:
    """Why a probe fails. `value` and `limit` are in seconds where the check is about time."""

    check: str
    message: str
    value: float | None = None
    limit: float | None = None


Check = Callable[[], Iterable[Problem]]


class LoopLag:
    """Measures how late the event loop runs its timers."""

    def __init__(self) -> None:
        self._due: float | None = None
        self._last = 0.0

    def seconds(self) -> float:
        """The last lag, or the present one when that is larger."""
        late = time.monotonic() - self._due if self._due is not None else 0.0
        return max(self._last, late, 0.0)

    async def run(self, on_tick: Callable[[], None] = lambda: None) -> None:
        """Measure until cancelled; `on_tick` is called each period."""
        while True:
            self._due = time.monotonic() + LAG_PERIOD
            await asyncio.sleep(LAG_PERIOD)
            self._last = max(0.0, time.monotonic() - self._due)
            on_tick()


def over(check: str, what: str, value: float, limit: float) -> Iterable[Problem]:
    """One problem when `value` (seconds) exceeds `limit`."""
    if value > limit:
        yield Problem(check, f"{what}: {value:.1f} s, limit {limit:.1f} s", round(value, 3), limit)


class Health:
    """The HTTP server of the probes and metrics."""

    def __init__(
        self, host: str, port: int, *, live: list[Check], ready: list[Check], expose: Callable[[Sequence[str]], bytes]
    ) -> None:
        """`port` 0 takes any free one; see `port` after `start`. `expose` makes the metrics of these names; of none: all."""
        self._host = host
        self.port = port
        self._live = live
        self._ready = ready
        self._expose = expose
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Listen.

        Raises:
            OSError: the address is taken.
        """
        app = web.Application()
        app.router.add_get("/healthz", self._healthz)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/metrics", self._metrics)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """Stop listening; open connections have a second."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _healthz(self, _: web.Request) -> web.Response:
        return self._answer(self._live)

    async def _readyz(self, _: web.Request) -> web.Response:
        return self._answer([*self._live, *self._ready])

    @staticmethod
    def _answer(checks: list[Check]) -> web.Response:
        problems = [asdict(problem) for check in checks for problem in check()]
        body = {"status": "failing" if problems else "ok", "problems": problems}
        return web.Response(text=json.dumps(body) + "\n", content_type="application/json", status=503 if problems else 200)

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._expose(request.query.getall("name[]", [])), headers={"Content-Type": CONTENT_TYPE_LATEST})
