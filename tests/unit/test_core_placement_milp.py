"""The planner against an exact mixed-integer program of the same rules (HiGHS).

Same feasibility always, effective capacity within 1 %, at least 95 % of the plans optimal on all levels. PDD_SOAK=1 takes 10,000
instances instead of 500. HiGHS has TIME_LIMIT_S for each run; what it does not prove in time is counted apart. For every tenth
instance, and wherever the planner's answer is the better one, the program is solved again with the planner's counts fixed, so
that the program's own rules confirm them.
"""

from __future__ import annotations

import os
from collections import Counter

import pytest
from placement_milp import TIME_LIMIT_S, solve
from placement_world import World, random_world

from pd_operator.core.placement.planner import place

SOAK = os.environ.get("PDD_SOAK") == "1"
INSTANCES = 10_000 if SOAK else 500
LARGE = 200 if SOAK else 6


def compare(world: World, count: Counter[str], confirm: bool) -> None:
    """One instance; failures of the hard promises are raised, the rest is counted."""
    plan, answer = place(world.demand, world.view), solve(world)
    if answer is None or answer.objective != plan.objective:
        count["solved again without presolve"] += 1
        answer = solve(world, presolve=False)
    assert answer is not None
    count["instances"] += 1
    count["placed"] += bool(plan.domains)
    count["proven by the planner"] += plan.exact
    count["HiGHS out of time"] += not answer.proven
    if plan.objective < answer.objective or confirm:
        again = solve(world, plan.domains, presolve=False)
        assert again is not None and again.objective == plan.objective, f"the program's rules give {again} for {plan}"
    count["HiGHS worse"] += plan.objective < answer.objective
    count["optimal"] += plan.objective <= answer.objective
    whole = world.demand.prefill * world.demand.decode
    best = whole - min(answer.objective.lost, plan.objective.lost)
    assert bool(plan.domains) == (best > 0), f"{plan} against {answer}"
    assert whole - plan.objective.lost >= 0.99 * best or not answer.proven, f"{plan} against {answer}"
    assert not plan.exact or plan.objective <= answer.objective or not answer.proven, f"called exact: {plan} against {answer}"


@pytest.mark.timeout(7200 if SOAK else 300)
def test_plans_are_as_good_as_the_exact_ones(capsys: pytest.CaptureFixture[str]) -> None:
    count: Counter[str] = Counter()
    for seed in range(INSTANCES):
        compare(random_world(seed), count, confirm=seed % 10 == 0)
    with capsys.disabled():
        print(f"\nplanner against HiGHS ({TIME_LIMIT_S:.0f} s a run): {dict(count)}")
    assert count["optimal"] >= 0.95 * count["instances"]
    assert count["placed"] > 0.5 * count["instances"]
    assert count["HiGHS out of time"] <= 0.01 * count["instances"]


@pytest.mark.timeout(7200 if SOAK else 300)
def test_larger_ones_are_near(capsys: pytest.CaptureFixture[str]) -> None:
    """More domains than are searched together."""
    count: Counter[str] = Counter()
    for seed in range(LARGE):
        compare(random_world(10**6 + seed, most_nodes=200, most_domains=64, most=40), count, confirm=True)
    with capsys.disabled():
        print(f"\nup to 64 domains, 200 nodes, 80 replicas: {dict(count)}")
