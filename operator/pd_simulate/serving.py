"""Serving: a request's way: router, P, handoff, D, and every way in which it may end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from pd_simulate.clock import Clock
from pd_simulate.fleet import Fleet
from pd_simulate.prefill import PrefillEngine
from pd_simulate.replica import Replica
from pd_simulate.request import NEVER, OPEN, Phase, Request
from pd_simulate.result import CANCELLED, COMPLETED, EXPIRED, FAILED, REJECTED, TIMED_OUT
from pd_simulate.router import Lane, Router
from pd_simulate.workload import Workload


@dataclass
class Tally:
    """Cumulative counts; the names of view.Counters, and what only a result shows."""

    offered: int = 0
    offered_tokens: int = 0
    offered_uncached: int = 0
    accepted: int = 0
    rejected: int = 0
    prefilled: int = 0
    prefill_tokens: int = 0
    decode_starts: int = 0
    finished: int = 0
    finished_output: int = 0
    finished_prompt: int = 0
    cancelled: int = 0
    timed_out: int = 0
    expired: int = 0
    recomputed: int = 0
    preemptions: int = 0
    retries: int = 0
    open: int = 0


class Serving:
    """All slices. Engines call back here when something of theirs ends; `pools` adds and removes replicas."""

    def __init__(self, fleet: Fleet, workload: Workload, clock: Clock) -> None:
        self.fleet = fleet
        self.workload = workload
        self.clock = clock
        self.tally = Tally()
        self.router = Router(fleet, workload.block)
        profile = fleet.profile
        # (alpha, beta) of a decode step by the number of requests
        self.step_law = [profile.step_law(batch) for batch in range(profile.max_num_seqs + 1)]
        # (time, value) pairs for the latencies of a view
        self.ttft: list[tuple[float, float]] = []
        self.prefill_latency: list[tuple[float, float]] = []
        self.handoff_wait: list[tuple[float, float]] = []
        self.emptied: list[Replica] = []  # draining ones that may be over; the pools look at them

    # -- arrival ----------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request reaches the front door."""
        tally, fleet = self.tally, self.fleet
        tally.offered += 1
        tally.open += 1
        tally.offered_tokens += request.prompt
        lane = self.router.lane(request)
        if lane.cache is not None:
            self.router.cover(request, lane.cache.hit(request))
        request.ttft_limit = fleet.slo.ttft_limit(request.uncached)
        tally.offered_uncached += request.uncached
        if self._too_long(request):
            self.end(request, FAILED)
            return
        if fleet.admission.enabled and self.router.full(lane):
            tally.rejected += 1
            self.end(request, REJECTED)
            return
        tally.accepted += 1
        self.clock.at(request.arrival + fleet.slo.patience * request.ttft_limit, self._give_up, request)
        self.router.dispatch(request)

    def _too_long(self, request: Request) -> bool:
        profile = self.fleet.profile
        on_prefill = self.fleet.mode == "disaggregated" and request.prompt > profile.prefill_kv_capacity
        return on_prefill or request.prompt + request.output > profile.kv_capacity

    # -- prefill and handoff ------------------------------------------------------------------------------------------

    def computed(self, engine: PrefillEngine, tokens: int, done: list[Request]) -> None:
        """A step of P has ended; `done` are prefilled."""
        self.tally.prefill_tokens += tokens
        for request in done:
            if request.outcome != OPEN:
                continue
            now = self.clock.now
            self.tally.prefilled += 1
            request.prefilled_at = now
            request.phase = Phase.HANDOFF
            self.prefill_latency.append((now, now - request.prefill_start))
            request.lease_until = now + self.fleet.lease
            self.clock.at(request.lease_until, self.lease_over, request)
            self.hand_over(request)
        lane = self.router.lanes[engine.slice]
        if lane.queue:
            self.router.pump(lane)
        self.settled(engine)

    def computed_locally(self, tokens: int) -> None:
        """A step of a D has carried prompt tokens."""
        self.tally.prefill_tokens += tokens

    def hand_over(self, request: Request) -> None:
        """Choose D; without a ready one the request waits for the first."""
        lane = self.router.lanes[request.slice]
        request.decode = None
        request.phase = Phase.HANDOFF
        paired = request.paired
        engine = paired if paired is not None and paired in lane.decodes else self.router.pick_decode(lane)
        if engine is None:
            lane.orphans.append(request)
        else:
            engine.offer(request)

    def adopt(self, lane: Lane) -> None:
        """A D is ready: it takes the handoffs that waited for one."""
        orphans, lane.orphans = lane.orphans, deque()
        for request in orphans:
            if request.outcome == OPEN:
                self.hand_over(request)

    def reserved(self, request: Request) -> None:
        """D has set KV aside: pull, or prefill there."""
        now = self.clock.now
        if request.phase == Phase.LOCAL:
            if request.prefilled_at == NEVER and request.prefill_start == NEVER:
                request.prefill_start = now
            return
        request.reserved_at = now
        self.handoff_wait.append((now, now - request.prefilled_at))
        request.transfer += 1
        assert request.prefill is not None
        request.prefill.nic.start(request, request.prompt * self.fleet.profile.kv_bytes_per_token)

    def transferred(self, request: Request, number: int) -> None:
        """A pull has ended: P frees, D takes it into its batch."""
        if number != request.transfer or request.phase not in (Phase.TRANSFER, Phase.DONE):
            return
        decode, prefill = request.decode, request.prefill
        if decode is None or prefill is None or request not in decode.transit:
            return
        decode.pulled(request)
        prefill.release(request)
        self.settled(decode)

    def lease_over(self, request: Request) -> None:
        """P frees by itself what D has not begun to pull."""
        if request.outcome != OPEN or request.phase != Phase.HANDOFF or not request.held or self.clock.now < request.lease_until:
            return
        self.tally.expired += 1
        prefill = request.prefill
        assert prefill is not None
        self.lost(request)
        prefill.release(request)

    def lost(self, request: Request) -> None:
        """A prefilled request's KV on P is gone: D prefills it again, or it ends."""
        if self.fleet.on_lease_end == "fail":
            if request.phase == Phase.TRANSFER and request.decode is not None:
                request.decode.abort_transit(request)
            self.end(request, EXPIRED)
            return
        self._count_recompute(request)
        if request.decode is not None and request.phase == Phase.HANDOFF:
            request.decode.make_local(request)
        elif request.phase == Phase.TRANSFER and request.decode is not None:
            request.decode.forget_transit(request)
        else:
            request.local, request.left, request.context = True, request.prompt, 0

    def _count_recompute(self, request: Request) -> None:
        request.recomputed = True
        self.tally.recomputed += 1

    def preempted(self, request: Request) -> None:
        """D was full and put it back."""
        self.tally.preemptions += 1

    # -- ends ---------------------------------------------------------------------------------------------------------

    def streamed(self, request: Request) -> None:
        """Its first token is out (or will be at `first_token`, the end of the step that begins now)."""
        self.tally.decode_starts += 1
        self.ttft.append((request.first_token, request.first_token - request.arrival))
        if request.local and request.prefilled_at == NEVER:
            request.prefilled_at = self.clock.now
            self.tally.prefilled += 1
            self.prefill_latency.append((self.clock.now, self.clock.now - request.prefill_start))

    def complete(self, request: Request) -> None:
        """All its tokens are out."""
        self.tally.finished += 1
        self.tally.finished_output += request.output
        self.tally.finished_prompt += request.prompt
        self.end(request, COMPLETED)

    def _give_up(self, request: Request) -> None:
        if request.outcome == OPEN and request.first_token > self.clock.now:
            self.tally.timed_out += 1
            self.end(request, TIMED_OUT)

    def cancel(self, request: Request) -> None:
        """The client cancels, if it still waits."""
        if request.outcome == OPEN:
            self.tally.cancelled += 1
            self.end(request, CANCELLED)

    def end(self, request: Request, outcome: int) -> None:
        """The one place where a request gets its outcome; whatever holds it lets go, at once or at its next step."""
        assert request.outcome == OPEN, f"request {request.index} ends twice"
        request.outcome = outcome
        self.tally.open -= 1
        if request.first_token > self.clock.now:
            request.first_token = NEVER
        phase, request.phase = request.phase, Phase.DONE
        decode, prefill = request.decode, request.prefill
        if phase == Phase.QUEUED and prefill is not None:
            prefill.drop_queued(request)
        elif phase == Phase.HANDOFF:
            if decode is not None:
                decode.drop_waiting(request)
            if request.held and prefill is not None:
                prefill.release(request)
            if decode is not None:
                decode.admit()
        elif phase == Phase.DECODE and decode is not None and outcome != COMPLETED:
            decode.leave(request)
        elif phase == Phase.ROUTER and outcome in (CANCELLED, TIMED_OUT):
            self.router.unqueue(request)

    def settled(self, engine: Replica) -> None:
        """An engine has less than before: a draining one may be over."""
        if engine.state == "draining":
            self.emptied.append(engine)
