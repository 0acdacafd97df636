"""HPA arithmetic against the documentation's examples and kubernetes' own test tables, and the two HPA policies."""

from __future__ import annotations

import pytest
from simulate_policies_views import pods, view

from pd_simulate.policies.hpa import Behavior, Hpa, PodValues, Step, average_value, largest, per_pod
from pd_simulate.policies.hpa_pools import hpa_concurrency, hpa_utilization


@pytest.mark.parametrize(
    ("current", "values", "missing", "unready", "target", "expected"),
    [
        (50, (90.0,) * 50, 0, 0, 75, 60),  # Kubernetes 1.33 blog: ceil(50 * 90/75)
        (4, (200.0,) * 4, 0, 0, 100, 8),  # documentation: 200m of 100m doubles
        (4, (50.0,) * 4, 0, 0, 100, 2),  # 50m of 100m halves
        (3, (300.0, 500.0, 700.0), 0, 0, 300, 5),  # TestReplicaCalcScaleUp
        (3, (500.0, 700.0), 0, 1, 300, 4),  # TestReplicaCalcScaleUpUnreadyLessScale
        (3, (400.0,), 0, 2, 400, 3),  # TestReplicaCalcScaleUpUnreadyNoScale (ratio 1)
        (5, (100.0, 300.0, 500.0, 250.0, 250.0), 0, 0, 500, 3),  # TestReplicaCalcScaleDown
        (3, (1010.0, 1030.0, 1020.0), 0, 0, 1000, 3),  # inside the tolerance
        (4, (400.0, 95.0), 2, 0, 1000, 3),  # TestReplicaCalcMissingMetrics: missing count as the target on a fall
        (4, (1500.0, 1500.0), 2, 0, 1000, 4),  # ... and as nothing on a rise: 0.75 turns the direction, so kept
        (5, (300.0, 300.0, 300.0), 0, 2, 500, 2),  # a fall leaves pods that are not ready out: ceil(0.6 * 3)
    ],
)
def test_per_pod(current: int, values: tuple[float, ...], missing: int, unready: int, target: float, expected: int) -> None:
    assert per_pod(current, PodValues(values, missing, unready), target) == expected


def test_per_pod_without_values() -> None:
    assert per_pod(3, PodValues((), 3), 1.0) is None


@pytest.mark.parametrize(
    ("current", "total", "target", "expected"),
    [(3, 9.0, 1.5, 6), (6, 9.0, 1.5, 6), (6, 9.8, 1.5, 6), (6, 9.95, 1.5, 7), (4, 2.4, 0.8, 3), (2, 0.0, 0.8, 0)],
)
def test_average_value(current: int, total: float, target: float, expected: int) -> None:
    assert average_value(current, total, target) == expected


def test_largest_of_several_metrics() -> None:
    assert largest([3, 7, 5], 4) == 7
    assert largest([None, 3], 4) == 4  # a metric failed: no fall
    assert largest([None, 6], 4) == 6
    assert largest([None, None], 4) == 4


def test_default_rise_is_four_pods_or_double_in_fifteen_seconds() -> None:
    hpa = Hpa()
    counts, current = [], 1
    for tick in range(4):
        current = hpa.settle(15.0 * tick, current, 64, 1, 64)
        counts.append(current)
    assert counts == [5, 10, 20, 40]


def test_rise_budget_is_shared_by_the_syncs_of_one_period() -> None:
    hpa = Hpa(Behavior(up=(Step("Pods", 1, 180.0),)))
    counts, current = [], 2
    for tick in range(26):
        current = hpa.settle(15.0 * tick, current, 9, 1, 10)
        counts.append(current)
    assert counts[0] == 3
    assert counts[11] == 3  # 165 s
    assert counts[12] == 4  # 180 s
    assert counts[24] == 5


def test_fall_waits_for_the_window_and_takes_its_maximum() -> None:
    hpa = Hpa()
    current = hpa.settle(0.0, 10, 10, 1, 64)
    current = hpa.settle(15.0, current, 6, 1, 64)
    assert current == 10
    current = hpa.settle(299.0, current, 3, 1, 64)
    assert current == 10
    assert hpa.settle(301.0, current, 3, 1, 64) == 6  # the 10 at 0 s is out of the window, the 6 at 15 s is not


def test_documented_percent_steps_down() -> None:
    hpa = Hpa(Behavior(down=(Step("Percent", 10, 60.0),), down_window=0.0))
    first = hpa.settle(0.0, 80, 10, 1, 100)
    second = hpa.settle(60.0, first, 10, 1, 100)
    assert (first, second) == (72, 64)  # documentation: 10 % of 72 is 7.2, rounded up to 8


def test_rise_window_takes_the_minimum() -> None:
    hpa = Hpa(Behavior(up_window=30.0))
    assert hpa.settle(0.0, 2, 2, 1, 10) == 2
    assert hpa.settle(15.0, 2, 6, 1, 10) == 2
    assert hpa.settle(31.0, 2, 5, 1, 10) == 5


def test_utilization_policy_cannot_see_held_kv() -> None:
    idle_p = pods("prefill", 2, busy=0.0, waiting=30, waiting_tokens=60_000, held=10)
    full_d = pods("decode", 2, busy=1.0)
    targets = hpa_utilization(0.7).decide(view(0.0, idle_p + full_d))
    assert targets.decode == 3  # ceil(2 / 0.7)
    assert targets.prefill == 2  # the fall waits for its window


def test_concurrency_policy() -> None:
    p = pods("prefill", 2, running=2, waiting=10)
    d = pods("decode", 4, kv_used=35_000)
    policy = hpa_concurrency(prefill_in_flight=4.0, decode_kv=0.70)
    targets = policy.decide(view(0.0, p + d))
    assert (targets.prefill, targets.decode) == (6, 4)
    assert policy.decide(view(330.0, p + d)).decode == 2  # half the target for longer than the window


def test_lost_scrapes_are_missing_pods() -> None:
    p = (*pods("prefill", 1, running=20), *pods("prefill", 1, first=1, known=False))
    d = pods("decode", 2, known=False)
    targets = hpa_concurrency(4.0, 0.7).decide(view(0.0, p + d))
    assert targets.prefill == 5  # (20 + 0) / 2 pods = 10 each: ceil(2.5 * 2)
    assert targets.decode == 2
    assert "no metric" in targets.note
