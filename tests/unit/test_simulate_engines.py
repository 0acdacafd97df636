"""Engines, links and lives: closed forms against step-by-step programs, and each rule of the handoff by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from simulate_world import ENDLESS, PLAIN, REAL, Hold, Script, fleet, work

from pd_simulate import profiles
from pd_simulate.clock import Clock
from pd_simulate.fleet import Admission, LeadTime, Link, NodeLoss, Outage, QuotaChange, Router, Scrape, Slice
from pd_simulate.gaps import p95
from pd_simulate.link import Nic
from pd_simulate.pools import divide
from pd_simulate.request import Request
from pd_simulate.result import CANCELLED, COMPLETED, EXPIRED, FAILED, OUTCOMES, REJECTED, TIMED_OUT
from pd_simulate.simulation import simulate
from pd_simulate.view import Profile
from pd_simulate.workload import Workload, poisson

SLOW_LINK = (Slice(link=Link(bandwidth=100.0, setup=0.0)),)


def _names(outcome: np.ndarray) -> list[str]:
    return [OUTCOMES[code] for code in outcome]


def _stepwise(profile: Profile, joins: list[float], load: Workload) -> tuple[list[float], list[float]]:
    """TTFT and p95 of gaps from a program that takes every decode step by itself."""
    now, running = 0.0, {}
    waiting = sorted(range(len(joins)), key=lambda i: joins[i])
    tokens: dict[int, list[float]] = {i: [] for i in waiting}
    while waiting or running:
        if not running:
            now = max(now, joins[waiting[0]])
        while waiting and joins[waiting[0]] <= now + 1e-12:
            running[waiting[0]] = int(load.prompt[waiting[0]])
            waiting.pop(0)
        now += profile.step(len(running), sum(running.values()))
        for index in list(running):
            running[index] += 1
            tokens[index].append(now)
            if len(tokens[index]) == load.output[index]:
                del running[index]
    ttft = [tokens[i][0] - load.arrival[i] for i in range(len(joins))]
    return ttft, [p95(np.diff(tokens[i])) for i in range(len(joins))]


@pytest.mark.parametrize("name", ["REAL", "DSV3-H200-TP8"])
def test_the_jump_equals_the_walk(name: str) -> None:
    """Every first token and every p95 gap of 150 requests, against a program that walks step by step."""
    profile = REAL if name == "REAL" else profiles.get(name)
    profile = replace(profile, a=1e-3, b=0.0, c=0.0, floor=0.0, kv_capacity=10**9, prefill_kv_capacity=10**9)
    load = poisson(5.0, 30.0, 4, prompt=(3000.0, 1.0), output=(120.0, 1.0))
    result = simulate(load, fleet(profile, step_requests=1, step_tokens=10**9), Hold(1, 1), seed=1)
    joins, free = [], 0.0
    for arrival in load.arrival.tolist():
        free = max(arrival, free) + 1e-3
        joins.append(free)
    ttft, itl = _stepwise(profile, joins, load)
    assert result.ttft == pytest.approx(np.array(ttft), abs=1e-8)
    assert result.itl == pytest.approx(np.array(itl), abs=1e-8)


def test_a_prefill_step_batches_up_to_its_budget_and_chunks_the_rest() -> None:
    """Budget 1,000: [600 + 400 of 900] in 1.0 s, then [500] in 0.5 s; chunking costs no work of its own (a = 0, c = 0)."""
    # The first arrival finds the engine idle and runs alone; both wait behind a request of 100 tokens.
    load = work((0.0, 100, 1), (0.05, 600, 1), (0.05, 900, 1))
    result = simulate(load, fleet(step_tokens=1000), Hold(1, 1), seed=1)
    assert result.ttft + load.arrival == pytest.approx([0.1 + 0.01, 1.1 + 0.01, 1.6 + 0.01])


def test_quadratic_attention_is_paid_over_chunks_too() -> None:
    profile = replace(PLAIN, b=0.0, c=1e-6)
    result = simulate(work((0.0, 3000, 1)), fleet(profile, step_tokens=1000), Hold(1, 1), seed=1)
    assert result.ttft[0] == pytest.approx(1e-6 * 3000**2 + 0.01)


def test_a_link_is_shared_fairly() -> None:
    """100 bytes/s; 100 bytes from 0 s on, 100 from 0.5 s on: the first has 50 left, shared, ends at 1.5 s, the other at 2 s."""
    clock, ended = Clock(), []
    nic = Nic(clock, 100.0, 0.0, lambda request, number: ended.append((request.index, clock.now)))
    nic.start(Request(0, 0.0, 1, 1), 100.0)
    clock.at(0.5, lambda _: nic.start(Request(1, 0.0, 1, 1), 100.0), None)
    while clock.step():
        pass
    assert ended == [(0, pytest.approx(1.5)), (1, pytest.approx(2.0))]


def test_a_link_that_slows_down_slows_what_is_under_way() -> None:
    clock, ended = Clock(), []
    nic = Nic(clock, 100.0, 0.0, lambda request, number: ended.append(clock.now))
    nic.start(Request(0, 0.0, 1, 1), 100.0)
    clock.at(0.5, lambda _: nic.change(25.0), None)
    while clock.step():
        pass
    assert ended == [pytest.approx(2.5)]


def test_prefix_hits_shorten_prefill() -> None:
    blocks = tuple(range(4))
    load = work((0.0, 2048, 1), (10.0, 2048, 1), prefix=(blocks, (*blocks[:2], 9, 10)))
    seconds = [simulate(load, fleet(prefix=how), Hold(1, 1), seed=1).ttft - 0.01 for how in ("off", "shared", "local")]
    assert seconds[0] == pytest.approx([2.048, 2.048])
    assert seconds[1] == pytest.approx([2.048, 1.024])
    assert seconds[2] == pytest.approx([2.048, 1.024])
    mixed = {"mode": "aggregated", "prefill": 0, "minimum": {"prefill": 0, "decode": 1}, "mixed_tokens": 10_000}
    for how in ("shared", "local"):
        assert simulate(load, fleet(prefix=how, **mixed), Hold(0, 1), seed=1).ttft == pytest.approx([2.048, 1.024])
    given = simulate(replace(load, prefix=None, cached=np.array([0, 2000])), fleet(), Hold(1, 1), seed=1)
    assert given.ttft - 0.01 == pytest.approx([2.048, 0.048])
    assert given.uncached.tolist() == [2048, 48]


def test_kv_on_prefill_is_held_until_the_pull_has_ended() -> None:
    """P's KV takes one prompt: the second may not run before D has pulled the first (1 s prefill, 10 s transfer)."""
    profile = replace(PLAIN, prefill_kv_capacity=1000)
    result = simulate(work((0.0, 1000, 1), (0.0, 1000, 1)), fleet(profile, slices=SLOW_LINK), Hold(1, 1), seed=1, audit=True)
    assert result.ttft == pytest.approx([11.01, 22.01])
    assert result.held_token_seconds == pytest.approx(20_000)


