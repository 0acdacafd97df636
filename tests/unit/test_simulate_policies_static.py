"""Static split and its search, the oracle's needs and plan."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from simulate_policies_views import EVEN, load_of, pods, view

from pd_simulate.policies.oracle import Oracle, cheapest, decode_need, prefill_need
from pd_simulate.policies.static import Outcome, Static, best_split, splits
from pd_simulate.workload import Workload


class Fluid:
    """A run callback whose attainment is min(1, capacity / load) of either pool."""

    def __init__(self, load: float, mu_p: float, mu_d: float) -> None:
        self.load, self.mu_p, self.mu_d, self.calls = load, mu_p, mu_d, 0

    def __call__(self, prefill: int, decode: int) -> Outcome:
        self.calls += 1
        flow = min(self.load, prefill * self.mu_p, decode * self.mu_d)
        return Outcome(flow / self.load, flow, 100.0 * (prefill + decode))


def brute(run: Fluid, budget: int, floor: float, p_gpu: int, d_gpu: int) -> int:
    """GPUs of the cheapest split that reaches the floor."""
    costs = [p * p_gpu + d * d_gpu for p, d in splits(budget, p_gpu, d_gpu) if run(p, d).attainment >= floor]
    return min(costs)


@pytest.mark.parametrize(("load", "gpus", "floor"), list(product((20.0, 33.0, 47.0), ((1, 1), (1, 2), (2, 1)), (0.8, 0.95, 1.0))))
def test_best_split_equals_the_full_search(load: float, gpus: tuple[int, int], floor: float) -> None:
    run = Fluid(load, 5.0, 3.0)
    p, d, outcome = best_split(run, 64, floor, *gpus)
    assert outcome.attainment >= floor
    assert p * gpus[0] + d * gpus[1] == brute(Fluid(load, 5.0, 3.0), 64, floor, *gpus)
    assert run.calls <= 120  # of 2,016 pairs at one GPU each


def test_best_split_without_enough_gpus() -> None:
    p, d, outcome = best_split(Fluid(100.0, 5.0, 5.0), 8, 0.95)
    assert (p, d) == (4, 4)
    assert outcome.attainment == pytest.approx(0.2)


def test_static_keeps_bounds() -> None:
    targets = Static(9, 3).decide(view(0.0, maximum={"prefill": 4, "decode": 64}))
    assert (targets.prefill, targets.decode) == (4, 3)


def burst() -> Workload:
    """100 prompts of 1,000 tokens (0.1 s each) in the first second of 100 s, 10 output tokens each."""
    return load_of(np.linspace(0.0, 0.99, 100), 1_000, 10, 100.0)


def test_prefill_need_of_a_burst() -> None:
    need = prefill_need(burst(), EVEN, slack=1.0)
    assert need[0] == pytest.approx(10.0 / 2.0)  # 10 s of work, done within 1 s and the slack
    assert need[1] == pytest.approx(10.0 / 2.0)
    assert need[2] == pytest.approx(10.0 / 3.0)
    assert need[3] == pytest.approx(10.0 / 5.0)
    assert need[70] == 0.0


def test_prefill_need_of_a_steady_load_tends_to_its_work() -> None:
    arrival = np.arange(0.0, 200.0, 0.05)
    load = load_of(arrival, 1_000, 10)
    need = prefill_need(load, EVEN, slack=0.5)
    assert need[100] == pytest.approx(2.0 * 64 / 64.5)


def test_decode_need_by_hand() -> None:
    # 20 requests/s of 400 tokens at 50 ms: 400 decoding, 40 on each D.
    arrival = np.arange(0.0, 100.0, 0.05)
    load = load_of(arrival, 800, 400)
    need = decode_need(load, EVEN, 0.050)
    assert need[60] == pytest.approx(10.0, rel=0.02)
    assert need[0] < 1.0
    memory = decode_need(load_of(arrival, 9_800, 400), EVEN, 0.050)
    # 10 fit in 100,000 tokens of KV: 20 ms a step, so 160 decoding hold 1.6 M tokens.
    assert memory[60] == pytest.approx(16.0, rel=0.03)


@pytest.mark.parametrize(
    ("need", "lead", "expected"),
    [
        ([1, 3, 1, 1, 3, 1], 2.0, [1, 3, 3, 3, 3, 1]),  # a gap of two seconds, a restart wastes two
        ([1, 3, 1, 1, 3, 1], 1.0, [1, 3, 1, 1, 3, 1]),
        ([1, 3, 2, 1, 2, 3], 1.0, [1, 3, 2, 2, 2, 3]),
        ([0, 0, 0], 9.0, [0, 0, 0]),
    ],
)
def test_cheapest_plan(need: list[int], lead: float, expected: list[int]) -> None:
    assert cheapest(np.array(need), lead, 1.0).tolist() == expected


def cost(plan: tuple[int, ...], lead: float) -> float:
    """Replica-seconds, and `lead` of them for every start, from none."""
    return sum(plan) + lead * sum(max(0, b - a) for a, b in pairwise((0, *plan)))


@pytest.mark.parametrize(("seed", "lead"), list(product(range(6), (1.0, 2.0, 3.0))))
def test_cheapest_plan_equals_all_plans_tried(seed: int, lead: float) -> None:
    need = np.random.default_rng(seed).integers(0, 4, 7)
    every = product(*(range(int(n), 4) for n in need))
    assert cost(tuple(cheapest(need, lead, 1.0).tolist()), lead) == min(cost(plan, lead) for plan in every)


def test_oracle_orders_one_lead_time_ahead() -> None:
    arrival = np.concatenate((np.arange(0.0, 200.0, 1.0), np.arange(200.0, 260.0, 0.02)))
    load = load_of(arrival, 1_000, 10)
    policy = Oracle(load, EVEN, utilization=1.0)
    counts = {at: policy.decide(view(at, pods("prefill", 1) + pods("decode", 1))).prefill for at in (0.0, 120.0, 130.0, 140.0)}
    assert counts[0.0] == counts[120.0] == 1
    assert counts[140.0] == 5  # 50 requests/s of 0.1 s from 200 s on, 60 s lead time


def test_oracle_fits_the_budget_in_proportion() -> None:
    arrival = np.arange(0.0, 60.0, 0.01)
    load = load_of(arrival, 1_000, 100)
    targets = Oracle(load, EVEN, 1.0).decide(view(0.0, budget=8))
    assert targets.prefill + targets.decode == 8
    assert min(targets.prefill, targets.decode) >= 2
