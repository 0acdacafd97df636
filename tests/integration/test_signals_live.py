"""Both sources on the stand-ins' real /metrics over HTTP (their names are checked against real vLLM), and on pods that die."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from monitor.pages import Pages, job
from monitor.pods import Pod, deployment
from monitor.prometheus import Prometheus as Server
from pd_operator.core.scaling.readings import Quality
from pd_operator.signals.fleet import Deployment, Key, Target
from pd_operator.signals.load import Load
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.signals.scrape import PodScrape
from pd_operator.upstream import signals_catalog as catalog
from standin import shapes
from standin.local import Local, Running, handoff, with_cache

pytestmark = pytest.mark.timeout(120)
HANDOFFS = 10
OUTPUT = 20
PROMPT = "one two three four five six seven eight nine ten " * 12


class Engines:
    """One P, one D, one LMCache server, and the PDDeployment that they are."""

    def __init__(self, local: Local, version: str = "0.32.0") -> None:
        slow = {"STANDIN_VERSION": version, "STANDIN_DECODE_BASE_S": "0.005"}
        self.cache = local.cache()
        self.prefill = local.engine("kv_producer", kv=with_cache("kv_producer", self.cache.ports["data"]), wait=False, **slow)
        self.decode = local.engine("kv_consumer", wait=False, **slow)
        for running in (self.prefill, self.decode):
            running.ready()
        self.pods = {side: Pod(side, version=version if side != "cache" else "") for side in ("prefill", "decode", "cache")}
        self.fleet = Deployment("team", "chat", tuple(self._target(side) for side in self.pods))

    def _target(self, side: str) -> Target:
        running: Running = getattr(self, side)
        return self.pods[side].target(f"{running.url}/metrics")

    def scrape_configs(self) -> list[dict[str, Any]]:
        """What Prometheus is to scrape."""
        return [job(side, getattr(self, side).url, self.pods[side]) for side in ("prefill", "decode")]

    def serve(self, count: int, output: int = OUTPUT) -> None:
        """So many handoffs, one after the other, each with a prompt of its own."""
        for n in range(count):
            handoff(self.prefill, self.decode, prompt=f"{n} {time.monotonic_ns()} {PROMPT}", max_tokens=output)


@pytest.fixture(scope="module")
def engines() -> Iterator[Engines]:
    with Local() as local:
        yield Engines(local)


class Scraper:
    """podScrape with a clock of the test's own, so that rates are exact."""

    def __init__(self, *fleet: Deployment) -> None:
        self.now = 1000.0
        self.source = PodScrape(lambda: fleet, clock=lambda: self.now)

    async def step(self, seconds: float) -> Mapping[Key, Load]:
        """Time passes, a sweep goes round."""
        self.now += seconds
        await self.source.sweep()
        return await self.source.read(self.now)


async def test_handoffs_of_stand_ins_by_podscrape(engines: Engines) -> None:
    scraper = Scraper(engines.fleet)
    await scraper.step(0)
    before = shapes.total(engines.prefill.client.page(), "vllm:prompt_tokens_by_source_total", source="local_compute")
    await asyncio.to_thread(engines.serve, HANDOFFS)
    load = (await scraper.step(10))["team", "chat"]
    await scraper.source.close()
    computed = shapes.total(engines.prefill.client.page(), "vllm:prompt_tokens_by_source_total", source="local_compute") - before
    blocks = shapes.samples(engines.decode.client.page())
    size = next(int(text.partition('num_gpu_blocks="')[2].partition('"')[0]) for text in blocks if "cache_config_info" in text) * 32
    assert computed > 100 * HANDOFFS
    assert {name for name, s in load.signals().items() if not s.known} == set()
    assert load.prefill_rate.value == pytest.approx(computed / 10)
    assert (load.request_rate.value, load.decode_starts.value) == pytest.approx((HANDOFFS / 10, HANDOFFS / 10))
    assert load.prompt_rate.value == pytest.approx(computed / 10)
    assert load.output_tokens.value == OUTPUT
    assert 0.005 <= load.itl.value < 0.5
    assert (load.kv_capacity.value, load.running.value, load.handoff_waiting.value) == (size, 0.0, 0.0)
    assert (load.handoff_waiting.quality, load.every_prefill_waiting) == (Quality.EXACT, False)


