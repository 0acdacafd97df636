"""PrefillEngine: a P replica: batches prompts up to a token budget per step, keeps their KV until D has pulled it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from pd_simulate.cache import PrefixCache
from pd_simulate.link import Nic
from pd_simulate.replica import Replica
from pd_simulate.request import OPEN, Phase, Request

if TYPE_CHECKING:
    from pd_simulate.serving import Serving


class PrefillEngine(Replica):
    """First come, first served; a prompt longer than what is left of a step's budget is chunked.

    One step takes a + sum over its chunks of b n + c ((s + n)^2 - s^2) seconds, n tokens after s tokens of context: the
    profile's law of one prompt, with the constant paid once a step. KV of the whole prompt is taken when it first runs.
    """

    __slots__ = (
        "_held_since",
        "_version",
        "batch",
        "cache",
        "held",
        "held_token_seconds",
        "held_tokens",
        "kv_capacity",
        "kv_used",
        "nic",
        "partial",
        "queue",
        "queued",
        "queued_tokens",
        "running_tokens",
        "serving",
    )

    def __init__(self, serving: Serving, name: str, slice_index: int, nic: Nic, cache: PrefixCache | None) -> None:
        super().__init__(serving.clock, name, "prefill", slice_index)
        self.serving = serving
        self.nic = nic
        self.cache = cache
        self.kv_capacity = serving.fleet.profile.prefill_kv_capacity
        self.kv_used = 0
        self.queue: deque[Request] = deque()
        self.queued = 0  # live ones of the queue
        self.queued_tokens = 0
        self.batch: list[tuple[Request, int]] = []  # (request, tokens of this step)
        self.partial: Request | None = None  # chunked: its next chunk comes first
        self.running_tokens = 0  # uncached tokens left of what runs
        self.held: dict[Request, float] = {}  # prefilled, KV kept; since when
        self.held_tokens = 0
        self.held_token_seconds = 0.0
        self._held_since = 0.0
        self._version = 0

    @property
    def load(self) -> int:
        """Uncached prompt tokens accepted and not computed."""
        return self.queued_tokens + self.running_tokens

    def accept(self, request: Request) -> None:
        """Queue a request; runs at once if the engine is idle."""
        request.prefill = self
        request.phase = Phase.QUEUED
        self.queue.append(request)
        self.queued += 1
        self.queued_tokens += request.left
        if self.active_since < 0:
            self._start()

    def drop_queued(self, request: Request) -> None:
        """A queued request has ended; it leaves the queue when its turn comes."""
        self.queued -= 1
        self.queued_tokens -= request.left

    def release(self, request: Request) -> None:
        """D has pulled it, or its lease has ended: free its KV."""
        if request not in self.held:
            return
        self._count_held()
        del self.held[request]
        request.held = False
        self.held_tokens -= request.prompt
        self.kv_used -= request.prompt
        if self.active_since < 0 and self.queued:
            self._start()
        self.serving.settled(self)

    def kill(self) -> list[Request]:
        """The node is gone: everything it had, in order; nothing is freed one by one."""
        self._version += 1
        self._count_held()
        lost = [request for request, _ in self.batch]
        lost += [request for request in self.queue if request.phase == Phase.QUEUED and request.prefill is self]
        lost += list(self.held)
        self.queue.clear()
        self.batch, self.partial, self.held = [], None, {}
        self.queued = self.queued_tokens = self.running_tokens = self.kv_used = self.held_tokens = 0
        self.idle()
        return lost

    @property
    def empty(self) -> bool:
        """Nothing queued, running or held."""
        return self.queued == 0 and not self.batch and not self.held

    def _count_held(self) -> None:
        now = self.clock.now
        self.held_token_seconds += self.held_tokens * (now - self._held_since)
        self._held_since = now

    def _start(self) -> None:
        """Fill one step: the chunked prompt first, then the queue while budget and KV last."""
        settings = self.serving.fleet
        budget, most = settings.step_tokens, settings.step_requests
        batch: list[tuple[Request, int]] = []
        if self.partial is not None:
            chunk = min(self.partial.left, budget)
            batch.append((self.partial, chunk))
            budget -= chunk
            self.partial = None
        queue = self.queue
        while queue and budget > 0 and len(batch) < most:
            request = queue[0]
            if request.outcome != OPEN:
                queue.popleft()
                continue
            if self.kv_used + request.prompt > self.kv_capacity:
                break
            queue.popleft()
            self._admit(request)
            chunk = min(request.left, budget)
            batch.append((request, chunk))
            budget -= chunk
        self.batch = batch
        if not batch:
            self.idle()
            return
        self.begin()
        self._version += 1
        self.clock.at(self.clock.now + self._seconds(batch), self._end, self._version)

    def _admit(self, request: Request) -> None:
        self.queued -= 1
        self.queued_tokens -= request.left
        self.running_tokens += request.left
        self.kv_used += request.prompt
        request.phase = Phase.PREFILL
        request.prefill_start = self.clock.now

    def _seconds(self, batch: list[tuple[Request, int]]) -> float:
        profile = self.serving.fleet.profile
        b, c = profile.b, profile.c
        seconds = profile.a
        for request, chunk in batch:
            seconds += b * chunk + c * chunk * (2 * request.context + chunk)
        return max(profile.floor, seconds)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        done: list[Request] = []
        computed = 0
        for request, chunk in self.batch:
            request.left -= chunk
            request.context += chunk
            request.computed += chunk
            computed += chunk
            self.running_tokens -= chunk
            if request.outcome != OPEN:
                self.running_tokens -= request.left
                self.kv_used -= request.prompt
            elif request.left:
                self.partial = request
            else:
                done.append(request)
        self.batch = []
        self._count_held()
        now = self.clock.now
        for request in done:
            self.held[request] = now
            request.held = True
            self.held_tokens += request.prompt
            if self.cache is not None:
                self.cache.add(request)
        self._start()
        self.serving.computed(self, computed, done)
