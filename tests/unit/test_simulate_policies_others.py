"""AIBrix, HeteroScale, TokenScale, Chiron, SageServe and kthena, on hand-computed cases and their own tests' tables."""

from __future__ import annotations

from fractions import Fraction

import pytest
from simulate_policies_views import EVEN, latency, pods, traffic, view

from pd_simulate.policies.aibrix import Limits, aibrix_apa, aibrix_kpa, apa_target, kpa_pods, kpa_target
from pd_simulate.policies.chiron import Chiron, backpressure
from pd_simulate.policies.heteroscale import HeteroScale, stress_ratio, target_rate
from pd_simulate.policies.kthena import Kthena, enforce_ratio
from pd_simulate.policies.sageserve import SageServe, reactive
from pd_simulate.policies.static import Outcome
from pd_simulate.policies.tokenscale import TokenScale, convertible_decoders, decode_velocity
from pd_simulate.view import Targets, View

LIMITS = Limits()


@pytest.mark.parametrize(
    ("stable", "panic", "count", "high", "limits", "expected"),
    [
        (20, 20, 2, None, LIMITS, 2),  # kpa_test.go: stable_mode_basic_scaling
        (30, 70, 2, 2, LIMITS, 4),  # panic_mode_scaling_up (its flag set; here 70 / 30 > 2): ceil(7) within 2 * 2
        (20, 50, 5, 5, LIMITS, 5),  # panic_mode_no_scale_down
        (1, 1, 1, None, LIMITS, 1),
        (100, 100, 2, None, Limits(up_rate=1.5), 3),  # max_scale_up_rate_limit
        (5, 5, 4, None, LIMITS, 2),  # max_scale_down_rate_limit
        (21.9, 21.9, 2, None, LIMITS, 2),  # inside 10 %
        (22.1, 22.1, 2, None, LIMITS, 3),
        (0, 0, 3, None, LIMITS, 1),  # no stable load counts as panic, floor(3 / 2)
    ],
)
def test_kpa(stable: float, panic: float, count: int, high: int | None, limits: Limits, expected: int) -> None:
    assert kpa_target(stable, panic, count, 10.0, high, limits)[0] == expected


def test_knative_example() -> None:
    assert kpa_pods(100, 10, 10 * 0.7, LIMITS) == 15  # 100 requests, concurrency 10, 70 %


@pytest.mark.parametrize(
    ("use", "count", "expected"), [(80, 4, 7), (85, 4, 7), (54, 4, 4), (46, 4, 4), (500, 4, 8), (5, 4, 2), (44, 10, 9)]
)
def test_apa(use: float, count: int, expected: int) -> None:
    assert apa_target(use, count, 50.0, LIMITS) == expected


def test_aibrix_windows() -> None:
    policy = aibrix_kpa(prefill_target=4.0)
    steady = pods("prefill", 2, running=4) + pods("decode", 2, kv_used=70_000)
    for at in range(0, 180, 10):
        assert policy.decide(view(float(at), steady)).prefill == 2
    burst = pods("prefill", 2, running=4, waiting=60) + pods("decode", 2, kv_used=70_000)
    counts = [policy.decide(view(180.0 + 10.0 * i, burst)).prefill for i in range(7)]
    assert counts[0] == 4  # stable (18 * 8 + 128) / 19 = 14.3: ceil(3.6), at most double
    assert counts[-1] == 4


def test_aibrix_falls_after_its_window() -> None:
    policy = aibrix_apa(prefill_target=4.0)
    busy = pods("prefill", 4, running=4) + pods("decode", 1, kv_used=70_000)
    idle = pods("prefill", 4, running=1) + pods("decode", 1, kv_used=70_000)
    assert policy.decide(view(0.0, busy)).prefill == 4
    assert policy.decide(view(290.0, idle)).prefill == 4
    assert policy.decide(view(310.0, idle)).prefill == 2


def test_aibrix_pending_guard_and_failed_scrape() -> None:
    policy = aibrix_apa(prefill_target=4.0)
    half = pods("prefill", 2, running=8) + pods("prefill", 2, "starting", first=2) + pods("decode", 1, kv_used=70_000)
    assert policy.decide(view(0.0, half)).prefill == 4  # 8 of 4 would double 4; the pending two count as idle: 8 * 2 / 4
    lost = pods("prefill", 2, running=80) + pods("prefill", 1, first=2, known=False) + pods("decode", 1)
    assert policy.decide(view(10.0, lost)).prefill == 3


def balanced(mu_p: float, mu_d: float) -> object:
    return lambda p, d: Outcome(1.0, min(p * mu_p, d * mu_d), 0.0)


