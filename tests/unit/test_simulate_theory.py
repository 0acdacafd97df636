"""The simulator against queueing theory, and the trap that this product exists for."""

from __future__ import annotations

import heapq
import math
from dataclasses import replace

import numpy as np
import pytest
from simulate_world import AT_ONCE, ENDLESS, PLAIN, REAL, Hold, fleet, work

from pd_simulate.fleet import Fleet, Router, Scrape
from pd_simulate.result import COMPLETED
from pd_simulate.simulation import simulate
from pd_simulate.workload import Floats, Workload, poisson

COUNT = 12_000
RARELY = 1000.0  # seconds between scrapes and ticks, which are not the subject here


def _exponential(rng: np.random.Generator, mean: float, count: int) -> Floats:
    """Stratified: the exact distribution in random order, which takes most of the noise out of a mean."""
    return -mean * np.log1p(-(rng.permutation(count) + 0.5) / count)


def _waits(arrival: Floats, service: Floats, servers: int) -> Floats:
    """First come, first served on `servers`: Kiefer and Wolfowitz's recursion, an independent program."""
    free = [0.0] * servers
    found = []
    for time, length in zip(arrival.tolist(), service.tolist(), strict=True):
        start = max(time, heapq.heappop(free))
        heapq.heappush(free, start + length)
        found.append(start - time)
    return np.array(found)


def _erlang_wait(rho: float, servers: int) -> float:
    """Mean wait of M/M/N in mean service times: Erlang's C / (N (1 - rho))."""
    load = rho * servers
    top = load**servers / math.factorial(servers) / (1 - rho)
    return top / (sum(load**k / math.factorial(k) for k in range(servers)) + top) / (servers * (1 - rho))


def _load(rho: float, servers: int, prompt: Floats, output: Floats, mean: float, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    arrival = np.cumsum(_exponential(rng, mean / (rho * servers), len(prompt)))
    sizes = [np.maximum(1, np.rint(one)).astype(np.int64) for one in (prompt, output)]
    return Workload("theory", arrival, sizes[0], sizes[1], float(arrival[-1]))


# Prefill is a server of its own here: one prompt a step, a central queue in the router, a decode step of no length.
SERVER = replace(PLAIN, b=1e-6, d=1e-9, kv_capacity=10**12, prefill_kv_capacity=10**12)


def _prefill_waits(load: Workload, servers: int) -> Floats:
    policy = Hold(servers, 1)
    policy.tick = RARELY
    settings = fleet(
        SERVER,
        scrape=Scrape(RARELY, 0.0, loss=0.0),
        prefill=servers,
        step_requests=1,
        step_tokens=10**9,
        router=Router(per_prefill=1),
    )
    result = simulate(load, settings, policy, seed=1)
    assert (result.outcome == COMPLETED).all()
    return np.asarray(result.ttft - load.prompt * SERVER.b - SERVER.d)


@pytest.mark.parametrize(("rho", "servers", "fixed"), [(0.5, 1, True), (0.6, 4, False), (0.5, 1, False)])
def test_prefill_is_the_queue_of_theory(rho: float, servers: int, fixed: bool) -> None:
    rng = np.random.default_rng(7)
    prompt = np.full(COUNT, 1e6) if fixed else _exponential(rng, 1e6, COUNT)
    load = _load(rho, servers, prompt, np.ones(COUNT), 1.0, seed=8)
    waits = _prefill_waits(load, servers)
    # Request by request what an independent program says ...
    assert np.allclose(waits, _waits(load.arrival, load.prompt * SERVER.b, servers), atol=1e-6)
    # ... and in the mean what the closed form says: M/D/1 rho / (2 (1 - rho)), M/M/N Erlang's C.
    theory = rho / (2 * (1 - rho)) if fixed else _erlang_wait(rho, servers)
    assert 1 + waits.mean() == pytest.approx(1 + theory, rel=0.02)


@pytest.mark.parametrize(("rho", "servers", "fixed"), [(0.5, 1, True), (0.6, 4, False)])
def test_the_independent_program_meets_the_closed_form_on_a_long_run(rho: float, servers: int, fixed: bool) -> None:
    rng = np.random.default_rng(3)
    count = 400_000
    service = np.ones(count) if fixed else _exponential(rng, 1.0, count)
    arrival = np.cumsum(_exponential(rng, 1.0 / (rho * servers), count))
    theory = rho / (2 * (1 - rho)) if fixed else _erlang_wait(rho, servers)
    assert _waits(arrival, service, servers).mean() == pytest.approx(theory, rel=0.02)


def test_decode_seats_are_the_servers_of_theory() -> None:
    """M/M/N: N seats on one D, a step of 1 ms, outputs of 500 tokens in the mean. Joining waits for a step's end: at most 1 ms."""
    seats, rho, step = 4, 0.6, 1e-3
    rng = np.random.default_rng(5)
    output = _exponential(rng, 500.0, COUNT)
    load = _load(rho, seats, np.ones(COUNT), output, 0.5, seed=6)
    profile = replace(PLAIN, b=0.0, a=1e-9, d=step, max_num_seqs=seats)
    result = simulate(load, fleet(profile, lease=1e6, scrape=Scrape(RARELY, 0.0, loss=0.0)), Hold(1, 1), seed=1)
    assert (result.outcome == COMPLETED).all()
    waits = result.ttft - step
    exact = _waits(load.arrival, load.output * step, seats)
    assert float(np.abs(waits - exact).mean()) < 2 * step
    assert 0.5 + waits.mean() == pytest.approx(0.5 * (1 + _erlang_wait(rho, seats)), rel=0.02)


def test_more_prefill_does_not_help_when_decode_is_full() -> None:
    """The backpressure identity (facts/autoscaling.md 2.2): +50 % P moves goodput by 1 % at most and holds strictly more KV."""
    load = poisson(20.0, 600.0, 1, prompt=(2000.0, 0.5), output=(600.0, 0.5))
    profile = replace(REAL, max_num_seqs=16)

    def run(prefill: int) -> tuple[int, float]:
        settings = Fleet(profile, prefill, 2, budget=64, slices=AT_ONCE, slo=ENDLESS, warmup=0.0, horizon=0.0, lease=1e6)
        result = simulate(load, settings, Hold(prefill, 2), seed=1)
        return int(result.good.sum()), result.held_token_seconds

    few, held_few = run(2)
    many, held_many = run(3)
    assert few < 0.8 * len(load)  # D is full indeed
    assert abs(many - few) <= 0.01 * few
    assert held_many > held_few


def test_a_request_alone_takes_what_its_parts_take() -> None:
    """500 ms prefill, 10 + 250 ms transfer of 500 bytes at 2,000 bytes/s, then 3 tokens in steps of 10 ms."""
    slices = (replace(AT_ONCE[0], link=replace(AT_ONCE[0].link, bandwidth=2000.0, setup=0.010)),)
    result = simulate(work((2.0, 500, 3)), fleet(slices=slices, slo=replace(ENDLESS, ttft=0.8, itl=0.0101)), Hold(1, 1), seed=1)
    assert result.ttft[0] == pytest.approx(0.5 + 0.01 + 0.25 + 0.01)
    assert result.itl[0] == pytest.approx(0.010)
    assert result.good.tolist() == [True]
    assert result.summary()["attainment"] == 1.0
