"""Referee: the view made of a replay's tick, clamps, the files for the replay, tau; and the replay itself where the wheel is."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from simulate_policies_views import EVEN, load_of, pods, view
from simulate_policies_views import latency as shown

from pd_simulate import referee, referee_study, second
from pd_simulate.fleet import Slo
from pd_simulate.policies.static import Static
from pd_simulate.referee import Outcome, Replay, tau
from pd_simulate.referee_view import Scaling, blurred, fit, latency
from pd_simulate.view import Targets, View

PAGES = Path(__file__).resolve().parent.parent.parent / "docs" / "simulate"

FLEET = referee.fleet(EVEN, 2, 2, 8, Slo(1.0, 0.0, 0.050), 60.0)


def fpm(worker: int, **fields: Any) -> dict[str, Any]:
    """One worker's forward-pass metrics; keys as the wheel 1.4.2 gives them."""
    prefill = (
        "num_prefill_requests",
        "sum_prefill_tokens",
        "sum_prefill_kv_tokens",
        "num_queued_prefill",
        "sum_queued_prefill_tokens",
    )
    decode = ("num_decode_requests", "sum_decode_kv_tokens", "num_queued_decode", "sum_queued_decode_kv_tokens")
    return {"worker_id": worker, "dp_rank": 0, "wall_time": 0.0, **dict.fromkeys((*prefill, *decode), 0), **fields}