@pytest.mark.parametrize(("mu_p", "mu_d", "expected"), [(1.0, 1.0, 1.0), (3.0, 1.0, 1 / 3), (1.0, 7.0, 7.0)])
def test_stress_ratio(mu_p: float, mu_d: float, expected: float) -> None:
    assert stress_ratio(balanced(mu_p, mu_d), 8) == pytest.approx(expected)  # type: ignore[arg-type]


def test_target_rate() -> None:
    # 40 requests at 50 ms = 800 tokens/s.
    assert target_rate(EVEN, 800, 400, 0.050, 1.0) == pytest.approx(800.0)
    assert target_rate(EVEN, 800, 400, 0.050, 0.75) == pytest.approx(600.0)


def hetero(policy: HeteroScale, at: float, rate: float, d: int, **fields: object) -> Targets:
    replicas = pods("prefill", 2) + pods("decode", d)
    return policy.decide(view(at, replicas, counters=traffic(at, rate, 500, 100), **fields))


def test_heteroscale_scales_both_by_the_ratio() -> None:
    policy = HeteroScale(ratio=0.5, per_instance=800.0)
    hetero(policy, 0.0, 40.0, 4)
    up = hetero(policy, 60.0, 40.0, 4)  # 4,000 tokens/s: 5 D
    assert (up.prefill, up.decode) == (3, 5)
    banded = HeteroScale(ratio=0.5, per_instance=800.0)
    hetero(banded, 0.0, 35.0, 4)
    assert hetero(banded, 60.0, 35.0, 4).decode == 4  # 4.375 lies within 10 % of 4


def test_heteroscale_cooldowns_and_latency_step() -> None:
    policy = HeteroScale(ratio=1.0, per_instance=800.0)
    hetero(policy, 0.0, 40.0, 4)
    assert hetero(policy, 60.0, 40.0, 4).decode == 5
    assert hetero(policy, 180.0, 80.0, 5).decode == 5  # up cooldown of 180 s
    assert hetero(policy, 240.0, 80.0, 5).decode > 5
    calm = HeteroScale(ratio=1.0, per_instance=800.0)
    hetero(calm, 0.0, 32.0, 10)
    assert hetero(calm, 60.0, 32.0, 10).decode == 4
    assert hetero(calm, 120.0, 8.0, 4).decode == 4  # down cooldown of 600 s
    for p90, expected in ((0.055, 11), (0.070, 12), (0.049, 4)):
        fresh = HeteroScale(ratio=1.0, per_instance=800.0)
        hetero(fresh, 0.0, 32.0, 10)
        assert hetero(fresh, 60.0, 32.0, 10, itl=latency(p90)).decode == expected


def test_tokenscale_velocities() -> None:
    assert TokenScale(EVEN).velocity() == pytest.approx(10_000.0)
    slow = TokenScale(EVEN, link=1e9)
    assert slow.velocity() == pytest.approx(1e9 / 131_072)  # 7,629 tokens/s: the link is the bottleneck
    # mu_D = 40 / (400 * 0.05) = 2 requests/s of 1,200 tokens.
    assert decode_velocity(EVEN, 800, 400, 0.050) == pytest.approx(2_400.0)


def test_tokenscale_sizes_for_arrivals() -> None:
    policy = TokenScale(EVEN)
    for at in (0.0, 15.0, 30.0):
        targets = policy.decide(view(at, pods("prefill", 1) + pods("decode", 1), counters=traffic(at, 31.0, 800, 400)))
    assert (targets.prefill, targets.decode, targets.convertible) == (3, 16, 0)  # 24,800 / 10,000 and 31 / 2
    with_headroom = TokenScale(EVEN, headroom=1.25, convertible=3)
    for at in (0.0, 15.0, 30.0):
        seen = view(at, pods("prefill", 1) + pods("decode", 1), counters=traffic(at, 31.0, 800, 400))
        targets = with_headroom.decide(seen)
    assert (targets.prefill, targets.decode, targets.convertible) == (4, 20, 3)
    assert with_headroom.name == "tokenscale-convertible"


def test_convertible_count() -> None:
    calm = [10_000.0] * 100
    assert convertible_decoders(calm, 10_000.0, 5_000.0) == 0
    burst = [10_000.0] * 95 + [40_000.0] * 5  # mean 11,500: two prefillers take 20,000
    assert convertible_decoders(burst, 10_000.0, 5_000.0) == 4
    assert convertible_decoders([], 10_000.0, 5_000.0) == 0


def test_chiron() -> None:
    assert backpressure(3, 5) == 0.6
    assert backpressure(0, 0) == 0.0
    busy = pods("prefill", 3, running=1) + pods("prefill", 2, first=3) + pods("decode", 4, running=1) + pods("decode", 1, first=4)
    targets = Chiron().decide(view(0.0, busy))
    assert (targets.prefill, targets.decode) == (4, 6)  # 0.6 is not above the threshold; 0.8 is
    moving = busy + pods("decode", 1, "starting", first=7)
    assert Chiron().decide(view(0.0, moving)).decode == 6  # what was asked for


