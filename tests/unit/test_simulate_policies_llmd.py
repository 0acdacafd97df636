"""llm-d: token-aware KEDA, the SLO-aware law and WVA v2, on their guides' and tests' own numbers."""

from __future__ import annotations

import pytest
from simulate_policies_views import EVEN, latency, pods, traffic, view

from pd_simulate.policies.hpa import Hpa
from pd_simulate.policies.llmd_slo import BEHAVIOR, SloAware, ratio, wanted
from pd_simulate.policies.llmd_tokens import backlog_seconds, kv_in_use, threshold, token_aware_fast, token_aware_shipped
from pd_simulate.policies.wva import Analyzer, Wva, WvaSettings, bucket, derived_capacity
from pd_simulate.view import ReplicaView


@pytest.mark.parametrize(
    ("isl", "slo", "velocity", "floor", "expected"),
    [
        (8192, 8.0, 2696, 3.04, 5.0),  # the guide's table of worked thresholds
        (8192, 8.0, 15928, 0.51, 7.5),
        (2048, 3.0, 2696, 0.76, 2.2),
        (2048, 3.0, 15928, 0.13, 2.9),
    ],
)
def test_published_thresholds(isl: int, slo: float, velocity: float, floor: float, expected: float) -> None:
    assert isl / velocity == pytest.approx(floor, abs=0.005)
    assert round(threshold(slo, isl, velocity), 1) == expected


def test_backlog_and_kv_sums() -> None:
    p = pods("prefill", 2, running_tokens=4_000, waiting_tokens=11_000)
    d = pods("decode", 3, kv_used=80_000)
    assert backlog_seconds(view(0.0, p + d), 10_000.0) == pytest.approx(3.0)
    assert backlog_seconds(view(0.0, p + d, router_queue_tokens=5_000), 10_000.0) == pytest.approx(3.5)
    assert backlog_seconds(view(0.0, p + d, counters_known=False), 10_000.0) == 0.0  # `or vector(0)`
    assert kv_in_use(view(0.0, p + d)) == pytest.approx(2.4)
    assert kv_in_use(view(0.0, p + d[:2] + pods("decode", 1, first=2, known=False))) == pytest.approx(1.6)


def test_shipped_law_and_its_slow_behaviour() -> None:
    policy = token_aware_shipped(EVEN)  # V_P = 10,000 tokens/s
    p = pods("prefill", 2, waiting_tokens=37_501)
    d = pods("decode", 2, kv_used=95_000)
    first = policy.decide(view(0.0, p + d))
    assert (first.prefill, first.decode) == (3, 3)  # ceil(7.5 / 1.5) = 6 and ceil(1.9 / 0.8) = 3; one a 180 s
    same = policy.decide(view(165.0, p + d, desired={"prefill": 3, "decode": 3}))
    assert same.prefill == 3
    later = policy.decide(view(180.0, p + d, desired={"prefill": 3, "decode": 3}))
    assert (later.prefill, later.decode) == (4, 3)


def test_shipped_law_falls_one_by_one() -> None:
    policy = token_aware_shipped(EVEN)
    counts, current = [], 4
    for tick in range(45):
        idle = pods("prefill", current) + pods("decode", 1, kv_used=10_000)
        current = policy.decide(view(15.0 * tick, idle)).prefill
        counts.append(current)
    assert counts[0] == 4
    assert counts.index(3) == 20  # 300 s
    assert counts.index(2) == 40  # 600 s


def test_fast_law_takes_theta_from_the_slo() -> None:
    policy = token_aware_fast(EVEN, share=1.0)
    for at in (0.0, 60.0):
        seen = view(
            at,
            pods("prefill", 2, waiting_tokens=10_000) + pods("decode", 1),
            counters=traffic(at, 10.0, 2_000, 100, cached=1_000),
            slo_ttft=0.6,
        )
        targets = policy.decide(seen)
    assert "of 0.5" in targets.note  # 0.6 - 1000 / 10000 s
    assert targets.prefill == 4  # 2 s / 0.5


@pytest.mark.parametrize(
    ("saturation", "n", "ready", "expected"),
    [
        (0.70, 8, 8, 11),  # 8 + ceil(8 * 0.2727)
        (0.56, 8, 8, 9),
        (0.55, 8, 8, 8),
        (0.45, 8, 8, 8),
        (0.40, 8, 8, 8),
        (0.20, 8, 8, 4),  # 8 - floor(8 * 0.5)
        (0.39, 8, 8, 8),  # floor(0.2)
        (2.0, 3, 3, 11),  # 3 + ceil(3 * 2.636)
        (1.1, 6, 3, 6),  # credit 3/6: 1.1 * 0.5 / 0.55 - 1 = 0, what starts will do
        (1.1, 6, 0, 12),  # nothing ready: no credit
        (0.2, 6, 3, 3),  # a fall has no credit
    ],
)
def test_slo_law(saturation: float, n: int, ready: int, expected: int) -> None:
    assert wanted(saturation, n, ready) == expected


