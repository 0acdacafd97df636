"""python -m bench.signals [--deployments 1000] [--only PART]: the cost of a page, of podScrape, and of a tick of Prometheus.

CPU is this process's own, all threads. The baseline of a page is prometheus_client's parser on the same bytes in the same run.
Pages are those of a stand-in engine (vLLM's names and buckets) and come from another process; Prometheus holds a made-up past.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from bench import tick
from bench.tick import World
from cluster.progress import say
from monitor.pods import PROGRAMS, Pod, deployment, past
from monitor.prometheus import Prometheus as Server
from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Replicas
from pd_operator.core.scaling.record import make
from pd_operator.signals import answers, exposition, http
from pd_operator.signals.fleet import Deployment, Side, Target
from pd_operator.signals.load import Load
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.signals.scrape import PERIOD, PodScrape
from pd_operator.upstream.signals_promql import Expressions
from standin.local import Local

TICK = 15.0
STEP = 15
MOST = 10  # times the CPU of reading its answers as JSON: what a whole tick may take (measured: 5)
SIDES: tuple[Side, ...] = ("prefill",) * 4 + ("decode",) * 4 + ("router",) * 2  # pods of one deployment


def main() -> int:
    """Run it all; prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.signals", description=__doc__)
    parser.add_argument("--deployments", type=int, default=1000, help="for Prometheus, of 10 pods each (default 1000)")
    parser.add_argument("--only", choices=("page", "podScrape", "prometheus"), help="one part (default all)")
    options = parser.parse_args()
    with Local() as local:
        prefill, decode = local.engine("kv_producer", wait=False), local.engine("kv_consumer", wait=False)
        pages = {"prefill": prefill.ready().client.page().encode(), "decode": decode.ready().client.page().encode()}
    pages["router"] = Pod("router", offered=5.0).page()
    parts = {
        "page": lambda: _page(pages["decode"]),
        "podScrape": lambda: _scrapes(pages),
        "prometheus": lambda: _prometheus(options.deployments),
    }
    rows = [row for name, part in parts.items() if options.only in (None, name) for row in part()]
    print()
    for what, value in rows:
        print(f"{what:78} {value}")
    return 0


def _cpu(work: Callable[[], Any], times: int) -> float:
    """CPU seconds of one call, the best of three rounds."""
    best = float("inf")
    for _ in range(3):
        begin = time.process_time()
        for _ in range(times):
            work()
        best = min(best, (time.process_time() - begin) / times)
    return best


def _page(page: bytes) -> Iterator[tuple[str, str]]:
    reader = exposition.reader("vllm", "0.32.0")
    assert reader is not None
    ours = _cpu(lambda: reader.read(page), 200)
    naive = _cpu(lambda: [s for f in text_string_to_metric_families(page.decode()) for s in f.samples], 5)
    yield "a page: size, lines, series read", f"{len(page) / 1024:.0f} KiB, {page.count(10)}, {len(reader.read(page))}"
    yield "a page: CPU", f"{ours * 1e6:.0f} us"
    yield "a page: CPU of prometheus_client's parser, ratio to ours", f"{naive * 1e6:.0f} us, {naive / ours:.0f}"


def _serve(pages: dict[str, bytes], port: Any) -> None:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            body = pages[self.path.split("/")[1]]
            self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_address[1])
    server.serve_forever()


@contextmanager
def _served(pages: dict[str, bytes]) -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=_serve, args=(pages, theirs), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.kill()
        process.join()


def _fleet(deployments: int, url: str = "") -> tuple[Deployment, ...]:
    found = []
    for n in range(deployments):
        pods = [Pod(side, name=f"d{n}-{side}-{i}", namespace=f"team-{n % 50}", deployment=f"d{n}") for i, side in enumerate(SIDES)]
        made = deployment(*pods)
        if url:
            targets: list[Target] = [replace(t, url=f"{url}/{t.side}/{t.pod}") for t in made.targets]
            made = replace(made, targets=tuple(targets))
        found.append(made)
    return tuple(found)


def _scrapes(pages: dict[str, bytes]) -> Iterator[tuple[str, str]]:
    naive = _cpu(lambda: [s for f in text_string_to_metric_families(pages["decode"].decode()) for s in f.samples], 3)
    with _served(pages) as url:
        for deployments in (10, 30, 100):
            say(f"podScrape, {10 * deployments} pods over HTTP")
            sweep, read, wall, memory = asyncio.run(_sweeps(_fleet(deployments, url)))
            pods = 10 * deployments
            share = 100 * (sweep / PERIOD + read / TICK)
            full = naive * pods * len([s for s in SIDES if s != "router"]) / len(SIDES)
            yield (
                f"podScrape {pods} pods: CPU of a sweep, of a read; share of a core",
                f"{sweep:.3f} s, {read:.3f} s; {share:.1f} %",
            )
            yield f"podScrape {pods} pods: a sweep's wall time, KiB of memory a pod", f"{wall:.2f} s, {memory / pods:.1f}"
            yield (
                f"podScrape {pods} pods: full parse of the same pages, ratio to a whole sweep",
                f"{full:.2f} s, {full / sweep:.1f}",
            )


