"""From pods to signals without any network: windows of pods of one PDDeployment, and what the formulas make of them."""

from __future__ import annotations

import math

import pytest

from monitor.pods import Pod, deployment
from monitor.seen import busy, seen, windows
from pd_operator.core.scaling.readings import Quality, Replicas, State
from pd_operator.signals import exposition
from pd_operator.signals.fleet import Deployment, Target
from pd_operator.signals.formulas import load
from pd_operator.signals.group import from_windows, group_key
from pd_operator.signals.load import SIGNALS, Load
from pd_operator.signals.window import Columns, Window
from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_table as tables

SLICE = "chat-1a2b3c4d-0"


def values(found: Load) -> dict[str, float]:
    """Known values."""
    return {name: round(s.value, 6) for name, s in found.signals().items() if s.known}


def test_a_busy_deployment() -> None:
    found = seen(busy())
    assert values(found) == {
        "request_rate": 4.0,
        "prompt_rate": 2000.0,
        "queued_tokens": (3 + 1 + 1) * 500.0,
        "prefill_rate": 2000.0,
        "prefill_seconds": 0.8,
        "prefill_latency": 0.2,
        "running": 20.0,
        "handoff_waiting": 4.0,
        "decode_starts": 4.0,
        "kv_tokens": 8000.0,
        "kv_capacity": 16_000.0,
        "output_tokens": 300.0,
        "itl": 0.03,
        # P: every first token between 0.1 and 0.5 s, tail 0.48, mean 0.3; D: tail 0.3, mean 0.05.
        "ttft": 0.6,
    }
    assert found.every_prefill_waiting
    (part,) = found.slices
    assert (part.name, part.waiting.value, part.starts.value) == (SLICE, 4.0, 4.0)
    assert {s.age for s in found.signals().values()} == {1.0}


def test_quality_is_that_of_the_table() -> None:
    found = seen(busy())
    table = catalog.table("vllm", "0.32.0")
    assert table is not None
    for name, signal in found.signals().items():
        row = table.row(name) or catalog.table("smg", "").row(name)  # type: ignore[union-attr]
        assert row is not None, name
        assert signal.quality.value == row.quality.value, name
        assert row.formula in signal.source


def test_readings_take_everything_over() -> None:
    found = seen(busy())
    readings = found.readings(Replicas(1, 1), Replicas(2, 2), rollout=True)
    assert {name: getattr(readings, name) for name in SIGNALS} == found.signals()
    assert (readings.every_prefill_waiting, readings.slices, readings.rollout) == (True, found.slices, True)
    assert (readings.prefill, readings.decode) == (Replicas(1, 1), Replicas(2, 2))


def test_idle_is_zero_and_not_unknown() -> None:
    found = seen([[Pod("prefill"), Pod("decode", fetching={"in_progress": 0}), Pod("router", queued=None)]] * 3)
    idle = {name for name, s in found.signals().items() if s.state is State.IDLE}
    assert idle == {
        "prompt_rate", "request_rate", "queued_tokens", "prefill_rate", "prefill_seconds", "running", "handoff_waiting",
        "decode_starts", "kv_tokens",
    }  # fmt: skip
    assert {n for n, s in found.signals().items() if not s.known} == {"output_tokens", "itl", "prefill_latency", "ttft"}
    assert "no prefills in the window" in found.prefill_latency.source
    assert not found.every_prefill_waiting


def test_version_decides_what_waits_for_handoff() -> None:
    rows = busy(prefill={"version": "0.31.0"}, decode={"version": "0.31.0", "fetching": {}})
    found = seen(rows)
    assert (found.handoff_waiting.value, found.handoff_waiting.quality) == (5.0, Quality.DERIVED)
    lost = seen(busy(decode={"fetching": {}}))
    assert not lost.handoff_waiting.known
    assert "vllm:num_requests_kv_fetch_by_stage is absent" in lost.handoff_waiting.source
    assert lost.running.known


