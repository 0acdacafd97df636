"""The source `prometheus` on a real Prometheus that holds a past made for the purpose: one Prometheus, a namespace a case.

What is filled in ends about a second before the first query; scrapes were every 15 s, as is usual.
"""

from __future__ import annotations

import asyncio
import functools
import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.error import HTTPError

import pytest
import yaml
from prometheus_api_client import PrometheusConnect

from monitor.pods import Pod, deployment, past
from monitor.prometheus import Prometheus as Server
from monitor.seen import busy, seen
from pd_operator.core.evidence.counters import Counters
from pd_operator.core.scaling.readings import Quality, State
from pd_operator.signals.fleet import Deployment, Key
from pd_operator.signals.load import SIGNALS, Load
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_promql as promql

STEP = 15
SCRAPES = 9
SIDES = ("prefill", "decode", "router")
History = Sequence[Sequence[Pod]]


def quiet(namespace: str, count: int = SCRAPES, **changes: Any) -> list[list[Pod]]:
    """`busy`, 4/3 requests/s over scrapes 15 s apart, in a namespace of its own; `changes` are by side."""
    sides = {side: {"namespace": namespace, **changes.get(side, {})} for side in SIDES}
    return busy(count, **sides)


def edited(history: History, side: str, **series: Sequence[float]) -> list[list[Pod]]:
    """The same with one side's numbers replaced, scrape by scrape."""
    return [
        [pod.but(**{k: v[n] for k, v in series.items()}) if pod.side == side else pod for pod in row]
        for n, row in enumerate(history)
    ]


def extra(history: History, pod: Pod, rows: range) -> list[list[Pod]]:
    """One more pod in some of the scrapes."""
    return [[*row, pod] if n in rows else list(row) for n, row in enumerate(history)]


def cases() -> dict[str, tuple[History, Deployment]]:
    """Namespace -> scrapes, and what the operator knows is there now."""
    found: dict[str, tuple[History, Deployment]] = {}

    def case(name: str, history: History, fleet: Deployment | None = None) -> None:
        found[name] = (history, fleet or deployment(*(p for p in history[-1] if p.namespace == name)))

    case("plain", quiet("plain"))
    rows = range(SCRAPES)
    case("stall", edited(quiet("stall"), "decode", stalls=[100 * n for n in rows], gap_seconds=[80.0 * n for n in rows]))
    case("theirs", quiet("theirs", prefill={"waiting": 70}, decode={"running": 90}))  # same deployment, slice, model name
    case("ranks", quiet("ranks", prefill={"ranks": 2}, decode={"ranks": 4}))
    growth = [1000.0 * n for n in range(SCRAPES)]
    case("restarted", edited(quiet("restarted"), "prefill", computed=[*growth[:7], 400.0, 1400.0]))
    case("nan", quiet("nan", decode={"running": math.nan}))
    case("inf", quiet("inf", decode={"usage": math.inf}))
    case("nancounter", edited(quiet("nancounter"), "prefill", computed=[*growth[:7], math.nan, math.nan]))
    case("old", quiet("old", prefill={"version": "0.31.0"}, decode={"version": "0.31.0", "fetching": {}}))
    dead = Pod("decode", name="d-dead", namespace="dead", running=50, fetching={"in_progress": 9}, first_tokens={0.1: 500.0})
    case("dead", extra(quiet("dead"), dead, range(4)), deployment(*quiet("dead")[-1]))
    late = Pod("decode", name="d-late", namespace="late", running=5, fetching={"in_progress": 0})
    case("late", extra(quiet("late"), late, range(4)), deployment(*quiet("late")[-1], late))
    new = Pod("prefill", name="p-new", namespace="new", computed=1e9, prefills=1e6)
    case("new", extra(quiet("new"), new, range(SCRAPES - 1, SCRAPES)))
    stranger = Pod("decode", name="d-stranger", namespace="claimed", running=50, fetching={"in_progress": 0})
    case("claimed", extra(quiet("claimed"), stranger, range(SCRAPES)), deployment(*quiet("claimed")[-1]))
    case("copies", quiet("copies"))
    case("parallel", quiet("parallel"))
    case("twice", quiet("twice"))
    case(
        "idle",
        [[Pod("prefill", namespace="idle"), Pod("decode", namespace="idle", fetching={"a": 0}), Pod("router", namespace="idle")]]
        * SCRAPES,
    )
    case("absent", [], deployment(Pod("prefill", namespace="absent"), Pod("decode", namespace="absent")))
    two = [a + b for a, b in zip(quiet("two"), quiet("two", **{side: {"slice": "b"} for side in SIDES}), strict=True)]
    case("two", two)
    return found


