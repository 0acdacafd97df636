"""Counters of each pod by itself: out of pages as the programs write them, and out of a Prometheus' answers."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping

import pytest

from monitor.answering import Answering, Rows
from pd_operator.core.evidence.counters import Counters, fallbacks
from pd_operator.signals import exposition
from pd_operator.signals.answers import Answers
from pd_operator.signals.fleet import Deployment, Side, Target
from pd_operator.signals.pages import page_queries, pages_of
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.signals.tally import of_window
from pd_operator.signals.window import Columns, Window
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_promql import Expressions
from standin.cache_store import CacheMetrics
from standin.engine_metrics import EngineMetrics

VERSIONS = {"vllm": "0.32.0", "lmcache": "0.5.5", "smg": "1.13.0", "vllm-router": "0.1.17"}
PROGRAMS: Mapping[Side, str] = {"prefill": "vllm", "decode": "vllm", "cache": "lmcache", "router": "smg"}


def target(side: Side, pod: str = "", version: str = "") -> Target:
    program = PROGRAMS[side]
    name = pod or f"{side}-0"
    return Target("team", "chat", "chat-1-0", side, name, f"uid-{name}", "http://x/metrics", program, version or VERSIONS[program])


def page(side: Side, *pages: bytes, version: str = "", failure: str = "", now: float = 100.0) -> Counters:
    """What these pages of one pod, 5 s apart and the last one 1 s ago, tell."""
    mine = target(side, version=version)
    reader = exposition.reader(mine.program, mine.version)
    assert reader is not None
    window = Window(reader.table, Columns(), 30.0, 5.0)
    for n, body in enumerate(pages):
        window.add(99.0 - 5.0 * (len(pages) - 1 - n), reader.read(body))
    return of_window(mine, window if pages else None, failure, now)


def engine(consumer: bool = True, version: tuple[int, int] = (0, 32)) -> EngineMetrics:
    return EngineMetrics("chat", 8192, consumer=consumer, nixl=True, version=version)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_engine_s_page_has_every_number_that_is_asked(side: Side) -> None:
    """Names are those of the stand-in, which tests/real compares with the real engine's."""
    table = catalog.table("vllm", "0.32.0")
    assert table is not None
    found = page(side, engine(consumer=side == "decode").registry.render())
    wanted = {q.name for q in table.evidence if q.role in ("", side)}
    assert set(found.values) | set(found.buckets) == wanted
    assert set(found.values.values()) == {0.0} and found.time == 99.0 and not found.failure


def test_tokens_that_came_and_tokens_that_were_computed_are_told_apart() -> None:
    metrics = engine()
    metrics.count_prompt(500, 0, 500)  # handed over
    metrics.count_prompt(500, 120, 380)  # partly in its own cache
    metrics.count_prompt(500, 0, 495)  # the last tokens again, as multi-token prediction does
    metrics.count_prompt(500, 0, 0)  # computed here
    metrics.count_prompt(500, 490, 0)  # found here
    metrics.count_transfer(0.1, 4096, 3)
    metrics.counter["nixl_num_failed_transfers"].inc(2)
    values = page("decode", metrics.registry.render()).values
    assert (values["computed"], values["received"]) == (515.0, 1375.0)
    assert (values["transfers"], values["transferred_bytes"], values["failed_transfers"]) == (1.0, 4096.0, 2.0)


def test_a_prompt_that_came_is_no_fallback_though_decode_shows_it_as_computed() -> None:
    """vLLM 0.32 counts in decode's histogram what prefill had computed: all of it (tests/real compares)."""
    metrics = engine()
    for _ in range(4):
        metrics.count_prompt(500, 0, 500, said=0)
    metrics.count_prompt(500, 0, 493, said=0)
    values = page("decode", metrics.registry.render()).values
    assert fallbacks({**values, "prompts": 5.0}) == 0.0
    metrics.count_prompt(500, 0, 0)
    values = page("decode", metrics.registry.render()).values
    assert fallbacks({**values, "prompts": 6.0}) == pytest.approx(1.0, abs=0.05)


def test_one_short_prompt_computed_on_decode_beside_longer_ones_is_a_whole_fallback() -> None:
    metrics = engine()
    for _ in range(9):
        metrics.count_prompt(1000, 0, 1000, said=0)
    metrics.count_prompt(200, 0, 0)
    assert fallbacks({**page("decode", metrics.registry.render()).values, "prompts": 10.0}) == 1.0


def test_numbers_that_a_version_does_not_have_are_absent_and_not_zero() -> None:
    old = page("prefill", engine(consumer=False, version=(0, 31)).registry.render(), version="0.31.0").values
    assert "read_late" not in old and old["expired"] == 0.0
    lost = b"\n".join(li for li in engine().registry.render().splitlines() if b"nixl_num_failed" not in li)
    assert "failed_transfers" not in page("decode", lost).values


def test_a_cache_s_counters_are_zero_before_their_first_event() -> None:
    metrics = CacheMetrics()
    assert page("cache", metrics.registry.render()).values == {"lookups": 0.0, "requested": 0.0, "hit": 0.0, "stored": 0.0}
    metrics.lookups.inc(model_name="chat", cache_salt="")
    metrics.l1_write.inc(8)
    found = page("cache", metrics.registry.render()).values
    assert (found["lookups"], found["stored"]) == (1.0, 8.0)