def test_mixed_versions_of_two_slices() -> None:
    old = busy(prefill={"version": "0.31.0", "slice": "old"}, decode={"version": "0.31.0", "slice": "old"}, router={"slice": "old"})
    found = seen([a + b for a, b in zip(busy(), old, strict=True)])
    assert (found.handoff_waiting.value, found.handoff_waiting.quality) == (9.0, Quality.DERIVED)
    assert [(s.name, s.waiting.value, s.waiting.quality) for s in found.slices] == [
        (SLICE, 4.0, Quality.EXACT),
        ("old", 5.0, Quality.DERIVED),
    ]
    assert (found.request_rate.value, found.running.value, found.kv_capacity.value) == (8.0, 40.0, 16_000.0)
    assert {name: s.value for name, s in found.requests.items()} == {SLICE: 4.0, "old": 4.0}


def test_every_rank_counts() -> None:
    found = values(seen(busy(prefill={"ranks": 2}, decode={"ranks": 4})))
    one = values(seen(busy()))
    assert found["running"] == 4 * one["running"]
    assert found["kv_capacity"] == 4 * one["kv_capacity"]
    assert found["kv_tokens"] == 4 * one["kv_tokens"]
    assert found["prefill_rate"] == 2 * one["prefill_rate"]
    assert found["itl"] == one["itl"]


def test_a_stall_does_not_move_the_time_between_tokens() -> None:
    """A tenth of the gaps takes 0.5 s: the mean triples, the median stays in its bucket of 25 to 50 ms."""
    rows = busy()
    stalled = [
        [p.but(stalls=100 * n, gap_seconds=30.0 * n + 50.0 * n) if p.side == "decode" else p for p in row]
        for n, row in enumerate(rows)
    ]
    found = seen(stalled).itl
    assert found.value == pytest.approx(0.025 + 0.025 * 500 / 900) and found.quality is Quality.DERIVED
    slow = [
        [p.but(slice="slow", gap_seconds=900.0 * n, stalls=900 * n) if p.side == "decode" else p for p in r]
        for n, r in enumerate(rows)
    ]
    both = [a + [p.but(slice="slow") for p in b] for a, b in zip(rows, slow, strict=True)]
    assert seen(both).itl.value == pytest.approx(0.1 + 0.9 * 400 / 900)  # of two slices the slower one


def test_a_ready_pod_that_does_not_answer_makes_its_role_unknown_and_only_it() -> None:
    rows = busy()
    lost = Pod("decode", name="d-1")
    found = seen(rows, fleet=deployment(*rows[-1], lost))
    for name in ("running", "handoff_waiting", "decode_starts", "kv_tokens", "itl", "ttft"):
        assert not found.signals()[name].known
    assert found.running.source == "podScrape: pod d-1: no sample yet, refused"
    assert found.request_rate.known
    assert found.queued_tokens.known
    assert not found.slices[0].waiting.known


def test_half_of_the_pods_missing() -> None:
    pods = [Pod("decode", name=f"d-{n}", running=5, fetching={"in_progress": 0}) for n in range(4)]
    found = seen([pods[:2]] * 3, fleet=deployment(*pods))
    assert found.running.source == "podScrape: pod d-2: no sample yet, refused (2 of 4 pods are missing)"


def test_a_pod_that_is_not_ready_counts_when_it_answers_and_is_not_missed() -> None:
    rows = busy()
    starting = Pod("decode", name="d-new", ready=False)
    assert seen(rows, fleet=deployment(*rows[-1], starting)).running.value == 20.0
    draining = Pod("decode", name="d-old", ready=False, running=7, fetching={"in_progress": 0})
    assert seen([[*row, draining] for row in rows]).running.value == 27.0


def test_i4_pods_that_are_all_gone_or_down_are_not_idle() -> None:
    rows = busy()
    crashed = seen(rows, fleet=deployment(rows[-1][1], rows[-1][2], Pod("prefill", ready=False, name="p-x")))
    assert not crashed.queued_tokens.known
    for side, signals in (
        ("prefill", ("prefill_rate", "queued_tokens")),
        ("decode", ("running", "handoff_waiting", "decode_starts")),
    ):
        gone = seen(rows, fleet=deployment(*(pod for pod in rows[-1] if pod.side != side)))
        for name in signals:
            assert (gone.signals()[name].state, gone.signals()[name].source) == (State.UNKNOWN, f"no {side} pods")
        assert gone.request_rate.known
    assert not seen(rows, fleet=deployment(rows[-1][0], rows[-1][2])).slices[0].waiting.known


