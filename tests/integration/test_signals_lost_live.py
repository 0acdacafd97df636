"""Signals lost while the operator runs, with a real Prometheus or the pods' own pages: nothing shrinks, status says why and since
when, recovery needs no hand, and a leader change in the middle changes no decision.

Before each fault the pools are idle, so whatever takes the missing for zero gives replicas back once its window is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from monitor.answering import Answering
from monitor.pages import Pages, job
from monitor.pods import Pod
from monitor.prometheus import Prometheus as Server
from opsrunner import waits
from opsrunner.api import Api
from opsrunner.scaled import Live, decoding, live
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.record import parse
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.load import Load
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.signals.scrape import PodScrape
from pd_operator.signals.source import Source
from pd_simulate.cli import main as simulate

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(300)

FRESH = 3  # seconds: pages are scraped twice a second
STEP = 58.0  # seconds that a tick takes here
TICKS = 6  # together longer than the down window of 300 s
COME = 40.0  # seconds for a fault or its end to be seen


class Lost:
    """An idle object with 1 prefill and 3 decode, its pages, and faults."""

    def __init__(self, it: Live, api: Api) -> None:
        self.it, self.api = it, api
        targets = [t for d in it.process.reconciler.roster.fleet() for t in d.targets]
        mine = {t.pod: Pod(t.side, t.pod, t.namespace, t.deployment, t.slice, **_idle(t.side)) for t in targets}
        theirs = {f"theirs-{name}": pod.but(namespace="theirs") for name, pod in mine.items()}
        self.pages = Pages({**mine, **theirs})
        self.decode = sorted(name for name, pod in mine.items() if pod.side == "decode")
        assert len(self.decode) == 3

    def jobs(self) -> dict[str, Any]:
        """What Prometheus scrapes."""
        return {"scrape_configs": [job(name, self.pages.url(name), pod) for name, pod in self.pages.pods.items()]}

    def fleet(self) -> tuple[Deployment, ...]:
        """The roster's, at the addresses of the pages."""
        found = self.it.process.reconciler.roster.fleet()
        here = [tuple(replace(t, url=f"{self.pages.url(t.pod)}/metrics") for t in d.targets) for d in found]
        return tuple(replace(d, targets=targets) for d, targets in zip(found, here, strict=True))

    async def load(self, source: Source) -> Load:
        return (await source.read(self.it.now))[self.it.key]

    async def until(self, source: Source, known: bool, beat: Callable[[], Any]) -> None:
        """Wait until decode is known, or is not."""
        end = time.monotonic() + COME
        while (found := await self.load(source)).running.known is not known:
            assert time.monotonic() < end, f"running is not {known=} after {COME:g} s: {found.running}"
            await beat()

    async def stands(self, source: Source, beat: Callable[[], Any], says: str) -> None:
        """The outage: longer than any window, another leader in its middle."""
        await self.until(source, False, beat)
        first = len(self.it.lines)
        for number in range(TICKS):
            if number == TICKS // 2:
                self.it.restart(source)
                await self.it.process.reconciler.reconcile(self.it.key)
            await self.it.loop.once()
            self.it.now += STEP
            await beat()
        await self.it.settle()
        decided = [parse(line).decision.decode for line in self.it.lines[first:]]
        assert {(d.desired, d.reason) for d in decided} == {(3, Reason.SIGNALS_UNKNOWN)} and len(decided) == TICKS
        assert self.it.counts() == (1, 3, 1, 3)
        told = waits.conditions(self.it.pool())["ScalingActive"]
        assert told["status"] == "False" and told["reason"] in ("SignalsUnknown", "NoSeries"), told
        assert says in told["message"] and "the number is kept since 20" in told["message"], told

    async def recovers(self, source: Source, beat: Callable[[], Any]) -> None:
        """Nobody does anything, and a tick knows: the next one, or a later one where a slow machine missed a scrape again."""
        await self.until(source, True, beat)
        end = time.monotonic() + COME
        while True:
            await self.it.loop.once()
            self.it.now += 15
            await self.it.settle()
            if (reason := parse(self.it.lines[-1]).decision.decode.reason) is not Reason.SIGNALS_UNKNOWN:
                break
            assert time.monotonic() < end, f"{reason} for {COME:g} s after the signals were known again"
            await beat()
        assert waits.conditions(self.it.pool())["ScalingActive"]["status"] == "True"
        assert self.it.counts() == (1, 3, 1, 3)


def _idle(side: str) -> dict[str, Any]:
    return {"fetching": {"in_progress": 0}, "queued": 0.0 if side == "router" else None}


@contextlib.asynccontextmanager
async def idle(cluster: Cluster, api: Api, space: str, name: str) -> Any:
    async with live(cluster, api, space, name) as it:
        await it.tick(decoding(400), 3)
        assert it.counts() == (1, 3, 1, 3)
        lost = Lost(it, api)
        try:
            yield lost
        finally:
            lost.pages.close()


async def real_time() -> None:
    await asyncio.sleep(0.2)


