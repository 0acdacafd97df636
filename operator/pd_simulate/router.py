"""Router: slices, their queues, which replica takes a request, and our admission limits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pd_simulate.cache import PrefixCache
from pd_simulate.decode import DecodeEngine
from pd_simulate.fleet import Fleet
from pd_simulate.prefill import PrefillEngine
from pd_simulate.request import NEVER, OPEN, Phase, Request

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


class Router:
    """One router per slice, and the front door before them."""

    def __init__(self, fleet: Fleet, block: int) -> None:
        self.fleet = fleet
        self.lanes = [Lane(one.weight) for one in fleet.slices]
        if fleet.prefix == "shared":
            for lane in self.lanes:
                lane.cache = PrefixCache(fleet.prefix_blocks, block)
        self.velocity = TYPICAL_PROMPT / fleet.profile.prefill(TYPICAL_PROMPT)

    def lane(self, request: Request) -> Lane:
        """The front door: the slice of this request, by weight, among those that can serve."""
        lanes = self.lanes
        if len(lanes) == 1:
            return lanes[0]
        able = [index for index, lane in enumerate(lanes) if lane.prefills or (lane.decodes and self.fleet.mode == "aggregated")]
        request.slice = min(able or range(len(lanes)), key=lambda index: (lanes[index].routed + 1 / lanes[index].weight, index))
        lanes[request.slice].routed += 1 / lanes[request.slice].weight
        return lanes[request.slice]

    @staticmethod
    def cover(request: Request, tokens: int) -> None:
        """A prefix hit of so many tokens."""
        request.uncached = request.left = request.prompt - tokens
        request.context = tokens

    def full(self, lane: Lane) -> bool:
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
                self.cover(request, engine.cache.hit(request))
            return engine is not None and self._local(engine, request)
        target = self._pick_prefill(lane)
        convertible = self._pick_convertible(lane, target)
        if convertible is not None:
            return self._local(convertible, request)
        if target is None:
            return False
        if target.cache is not None and self.fleet.prefix == "local":
            self.cover(request, target.cache.hit(request))
        if self.fleet.router.pairs == "arrival":
            request.paired = self.pick_decode(lane)
        target.accept(request)
        return True

    @staticmethod
    def _local(engine: DecodeEngine, request: Request) -> bool:
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

    def unqueue(self, request: Request) -> None:
        """A request in the router's queue has ended; it leaves the queue when its turn comes."""
        lane = self.lanes[request.slice]
        lane.queued -= 1
        lane.queued_tokens -= request.uncached

    def pick_decode(self, lane: Lane) -> DecodeEngine | None:
        """The D for a prefilled request; None while none is ready."""
        engines = lane.decodes
        if not engines:
            return None
        if self.fleet.router.choice == "round_robin":
            lane.turn_decode += 1
            return engines[lane.turn_decode % len(engines)]
        best, least = engines[0], engines[0].load
        for engine in engines:
            load = engine.load
            if load < least:
                best, least = engine, load
        return best