def test_a_slice_without_pods_of_a_role_does_nothing_there() -> None:
    rows = [[*row, Pod("router", slice="b", offered=20.0 * n)] for n, row in enumerate(busy())]
    found = seen(rows)
    assert (found.running.value, found.request_rate.value, found.slices[0].name) == (20.0, 8.0, "b")
    assert found.slices[0].waiting.state is State.IDLE
    assert (found.running.quality, found.kv_tokens.quality) == (Quality.EXACT, Quality.DERIVED)


def test_three_missed_samples() -> None:
    assert seen(busy(), now=1017.4).running.known
    old = seen(busy(), now=1017.6)
    assert not old.running.known
    assert old.running.source == "podScrape: pod chat-1a2b3c4d-0-decode-0: last sample 18 s ago, refused"
    assert old.running.age == pytest.approx(17.6)


def test_a_new_pod_with_one_sample_has_no_rate_yet() -> None:
    rows = busy()
    new = Pod("prefill", name="p-1", computed=1e9, prefills=1e6)
    found = seen([rows[0], rows[1], [*rows[2], new]])
    assert not found.prefill_rate.known
    assert "pod p-1: vllm:prompt_tokens_by_source_total has one sample only" in found.prefill_rate.source
    assert found.request_rate.known
    assert seen([rows[0], [*rows[1], new], [*rows[2], new]]).prefill_rate.value == pytest.approx(2000.0)


@pytest.mark.parametrize("samples", [0, 1])
def test_an_engine_that_has_just_become_ready_counts_as_one_that_starts_until_it_is_read(samples: int) -> None:
    """Its load is not known, and neither is it missed: what the others do is divided by their number."""
    rows = busy()
    new = Pod("decode", name="d-new", since=990.0, running=3, first_tokens={0.1: 1e6})
    history = [*rows[:2], [*rows[2], *([new] if samples else [])]]
    found = seen(history, fleet=deployment(*rows[2], new))
    assert (found.running.value, found.decode_starts.value, found.unread) == (20.0, seen(rows).decode_starts.value, {"decode": 1})
    tick = found.readings(Replicas(1, 1), Replicas(2, 2))
    assert (tick.prefill, tick.decode) == (Replicas(1, 1), Replicas(2, 1, starting=1, unread=1))
    read = seen([rows[0], [*rows[1], new], [*rows[2], new]])
    assert (read.running.value, read.unread) == (23.0, {})


def test_an_engine_without_a_sample_is_missed_when_it_has_been_ready_for_long() -> None:
    rows = busy()
    for since, known in ((984.0, True), (983.0, False), (1018.0, True), (1019.0, False), (0.0, False)):  # now is 1,001
        found = seen(rows, fleet=deployment(*rows[-1], Pod("decode", name="d-new", since=since)))
        assert found.running.known is known, since
        assert found.unread == ({"decode": 1} if known else {})


def test_i4_where_no_other_engine_tells_anything_a_new_one_is_missed() -> None:
    prefill, decode, router = busy()[-1]
    new = decode.but(name="d-new", since=1000.0)
    alone = seen([[p, r] for p, _, r in busy()], fleet=deployment(prefill, router, new))
    assert alone.running.source == "podScrape: pod d-new: no sample yet, refused"
    mute = seen([[p, r] for p, _, r in busy()], fleet=deployment(prefill, router, new, decode.but(name="d-mute")))
    assert not mute.running.known and "d-mute" in mute.running.source


def test_a_new_router_is_missed_at_once() -> None:
    """It has its share of the requests from the moment that it is ready: without it less would seem to be offered."""
    rows = busy()
    found = seen(rows, fleet=deployment(*rows[-1], Pod("router", name="r-new", since=1000.0)))
    assert not found.request_rate.known and found.unread == {}


def test_a_dead_pod_leaves_nothing_behind() -> None:
    rows = busy()
    dead = Pod("decode", name="d-dead", running=50, fetching={"in_progress": 9})
    found = seen([[*row, dead] for row in rows], fleet=deployment(*rows[-1]))
    assert (found.running.value, found.handoff_waiting.value) == (20.0, 4.0)


