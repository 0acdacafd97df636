"""What must hold in every run: one outcome each, KV and tokens conserved, GPUs inside the budget, same seed, linear cost."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from simulate_world import EXACT, REAL, Hold, Wild

from pd_simulate.fleet import (
    Admission,
    Fleet,
    LeadTime,
    Link,
    LinkChange,
    NodeLoss,
    Outage,
    QuotaChange,
    Router,
    Scrape,
    Slice,
    Slo,
)
from pd_simulate.result import COMPLETED, OUTCOMES, Result
from pd_simulate.simulation import simulate
from pd_simulate.workload import Workload, cancelling, poisson

SMALL = replace(REAL, kv_capacity=15_000, prefill_kv_capacity=15_000, max_num_seqs=32)
TWO = (Slice("a", Link(2e9, 0.001)), Slice("b", Link(20e9, 0.0), 2.0))


def _world(seed: int) -> tuple[Workload, Fleet]:
    """A run in which everything that can happen happens, differently for each seed."""
    draw = random.Random(seed)
    load = poisson(draw.choice([1, 3, 8]), 60.0, seed, prompt=(1200.0, 0.8), output=(draw.choice([3, 100, 500]), 0.9))
    load = cancelling(load, 0.2, seed)
    load = replace(load, prefix=tuple(tuple(draw.randint(0, 5) * 1000 + k for k in range(int(p) // 512)) for p in load.prompt))
    slices = draw.choice([(Slice(),), TWO])
    settings = Fleet(
        SMALL,
        budget=draw.choice([5, 8]),
        mode=draw.choice(["disaggregated", "disaggregated", "disaggregated", "aggregated"]),
        slices=slices,
        minimum={"prefill": len(slices), "decode": len(slices)},
        slo=Slo(draw.choice([0.2, 2.0]), 1e-4, 0.05),
        lead_prefill=LeadTime(5.0),
        lead_decode=LeadTime(8.0),
        router=Router(draw.choice(["least_loaded", "round_robin"]), draw.choice([0, 2])),
        admission=draw.choice([Admission(), Admission(True, 1.0, 8, 4)]),
        losses=(NodeLoss(15.0, "decode", 0.5), NodeLoss(25.0, "prefill", 0.5), NodeLoss(40.0, "decode", 0.5)),
        link_changes=(LinkChange(30.0, 0.1),),
        quotas=(QuotaChange(28.0, 4), QuotaChange(45.0, 8)),
        outages=(Outage(10.0, 20.0),),
        lease=draw.choice([1.0, 5.0]),
        on_lease_end=draw.choice(["recompute", "fail"]),
        drain_timeout=draw.choice([2.0, 20.0]),
        prefix=draw.choice(["off", "given", "shared", "local"]),
        growth=draw.choice(["reserve", "grow"]),
        warmup=0.0,
        horizon=60.0,
    )
    return load, settings


def _check(load: Workload, result: Result) -> None:
    counts = result.counts(warmup=True)
    assert sum(counts.values()) == len(load)
    assert set(counts) == set(OUTCOMES)
    done = result.outcome == COMPLETED
    assert not result.good[~done].any()
    assert np.isfinite(result.ttft[done]).all() and (result.ttft[done] > 0).all()
    assert np.isfinite(result.itl[done]).all() and (result.itl[done] >= 0).all()
    assert (result.handoff_wait[np.isfinite(result.handoff_wait)] >= -1e-9).all()
    assert result.wasted_prefill_tokens >= 0


@pytest.mark.parametrize("seed", range(40))
def test_nothing_is_lost_or_counted_twice(seed: int) -> None:
    load, settings = _world(seed)
    _check(load, simulate(load, settings, Wild(seed), seed, audit=True))


def test_the_worlds_above_reach_what_they_are_for() -> None:
    """Together they see every outcome, preemption, recompute, retry and a drain that is cut: the audit was not idle."""
    seen: dict[str, int] = dict.fromkeys(OUTCOMES, 0)
    others = dict.fromkeys(("preemptions", "recomputed", "retries", "drain_aborted", "clamps"), 0)
    for seed in range(40):
        load, settings = _world(seed)
        result = simulate(load, settings, Wild(seed), seed)
        for name, count in result.counts(warmup=True).items():
            seen[name] += count
        for name in others:
            others[name] += int(np.sum(getattr(result, name)))
    assert [name for name, count in seen.items() if count == 0] in ([], ["unfinished"])
    assert [name for name, count in others.items() if count == 0] == []


def _fingerprint(result: Result) -> tuple[bytes, bytes, bytes, str]:
    return result.outcome.tobytes(), result.ttft.tobytes(), result.timeline.tobytes(), str(result.decisions)


def test_same_seed_same_run_other_seed_other_run() -> None:
    load, settings = _world(11)
    first, again = (simulate(load, settings, Wild(11), 4) for _ in range(2))
    assert _fingerprint(first) == _fingerprint(again)
    assert _fingerprint(first) != _fingerprint(simulate(load, settings, Wild(11), 5))


def test_the_policy_does_not_move_the_scrapes_that_are_lost() -> None:
    """Common random numbers: two policies lose the same samples."""
    load = poisson(2.0, 300.0, 1)
    settings = Fleet(REAL, 2, 2, warmup=0.0, scrape=Scrape(loss=0.3))
    lost = []
    for policy in (Hold(2, 2), Hold(3, 4)):
        simulate(load, settings, policy, seed=9)
        lost.append([view.counters_known for view in policy.views])
    assert lost[0] == lost[1]
    assert set(lost[0]) == {False, True}


@pytest.mark.parametrize(("rate", "output"), [(4.0, 50.0), (4.0, 1500.0), (30.0, 300.0)])
def test_events_grow_with_requests_not_with_tokens(rate: float, output: float) -> None:
    load = poisson(rate, 120.0, 2, prompt=(2000.0, 0.5), output=(output, 0.5))
    result = simulate(load, Fleet(REAL, 4, 4, warmup=0.0, scrape=EXACT), Hold(4, 4), seed=1)
    assert (result.outcome == COMPLETED).all()
    ticks = 2 * result.timeline.shape[0]
    assert result.events - ticks <= 12 * len(load)


def test_an_hour_costs_twice_what_half_of_it_costs() -> None:
    settings = Fleet(REAL, 3, 3, warmup=0.0, scrape=EXACT)
    events = [simulate(poisson(10.0, span, 3), settings, Hold(3, 3), seed=1).events for span in (150.0, 300.0)]
    assert 1.8 < events[1] / events[0] < 2.2
