"""podScrape over real HTTP: bounds on time, bytes and connections, pods that come and go, and the limit of its size."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from monitor.pods import Pod
from pd_operator.signals import scrape
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.load import Load
from pd_operator.signals.scrape import PodScrape


class Cluster:
    """Pods that serve their pages under /NAME, and a clock that stands until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.pods: dict[str, Pod] = {}
        self.faults: dict[str, str] = {}
        self.asked: list[str] = []
        self.accepts: set[str] = set()
        self.at_once = self.most_at_once = 0
        self.release = asyncio.Event()
        self.url = ""
        self.percentile = 95

    async def page(self, request: web.Request) -> web.StreamResponse:
        """GET /NAME."""
        name = request.match_info["name"]
        self.asked.append(name)
        self.accepts.add(request.headers["Accept"])
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            return await self._answer(request, name, self.faults.get(name, ""))
        finally:
            self.at_once -= 1

    async def _answer(self, request: web.Request, name: str, fault: str) -> web.StreamResponse:
        if fault == "hang":
            await self.release.wait()
        if fault in ("drip", "endless"):
            response = web.StreamResponse()
            await response.prepare(request)
            while not self.release.is_set():
                await response.write(b"#" * (2**16 if fault == "endless" else 1))
                await asyncio.sleep(0.01)
            return response
        if fault == "redirect":
            raise web.HTTPFound(f"{self.url}/elsewhere")
        if fault == "reset":
            assert request.transport is not None
            request.transport.abort()
        await asyncio.sleep(0)
        return web.Response(body=self.pods[name].page(), status=int(fault) if fault.isdigit() else 200)

    def fleet(self) -> tuple[Deployment, ...]:
        """What the operator knows."""
        by: dict[tuple[str, str], list[Pod]] = {}
        for pod in self.pods.values():
            by.setdefault((pod.namespace, pod.deployment), []).append(pod)
        return tuple(
            Deployment(*key, tuple(pod.target(f"{self.url}/{pod.pod}") for pod in pods), self.percentile)
            for key, pods in by.items()
        )

    def add(self, *pods: Pod) -> None:
        """Make pods, or change them."""
        self.pods |= {pod.pod: pod for pod in pods}


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    made = Cluster()
    app = web.Application()
    app.router.add_get("/{name}", made.page)
    server = TestServer(app)
    await server.start_server()
    made.url = str(server.make_url("")).rstrip("/")
    yield made
    made.release.set()
    await server.close()


@pytest.fixture
async def source(cluster: Cluster) -> AsyncIterator[PodScrape]:
    made = PodScrape(cluster.fleet, clock=lambda: cluster.now, timeout=10.0)
    yield made
    await made.close()


async def step(cluster: Cluster, source: PodScrape, *pods: Pod, seconds: float = 5.0) -> Load:
    """Time passes, pods change, a sweep goes round."""
    cluster.now += seconds
    cluster.add(*pods)
    await source.sweep()
    return (await source.read(cluster.now))["team", "chat"]


P, D, R = Pod("prefill"), Pod("decode", fetching={"in_progress": 0}), Pod("router")


async def test_rates_and_gauges_over_http(cluster: Cluster, source: PodScrape) -> None:
    first = await step(cluster, source, P, D.but(running=3), R)
    assert (first.running.value, first.running.age) == (3.0, 0.0)
    assert "one sample only" in first.request_rate.source
    second = await step(cluster, source, P.but(computed=1000, prefills=10), D.but(running=4), R.but(offered=20))
    assert (second.running.value, second.request_rate.value, second.prefill_rate.value) == (4.0, 4.0, 200.0)
    assert second.prompt_rate.value == 400.0
    later = (await source.read(cluster.now + 6))["team", "chat"]
    assert (later.running.value, later.running.age) == (4.0, 6.0)
    assert cluster.accepts == {"text/plain;version=0.0.4;q=1,*/*;q=0.1"}


