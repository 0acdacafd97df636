"""simulate(): one workload, one fleet, one policy, one seed -> one Result."""

from __future__ import annotations

import time
from dataclasses import dataclass
from heapq import heappop

import numpy as np

from pd_simulate.audit import audit as check
from pd_simulate.clock import Clock
from pd_simulate.fleet import Fleet
from pd_simulate.pools import Pools
from pd_simulate.request import NEVER, OPEN, Request
from pd_simulate.result import COMPLETED, UNFINISHED, Decision, Result
from pd_simulate.sampling import Sampler
from pd_simulate.serving import Serving
from pd_simulate.view import Policy
from pd_simulate.workload import Floats, Workload


def simulate(workload: Workload, fleet: Fleet, policy: Policy, seed: int, audit: bool = False) -> Result:
    """Run to the end of the workload and until its requests have ended (bounded by `fleet.horizon`).

    The policy is called every `policy.tick` seconds from time 0. Its answer is clamped here to minimum, maximum and budget
    (the larger rise is trimmed first); clamps are counted. `seed` moves lead times, scrape losses and which replicas fail:
    the workload is seeded where it is made, so that policies can be compared on common random numbers.
    `audit` checks every conservation rule after every event (slow) and raises AssertionError with the rule's name.
    """
    started = time.perf_counter()
    run = _Run(workload, fleet, policy, seed)
    run.play(audit)
    return run.result(seed, time.perf_counter() - started)


@dataclass(slots=True)
class _Run:
    """The parts of one run, wired."""

    workload: Workload
    fleet: Fleet
    policy: Policy
    clock: Clock
    serving: Serving
    pools: Pools
    sampler: Sampler
    requests: list[Request]
    decisions: list[Decision]
    arrived: int

    def __init__(self, workload: Workload, fleet: Fleet, policy: Policy, seed: int) -> None:
        self.workload, self.fleet, self.policy = workload, fleet, policy
        self.clock = Clock()
        self.serving = Serving(fleet, workload, self.clock)
        # Streams of their own: a policy that creates more replicas must not change which scrapes are lost.
        lives, scrapes = np.random.SeedSequence(seed).generate_state(2)
        self.pools = Pools(self.serving, int(lives), workload.duration)
        self.sampler = Sampler(self.serving, self.pools, int(scrapes))
        self.requests = _requests(workload, fleet)
        self.decisions = []
        self.arrived = 0

    def play(self, audit: bool) -> None:
        """All events until nothing is open, or the horizon."""
        clock, tally = self.clock, self.serving.tally
        for loss in self.fleet.losses:
            clock.at(loss.at, self.pools.lose, loss)
        for change in self.fleet.link_changes:
            clock.at(change.at, self.pools.change_link, change)
        for quota in self.fleet.quotas:
            clock.at(quota.at, self.pools.change_quota, quota)
        clock.at(0.0, self.sampler.scrape, None)
        clock.at(0.0, self._tick, None)
        if self.requests:
            clock.at(self.requests[0].arrival, self._arrive, None)
        end, total = self.workload.duration + self.fleet.horizon, len(self.requests)
        emptied, duration, heap, step = self.serving.emptied, self.workload.duration, clock.heap, heappop
        while heap:  # Clock.step in place: most of a run's time is events of a few microseconds
            clock.now, _, call, argument = step(heap)
            clock.events += 1
            call(argument)
            while emptied:
                self.pools.settle(emptied.pop())
            if audit:
                check(self.serving, self.pools, self.requests[: self.arrived])
            if clock.now >= end or (tally.open == 0 and self.arrived == total and clock.now >= duration):
                break

    def _arrive(self, _: object) -> None:
        request = self.requests[self.arrived]
        self.arrived += 1
        if self.arrived < len(self.requests):
            self.clock.at(self.requests[self.arrived].arrival, self._arrive, None)
        cancel_after = float(self.workload.cancel_after[request.index])
        if cancel_after < NEVER:
            self.clock.at(request.arrival + cancel_after, self.serving.cancel, request)
        self.serving.arrive(request)

    def _tick(self, _: object) -> None:
        targets = self.policy.decide(self.sampler.view())
        applied, clamped = self.pools.apply(targets)
        asked = {"prefill": targets.prefill, "decode": targets.decode}
        self.decisions.append(Decision(self.clock.now, asked, applied, targets.note, clamped))  # type: ignore[arg-type]
        self.clock.at(self.clock.now + self.policy.tick, self._tick, None)

    def result(self, seed: int, wall: float) -> Result:
        """What became of all."""
        self.pools.close()
        for request in self.requests:
            if request.outcome == OPEN:
                request.outcome = UNFINISHED
        requests, tally, pools = self.requests, self.serving.tally, self.pools
        outcome = np.array([one.outcome for one in requests], dtype=np.int8)
        ttft = _finite([one.first_token - one.arrival for one in requests])
        itl = np.array([one.itl for one in requests])
        limit = np.array([one.ttft_limit for one in requests])
        # A hair of tolerance: sums of step times are not exact.
        good = (outcome == COMPLETED) & (ttft <= limit + 1e-9) & (itl <= self.fleet.slo.itl + 1e-9)
        wasted = sum(one.computed - (one.uncached if one.outcome == COMPLETED else 0) for one in requests)
        return Result(
            workload=self.workload.name,
            policy=self.policy.name,
            seed=seed,
            warmup=self.fleet.warmup,
            duration=self.workload.duration,
            arrival=self.workload.arrival,
            uncached=np.array([one.uncached for one in requests], dtype=np.int64),
            outcome=outcome,
            good=good,
            ttft=ttft,
            itl=itl,
            handoff_wait=_finite([one.reserved_at - one.prefilled_at if one.reserved_at < NEVER else NEVER for one in requests]),
            recomputed=np.array([one.recomputed for one in requests], dtype=np.bool_),
            retried=np.array([one.retried for one in requests], dtype=np.bool_),
            timeline=np.array(self.sampler.rows),
            decisions=self.decisions,
            gpu_seconds=dict(pools.gpu_seconds),
            wasted_prefill_tokens=wasted,
            held_token_seconds=pools.held_token_seconds,
            preemptions=tally.preemptions,
            clamps=pools.clamps,
            drain_aborted=pools.drain_aborted,
            retries=tally.retries,
            events=self.clock.events,
            wall_seconds=wall,
        )


def _requests(workload: Workload, fleet: Fleet) -> list[Request]:
    arrays = (workload.arrival, workload.prompt, workload.output, workload.cached)
    columns = zip(*(array.tolist() for array in arrays), strict=True)
    by_hash = fleet.prefix in ("shared", "local") and workload.prefix is not None
    given = fleet.prefix != "off" and not by_hash
    made = []
    for index, (arrival, prompt, output, cached) in enumerate(columns):
        request = Request(index, arrival, prompt, output)
        if given and cached:
            request.context = min(cached, prompt - 1)
            request.uncached = request.left = prompt - request.context
        elif by_hash and workload.prefix is not None:
            request.prefix = workload.prefix[index]
        made.append(request)
    return made


def _finite(values: list[float]) -> Floats:
    array = np.array(values, dtype=np.float64)
    array[~np.isfinite(array)] = np.nan
    return array