def faults(lost: Lost, server: Server, front: Answering) -> Iterator[tuple[str, Callable[[], object], Callable[[], object], str]]:
    """Name, what breaks it, what mends it, and what the condition must say."""
    pages, decode = lost.pages, lost.decode
    yield "500", lambda: front.faults.append("500"), front.faults.clear, "query pods: ServerError"
    yield "hangs", lambda: front.faults.append("hang"), front.faults.clear, "query pods: no answer in time"
    yield "empty", lambda: front.faults.append("empty"), front.faults.clear, f"pod {decode[0]}: not scraped"
    nan = {name: pages.pods[name] for name in decode[:1]}
    yield (
        "NaN",
        lambda: pages.pods.update({n: p.but(running=math.nan) for n, p in nan.items()}),
        lambda: pages.pods.update(nan),
        "query running: nan is no number",
    )
    # The other tenant's pods of the same names are there all the time, and idle.
    yield (
        "half",
        lambda: [pages.kill(n) for n in decode[1:]],
        lambda: [pages.serve(n) for n in decode[1:]],
        "(2 of 3 pods are missing)",
    )
    yield "hanging pages", lambda: pages.hangs.add(decode[0]), pages.hangs.clear, f"query pods: pod {decode[0]}: not scraped"


async def test_prometheus_lost(
    kwok_cluster: Cluster, api: Api, space: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with idle(kwok_cluster, api, space, "lost") as lost:
        with Server(lost.jobs()) as server, Answering(lambda query: [(m, v) for m, v in server.query(query)]) as front:
            options = Options(front.url, window=20, fresh=FRESH, timeout=1.0, deadline=6.0)
            source, direct = (Prometheus(lost.fleet, replace(options, url=url)) for url in (front.url, server.url))
            lost.it.restart(source)
            await lost.it.process.reconciler.reconcile(lost.it.key)
            await lost.recovers(source, real_time)
            for name, breaks, mends, says in faults(lost, server, front):
                print(f"fault: {name}", flush=True)
                breaks()
                await lost.stands(source, real_time, says)
                mends()
                await lost.recovers(source, real_time)

            lost.it.restart(direct)
            await lost.it.process.reconciler.reconcile(lost.it.key)
            await lost.recovers(direct, real_time)
            server.kill()
            await lost.stands(direct, real_time, "query pods: ConnectionError")
            server.configuration = {}  # it is back, with old samples, and scrapes nobody
            server.start()
            await lost.stands(direct, real_time, f"pod {lost.decode[0]}: last scraped")
            server.configure(lost.jobs())
            await lost.recovers(direct, real_time)
            for one in (source, direct):
                await one.close()
        shrinks_at_last(lost)
        replays(lost.it.lines, tmp_path, capsys)


def shrinks_at_last(lost: Lost) -> None:
    """Only what is known to be idle for a whole window goes down: the outages counted as nothing."""
    decided = [parse(line).decision.decode for line in lost.it.lines]
    assert all(d.desired == 3 for d in decided[2:])


def replays(lines: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What the live run decided, decided again by `pdd-simulate replay`, byte for byte."""
    log = folder / "decisions.jsonl"
    log.write_text("".join(f"{line}\n" for line in lines))
    capsys.readouterr()
    assert simulate(["replay", str(log)]) == 0
    assert capsys.readouterr().out == f"{len(lines)} decisions agree\n"
    bent = lines[-1].replace('"desired":3', '"desired":4')
    assert bent != lines[-1]
    log.write_text(f"{bent}\n")
    assert simulate(["replay", str(log)]) == 1


async def test_pages_lost(kwok_cluster: Cluster, api: Api, space: str) -> None:
    async with idle(kwok_cluster, api, space, "pages") as lost:
        source = PodScrape(lost.fleet, clock=lambda: lost.it.now, timeout=0.5)

        async def sweeps() -> None:
            for _ in range(4):
                lost.it.now += 5
                await source.sweep()

        lost.it.restart(source)
        await lost.it.process.reconciler.reconcile(lost.it.key)
        await lost.recovers(source, sweeps)
        lost.pages.hangs.update(lost.decode)
        await lost.stands(source, sweeps, f"pod {lost.decode[0]}: last sample")
        assert "no answer in time (3 of 3 pods are missing)" in waits.conditions(lost.it.pool())["ScalingActive"]["message"]
        lost.pages.hangs.clear()
        await lost.recovers(source, sweeps)
        for name in lost.decode[1:]:
            lost.pages.kill(name)
        await lost.stands(source, sweeps, "(2 of 3 pods are missing)")
        for name in lost.decode[1:]:
            lost.pages.serve(name)
        await lost.recovers(source, sweeps)
        first = len(lost.it.lines)
        for _ in range(7):  # known to be idle for more than the window: now they go, one at a time
            lost.it.now += 40
            await sweeps()
            await lost.it.loop.once()
        counts = [parse(line).decision.decode.desired for line in lost.it.lines[first:]]
        assert counts[:3] == [3, 3, 3] and counts[-1] < 3 and sorted(counts, reverse=True) == counts, counts
        await source.close()