CASES = cases()


def filled(at: float) -> str:
    """Everything that was ever scraped, the last time at `at`."""
    times = [at - STEP * (SCRAPES - 1 - n) for n in range(SCRAPES)]
    merged = [
        (time, [p for history, _ in CASES.values() for row in history[n : n + 1] for p in row]) for n, time in enumerate(times)
    ]
    more = []
    for n, when in enumerate(times):
        for pod in CASES["copies"][0][n]:  # a second job scrapes the pod too, and each of its ranks says the same
            for name, own, value in pod.samples():
                more.append((name, {**own, **pod.labels(), "job": "second"}, value, when))
                more.append((name, {**own, **pod.labels(), "job": "pods", "tp_rank": "1"}, value, when))
        for pod in (p for p in CASES["parallel"][0][n] if p.side != "router"):  # a second data parallel rank; both have two stages
            for name, own, value in pod.samples():
                rank = {**own, **pod.labels(), "job": "pods", "dp_rank": "1"}
                more += [(name, {**rank, "pp_rank": "0"}, value, when), (name, {**rank, "pp_rank": "1"}, value, when)]
                more.append((name, {**own, **pod.labels(), "job": "pods", "pp_rank": "1"}, value, when))
        twice = {
            **Pod("decode", namespace="twice").labels(),
            "engine": "0",
            "num_gpu_blocks": "7",
            "block_size": "16",
            "job": "pods",
        }
        more.append(("vllm:cache_config_info", twice, 1.0, when))
    return past(merged, more)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, at: float) -> Iterator[Server]:
    rules = promql.rules()
    rules["groups"][0]["interval"] = "1s"  # type: ignore[index]
    file = tmp_path_factory.mktemp("rules") / "signals.yaml"
    file.write_text(yaml.safe_dump(rules))
    with Server({"rule_files": [str(file)], "scrape_configs": []}, filled(at - 1)) as made:
        yield made


@pytest.fixture(scope="module")
def at() -> float:
    """The moment of every query, a second after the last scrape: rates over a minute are others a few scrapes later."""
    return time.time()


def read(server: Server, at: float | None = None, **options: Any) -> Mapping[Key, Load]:
    """All loads as Prometheus had them at a moment; now, without one."""
    with pytest.MonkeyPatch.context() as patch:
        if at is not None:
            query = functools.partialmethod(PrometheusConnect.custom_query, params={"time": at})
            patch.setattr(PrometheusConnect, "custom_query", query)
        return asyncio.run(_once(server, time.time() if at is None else at, Options(server.url, **options)))


async def _once(server: Server, now: float, options: Options) -> Mapping[Key, Load]:
    source = Prometheus(lambda: tuple(f for _, f in CASES.values()), options)
    try:
        return await source.read(now)
    finally:
        await source.close()


@pytest.fixture(scope="module")
def loads(server: Server, at: float) -> Mapping[str, Load]:
    """By case, all in one read."""
    return {namespace: load for (namespace, _), load in read(server, at).items()}


def known(load: Load) -> dict[str, float]:
    return {name: s.value for name, s in load.signals().items() if s.known}


def test_the_same_past_gives_the_same_load_as_podscrape(loads: Mapping[str, Load]) -> None:
    history, fleet = CASES["plain"]
    scraped = seen(history[-3:], 1001.0, fleet, step=float(STEP))
    assert known(loads["plain"]) == pytest.approx(known(scraped), rel=0.01)
    assert set(known(scraped)) == set(SIGNALS)
    assert loads["plain"].every_prefill_waiting
    assert [(s.name, s.waiting.value) for s in loads["plain"].slices] == [(s.name, s.waiting.value) for s in scraped.slices]
    assert {n: s.quality for n, s in loads["plain"].signals().items()} == {n: s.quality for n, s in scraped.signals().items()}