async def test_restart_of_a_container(cluster: Cluster, source: PodScrape) -> None:
    await step(cluster, source, P.but(computed=90_000), D, R)
    await step(cluster, source, P.but(computed=91_000))
    assert (await step(cluster, source, P.but(computed=500))).prefill_rate.value == pytest.approx(150.0)


async def test_a_pod_made_anew_under_its_name_is_another_one(
    cluster: Cluster, source: PodScrape, monkeypatch: pytest.MonkeyPatch
) -> None:
    await step(cluster, source, P.but(computed=90_000), D, R)
    await step(cluster, source, P.but(computed=91_000))
    made = Pod.target
    monkeypatch.setattr(Pod, "target", lambda self, url="": replace(made(self, url), uid=f"second-{self.pod}"))
    found = await step(cluster, source, P.but(computed=99_000))
    assert "one sample only" in found.prefill_rate.source


FAULTS = [
    ("hang", "no answer in time"),
    ("drip", "no answer in time"),
    ("endless", "answers with more than 100000 bytes"),
    ("503", "answered 503"),
    ("redirect", "answered 302"),
    ("reset", "Server disconnected"),
]


@pytest.mark.parametrize(("fault", "text"), FAULTS)
async def test_a_pod_that_fails_is_unknown_after_three_missed_samples_and_comes_back_by_itself(
    cluster: Cluster, fault: str, text: str
) -> None:
    patience = 0.6 if text == "no answer in time" else 10.0  # seconds; healthy pods have to answer in it too
    source = PodScrape(cluster.fleet, clock=lambda: cluster.now, timeout=patience, max_bytes=100_000)
    await step(cluster, source, P, D.but(running=3), R)
    cluster.faults[D.pod] = fault
    for missed in (1, 2, 3):
        found = await step(cluster, source)
        assert (found.running.value, found.running.age) == (3.0, 5.0 * missed)
    lost = await step(cluster, source)
    assert not lost.running.known
    assert f"pod {D.pod}: last sample 20 s ago" in lost.running.source
    assert text in lost.running.source
    assert lost.prefill_rate.known
    cluster.faults.clear()
    cluster.release.set()
    assert (await step(cluster, source)).running.value == 3.0
    await source.close()


async def test_dead_pods_are_forgotten(cluster: Cluster, source: PodScrape) -> None:
    other = D.but(name="d-1", running=9)
    assert (await step(cluster, source, P, D.but(running=3), R, other)).running.value == 12.0
    del cluster.pods["d-1"]
    assert (await source.read(cluster.now))["team", "chat"].running.value == 3.0
    await step(cluster, source)
    assert len(source._states) == 3


async def test_a_model_of_the_same_name_elsewhere_is_not_counted(cluster: Cluster, source: PodScrape) -> None:
    foreign = Pod("decode", name="theirs", namespace="other", deployment="chat", running=70, fetching={"in_progress": 9})
    assert foreign.model == D.model
    found = await step(cluster, source, P, D.but(running=3), R, foreign)
    assert (found.running.value, found.handoff_waiting.value) == (3.0, 0.0)
    assert (await source.read(cluster.now))["other", "chat"].running.value == 70.0


async def test_requests_at_once_are_bounded(cluster: Cluster, source: PodScrape, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "_healthy", asyncio.Semaphore(4))
    await step(cluster, source, P, R, *(D.but(name=f"d-{n}", running=1) for n in range(40)))
    assert (len(cluster.asked), cluster.most_at_once) == (42, 4)