@pytest.mark.parametrize(("policy", "ends"), [("fail", EXPIRED), ("recompute", COMPLETED)])
def test_a_lease_ends_for_what_decode_does_not_reserve(policy: str, ends: int) -> None:
    """One seat, taken for 20 s: the second's KV is freed after 5 s, and it is prefilled again by D or has failed."""
    profile = replace(PLAIN, max_num_seqs=1)
    load = work((0.0, 100, 2000), (0.0, 100, 2))
    result = simulate(load, fleet(profile, lease=5.0, on_lease_end=policy), Hold(1, 1), seed=1, audit=True)
    assert result.outcome.tolist() == [COMPLETED, ends]
    assert result.recomputed.tolist() == [False, ends == COMPLETED]
    if ends == COMPLETED:
        # It follows the other: 0.1 s of prefill on D, which yields the first token.
        assert result.ttft[1] == pytest.approx(0.1 + 20.0 + 0.1, abs=0.03)
        assert result.wasted_prefill_tokens == 100
    else:
        assert result.wasted_prefill_tokens == 100


def test_clients_cancel_and_give_up() -> None:
    load = work((0.0, 5000, 10), (0.0, 1000, 10), (0.0, 1000, 1000), cancel_after=np.array([np.inf, 1.0, 8.0]))
    slo = replace(ENDLESS, ttft=0.5, patience=10.0)
    result = simulate(load, fleet(slo=slo, step_requests=1), Hold(1, 1), seed=1, audit=True)
    # The first has its token at 5.01 s, one step after it gave up; the second is cancelled in the queue.
    assert result.outcome.tolist() == [TIMED_OUT, CANCELLED, TIMED_OUT]
    generous = simulate(load, fleet(step_requests=1), Hold(1, 1), seed=1, audit=True)
    assert generous.outcome.tolist() == [COMPLETED, CANCELLED, CANCELLED]
    assert generous.ttft[2] == pytest.approx(6.01)  # it streamed, and was cancelled in mid-stream