async def _sweeps(fleet: tuple[Deployment, ...]) -> tuple[float, float, float, float]:
    """CPU of a sweep and of a read (the least of six), wall time of that sweep, memory in KiB of ten sweeps' windows."""
    clock = [1000.0]
    source = PodScrape(lambda: fleet, clock=lambda: clock[0], timeout=30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sweeps, reads = [], []
    for _ in range(10):
        clock[0] += PERIOD
        begin, wall = time.process_time(), time.monotonic()
        await source.sweep()
        sweeps.append((time.process_time() - begin, time.monotonic() - wall))
        begin = time.process_time()
        loads = await source.read(clock[0])
        reads.append(time.process_time() - begin)
    assert all(load.running.known and load.prefill_rate.known for load in loads.values())
    await source.close()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return min(s for s, _ in sweeps[-6:]), min(reads[-6:]), min(w for _, w in sweeps[-6:]), memory


def _history(fleet: tuple[Deployment, ...], at: float) -> str:
    """Three scrapes of busy pods."""
    rows = []
    for n in range(3):
        pods = []
        for d in fleet:
            for t in d.targets:
                pod = Pod(t.side, name=t.pod, namespace=t.namespace, deployment=t.deployment, running=5, usage=0.5)
                grown = {"computed": 9000 * n, "prefills": 9 * n, "prefill_seconds": 3.0 * n, "first_tokens": {0.5: 9 * n}}
                work = {"gaps": 900 * n, "gap_seconds": 27.0 * n, "outputs": 9 * n, "output_tokens": 900 * n, "offered": 9 * n}
                pods.append(pod.but(fetching={"in_progress": 1}, first_token_seconds=2.0 * n, **grown, **work))
        rows.append((at - STEP * (2 - n), pods))
    return past(rows)


def _prometheus(deployments: int) -> Iterator[tuple[str, str]]:
    fleet = _fleet(deployments)
    assert PROGRAMS["decode"] == ("vllm", "0.32.0")
    say(f"Prometheus with {deployments} deployments, {10 * deployments} pods: making a past")
    end = time.time() + 5 + 0.02 * 10 * deployments  # making and loading it takes about that long
    text = _history(fleet, end)
    with Server({"scrape_configs": []}, text, ["--query.max-samples=100000000", "--query.timeout=60s"]) as server:
        del text
        say(f"loaded {end - time.time():+.0f} s before its end; a tick")
        time.sleep(max(0.0, end + 1 - time.time()))
        kept = _keep_answers()
        cpu, wall, theirs, queries, known, deciding = asyncio.run(_tick(server, fleet))
        size, baseline = sum(map(len, kept)), _cpu(lambda: [json.loads(text) for text in kept], 1)
        world = World()
        world.take(fleet)
        whole = asyncio.run(tick.cpu(world, Prometheus(world.fleet, _options(server))))
        unknown = [s.unknown for e in world.roster.entries() if (s := world.roster.scaled(e.key, e.uid)) and s.unknown]
        assert not unknown, unknown[0]
        assert whole < MOST * baseline, f"a tick took {whole:.3f} s of CPU, and its answers as JSON {baseline:.3f} s"
        what = f"Prometheus {deployments} deployments, {10 * deployments} pods"
        yield f"{what}: queries of a tick, MiB of all answers", f"{queries}, {size / 2**20:.1f}"
        yield f"{what}: CPU of reading; share of a core", f"{cpu:.3f} s; {100 * cpu / TICK:.1f} %"
        yield f"{what}: CPU of deciding; share of a core", f"{deciding:.3f} s; {100 * deciding / TICK:.1f} %"
        yield f"{what}: CPU of a whole tick; share of a core", f"{whole:.3f} s; {100 * whole / TICK:.1f} %"
        yield f"{what}: CPU of the answers as JSON alone, ratio of a whole tick to it", f"{baseline:.3f} s, {whole / baseline:.1f}"
        yield (
            f"{what}: wall time of a tick, Prometheus' CPU in it, its memory",
            f"{wall:.1f} s, {theirs:.1f} s, {server.resident_mib():.0f} MiB",
        )
        yield f"{what}: deployments fully known", f"{known}"


def _keep_answers() -> list[bytes]:
    """The answers of the first tick from here on, decompressed, as the session gets them."""
    kept: list[bytes] = []
    original = http.BoundedSession.request

    def keeping(self: http.BoundedSession, *args: Any, **kwargs: Any) -> Any:
        response = original(self, *args, **kwargs)
        if len(kept) < len(answers.queries(Expressions(), {95})):
            kept.append(response.content)
        return response

    http.BoundedSession.request = keeping  # type: ignore[method-assign]
    return kept


def _options(server: Server) -> Options:
    return Options(server.url, timeout=60, deadline=300, fresh=600)  # the machine may be busy, and the past grows old


async def _tick(server: Server, fleet: tuple[Deployment, ...]) -> tuple[float, float, float, int, int, float]:
    source = Prometheus(lambda: fleet, _options(server))
    cpu, wall, theirs = time.process_time(), time.monotonic(), server.cpu_seconds()
    loads = await source.read(time.time())
    cpu, wall, theirs = time.process_time() - cpu, time.monotonic() - wall, server.cpu_seconds() - theirs
    await source.close()
    known = sum(load.running.known and load.prompt_rate.known and load.kv_tokens.known for load in loads.values())
    return cpu, wall, theirs, len(answers.queries(Expressions(), {95})), known, _deciding(loads.values())


def _deciding(loads: Iterable[Load]) -> float:
    """CPU of one decision for each load; a decision log that is turned on comes on top."""
    replicas = Replicas(4, 4)
    role = RoleBounds(1, 16, 1, 120.0)
    begin = time.process_time()
    for load in loads:
        make("team/chat", load.readings(replicas, replicas), Learned(), Bounds(role, role), 1000.0)
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(main())