async def test_requests_that_decode_are_seen_running(engines: Engines) -> None:
    scraper = Scraper(engines.fleet)
    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(engines.serve, 1, 400) for _ in range(3)]
        load = await until(lambda: scraper.step(5), lambda loads: loads["team", "chat"].running.value == 3)
        assert load["team", "chat"].kv_tokens.value >= 3 * 100
        for one in running:
            await asyncio.to_thread(one.result)
    assert (await scraper.step(5))["team", "chat"].running.value == 0
    await scraper.source.close()


async def until(step: Callable[[], Any], done: Callable[[Any], bool], seconds: float = 20.0) -> Any:
    """The first answer that is as wanted."""
    end = time.monotonic() + seconds
    while not done(found := await step()):
        assert time.monotonic() < end, f"did not come within {seconds:g} s: {found}"
        await asyncio.sleep(0.02)
    return found


async def test_an_engine_before_fetches_were_told_apart() -> None:
    with Local() as local:
        engines = Engines(local, "0.31.0")
        load = await Scraper(engines.fleet).step(0)
    found = load["team", "chat"].handoff_waiting
    assert (found.known, found.value, found.quality) == (True, 0.0, Quality.DERIVED)


@pytest.mark.parametrize("side", ["prefill", "decode", "cache"])
def test_every_name_of_a_table_is_in_the_page(engines: Engines, side: str) -> None:
    engines.serve(1)
    page: str = getattr(engines, side).client.page()
    table = catalog.table("lmcache", "0.5.5") if side == "cache" else catalog.table("vllm", "0.32.0")
    assert table is not None
    mine = [q for q in table.quantities if q.role in ("", side)]
    wanted = {q.series for q in mine} | {q.info for q in mine if q.info}
    lines = page.splitlines()
    for name in (n for key in wanted for n in table.series[key].names):
        assert any(line.startswith((f"{name}{{", f"{name} ")) for line in lines), name


async def test_prometheus_scrapes_stand_ins_and_sees_pods_die(engines: Engines) -> None:
    """One Prometheus: the stand-ins, and in other namespaces two decode pods of which one dies, and is missed, or has left."""
    mine = [Pod("decode", name=f"d-{n}", namespace="mine", running=5, fetching={"in_progress": 0}) for n in range(2)]
    theirs = Pod("decode", name="d-0", namespace="theirs", running=90, fetching={"in_progress": 9})
    named = {f"{pod.namespace}-{pod.name}": pod for pod in (*mine, theirs)}
    pages = Pages(named)
    configs = engines.scrape_configs() + [job(name, pages.url(name), pod) for name, pod in named.items()]
    fleet = [engines.fleet, deployment(*mine), deployment(theirs)]
    with Server({"scrape_configs": configs}) as server:
        source = Prometheus(lambda: tuple(fleet), Options(server.url, window=20))

        async def read() -> Mapping[Key, Load]:
            return await source.read(time.time())

        await until(read, lambda loads: all(load.running.known for load in loads.values()))
        start, begun = shapes.total(engines.decode.client.page(), "vllm:request_generation_tokens_count"), time.monotonic()
        await asyncio.to_thread(engines.serve, HANDOFFS)
        done = shapes.total(engines.decode.client.page(), "vllm:request_generation_tokens_count") - start
        loads = await until(read, lambda loads: loads["team", "chat"].output_tokens.known)
        assert (done, time.monotonic() - begun < 20) == (HANDOFFS, True)
        # rate() extrapolates the sum and the count of a short past differently.
        assert loads["team", "chat"].output_tokens.value == pytest.approx(OUTPUT, rel=0.1)
        assert loads["mine", "chat"].running.value == 10.0
        assert loads["theirs", "chat"].running.value == 90.0
        assert all(0 <= load.running.age < 5 for load in loads.values())

        pages.kill("mine-d-1")
        lost = await until(read, lambda loads: not loads["mine", "chat"].running.known)
        assert "query pods: pod d-1: not scraped" in lost["mine", "chat"].running.source
        assert lost["theirs", "chat"].running.value == 90.0
        fleet[1] = deployment(mine[0])  # the operator saw it go
        assert (await read())["mine", "chat"].running.value == 5.0
        await source.close()
    after = await Prometheus(lambda: tuple(fleet), Options(server.url)).read(time.time())  # Prometheus itself is gone
    assert not any(s.known for load in after.values() for s in load.signals().values())