def test_our_limits_reject_at_the_door() -> None:
    load = work(*[(0.001 * i, 1000, 1) for i in range(20)])
    result = simulate(load, fleet(admission=Admission(True, max_queue_time=5.0)), Hold(1, 1), seed=1, audit=True)
    assert (result.outcome == REJECTED).sum() == 15
    assert (result.outcome[:5] == COMPLETED).all()
    off = simulate(load, fleet(), Hold(1, 1), seed=1)
    assert (off.outcome == COMPLETED).all()


def test_a_full_decode_preempts_the_newest_and_computes_it_again() -> None:
    """KV of 1,000 tokens and two requests that end at 600 each: the second is put back and prefilled again."""
    profile = replace(PLAIN, kv_capacity=1000)
    load = work((0.0, 300, 300), (0.0, 300, 300))
    result = simulate(load, fleet(profile), Hold(1, 1), seed=1, audit=True)
    assert result.preemptions == 1
    assert _names(result.outcome) == ["completed", "completed"]
    assert result.wasted_prefill_tokens > 300
    reserve = simulate(load, fleet(profile, growth="reserve"), Hold(1, 1), seed=1, audit=True)
    assert reserve.preemptions == 0
    assert reserve.ttft[1] > result.ttft[1]


def test_mixed_steps_of_an_aggregated_engine_interfere() -> None:
    """A long prompt makes the gaps of a running request as long as its chunks: 10 ms alone, 10 + 500 ms beside a chunk."""
    load = work((0.0, 10, 100), (0.5, 5000, 2))
    settings = fleet(mode="aggregated", prefill=0, mixed_tokens=500, minimum={"prefill": 0, "decode": 1})
    result = simulate(load, settings, Hold(0, 1), seed=1, audit=True)
    assert result.itl[0] == pytest.approx(0.51)
    assert result.ttft[0] == pytest.approx(0.01)  # its prompt alone, no decode beside it
    assert (result.outcome == COMPLETED).all()


def test_convertible_decoders_take_the_burst() -> None:
    load = work(*[(0.0, 1000, 10)] * 6)
    settings = fleet(slo=replace(ENDLESS, ttft=2.0), decode=2)
    plain, helped = (simulate(load, settings, Hold(1, 2, count), seed=1, audit=True) for count in (0, 1))
    assert plain.ttft.max() == pytest.approx(6.01, abs=0.02)
    assert helped.ttft.max() < plain.ttft.max() - 0.5


def test_replicas_start_late_and_drain_before_they_end() -> None:
    """Asked for at 10 s with a lead time of 30 s: Ready at 40 s. Removed at 60 s: it first ends what it streams."""
    load = work((0.0, 10, 10), (50.0, 10, 3000), (50.0, 10, 3000), (120.0, 10, 1))
    policy = Script((0.0, 1, 1), (10.0, 1, 2), (60.0, 1, 1))
    settings = fleet(lead_decode=LeadTime(30.0, 0.0))
    result = simulate(load, settings, policy, seed=1, audit=True)
    assert (result.outcome == COMPLETED).all()
    assert result.gpu_seconds["decode/starting"] == pytest.approx(30.0)
    assert result.gpu_seconds["decode/draining"] == pytest.approx(50.02 + 30.0 - 60.0, abs=0.05)
    assert result.gpu_seconds["prefill/ready"] == pytest.approx(121.0)
    cut = simulate(load, replace(settings, drain_timeout=5.0), policy, seed=1, audit=True)
    assert (cut.outcome == FAILED).sum() == 1
    assert cut.drain_aborted == 1


