"""Dynamo planner: capacity search, forecasts, budget, load loop, throughput loop and how they share a tick."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from simulate_policies_views import EVEN, PROFILE, pods, traffic, view

from pd_simulate.policies.capacity import batch_sizes, chunked_seconds, decode_capacity, prefill_capacity
from pd_simulate.policies.dynamo import dynamo_combined, dynamo_load, dynamo_predictive
from pd_simulate.policies.dynamo_budget import Budget
from pd_simulate.policies.dynamo_load import by_thresholds
from pd_simulate.policies.forecast import ArimaLike, Constant, Kalman, fit_ar, predictor
from pd_simulate.view import ReplicaView, View


def test_batch_sizes() -> None:
    assert batch_sizes(3) == [1, 2, 3]
    assert len(batch_sizes(1000)) == 128
    assert batch_sizes(1000)[0] == 1
    assert batch_sizes(1000)[-1] == 1000


def test_prefill_capacity_by_hand() -> None:
    # t(b) = 0.05 + 0.08 b; inside 0.5 s b <= 5: 5 / 0.45
    best = prefill_capacity(PROFILE, 800, 0.0, 0.5)
    assert best is not None
    assert (best.batch, best.eligible) == (5, True)
    assert best.rps == pytest.approx(5 / 0.45)
    half = prefill_capacity(PROFILE, 1600, 0.5, 0.5)  # the hit rate leaves 800 tokens
    assert half == best
    late = prefill_capacity(PROFILE, 800, 0.0, 0.01)  # no batch fits: the best rate all the same (b = 10: 8,000 of 8,192 tokens)
    assert late is not None
    assert (late.batch, late.eligible) == (10, False)
    assert prefill_capacity(PROFILE, 0, 0.0, 1.0) is None


def test_long_prompts_are_chunked() -> None:
    assert chunked_seconds(PROFILE, 20_000, 8192) == pytest.approx(2 * (0.05 + 0.8192) + 0.05 + 0.3616)


def test_decode_capacity_by_hand() -> None:
    # ctx = 800 + 200; b <= min(64, 100); step = 10 ms + b ms <= 50 ms: b = 40; 40 / (400 * 0.05)
    best = decode_capacity(PROFILE, 800, 400, 0.050)
    assert best is not None
    assert (best.batch, best.eligible) == (40, True)
    assert best.rps == pytest.approx(2.0)
    small = decode_capacity(replace(PROFILE, kv_capacity=10_000), 800, 400, 0.050)
    assert small is not None
    assert small.batch == 10


def test_kalman_equals_the_matrix_filter() -> None:
    series = [100.0, 110, 105, 130, 160, 150, 180, 240, 230, 260]
    f, h, q = np.array([[1.0, 1.0], [0.0, 1.0]]), np.array([[1.0, 0.0]]), np.diag([1.0, 0.1])
    x, p = np.array([[series[0]], [0.0]]), 1000.0 * np.eye(2)
    filter_ = Kalman()
    filter_.add(0.0)  # leading zeros are skipped
    filter_.add(series[0])
    for value in series[1:]:
        x, p = f @ x, f @ p @ f.T + q
        gain = p @ h.T / (h @ p @ h.T + 10.0)
        x, p = x + gain * (value - x[0, 0]), (np.eye(2) - gain @ h) @ p
        filter_.add(value)
    assert filter_.predict() == pytest.approx((f @ x)[0, 0])
    assert filter_.predict() == pytest.approx((f @ x)[0, 0])  # asking twice moves nothing
    assert filter_.predict() == pytest.approx(277.138206)  # printed by the source's KalmanPredictor (filterpy) for this series


def test_kalman_says_the_last_value_before_five_points() -> None:
    filter_ = Kalman()
    for value in (10.0, 20.0, 30.0, 40.0):
        filter_.add(value)
    assert filter_.predict() == 40.0
    filter_.add(50.0)
    assert filter_.predict() > 50.0


def test_arima_stand_in() -> None:
    model = ArimaLike()
    assert model.predict() == 0.0
    for value in range(1, 11):
        model.add(float(value))
    assert model.predict() == pytest.approx(11.0)
    decay = ArimaLike()
    value = 100.0
    for _ in range(12):
        decay.add(value)
        value = 5.0 + 0.5 * value
    assert decay.predict() == pytest.approx(value, abs=1e-3)
    flat = ArimaLike()
    for _ in range(8):
        flat.add(7.0)
    assert flat.predict() == 7.0
    fitted = fit_ar([1.0, 2.0, 4.0, 8.0, 16.0, 32.0], 1)
    assert fitted is not None
    assert fitted[0] == pytest.approx([0.0, 2.0], abs=1e-9)


def test_predictors_by_name() -> None:
    assert isinstance(predictor("constant"), Constant)
    with pytest.raises(ValueError, match="'prophet' is not one of arima, constant, kalman"):
        predictor("prophet")


@pytest.mark.parametrize(
    ("budget", "pair", "expected"),
    [
        (Budget(8), (6, 10), (3, 5)),  # 6 * 8 / 16
        (Budget(8), (1, 15), (1, 7)),  # floor(0.5) is below the minimum
        (Budget(16, 2, 4), (4, 4), (2, 3)),  # 4 * 16 / 24 = 2.67; (16 - 4) / 4
        (Budget(16), (8, 8), (8, 8)),
        (Budget(1), (4, 4), (0, 0)),
        (Budget(-1), (40, 40), (40, 40)),
    ],
)
def test_clamp(budget: Budget, pair: tuple[int, int], expected: tuple[int, int]) -> None:
    assert budget.clamp(*pair) == expected


@pytest.mark.parametrize(
    ("current", "proposed", "expected"),
    [
        ((4, 4), (5, 4), (4, 4, "gpu_budget_guard_hold")),  # full: a rise needs a fall that pays
        ((4, 4), (5, 3), (5, 3, "")),
        ((4, 4), (6, 3), (5, 3, "")),  # both legs move, as far as it fits
        ((4, 4), (3, 4), (3, 4, "")),
        ((3, 4), (4, 4), (4, 4, "")),
        ((6, 6), (6, 7), (4, 4, "gpu_budget_reconcile")),
    ],
)
def test_guard(current: tuple[int, int], proposed: tuple[int, int], expected: tuple[int, int, str]) -> None:
    assert Budget(8).guard(current, proposed) == expected


def test_thresholds() -> None:
    assert by_thresholds([0.2, 1.0], 2, 1.0, 0.1, True, False) == 1  # any
    assert by_thresholds([0.2, 1.0], 2, 1.0, 0.6, False, False) == 0  # decode: above, not at
    assert by_thresholds([0.05, 0.09], 2, 1.0, 0.1, True, False) == -1  # all
    assert by_thresholds([0.05, 0.1], 2, 1.0, 0.1, True, False) == 0
    assert by_thresholds([0.55, 0.55], 2, 1.0, 0.6, False, False) == 0  # 0.55 * 2/1 would scale up again
    assert by_thresholds([0.0], 1, 1.0, 0.1, True, False) == 0  # never below one


def state(waiting_tokens: int, kv: int, kv_waiting: int = 0, p: int = 2, d: int = 3) -> tuple[ReplicaView, ...]:
    return pods("prefill", p, waiting_tokens=waiting_tokens) + pods("decode", d, running_tokens=kv, waiting_tokens=kv_waiting)


@pytest.mark.parametrize(
    ("target", "waiting", "kv", "expected"),
    [
        ("throughput", 131_072, 70_000, (3, 3)),
        ("throughput", 131_071, 70_000, (2, 3)),
        ("throughput", 1_000, 50_000, (1, 2)),
        ("latency", 13_108, 41_000, (3, 4)),
        ("latency", 1, 30_000, (2, 3)),
        ("latency", 0, 9_000, (1, 2)),
        ("load", 16_384, 80_000, (3, 4)),
        ("load", 1_024, 50_000, (1, 2)),
    ],
)
def test_load_loop_steps(target: str, waiting: int, kv: int, expected: tuple[int, int]) -> None:
    targets = dynamo_load(PROFILE, target).decide(view(0.0, state(waiting, kv)))
    assert (targets.prefill, targets.decode) == expected


def test_queued_kv_counts_and_a_full_decode_orders_useless_prefill() -> None:
    # Facts: P queues only because its KV is held for D; the rule adds a P all the same.
    seen = view(0.0, state(140_000, 90_000, 20_000))
    targets = dynamo_load(PROFILE, "throughput").decide(seen)
    assert (targets.prefill, targets.decode) == (3, 4)


@pytest.mark.parametrize(
    ("moving", "cancel", "wait", "expected"),
    [
        (("draining",), True, False, (3, 4)),  # draining alone stops nothing
        (("draining",), True, True, (2, 4)),
        (("starting",), False, False, (2, 4)),
        (("starting", "draining"), True, False, (2, 4)),
    ],
)
def test_when_both_pools_only_observe(moving: tuple[str, ...], cancel: bool, wait: bool, expected: tuple[int, int]) -> None:
    policy = dynamo_load(PROFILE, "throughput")
    policy.cancel_pending, policy.wait_for_drain = cancel, wait
    extra = [pods("decode", 1, name, first=9 + i) for i, name in enumerate(moving)]
    targets = policy.decide(view(0.0, sum(extra, state(200_000, 150_000)), desired={"prefill": 2, "decode": 4}))
    assert (targets.prefill, targets.decode) == expected
    assert (targets.note == "scaling_in_progress") == (expected == (2, 4))


def test_pending_start_allows_reductions_only() -> None:
    waiting = state(200_000, 1_000) + pods("decode", 1, "starting", first=9)
    policy = dynamo_load(PROFILE, "throughput")
    policy.cancel_pending = True
    targets = policy.decide(view(0.0, waiting, desired={"prefill": 2, "decode": 4}))
    assert (targets.prefill, targets.decode) == (2, 2)  # no P although its queue is long; D falls and the start is cancelled


def test_samples_have_no_age_but_a_new_worker_must_report() -> None:
    policy = dynamo_load(PROFILE, "throughput")
    policy.decide(view(0.0, state(200_000, 70_000)))
    lost = pods("prefill", 2, known=False) + pods("decode", 3, known=False)
    later = policy.decide(view(600.0, lost))
    assert later.prefill == 3  # still the queue of ten minutes ago
    other = lost + pods("prefill", 1, first=7, known=False)
    assert policy.decide(view(605.0, other)).note == "worker_count_mismatch"


def test_sla_loop_by_hand() -> None:
    policy = dynamo_load(EVEN, "sla")
    assert policy.load is not None
    policy.load.mean_isl, policy.load.mean_context = 1_000.0, 1_000.0
    # TTFT = (queue + 1000) * 1e-4 s against 0.5 s; ITL = 10 ms + (running + 1) ms against 50 ms.
    busy = pods("prefill", 2, waiting_tokens=4_001) + pods("decode", 2, running=40, running_tokens=40_000)
    assert policy.load.step_prefill(list(busy[:2]), view(0.0), 0.0) == 1
    assert policy.load.step_decode(list(busy[2:]), view(0.0)) == 1  # 51 ms
    one_free = [*busy[:1], *pods("prefill", 1, first=5, waiting_tokens=1_700)]
    assert policy.load.step_prefill(one_free, view(0.0), 0.0) == 0  # ALL must break it
    # Margin (0.5 - 0.1) * 0.8 = 0.32 s; the queue's part doubled is 0.2 * queue / 1000.
    assert policy.load.step_prefill(list(pods("prefill", 2, waiting_tokens=1_599)), view(0.0), 0.0) == -1
    assert policy.load.step_prefill(list(pods("prefill", 2, waiting_tokens=1_600)), view(0.0), 0.0) == 0
    # Doubled: 10 + (2 running + 1) ms < 40 ms, so 14 running; and KV doubled below the size.
    assert policy.load.step_decode(list(pods("decode", 2, running=14, running_tokens=1_000)), view(0.0)) == -1
    assert policy.load.step_decode(list(pods("decode", 2, running=15, running_tokens=1_000)), view(0.0)) == 0
    assert policy.load.step_decode(list(pods("decode", 2, running=14, running_tokens=50_000)), view(0.0)) == 0


def feed(seconds: float, rate: float, p: int, d: int, **fields: Any) -> View:
    return view(seconds, pods("prefill", p) + pods("decode", d), counters=traffic(seconds, rate, 800, 400), **fields)


def test_throughput_loop_by_hand() -> None:
    policy = dynamo_predictive(PROFILE, "constant")
    for at in range(0, 180, 5):
        kept = policy.decide(feed(float(at), 20.0, 2, 9))
        assert (kept.prefill, kept.decode) == (2, 9)
    planned = policy.decide(feed(180.0, 20.0, 2, 9))
    assert (planned.prefill, planned.decode) == (2, 10)  # 20 / 11.11 and 20 / 2


def test_throughput_loop_moves_eight_at_most_and_keeps_the_budget() -> None:
    policy = dynamo_predictive(PROFILE, "constant")
    policy.decide(feed(0.0, 20.0, 2, 1))
    assert policy.decide(feed(180.0, 20.0, 2, 1)).decode == 9
    tight = dynamo_predictive(PROFILE, "constant")
    tight.decide(feed(0.0, 20.0, 2, 5, budget=8))
    targets = tight.decide(feed(180.0, 20.0, 2, 5, budget=8))
    assert (targets.prefill, targets.decode) == (2, 5)  # the clamp to (1, 7) would turn P round: held
    assert targets.note == "gpu_budget_guard_hold"


def test_throughput_loop_holds_without_traffic_data() -> None:
    policy = dynamo_predictive(PROFILE, "constant")
    policy.decide(feed(0.0, 20.0, 2, 9))
    lost = policy.decide(feed(180.0, 20.0, 2, 9, counters_known=False))
    assert (lost.prefill, lost.decode) == (2, 9)


def test_combined_uses_the_plan_as_a_floor() -> None:
    policy = dynamo_combined(PROFILE, "constant")
    policy.decide(feed(0.0, 20.0, 2, 4))
    targets = policy.decide(feed(180.0, 20.0, 2, 4))
    assert policy.floor == (2, 10)
    assert targets.decode == 10  # the load loop alone would step down