@pytest.mark.parametrize(
    ("memory", "pending", "ratio", "expected"),
    [
        (0.95, 0, 1.0, 1),
        (0.90, 0, 1.0, 0),
        (0.10, 0, 1.6, 1),
        (0.60, 2, 1.0, 1),
        (0.50, 2, 1.0, 0),
        (0.20, -1, 1.0, -1),
        (0.30, -1, 1.0, 0),
        (0.95, -1, 9.0, 0),  # the plan says down: no rise
    ],
)
def test_sageserve_rule(memory: float, pending: int, ratio: float, expected: int) -> None:
    assert reactive(memory, pending, ratio, 1.5) == expected


def sage(policy: SageServe, at: float, rate: float, usage: int, p: int, d: int) -> Targets:
    replicas = pods("prefill", p, kv_used=usage) + pods("decode", d, kv_used=usage)
    return policy.decide(view(at, replicas, counters=traffic(at, rate, 800, 400)))


def test_sageserve_plan_is_carried_out_step_by_step() -> None:
    policy = SageServe(EVEN, history=[20.0 * 800 * 60] * 10, utilization=0.8)
    assert policy.forecast == pytest.approx(960_000.0)
    sage(policy, 0.0, 20.0, 60_000, 2, 4)
    first = sage(policy, 15.0, 20.0, 60_000, 2, 4)
    # P: 960,000 / (60 * 10,000 * 0.8) = 2; D: 960,000 / (60 * 800 * 2 * 0.8) = 12.5
    assert policy.planned("prefill", 0.050) == 2
    assert policy.planned("decode", 0.050) == 13
    assert (first.prefill, first.decode) == (2, 5)
    assert policy.pending["decode"] == 8
    assert sage(policy, 30.0, 20.0, 40_000, 2, 5).decode == 5  # memory below 0.5: not yet
    assert sage(policy, 45.0, 20.0, 60_000, 2, 5).decode == 6


def test_sageserve_adds_one_over_the_plan() -> None:
    policy = SageServe(EVEN, history=[20.0 * 800 * 60] * 10)
    sage(policy, 0.0, 20.0, 95_000, 2, 13)
    over = sage(policy, 15.0, 20.0, 95_000, 2, 13)
    assert (over.prefill, over.decode) == (3, 14)


P_BOUNDS, D_BOUNDS = (0, 8), (0, 16)


@pytest.mark.parametrize(
    ("pair", "p_bounds", "d_bounds", "low", "high", "expected"),
    [
        ((2, 4), P_BOUNDS, D_BOUNDS, "0.25", "1", (2, 4)),  # disaggregated_ratio_test.go, in its order
        ((1, 8), P_BOUNDS, D_BOUNDS, "0.25", "1", (2, 8)),
        ((1, 3), (1, 10), (1, 10), "0.5", "0.5", (2, 4)),
        ((7, 99), (7, 7), (1, 100), "0.07", "0.07", (7, 100)),
        ((6, 2), P_BOUNDS, D_BOUNDS, "0.25", "1", (6, 6)),
        ((2, 20), (0, 3), (0, 20), "0.25", "1", (3, 12)),
        ((0, 4), P_BOUNDS, D_BOUNDS, "0.25", "1", (1, 4)),
        ((4, 0), P_BOUNDS, D_BOUNDS, "0.25", "1", (4, 4)),
        ((0, 0), P_BOUNDS, D_BOUNDS, "0.25", "1", (0, 0)),
    ],
)
def test_kthena_ratio(
    pair: tuple[int, int], p_bounds: tuple[int, int], d_bounds: tuple[int, int], low: str, high: str, expected: tuple[int, int]
) -> None:
    assert enforce_ratio(*pair, p_bounds, d_bounds, Fraction(low), Fraction(high)) == expected


def test_kthena_infeasible_ratio() -> None:
    with pytest.raises(ValueError, match="no whole pair"):
        enforce_ratio(1, 2, (1, 2), (2, 3), Fraction("0.55"), Fraction("0.55"))


def test_kthena_buys_prefill_with_decode() -> None:
    busy_d: View = view(0.0, pods("prefill", 1, running=4) + pods("decode", 4, kv_used=90_000))
    targets = Kthena(low=0.5, high=2.0).decide(busy_d)
    assert (targets.prefill, targets.decode) == (3, 6)  # metrics ask (1, 6)
    lost = view(15.0, pods("prefill", 1, known=False) + pods("decode", 4, kv_used=90_000))
    assert Kthena().decide(lost).note.startswith("a role without metrics")