@pytest.mark.parametrize(("pairs", "last"), [("arrival", 16.01), ("handoff", 11.01)])
def test_a_late_decode_takes_nothing_of_what_the_router_has_paired(pairs: Literal["arrival", "handoff"], last: float) -> None:
    """Four requests at once, a second of prefill and five of decode each, one seat a D; the second D is ready after 1.5 s."""
    load = work(*[(0.0, 1000, 500)] * 4)
    settings = fleet(
        replace(PLAIN, max_num_seqs=1), lead_decode=LeadTime(1.5, 0.0), router=Router("round_robin", pairs=pairs), step_requests=1
    )
    result = simulate(load, settings, Script((0.0, 1, 2)), seed=1, audit=True)
    assert (result.outcome == COMPLETED).all()
    assert result.ttft.max() == pytest.approx(last)


def test_a_draining_prefill_keeps_what_it_holds() -> None:
    """P is removed at 5 s while D pulls from it until 11 s; its replacement is not there yet."""
    settings = fleet(slices=SLOW_LINK, prefill=2, minimum={"prefill": 0, "decode": 1})
    result = simulate(work((0.0, 1000, 1), (30.0, 10, 1)), settings, Script((0.0, 2, 1), (5.0, 1, 1)), seed=1, audit=True)
    assert result.outcome[0] == COMPLETED
    assert result.ttft[0] == pytest.approx(11.01)


def test_gpus_in_use_stay_inside_the_quota() -> None:
    """8 GPUs asked for, 4 bound: the rest is blocked and costs nothing until the quota allows it."""
    settings = fleet(budget=8, quotas=(QuotaChange(0.0, 4), QuotaChange(50.0, 8)), lead_decode=LeadTime(10.0, 0.0))
    policy = Script((0.0, 1, 1), (5.0, 2, 6))
    result = simulate(work((0.0, 10, 1), (99.0, 10, 1)), settings, policy, seed=1, audit=True)
    blocked = [row for view in policy.views for row in view.replicas if row.state == "blocked"]
    assert blocked
    assert max(sum(one.state != "blocked" for one in view.replicas) for view in policy.views if view.now < 50.0) == 4
    assert sum(one.state == "ready" for one in policy.views[-1].replicas) >= 7
    assert result.clamps == 0


def test_answers_are_clamped_and_counted() -> None:
    settings = fleet(budget=6, maximum={"prefill": 3, "decode": 64})
    result = simulate(work((0.0, 10, 1), (40.0, 10, 1)), settings, Script((0.0, 1, 1), (5.0, 9, 9), (20.0, 0, 2)), seed=1)
    assert result.decisions[1].applied == {"prefill": 3, "decode": 3}
    assert result.decisions[4].applied == {"prefill": 1, "decode": 2}
    assert result.clamps == sum(one.clamped for one in result.decisions) == 8


def test_a_lost_node_fails_streams_and_saves_what_prefill_holds() -> None:
    """D 1 is lost at 3 s: what it streams has failed, what waits on P goes to D 2 (one seat each)."""
    profile = replace(PLAIN, max_num_seqs=1)
    load = work((0.0, 100, 1000), (0.0, 100, 1000), (0.0, 100, 10), (0.0, 100, 10))
    settings = fleet(profile, decode=2, losses=(NodeLoss(3.0, "decode", 0.5),), lead_decode=LeadTime(1.0, 0.0))
    result = simulate(load, settings, Hold(1, 2), seed=1, audit=True)
    assert (result.outcome == FAILED).sum() == 1
    assert (result.outcome == COMPLETED).sum() == 3