def test_the_counters_of_each_pod_are_those_on_its_page(server: Server) -> None:
    """For core/evidence: by pod, whatever scrapes it twice; a rank's own number is part of it, a copy of it is not."""

    async def once() -> Mapping[Key, tuple[Counters, ...]]:
        source = Prometheus(lambda: tuple(f for _, f in CASES.values()), Options(server.url))
        try:
            return await source.counters(time.time())
        finally:
            await source.close()

    found = asyncio.run(once())
    for case in ("plain", "copies", "ranks", "two"):
        pages = {(p.side, p.slice): p for p in found[case, "chat"]}
        for pod in CASES[case][0][-1]:
            page = pages[pod.side, pod.slice]
            assert page.failure == "" and 0 < time.time() - page.time < 120
            expected = {"offered": pod.offered} if pod.side == "router" else {"computed": pod.computed * pod.ranks}
            if pod.side == "decode":
                expected |= {"running": pod.running * pod.ranks, "fetching": sum(pod.fetching.values()) * pod.ranks}
            assert {name: page.values[name] for name in expected} == pytest.approx(expected)
            if pod.side != "router":
                assert page.buckets["first_token"][math.inf] == max(pod.first_tokens.values(), default=0) * pod.ranks
                assert "transfers" not in page.values and page.values.get("ended") == 0.0  # not on the page; not yet on the page
    assert {p.failure for p in found["absent", "chat"]} == {"Prometheus has no page of it"}


def test_the_age_is_that_of_the_last_scrape(server: Server, at: float) -> None:
    first, second = (read(server, when)["plain", "chat"].running.age for when in (at, at + 1.5))
    assert first == pytest.approx(1.0, abs=0.01)
    assert second - first == pytest.approx(1.5, abs=0.01)


def test_another_tenant_s_model_of_the_same_name_is_not_counted(loads: Mapping[str, Load]) -> None:
    assert (loads["plain"].running.value, loads["theirs"].running.value) == (20.0, 90.0)
    assert (loads["plain"].queued_tokens.value, loads["theirs"].queued_tokens.value) == pytest.approx((2500.0, 36_000.0))


def test_every_rank_counts(loads: Mapping[str, Load]) -> None:
    one, many = loads["plain"], loads["ranks"]
    assert many.running.value == 4 * one.running.value
    assert many.kv_tokens.value == pytest.approx(4 * one.kv_tokens.value)
    assert many.kv_capacity.value == 4 * one.kv_capacity.value
    assert many.prefill_rate.value == pytest.approx(2 * one.prefill_rate.value)
    assert many.itl.value == pytest.approx(one.itl.value)


def test_a_stall_does_not_move_the_time_between_tokens(loads: Mapping[str, Load]) -> None:
    assert loads["plain"].itl.value == pytest.approx(0.03, rel=0.01)
    assert loads["stall"].itl.value == pytest.approx(0.025 + 0.025 * 500 / 900, rel=0.01)


def test_a_counter_that_restarted(loads: Mapping[str, Load]) -> None:
    """... 5000 6000 400 1400: three steps of 15 s with 1000 + 400 + 1000."""
    assert loads["restarted"].prefill_rate.value == pytest.approx(2400 / 45, rel=0.05)
    assert loads["restarted"].request_rate.known


def test_numbers_that_are_none(loads: Mapping[str, Load]) -> None:
    assert {n for n, s in loads["nan"].signals().items() if not s.known} == {"running"}
    assert "query running: nan is no number" in loads["nan"].running.source
    assert {n for n, s in loads["inf"].signals().items() if not s.known} == {"kv_tokens"}
    assert "query kv_used: inf is no number" in loads["inf"].kv_tokens.source
    assert not loads["nancounter"].prefill_rate.known
    assert loads["nancounter"].running.known


def test_a_version_without_the_series_of_fetches(loads: Mapping[str, Load]) -> None:
    assert (loads["old"].handoff_waiting.value, loads["old"].handoff_waiting.quality) == (5.0, Quality.DERIVED)


def test_a_dead_pod_without_staleness_markers_is_not_counted(server: Server, loads: Mapping[str, Load]) -> None:
    """Its series end 75 s ago and Prometheus still shows them, as it does for 5 minutes."""
    rows = server.query('sum(vllm:num_requests_running{namespace="dead",pdserve_dev_role="decode"})')
    assert [value for _, value in rows] == [70.0]
    assert (loads["dead"].running.value, loads["dead"].handoff_waiting.value) == (20.0, 4.0)
    assert loads["dead"].decode_starts.value == pytest.approx(4 / 3, rel=0.01)