def test_mean_tokens_since_the_start_when_nothing_ended_lately() -> None:
    rows = busy(prefill={"computed": 90_000, "prefills": 30, "prefill_seconds": 9.0})
    found = seen(rows)
    assert found.queued_tokens.value == pytest.approx(5 * 3000.0)
    assert found.prompt_rate.value == pytest.approx(4 * 3000.0)
    never = seen(busy(prefill={"computed": 0, "prefills": 0}))
    assert not never.queued_tokens.known
    assert "no prefill has ended yet" in never.queued_tokens.source


def test_without_a_router_of_ours_requests_are_derived_from_prefill() -> None:
    found = seen([row[:2] for row in busy()])
    assert (found.request_rate.value, found.request_rate.quality) == (4.0, Quality.DERIVED)
    assert found.queued_tokens.value == pytest.approx(3 * 500.0)


def test_a_router_without_a_queue_series() -> None:
    rows = busy()
    fleet = deployment(*rows[-1])
    targets = tuple(
        Target(t.namespace, t.deployment, t.slice, t.side, t.pod, t.uid, t.url, "vllm-router", "0.1.17")
        if t.side == "router"
        else t
        for t in fleet.targets
    )
    fleet = Deployment(fleet.namespace, fleet.name, targets)
    reader = exposition.reader("vllm-router", "0.1.17")
    assert reader is not None
    router = Window(reader.table, Columns(), 30.0, 5.0)
    for n in range(3):
        router.add(990.0 + 5 * n, reader.read(f'vllm_router_pd_requests_total{{route="/v1/completions"}} {20 * n}\n'.encode()))
    made = {(t.namespace, t.pod): w for t, w in windows(rows).items()} | {("team", targets[2].pod): router}
    groups = {group_key(t): from_windows([(t, made[t.namespace, t.pod], "")], 1001.0, 95) for t in targets}
    found = load(fleet, groups)
    assert (found.request_rate.value, found.request_rate.quality) == (4.0, Quality.DERIVED)
    assert found.queued_tokens.value == pytest.approx(3 * 500.0)


def test_nonsense_in_one_series_spoils_what_is_made_of_it_only() -> None:
    found = seen(busy(decode={"usage": math.nan}))
    assert {n for n, s in found.signals().items() if not s.known} == {"kv_tokens"}
    assert "vllm:kv_cache_usage_perc is no number" in found.kv_tokens.source
    found = seen(busy(prefill={"computed": math.inf}))
    assert {n for n, s in found.signals().items() if not s.known} == {"prefill_rate", "prompt_rate", "queued_tokens"}


def test_the_percentile_is_the_deployment_s() -> None:
    assert seen(busy(), percentile=50).ttft.value == pytest.approx(max(0.3 + 0.05, 0.3 + 0.1 * 10 / 18))


def test_an_engine_without_a_table_is_named() -> None:
    target = Target("team", "chat", SLICE, "prefill", "p", "u", "http://x", "mystery", "1.0")
    found = load(Deployment("team", "chat", (target,)), {})
    assert not any(s.known for s in found.signals().values())
    assert found.running.source.startswith("engine mystery 1.0 has no table of signals; those that have one are vllm")
    assert not load(Deployment("team", "chat", ()), {}).running.known


@pytest.mark.parametrize(("program", "version"), [("vllm", "0.22.1"), ("vllm", "0.31.0"), ("vllm", "0.32.0"), ("vllm", "0.33.0")])
def test_tables_are_whole(program: str, version: str) -> None:
    """Every signal has one row, every quantity its series, at each version."""
    table = catalog.table(program, version)
    assert table is not None
    rows = [row.signal for row in table.rows]
    assert sorted(rows) == sorted({*SIGNALS, "every_prefill_waiting"} - {"request_rate"})
    assert all(q.series in table.series and (not q.info or q.info in table.series) for q in table.quantities)
    assert len({q.name for q in table.quantities}) == len(table.quantities)
    assert all(row.quality in tables.Quality for row in table.rows)