def test_a_lost_prefill_is_tried_again_once() -> None:
    load = work((0.0, 5000, 10))
    settings = fleet(losses=(NodeLoss(3.0, "prefill", 1.0),), lead_prefill=LeadTime(2.0, 0.0))
    once = simulate(load, settings, Hold(1, 1), seed=1, audit=True)
    assert once.outcome.tolist() == [COMPLETED]
    assert once.retried.tolist() == [True]
    assert once.ttft[0] == pytest.approx(3.0 + 2.0 + 5.0 + 0.01)
    twice = replace(settings, losses=(NodeLoss(3.0, "prefill", 1.0), NodeLoss(7.0, "prefill", 1.0)))
    assert simulate(load, twice, Hold(1, 1), seed=1, audit=True).outcome.tolist() == [FAILED]


def test_slices_do_not_mix() -> None:
    """Two slices, one with a link a hundred times slower: half of the requests see it, none of the others do."""
    slices = (Slice("fast", Link(1e9, 0.0)), Slice("slow", Link(1e3, 0.0)))
    settings = fleet(slices=slices, prefill=2, decode=2, minimum={"prefill": 2, "decode": 2})
    load = work(*[(20.0 * i, 1000, 1) for i in range(6)])
    result = simulate(load, settings, Hold(2, 2), seed=1, audit=True)
    assert sorted(np.round(result.ttft, 2).tolist()) == pytest.approx([1.01] * 3 + [2.01] * 3)


def test_a_view_is_late_and_says_what_it_does_not_know() -> None:
    policy = Hold(1, 1)
    policy.tick = 5.0
    settings = fleet(scrape=Scrape(15.0, 0.0, delay=4.0, loss=0.0), outages=(Outage(29.0, 31.0),))
    simulate(work((0.0, 100, 10), (70.0, 10, 1)), settings, policy, seed=1)
    views = {view.now: view for view in policy.views}
    assert views[20.0].counters.offered == 1  # sampled at 15 s, seen from 19 s on
    assert (views[20.0].counters_age, views[30.0].counters_age) == (5.0, 15.0)
    assert [views[now].counters_known for now in (20.0, 35.0, 45.0, 50.0)] == [True, False, False, True]
    assert not any(one.known for one in views[35.0].replicas)
    assert all(one.known for one in views[50.0].replicas)


def test_a_view_counts_each_request_in_one_place() -> None:
    """At 15 s: P computes one and has one queued; D streams one, pulls none, and one waits for its only seat, held on P."""
    profile = replace(PLAIN, max_num_seqs=1)
    load = work((0.0, 100, 3000), (0.0, 900, 5), (1.0, 20_000, 5), (2.0, 700, 5))
    policy = Hold(1, 1)
    policy.tick = 5.0
    simulate(load, fleet(profile, lease=1e6), policy, seed=1)
    seen = next(view for view in policy.views if view.now == 15.0)
    prefill, decode = (next(one for one in seen.replicas if one.role == role) for role in ("prefill", "decode"))
    # Chunks of 8,192 tokens: the second is under way, the first is done.
    assert (prefill.running, prefill.running_tokens, prefill.waiting, prefill.waiting_tokens) == (1, 20_000 - 8192, 1, 700)
    assert (prefill.held, prefill.held_tokens, prefill.kv_used) == (1, 900, 900 + 20_000)
    assert prefill.oldest_held == pytest.approx(14.0)
    assert (prefill.busy, decode.busy) == (1.0, pytest.approx(14.9 / 15))
    assert (decode.running, decode.waiting, decode.waiting_tokens) == (1, 1, 900)
    assert decode.itl == pytest.approx(0.010)
    assert decode.kv_used == 100 + seen.counters.output_tokens == pytest.approx(100 + 1490, abs=1)
    assert (seen.counters.offered, seen.counters.prefilled, seen.counters.decode_starts) == (4, 2, 1)
    assert (seen.ttft.count, seen.ttft.mean) == (1, pytest.approx(0.11))
    assert (seen.itl.mean, seen.handoff_wait.count) == (pytest.approx(0.010), 1)  # of a run that has not ended yet


def test_shares_go_by_largest_remainder_one_each() -> None:
    assert divide(5, [1.0, 1.0]) == [3, 2]
    assert divide(2, [9.0, 1.0]) == [1, 1]
    assert divide(12, [3.0, 1.0]) == [9, 3]
    assert divide(1, [1.0, 1.0]) == [1, 0]
    assert divide(0, [1.0, 1.0]) == [0, 0]