def test_a_ready_pod_that_is_not_scraped_any_more(loads: Mapping[str, Load]) -> None:
    assert re.search(r"query pods: pod d-late: last scraped \d+ s ago", loads["late"].running.source)
    assert loads["late"].running.age > 60
    assert {"request_rate", "prefill_rate"} <= set(known(loads["late"]))


def test_a_pod_that_is_scraped_and_not_ours(loads: Mapping[str, Load]) -> None:
    assert "pod d-stranger carries the labels of chat and is none of its pods" in loads["claimed"].running.source


def test_a_new_pod_s_history_is_not_this_minute_s_work(loads: Mapping[str, Load]) -> None:
    assert loads["new"].prefill_rate.value == pytest.approx(loads["plain"].prefill_rate.value, rel=0.01)


def test_idle_is_zero(loads: Mapping[str, Load]) -> None:
    idle = {n for n, s in loads["idle"].signals().items() if s.state is State.IDLE}
    assert {"request_rate", "prompt_rate", "queued_tokens", "running", "handoff_waiting", "prefill_rate"} <= idle
    assert "nothing was observed" in loads["idle"].ttft.source or "no first token in the window" in loads["idle"].ttft.source


def test_nothing_at_all_is_unknown(loads: Mapping[str, Load]) -> None:
    assert known(loads["absent"]) == {}
    assert "query pods: pod chat-1a2b3c4d-0-decode-0: not scraped" in loads["absent"].running.source


def test_two_slices(loads: Mapping[str, Load]) -> None:
    assert loads["two"].running.value == 40.0
    assert loads["two"].kv_capacity.value == 16_000.0
    assert [(s.name, s.waiting.value) for s in loads["two"].slices] == [("b", 4.0), ("chat-1a2b3c4d-0", 4.0)]


def test_scope_by_namespace_and_external_label(server: Server, at: float) -> None:
    scoped = read(server, at, namespaces=("plain", "idle"))
    assert scoped["plain", "chat"].running.value == 20.0
    assert not scoped["theirs", "chat"].running.known
    assert not read(server, at, matchers={"cluster": "east"})["plain", "chat"].running.known


def test_the_chart_s_rules_say_the_same(server: Server) -> None:
    deadline = time.monotonic() + 15
    while not server.query(f"{promql.PODS}") or not server.query("pdserve:queue:sum"):
        assert time.monotonic() < deadline, "no rule was evaluated in 15 s"
        time.sleep(0.2)
    # Rules are evaluated a moment before the queries: a scrape that leaves the window in between counts in one of both.
    for _ in range(3):
        plain, recorded = read(server), read(server, recorded=True)
        if all(known(recorded[key]) == pytest.approx(known(load), rel=0.01) for key, load in plain.items()):
            break
        time.sleep(2)
    assert known(plain["plain", "chat"])
    for (case, _), load in plain.items():
        again = recorded[case, "chat"]
        assert known(again) == pytest.approx(known(load), rel=0.01), case
        assert [s.waiting.known for s in again.slices] == [s.waiting.known for s in load.slices]
        if load.running.known:
            assert again.running.age >= load.running.age, "the age is the scrape's, not the rule's"


def test_copies_count_once(loads: Mapping[str, Load]) -> None:
    assert known(loads["copies"]) == pytest.approx(known(loads["plain"]), rel=0.01)


def test_data_parallel_ranks_add_and_pipeline_stages_do_not(loads: Mapping[str, Load]) -> None:
    one, many = loads["plain"], loads["parallel"]
    for name in ("running", "handoff_waiting", "decode_starts", "prefill_rate", "kv_tokens", "kv_capacity"):
        found, alone = (getattr(load, name).value for load in (many, one))
        assert found == pytest.approx(2 * alone, rel=0.01), name
    assert many.request_rate.value == pytest.approx(one.request_rate.value, rel=0.01)
    assert many.itl.value == pytest.approx(one.itl.value, rel=0.01)


def test_a_pod_with_two_infos_does_not_fail_the_query_for_everybody(server: Server, loads: Mapping[str, Load]) -> None:
    query = promql.Expressions().quantity(*next((q, t) for q, t in catalog.union() if q.name == "kv_used"))
    on = "namespace, pod, engine, dp_rank"
    assert f"topk by ({on}) (1, " in query
    with pytest.raises(HTTPError, match="422"):
        server.query(query.replace(f"topk by ({on}) (1, ", "("))
    assert loads["twice"].kv_tokens.known
    assert loads["plain"].kv_tokens.value == 8000.0
