"""Serving: a request's way: router, P, handoff, D, and every way in which it may end."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pd_simulate.cache import PrefixCache
from pd_simulate.clock import Clock
from pd_simulate.decode import DecodeEngine
from pd_simulate.fleet import Fleet
from pd_simulate.prefill import PrefillEngine
from pd_simulate.replica import Replica
from pd_simulate.request import NEVER, OPEN, Phase, Request
from pd_simulate.result import CANCELLED, COMPLETED, EXPIRED, FAILED, REJECTED, TIMED_OUT
from pd_simulate.workload import Workload

# Prompt length at which a P replica's tokens/s is taken for limits "in seconds of queue".
TYPICAL_PROMPT = 2048


@dataclass
class Lane:
    """One slice: its ready replicas, the router's queue, handoffs that no D could take."""

    weight: float
    prefills: list[PrefillEngine] = field(default_factory=list)
    decodes: list[DecodeEngine] = field(default_factory=list)
    queue: deque[Request] = field(default_factory=deque)
    queued: int = 0
    queued_tokens: int = 0
    orphans: deque[Request] = field(default_factory=deque)
    cache: PrefixCache | None = None
    routed: float = 0.0  # requests / weight so far
    turn: int = 0  # round robin
    turn_decode: int = 0


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
        self.lanes = [Lane(one.weight) for one in fleet.slices]
        if fleet.prefix == "shared":
            for lane in self.lanes:
                lane.cache = PrefixCache(fleet.prefix_blocks, workload.block)
        profile = fleet.profile
        # (alpha, beta) of a decode step by the number of requests
        self.step_law = [profile.step_law(batch) for batch in range(profile.max_num_seqs + 1)]
        self.velocity = TYPICAL_PROMPT / profile.prefill(TYPICAL_PROMPT)
        # (time, value) pairs for the latencies of a view
        self.ttft: list[tuple[float, float]] = []
        self.prefill_latency: list[tuple[float, float]] = []
        self.handoff_wait: list[tuple[float, float]] = []
        self.emptied: list[Replica] = []  # draining ones that may be over; the pools look at them

    # -- router -------------------------------------------------------------------------------------------------------

    def arrive(self, request: Request) -> None:
        """A request reaches the front door."""
        tally, fleet = self.tally, self.fleet
        tally.offered += 1
        tally.open += 1
        tally.offered_tokens += request.prompt
        lane = self._lane(request)
        if lane.cache is not None:
            self._covered(request, lane.cache.hit(request))
        request.ttft_limit = fleet.slo.ttft_limit(request.uncached)
        tally.offered_uncached += request.uncached
        if self._too_long(request):
            self.end(request, FAILED)
            return
        if fleet.admission.enabled and self._full(lane):
            tally.rejected += 1
            self.end(request, REJECTED)
            return
        tally.accepted += 1
        self.clock.at(request.arrival + fleet.slo.patience * request.ttft_limit, self._give_up, request)
        self.dispatch(request)

    def _lane(self, request: Request) -> Lane:
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0]
        able = [index for index, lane in enumerate(lanes) if lane.prefills or (lane.decodes and self.fleet.mode == "aggregated")]
        request.slice = min(able or range(len(lanes)), key=lambda index: (lanes[index].routed + 1 / lanes[index].weight, index))
        lanes[request.slice].routed += 1 / lanes[request.slice].weight
        return lanes[request.slice]

    def _covered(self, request: Request, tokens: int) -> None:
        request.uncached = request.left = request.prompt - tokens
        request.context = tokens

    def _too_long(self, request: Request) -> bool:
        profile = self.fleet.profile
        on_prefill = self.fleet.mode == "disaggregated" and request.prompt > profile.prefill_kv_capacity
        return on_prefill or request.prompt + request.output > profile.kv_capacity

    def _full(self, lane: Lane) -> bool:
        """Our admission limits: every P has its bound queued, or too many handoffs wait."""
        limits = self.fleet.admission
        bound = limits.max_queue_time * self.velocity
        if self.fleet.mode == "aggregated":
            loads = [engine.local_tokens for engine in lane.decodes]
        else:
            loads = [engine.load for engine in lane.prefills]
        least = min(loads, default=0) + lane.queued_tokens / max(1, len(loads))
        if least >= bound:
            return True
        handoffs = sum(engine.waiting_count for engine in lane.decodes) if limits.handoffs_per_decode else 0
        return handoffs > limits.handoffs_per_decode * max(1, len(lane.decodes))

    def dispatch(self, request: Request) -> None:
        """To a replica, or into the router's queue while none may take it."""
        lane = self.lanes[request.slice]
        if lane.queued or not self._place(lane, request):
            request.phase = Phase.ROUTER
            lane.queue.append(request)
            lane.queued += 1
            lane.queued_tokens += request.uncached
            self.pump(lane)

    def pump(self, lane: Lane) -> None:
        """A replica may take more: the router's queue in order."""
        while lane.queue:
            request = lane.queue[0]
            if request.outcome == OPEN:
                tokens = request.uncached  # a local prefix hit may change it
                if not self._place(lane, request):
                    return
                lane.queued -= 1
                lane.queued_tokens -= tokens
            lane.queue.popleft()

    def _place(self, lane: Lane, request: Request) -> bool:
        if self.fleet.mode == "aggregated":
            engine = min(lane.decodes, key=lambda one: one.local_tokens + one.kv_used, default=None)
            if engine is not None and engine.cache is not None and self.fleet.prefix == "local":
                self._covered(request, engine.cache.hit(request))
            return engine is not None and self._local(engine, request)
        target = self._pick_prefill(lane)
        convertible = self._pick_convertible(lane, target)
        if convertible is not None:
            return self._local(convertible, request)
        if target is None:
            return False
        if target.cache is not None and self.fleet.prefix == "local":
            self._covered(request, target.cache.hit(request))
        target.accept(request)
        return True

    def _local(self, engine: DecodeEngine, request: Request) -> bool:
        request.local = True
        engine.offer(request)
        return True

    def _pick_prefill(self, lane: Lane) -> PrefillEngine | None:
        bound = self.fleet.router.per_prefill
        engines = lane.prefills
        if bound:
            engines = [one for one in engines if one.queued + len(one.batch) < bound]
        if not engines:
            return None
        if self.fleet.router.choice == "round_robin":
            lane.turn += 1
            return engines[lane.turn % len(engines)]
        best = engines[0]
        least = best.queued_tokens + best.running_tokens
        for engine in engines:
            load = engine.queued_tokens + engine.running_tokens
            if load < least:
                best, least = engine, load
        return best

    def _pick_convertible(self, lane: Lane, target: PrefillEngine | None) -> DecodeEngine | None:
        """TokenScale: in a burst (half the TTFT SLO queued on the best P) a convertible decoder with a shorter queue."""
        convertible = [one for one in lane.decodes if one.convertible]
        if not convertible:
            return None
        wait = target.load / self.velocity if target is not None else NEVER
        best = min(convertible, key=lambda one: one.local_tokens)
        # A convertible decoder computes in restricted chunks: it is slower than P by about their ratio.
        own = best.local_tokens / self.velocity * (self.fleet.step_tokens / self.fleet.convertible_tokens) ** 0.5
        return best if wait > self.fleet.slo.ttft / 2 and own < wait else None

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
            self.clock.at(request.lease_until, self._lease_over, request)
            self.hand_over(request)
        lane = self.lanes[engine.slice]
        if lane.queue:
            self.pump(lane)
        self.settled(engine)

    def computed_locally(self, tokens: int) -> None:
        """A step of a D has carried prompt tokens."""
        self.tally.prefill_tokens += tokens

    def hand_over(self, request: Request) -> None:
        """Choose D; without a ready one the request waits for the first."""
        lane = self.lanes[request.slice]
        request.decode = None
        request.phase = Phase.HANDOFF
        engines = lane.decodes
        if not engines:
            lane.orphans.append(request)
            return
        if self.fleet.router.choice == "round_robin":
            lane.turn_decode += 1
            engines[lane.turn_decode % len(engines)].offer(request)
            return
        best, least = engines[0], engines[0].load
        for engine in engines:
            load = engine.load
            if load < least:
                best, least = engine, load
        best.offer(request)

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

    def _lease_over(self, request: Request) -> None:
        """P frees by itself what D has not begun to pull."""
        if request.outcome != OPEN or request.phase != Phase.HANDOFF or not request.held or self.clock.now < request.lease_until:
            return
        self.tally.expired += 1
        prefill = request.prefill
        assert prefill is not None
        self._lost(request)
        prefill.release(request)

    def _lost(self, request: Request) -> None:
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
            self._unqueue(request)

    def _unqueue(self, request: Request) -> None:
        lane = self.lanes[request.slice]
        lane.queued -= 1
        lane.queued_tokens -= request.uncached

    def settled(self, engine: Replica) -> None:
        """An engine has less than before: a draining one may be over."""
        if engine.state == "draining":
            self.emptied.append(engine)

    # -- losses -------------------------------------------------------------------------------------------------------

    def lose_prefill(self, engine: PrefillEngine) -> None:
        """A P is gone, with its KV: what was on its way in starts again once, what was handed over is prefilled by D."""
        for request in engine.kill():
            request.held = False
            if request.outcome != OPEN:
                if request.decode is not None and request in request.decode.transit:
                    request.decode.abort_transit(request)
            elif request.phase in (Phase.HANDOFF, Phase.TRANSFER):
                request.transfer += 1
                self._lost(request)
            else:
                self.retry(request)

    def lose_decode(self, engine: DecodeEngine) -> int:
        """A D is gone: what streamed has failed; what P still holds goes to another D. Returns the number that failed."""
        failed = 0
        for request in engine.kill():
            if request.outcome != OPEN:
                if request.held and request.prefill is not None:
                    request.prefill.release(request)
                continue
            request.reserved = 0
            if request.held and request.phase in (Phase.HANDOFF, Phase.TRANSFER):
                request.transfer += 1
                self.hand_over(request)
                if self.clock.now >= request.lease_until and request.phase == Phase.HANDOFF:
                    self._lease_over(request)
            elif request.first_token <= self.clock.now:
                request.decode = None
                request.phase = Phase.ROUTER
                failed += 1
                self.end(request, FAILED)
            else:
                self.retry(request)
        return failed

    def retry(self, request: Request) -> None:
        """Once more from the router; the second loss fails it."""
        request.decode = request.prefill = None
        request.phase = Phase.ROUTER
        if request.retried:
            self.end(request, FAILED)
            return
        request.retried = True
        self.tally.retries += 1
        request.local, request.first_token, request.generated, request.gaps = False, NEVER, 0, None
        request.left, request.context = request.uncached, request.prompt - request.uncached
        request.prefill_start = request.prefilled_at = request.reserved_at = NEVER
        self.dispatch(request)