def tick(now: float, prefills: list[dict[str, Any]], decodes: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """A tick with two ready replicas of each role."""
    given = {
        "now_ms": now * 1000,
        "prefill_fpm_snapshots": prefills,
        "decode_fpm_snapshots": decodes,
        "active_prefill_ids": [0, 1],
        "active_decode_ids": [0, 1],
        "traffic": {},
    }
    none = {f"{state}_{role}_ids": [] for state in ("starting", "draining") for role in ("prefill", "decode")}
    return {**none, **given, **fields}


class Spy:
    """A policy that keeps what it saw and answers with `targets`."""

    name, tick = "spy", 15.0

    def __init__(self, targets: Targets) -> None:
        self.targets = targets
        self.seen: list[View] = []

    def decide(self, view: View) -> Targets:
        self.seen.append(view)
        return self.targets


def play(*ticks: dict[str, Any], targets: Targets | None = None) -> tuple[Spy, list[dict[str, Any]]]:
    """The ticks on a load of one request of 1,000 prompt tokens a second."""
    spy = Spy(targets or Targets(2, 2))
    scaling = Scaling(spy, load_of(np.arange(1.0, 101.0), 1_000, 100, 100.0), FLEET)
    assert scaling.initial_tick_ms() == 15_000.0
    return spy, [scaling.on_tick(one) for one in ticks]


def test_replicas_queues_and_handoffs() -> None:
    spy, _ = play(
        tick(
            15.0,
            [fpm(0, num_prefill_requests=1, sum_prefill_tokens=1_000, num_queued_prefill=3, sum_queued_prefill_tokens=3_000)],
            [fpm(0, num_decode_requests=4, sum_decode_kv_tokens=4_400, num_queued_decode=3, sum_queued_decode_kv_tokens=3_000)],
            starting_decode_ids=[2],
            draining_prefill_ids=[7],
        )
    )
    seen = spy.seen[0]
    by_name = {r.name: r for r in seen.replicas}
    assert [r.state for r in seen.replicas] == ["ready", "ready", "draining", "ready", "ready", "starting"]
    first = by_name["prefill-0"]
    assert (first.running, first.running_tokens, first.waiting, first.waiting_tokens) == (1, 1_000, 3, 3_000)
    assert (first.held, first.held_tokens) == (2, 1_500)  # three handoffs on two P
    assert by_name["prefill-1"].held == 1
    assert first.kv_used == 2_500
    decode = by_name["decode-0"]
    assert (decode.running, decode.kv_used, decode.waiting, decode.waiting_tokens) == (4, 4_400, 3, 3_000)
    assert by_name["prefill-1"].known  # no sample yet: it never ran anything
    assert by_name["decode-2"].created == 0.0


def test_samples_stay_until_the_next_pass() -> None:
    spy, _ = play(tick(15.0, [], [fpm(1, num_decode_requests=9)]), tick(30.0, [], []))
    assert [r.running for r in spy.seen[1].replicas if r.name == "decode-1"] == [9]


def test_counters() -> None:
    traffic = {"ttft_count": 12, "shape_count": 5, "avg_osl": 100.0, "avg_isl": 1000.0, "accept_length_forward_count": 700}
    spy, _ = play(
        tick(15.0, [fpm(0, num_queued_prefill=2, sum_queued_prefill_tokens=2_000)], [], traffic=traffic),
        tick(30.0, [], [fpm(0, num_decode_requests=4)], traffic=traffic),
    )
    first, second = (view.counters for view in spy.seen)
    assert (first.offered, first.offered_tokens, first.prefilled, first.prefill_tokens) == (15, 15_000, 13, 13_000)
    assert first.prefill_seconds == pytest.approx(1.3)
    assert (first.decode_starts, second.decode_starts) == (5, 10 + 4)
    assert (second.finished, second.finished_output, second.output_tokens) == (10, 1_000, 1_400)
    assert spy.seen[1].prefill_latency.mean == pytest.approx(0.1)
    busy = [[r.busy for r in view.replicas if r.role == "prefill"] for view in spy.seen]
    assert busy[0] == [pytest.approx(1.3 / 30)] * 2  # 13 prompts of 0.1 s on two P in 15 s
    assert busy[1] == [pytest.approx(1.5 / 30)] * 2  # the sample of the first tick stays


def test_latencies_are_weighted_over_a_minute() -> None:
    def one(now: float, count: int, ms: float) -> dict[str, Any]:
        return tick(now, [], [], traffic={"ttft_count": count, "avg_ttft_ms": ms, "itl_count": count, "avg_itl_ms": ms / 10})

    spy, _ = play(one(15.0, 30, 100.0), one(30.0, 10, 500.0), one(80.0, 10, 700.0))
    assert (spy.seen[1].ttft.mean, spy.seen[1].ttft.count) == (pytest.approx(0.2), 40)
    assert spy.seen[1].itl.p90 == pytest.approx(0.02)
    assert spy.seen[2].ttft.mean == pytest.approx(0.6)  # the first tick is out of the window
    assert latency([]).count == 0


def test_gpu_seconds_of_all_states() -> None:
    scaling = Scaling(Spy(Targets(2, 2)), load_of(np.arange(1.0, 101.0), 1_000, 100, 100.0), FLEET)
    scaling.on_tick(tick(15.0, [], []))
    scaling.on_tick(tick(30.0, [], [], starting_decode_ids=[2], draining_prefill_ids=[7]))
    assert scaling.gpu_seconds == 15.0 * 4 + 15.0 * 6


def test_answers() -> None:
    _, answers = play(tick(15.0, [], []), tick(90.0, [], []), targets=Targets(9, 3))
    assert answers[0] == {"target_prefill": 5, "target_decode": 3, "next_tick_ms": 30_000.0}  # 8 GPUs
    assert answers[1]["next_tick_ms"] is None  # beyond the window


@pytest.mark.parametrize(
    ("asked", "desired", "expected"),
    [
        ((3, 3), (2, 2), (3, 3)),
        ((2, 9), (2, 2), (2, 6)),
        ((8, 8), (4, 4), (4, 4)),
        ((0, 0), (2, 2), (1, 1)),
        ((6, 4), (2, 4), (4, 4)),
    ],
)
def test_fit_trims_the_larger_rise(asked: tuple[int, int], desired: tuple[int, int], expected: tuple[int, int]) -> None:
    found = fit(Targets(*asked), {"prefill": desired[0], "decode": desired[1]}, FLEET)
    assert (found["prefill"], found["decode"]) == expected


def test_blurred_views_tell_no_more_than_the_replay() -> None:
    p = (*pods("prefill", 1, running=3, running_tokens=9, waiting=2, held=5, held_tokens=501, kv_used=90_000, busy=0.9),
         *pods("prefill", 1, first=1, running=1, busy=0.1))  # fmt: skip
    sharp = view(0.0, p + pods("decode", 1, waiting=4), ttft=replace(shown(0.9), mean=0.2), handoff_wait=shown(0.4))
    seen = blurred(sharp)
    assert [r.running for r in seen.replicas[:2]] == [1, 0]  # one has work waiting; half of the time none of them is busy
    assert [(r.held, r.held_tokens, r.kv_used) for r in seen.replicas[:2]] == [(3, 251, 251), (2, 250, 250)]
    assert [r.busy for r in seen.replicas[:2]] == [0.5, 0.5]
    assert (seen.ttft.p90, seen.handoff_wait.count, seen.replicas[2].waiting) == (0.2, 0, 4)


def test_trace_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    referee.write_trace(load_of(np.array([0.5, 2.0]), 1_025, 7, 10.0), path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert rows[0] == {"timestamp": 500.0, "input_length": 1_025, "output_length": 7, "hash_ids": [0, 1, 2]}
    assert rows[1]["hash_ids"] == [3, 4, 5]  # nothing is shared


def test_profile_tables(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    profile = replace(EVEN, a=0.05, f=1e-7)
    referee.write_profile(profile, path)
    with np.load(path) as table:
        at = int(np.searchsorted(table["prefill_isl"], 8_192))
        assert table["prefill_ttft_ms"][at] == pytest.approx(50 + 819.2)
        used, context = table["decode_active_kv_tokens"][100], table["decode_context_length"][80]
        assert table["decode_itl"][100, 80] == pytest.approx(10 + used / context + 1e-4 * used)


def test_flat_profile() -> None:
    flat = referee.flat(replace(EVEN, c=1e-9, floor=0.1, knots=((1.0, 1.0, 1.0), (2.0, 2.0, 2.0))), 5_000)
    assert flat.prefill(1_000) == pytest.approx(0.1)
    assert (flat.step(1, 0), flat.kv_capacity, flat.prefill_kv_capacity) == (pytest.approx(0.011), 5_000, 5_000)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3, 4], [1, 2, 3, 4], 1.0),
        ([1, 2, 3, 4], [4, 3, 2, 1], -1.0),
        ([1, 2, 3, 4], [1, 2, 4, 3], 4 / 6),  # five pairs agree, one does not
        ([1, 1, 2], [1, 2, 3], 2 / 6**0.5),  # one pair tied: (2 - 0) / sqrt(2 * 3)
    ],
)
def test_tau(first: list[float], second: list[float], expected: float) -> None:
    assert tau(first, second) == pytest.approx(expected)
    assert np.isnan(tau([1, 1], [1, 2]))