def test_slo_ratio_is_clamped_and_silence_is_zero() -> None:
    assert ratio(latency(9.0), 0.5) == 2.0
    assert ratio(latency(0.2), 0.5) == pytest.approx(0.4)
    assert ratio(latency(9.0, count=0), 0.5) == 0.0


def test_slo_aware_splits_the_signals() -> None:
    policy = SloAware()
    replicas = pods("prefill", 4) + pods("decode", 4)
    for at in (0.0, 15.0, 30.0, 45.0):
        targets = policy.decide(view(at, replicas, ttft=latency(0.35), itl=latency(0.010)))
    assert targets.prefill == 6  # s = 0.7: 4 + ceil(4 * 0.273), after the 30 s window
    assert targets.decode == 4  # s = 0.2 asks for 2, the window of 180 s keeps 4
    assert policy.decide(view(181.0, replicas, ttft=latency(0.35), itl=latency(0.010))).decode == 3  # one in 120 s


def test_slo_behaviour_numbers() -> None:
    hpa = Hpa(BEHAVIOR)
    hpa.settle(0.0, 3, 3, 1, 20)
    assert hpa.settle(31.0, 3, 20, 1, 20) == 7  # max(100 %, 4 pods)


def replica(kv_used: int, waiting: int = 0, capacity: int = 16_000) -> ReplicaView:
    return pods("decode", 1, kv_capacity=capacity, kv_used=kv_used, waiting=waiting)[0]


def test_wva_capacity_priorities() -> None:
    # analyzer_test.go: k1 = 16000 * 0.8; a queue of 6 observes k2; the history outlives the queue; buckets are apart.
    analyzer = Analyzer(WvaSettings(max_batched_tokens=0), 256)
    assert analyzer.capacity(replica(5_000), 100, 50) == 12_800
    assert analyzer.capacity(replica(8_000, waiting=6), 100, 50) == 8_000
    assert analyzer.capacity(replica(6_000, waiting=2), 100, 50) == 8_000
    assert analyzer.capacity(replica(6_000, waiting=2), 100, 600) == 12_800
    assert analyzer.capacity(replica(4_000, waiting=10), 100, 600) == 4_000
    assert [bucket(o) for o in (99, 100, 499, 500)] == ["short", "medium", "medium", "long"]


def test_wva_derived_capacity() -> None:
    assert derived_capacity(2_048, 256, 500, 100) == 140_800  # analyzer_test.go: 256 * 550
    assert derived_capacity(600, 256, 500, 100) == 55_000  # 600 * 100 / 600 = 100 requests
    assert derived_capacity(2_048, 256, 500, 0) == 0
    derived = Analyzer(WvaSettings(max_batched_tokens=60), 256)
    assert derived.capacity(replica(5_000), 500, 100) == 5_500


@pytest.mark.parametrize(
    ("kv", "waiting", "ready", "pending", "router", "expected"),
    [
        (10_000, 0, 2, 0, 0.0, 0),  # 20,000 / 0.85 = 23,529 of 25,600
        (12_000, 0, 2, 0, 0.0, 1),  # 28,235: 2,635 short
        (12_000, 2, 2, 0, 0.0, 1),  # + 2 * 2 * 500
        (12_000, 0, 2, 1, 0.0, 0),  # the pending one counts as supply
        (12_000, 0, 2, 0, 20_000.0, 3),  # 51,765 - 25,600 = 26,165 of 12,800 each
        (3_000, 0, 4, 0, 0.0, -2),  # 51,200 - 12,000 / 0.7 = 34,057
    ],
)
def test_wva_change(kv: int, waiting: int, ready: int, pending: int, router: float, expected: int) -> None:
    analyzer = Analyzer(WvaSettings(max_batched_tokens=0), 256)
    replicas = tuple(replica(kv, waiting) for _ in range(ready))
    assert analyzer.change(replicas, ready, pending, router, 500.0, 100.0) == expected


def test_wva_never_rises_on_top_of_a_pending_replica() -> None:
    analyzer = Analyzer(WvaSettings(max_batched_tokens=0), 256)
    assert analyzer.change((replica(12_800),) * 2, 2, 1, 40_000.0, 500.0, 100.0) == 0


def test_wva_buys_prefill_for_held_kv() -> None:
    policy = Wva(EVEN, WvaSettings(max_batched_tokens=0))
    held = pods("prefill", 2, kv_used=90_000, held=30, held_tokens=90_000)
    targets = policy.decide(view(0.0, held + pods("decode", 2, kv_used=50_000)))
    assert targets.prefill == 3  # 180,000 / 0.85 = 211,765 of 160,000: held KV looks like demand
    assert targets.decode == 2


def test_wva_keeps_counts_without_metrics() -> None:
    policy = Wva(EVEN)
    lost = pods("prefill", 2, known=False) + pods("decode", 3, known=False)
    targets = policy.decide(view(0.0, lost))
    assert (targets.prefill, targets.decode) == (2, 3)
