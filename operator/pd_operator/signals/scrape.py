"""podScrape: the pods' own /metrics every 5 s, with nothing to install. The default source, for up to about 1,000 pods.

Counts and bytes are bounded: so many requests at once, so long for each, so large a page. A pod that failed waits in a line of
its own, so that hanging pods never hold up the others.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

import aiohttp

from pd_operator.core.evidence.counters import Counters
from pd_operator.signals import exposition
from pd_operator.signals.fleet import Deployment, Fleet, Key, Target
from pd_operator.signals.formulas import load
from pd_operator.signals.group import GroupKey, from_windows, group_key
from pd_operator.signals.load import Load, nothing
from pd_operator.signals.tally import of_window
from pd_operator.signals.window import MISSED, SLACK, Columns, Window

LOG = logging.getLogger(__name__)
PERIOD: Final = 5.0  # seconds between scrapes of one pod
WINDOW: Final = 30.0  # seconds over which rates are taken: two ticks of 15 s
TIMEOUT: Final = 3.0  # seconds for one page, connecting included
MAX_BYTES: Final = 4 * 2**20  # of a page; vLLM's are 61 KB (measured), smg's with a hundred workers a few hundred
MAX_PODS: Final = 1000  # pages a period; tests/bench/signals.py has what they cost
LEAD: Final = 1.0  # seconds from the begin of a sweep to the read that it is for; 1,000 pages take less (tests/bench/signals.py)
AT_ONCE: Final = 64
SUSPECTS_AT_ONCE: Final = 16
Identity = tuple[str, str]  # uid and URL


@dataclass(slots=True)
class _State:
    """What is known of one target."""

    window: Window | None = None
    failure: str = ""  # of the last try, "" after a success
    busy: bool = False


class PodScrape:
    """Scrapes the fleet and reads it. One event loop; `run()` beside, or `sweep()` by hand."""

    def __init__(
        self,
        fleet: Fleet,
        *,
        clock: Callable[[], float] = time.time,
        period: float = PERIOD,
        window: float = WINDOW,
        timeout: float = TIMEOUT,
        max_bytes: int = MAX_BYTES,
        max_pods: int = MAX_PODS,
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._period = period
        self._window = window
        self._max_bytes = max_bytes
        self._max_pods = max_pods
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._states: dict[Identity, _State] = {}
        self._columns: dict[tuple[str, str], Columns] = {}
        self._healthy = asyncio.Semaphore(AT_ONCE)
        self._suspects = asyncio.Semaphore(SUSPECTS_AT_ONCE)
        self._session: aiohttp.ClientSession | None = None
        self._sweeps = 0
        self._last_read: float | None = None  # the loop's time

    async def run(self) -> None:
        """A sweep every period until cancelled; one that takes longer does not hold up the next, its pods just sit that one out."""
        running: set[asyncio.Task[None]] = set()
        clock = asyncio.get_running_loop().time
        try:
            while True:
                begun = clock()
                task = asyncio.create_task(self._logged_sweep())
                running.add(task)
                task.add_done_callback(running.discard)
                await asyncio.sleep(next_sweep(begun, self._period, self._last_read) - clock())
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _logged_sweep(self) -> None:
        try:
            await self.sweep()
        except Exception:
            LOG.exception("a sweep failed")

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def sweep(self) -> None:
        """Scrape every target of the fleet whose turn it is. Pods that are no longer in it are forgotten."""
        self._sweeps += 1
        wanted = {_identity(t): t for d in self._within()[0] for t in d.targets}
        for gone in self._states.keys() - wanted.keys():
            del self._states[gone]
        due = [(i, t) for i, t in wanted.items() if self._sweeps % t.every == 0 or i not in self._states]
        await asyncio.gather(*(self._scrape(identity, target) for identity, target in due))

    async def read(self, now: float) -> Mapping[Key, Load]:
        """See Source. Uses the samples that are there and asks nobody."""
        self._last_read = asyncio.get_running_loop().time()
        inside, outside = self._within()
        found = {deployment.key: self._load(deployment, now) for deployment in inside if deployment.scales}
        if outside:
            pods = sum(len(d.targets) for d in (*inside, *outside))
            why = f"podScrape reads {self._max_pods} pages at most and there are {pods}: set signals.source to prometheus"
            found |= {d.key: nothing(why, tuple(sorted({t.slice for t in d.targets}))) for d in outside if d.scales}
        return found

    async def counters(self, now: float) -> Mapping[Key, tuple[Counters, ...]]:
        """See Pages. Uses the samples that are there and asks nobody; deployments beyond the limit are not in it."""
        return {deployment.key: tuple(self._counters(t, now) for t in deployment.targets) for deployment in self._within()[0]}

    def _counters(self, target: Target, now: float) -> Counters:
        state = self._states.get(_identity(target), _State())
        return of_window(target, state.window, state.failure, now)

    def _within(self) -> tuple[list[Deployment], list[Deployment]]:
        """The deployments that fit into the limit, and the others: those that scale first, in the order of their names."""
        inside: list[Deployment] = []
        outside: list[Deployment] = []
        used = 0.0
        for deployment in sorted(self._fleet(), key=lambda d: (not d.scales, d.key)):
            cost = sum(1 / target.every for target in deployment.targets)
            fits = used + cost <= self._max_pods
            (inside if fits else outside).append(deployment)
            used += cost if fits else 0.0
        return inside, outside

    def _load(self, deployment: Deployment, now: float) -> Load:
        members: dict[GroupKey, list[tuple[Target, Window | None, str]]] = {}
        for target in deployment.targets:
            state = self._states.get(_identity(target), _State())
            members.setdefault(group_key(target), []).append((target, state.window, state.failure))
        patience = (MISSED + SLACK) * self._period  # as long as a pod that was read may be silent
        groups = {key: from_windows(group, now, deployment.percentile, patience=patience) for key, group in members.items()}
        return load(deployment, groups)

    async def _scrape(self, identity: Identity, target: Target) -> None:
        state = self._states.setdefault(identity, _State())
        reader = exposition.reader(target.program, target.version)
        if state.busy or reader is None:
            return
        state.busy = True
        try:
            async with self._suspects if state.failure else self._healthy:
                taken, page = await self._page(target.url)
            values = reader.read(page)
            if state.window is None:
                columns = self._columns.setdefault((target.program, target.version), Columns())
                state.window = Window(reader.table, columns, self._window, self._period * target.every)
            state.window.period = self._period * target.every
            state.window.add(taken, values)
            state.failure = ""
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if not state.failure:
                LOG.info("no metrics from pod %s of %s/%s: %s", target.pod, target.namespace, target.deployment, _told(error))
            state.failure = _told(error)
        finally:
            state.busy = False

    async def _page(self, url: str) -> tuple[float, bytes]:
        """When the answer began, and its body. Raises what aiohttp does; ValueError for a page that cannot be one."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=4 * self._period)
            headers = {"Accept": exposition.CONTENT}
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout, headers=headers)
        async with self._session.get(url, allow_redirects=False) as response:
            taken = self._clock()
            if response.status != 200:
                raise ValueError(f"GET {url} answered {response.status}")
            return taken, await self._body(response.content.iter_any(), url)

    async def _body(self, chunks: aiohttp.streams.AsyncStreamIterator[bytes], url: str) -> bytes:
        parts, size = [], 0
        async for chunk in chunks:
            parts.append(chunk)
            size += len(chunk)
            if size > self._max_bytes:
                raise ValueError(f"GET {url} answers with more than {self._max_bytes} bytes")
        return b"".join(parts)


def next_sweep(begun: float, period: float, read: float | None) -> float:
    """When the sweep after one that began then begins: a period later, moved by at most half of one, so that one ends just before
    each read. Reads come a whole number of periods apart; a sample would else be up to a period old when it is decided on.
    """
    due = begun + period
    if read is None:
        return due
    phase = read - min(LEAD, period / 2)
    return phase + period * round((due - phase) / period)


def _identity(target: Target) -> Identity:
    return target.uid, target.url


def _told(error: Exception) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else f"{error}" or type(error).__name__