def test_smg_s_refusals_time_outs_and_failures_are_numbers_of_their_own() -> None:
    body = b"""
smg_http_requests_total{method="POST",path="/v1/completions"} 20
smg_admission_queue_rejected_total{reason="full"} 2
smg_admission_queue_rejected_total{reason="timeout"} 3
smg_pd_prefill_admission_rejections_total{reason="queue_full"} 4
smg_pd_prefill_admission_rejections_total{reason="queue_timeout"} 5
smg_http_responses_total{path="/v1/completions",status_code="503",error_code="no_available_workers"} 6
smg_http_responses_total{path="/v1/completions",status_code="500",error_code="prefill_upstream_error"} 7
smg_http_responses_total{path="/v1/models",status_code="500",error_code="x"} 9
smg_pd_kv_connector_mode_total{mode="nixl"} 11
smg_pd_kv_connector_mode_total{mode="passthrough"} 1
"""
    found = page("router", body).values
    assert found == {
        "offered": 20.0, "rejected": 6.0, "timed_out": 8.0, "unavailable": 6.0, "failed": 13.0, "not_handed": 1.0,
    }  # fmt: skip


def test_the_newest_page_counts_and_its_age_is_told() -> None:
    metrics = engine()
    first = metrics.registry.render()
    metrics.count_transfer(0.1, 1, 1)
    assert page("decode", first, metrics.registry.render()).values["transfers"] == 1.0
    assert page("decode", first, now=112.0).failure == "no page for 13 s"
    assert page("decode", first, failure="no answer in time").failure == "no answer in time"
    never = page("decode", failure="Connection refused")
    assert (never.time, never.values, never.failure) == (0.0, {}, "Connection refused")


# --- Prometheus -----------------------------------------------------------------------------------------------------------

FLEET = (
    Deployment("team", "chat", tuple(target(side) for side in PROGRAMS), scales=False),
    Deployment("other", "chat", ()),
)
CONTAINERS: Mapping[Side, str] = {"prefill": "engine", "decode": "engine", "router": "router", "cache": "lmcache"}


def own(side: Side) -> dict[str, str]:
    role = {} if side == "router" else {labels.ROLE: "prefill" if side == "cache" else side}
    pod = "cache-0" if side == "cache" else f"{side}-0"
    return {labels.NAMESPACE: "team", labels.DEPLOYMENT: "chat", labels.SLICE: "chat-1-0", labels.POD: pod, **role}


def answer(query: str) -> Rows:
    """Every page was scraped 4 s ago; each number of each pod is 3."""
    if query.startswith("max by"):
        return [({**own(s), labels.CONTAINER: CONTAINERS[s]}, time.time() - 4) for s in PROGRAMS]
    if "lmcache_mp" in query:
        return [(own("cache"), 3.0)]
    role = re.search(r'pdserve_dev_role="(\w+)"', query)
    sides: tuple[Side, ...] = ("prefill", "decode") if re.search(r"vllm:|\Whttp_requests_total", query) else ()
    rows = [own(s) for s in sides if role is None or role.group(1) == s]
    if ", le)" in query:
        return [({**row, "le": bound}, 3.0) for row in rows for bound in ("0.5", "+Inf")]
    return [(row, 3.0) for row in (*rows, *([own("router")] if "smg_" in query and "mode=" not in query else []))]


async def counters(url: str) -> Mapping[Side, Counters]:
    source = Prometheus(lambda: FLEET, Options(url))
    try:
        found = await source.counters(time.time())
    finally:
        await source.close()
    assert found["other", "chat"] == ()
    return {p.side: p for p in found["team", "chat"]}


def test_prometheus_gives_the_pages_that_podscrape_gives() -> None:
    with Answering(answer) as server:
        found = asyncio.run(counters(server.url))
        asked = len(server.requests)
    assert asked == len(page_queries(Expressions())) < 40
    for side, program in PROGRAMS.items():
        table = catalog.table(program, VERSIONS[program])
        assert table is not None
        wanted = {q.name for q in table.evidence if q.role in ("", side)}
        assert set(found[side].values) | set(found[side].buckets) == wanted
        assert found[side].failure == "" and found[side].time > 0
    assert found["decode"].values["transfers"] == 3.0 and found["decode"].buckets["first_token"][0.5] == 3.0
    assert found["router"].values["not_handed"] == 0.0  # it appears with its first event


def test_what_prometheus_does_not_say_is_not_known() -> None:
    asked = page_queries(Expressions())
    nothing = pages_of(FLEET, asked, Answers(failures={"pods": "no answer in time"}))
    assert {(p.time, p.failure) for p in nothing["team", "chat"]} == {(0.0, "no answer in time")}
    rows = {"pods": [({**own("decode"), labels.CONTAINER: "engine"}, 50.0)], "transfers": [(own("decode"), 3.0)]}
    partly = pages_of(FLEET, asked, Answers(rows, {"rejected": "HTTP 500"}, 60.0))
    by = {p.side: p for p in partly["team", "chat"]}
    assert by["prefill"].failure == "Prometheus has no page of it"
    assert by["decode"].time == 50.0 and by["decode"].values["transfers"] == 3.0
    assert "failed_transfers" not in by["decode"].values and "rejected" not in by["decode"].values
    assert by["decode"].values["ended"] == 0.0


def test_a_server_that_fails_gives_pages_that_know_nothing() -> None:
    with Answering(answer, "500") as server:
        found = asyncio.run(counters(server.url))
    assert all(p.time == 0.0 and p.failure and not p.values for p in found.values())