async def test_pods_that_hang_do_not_hold_up_the_others(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """30 of 33 pods hang. Once known, they wait for each other only, and the next sweep has the healthy ones all the same."""
    source = PodScrape(cluster.fleet, clock=lambda: cluster.now, timeout=0.6)
    monkeypatch.setattr(source, "_healthy", asyncio.Semaphore(8))
    monkeypatch.setattr(source, "_suspects", asyncio.Semaphore(2))
    hung = [D.but(name=f"h-{n}", slice="hung") for n in range(30)]
    cluster.faults = {pod.pod: "hang" for pod in hung}
    await step(cluster, source, P, R, D, *hung)
    assert cluster.most_at_once <= 8
    cluster.asked.clear()
    cluster.now += 5
    slow = asyncio.create_task(source.sweep())
    await _until(lambda: {P.pod, R.pod, D.pod} <= set(cluster.asked))
    assert len([name for name in cluster.asked if name.startswith("h-")]) <= 4
    assert not slow.done()
    # A second sweep meanwhile asks no pod twice.
    cluster.asked.clear()
    again = asyncio.create_task(source.sweep())
    await _until(lambda: {P.pod, R.pod, D.pod} <= set(cluster.asked))
    assert len(cluster.asked) == len(set(cluster.asked))
    slow.cancel()
    again.cancel()
    await asyncio.gather(slow, again, return_exceptions=True)
    assert not any(state.busy for state in source._states.values())
    await source.close()


async def _until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not done():
            await asyncio.sleep(0.01)


async def test_beyond_the_limit_the_rest_says_that_prometheus_is_needed(cluster: Cluster) -> None:
    source = PodScrape(cluster.fleet, clock=lambda: cluster.now, max_pods=4)
    await step(cluster, source, P, D, R, Pod("decode", name="z-0", deployment="zoo"), Pod("decode", name="z-1", deployment="zoo"))
    loads = await source.read(cluster.now)
    assert loads["team", "chat"].running.known
    why = "podScrape reads 4 pages at most and there are 5: set signals.source to prometheus"
    assert {s.source for s in loads["team", "zoo"].signals().values()} == {why}
    assert loads["team", "zoo"].slices[0].waiting.source == why
    assert sorted(cluster.asked) == sorted([P.pod, D.pod, R.pod])
    await source.close()


def test_the_limit_is_about_a_thousand() -> None:
    assert scrape.MAX_PODS == 1000
    assert scrape.PERIOD == 5.0


async def test_run_sweeps_until_cancelled_and_survives_a_broken_fleet(cluster: Cluster) -> None:
    cluster.add(P, D, R)
    calls: list[Any] = []

    def fleet() -> tuple[Deployment, ...]:
        calls.append(None)
        if len(calls) == 1:
            raise RuntimeError("the store is not there yet")
        return cluster.fleet()

    source = PodScrape(fleet, clock=lambda: cluster.now, period=0.02)
    task = asyncio.create_task(source.run())
    await _until(lambda: len(cluster.asked) >= 9)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    seen = len(cluster.asked)
    await asyncio.sleep(0.1)
    assert len(cluster.asked) == seen
    await source.close()
    await source.close()


@pytest.mark.parametrize("tick", [5.0, 15.0])
@pytest.mark.parametrize("late", [0.0, 0.3, 2.4, 2.6, 4.9])
def test_a_sweep_ends_just_before_each_read(tick: float, late: float) -> None:
    """Wherever the first sweep began: after two reads the newest sample at a read is LEAD old, and none is skipped."""
    begun, read, sweeps, ages = 100.0 + late, None, [100.0 + late], []
    for _ in range(200):
        due = scrape.next_sweep(begun, scrape.PERIOD, read)
        while (number := len(ages) + 1) * tick + 100.0 < due:  # reads before that sweep
            read = 100.0 + number * tick
            ages.append(read - begun)
        begun = due
        sweeps.append(begun)
    gaps = [b - a for a, b in itertools.pairwise(sweeps)]
    assert ages[3:] == pytest.approx([scrape.LEAD] * len(ages[3:]))
    assert gaps[12:] == pytest.approx([scrape.PERIOD] * len(gaps[12:]))
    assert all(scrape.PERIOD / 2 <= gap <= 1.5 * scrape.PERIOD + 1e-9 for gap in gaps)


async def test_a_cache_is_read_for_itself(cluster: Cluster, source: PodScrape) -> None:
    """An LMCache server that does not answer is its own trouble: no scaling signal needs it."""
    cache = Pod("cache", name="c-0")
    cluster.faults["c-0"] = "503"
    found = await step(cluster, source, P, D.but(running=3), R, cache)
    assert found.running.value == 3.0