def test_study_continues_a_file_and_sums_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def runs(world: Any, folder: Path, planner: bool) -> Any:
        for name, numbers in {"a": (0.5, 0.6), "b": (0.9, 0.8)}.items():
            for where, attainment in zip(("here", "replay"), numbers, strict=True):
                yield name, where, lambda n=name, a=attainment: calls.append(n) or Outcome(n, a, 4.0, 10)
        yield "planner-x", "replay", lambda: calls.append("planner-x") or Outcome("planner-x", 0.1, 2.0, 1)

    monkeypatch.setattr(referee_study, "runs", runs)
    out = tmp_path / "r.csv"
    rows = referee_study.study(out, referee_study.WORLDS[:1], planner=True)
    assert len(rows) == 5
    again = referee_study.study(out, referee_study.WORLDS[:1], planner=True)
    assert again == rows
    assert calls == ["a", "a", "b", "b", "planner-x"]
    text = "\n".join(referee_study.summary(rows))
    assert "| b | 0.9000, 4.00 | 0.8000, 4.00 |" in text
    assert "| planner-x | - | 0.1000, 2.00 |" in text
    assert "tau-b of attainment over 2 policies: 1.000" in text


def test_without_the_wheel_it_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(referee, "missing", lambda: "the referee needs the wheel x")
    assert referee_study.main(["--out", str(tmp_path / "r.csv")]) == 3
    assert "needs the wheel" in capsys.readouterr().err
    assert not (tmp_path / "r.csv").exists()


def test_both_simulators_agree_on_a_small_load(tmp_path: Path) -> None:
    """With the wheel (extra `referee`, 40 MB, not in the test environment) it runs; without, it says what to install."""
    if why := referee.missing():
        assert "ai-dynamo-runtime==1.4.2 and ai-dynamo==1.4.2" in why and "pip install --no-deps ai-dynamo==1.4.2" in why
        return
    load = load_of(np.arange(0.0, 60.0, 0.2), 800, 50, 60.0)
    here, there = referee.simulated(load, FLEET, Static(2, 2)), Replay(load, FLEET, tmp_path).run(Static(2, 2))
    assert here.completed == there.completed == len(load)
    assert here.attainment == pytest.approx(there.attainment, abs=0.01)
    assert here.gpus == pytest.approx(there.gpus, rel=0.02)


def test_both_simulators_order_the_policies_alike_and_the_page_says_how_much() -> None:
    """Of the committed study (docs/simulate/referee.csv): 0.8 was asked for, of the order by attainment on two traces."""
    page = (PAGES / "referee.md").read_text()
    outcomes = second.read(PAGES / "referee.csv")
    traces = {one.trace for one in outcomes}
    assert len(traces) == 2
    for trace in traces:
        count, taus = second.agreement(outcomes, trace)
        assert count == 17 and taus["attainment"] >= 0.8, (trace, taus)
        for measure, value in taus.items():
            assert f"* Kendall's tau-b of {measure}, {count} policies: **{value:.3f}**" in page, (trace, measure)
