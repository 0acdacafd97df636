"""DecodeEngine: a D replica: continuous batching, advanced in closed form between changes of its batch."""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import sqrt
from typing import TYPE_CHECKING

import numpy as np

from pd_simulate.cache import PrefixCache
from pd_simulate.gaps import GapLog, p95
from pd_simulate.replica import Replica
from pd_simulate.request import NEVER, OPEN, Phase, Request
from pd_simulate.workload import Floats

if TYPE_CHECKING:
    from pd_simulate.serving import Serving

# Share of KV that stays free when a request is admitted (vLLM's block manager keeps a watermark of 1 %).
WATERMARK = 0.01


class DecodeEngine(Replica):
    """One step of B requests with S tokens of context takes alpha(B) + beta(B) S seconds, so k steps take
    k (alpha + beta S) + beta B k (k - 1) / 2: the engine jumps to the next finish, join, leave or full KV, whichever is first.

    While it prefills itself (recompute, aggregated, convertible) each step also carries a chunk of prompt tokens, which adds
    b n + c ((s + n)^2 - s^2) seconds, and steps are taken one by one until the prompts are done.
    """

    __slots__ = (
        "_base",
        "_finishing",
        "_grow",
        "_joining",
        "_leaving",
        "_order",
        "_planned",
        "_run_start",
        "_version",
        "cache",
        "chunk_tokens",
        "chunks",
        "committed",
        "context",
        "convertible",
        "kv_capacity",
        "local_tokens",
        "log",
        "prefills",
        "reserve",
        "running",
        "seats",
        "serving",
        "steps",
        "tokens",
        "transit",
        "waiting",
        "waiting_count",
        "waiting_tokens",
    )

    def __init__(self, serving: Serving, name: str, slice_index: int, cache: PrefixCache | None = None) -> None:
        super().__init__(serving.clock, name, "decode", slice_index)
        fleet = serving.fleet
        self.serving = serving
        self.kv_capacity = fleet.profile.kv_capacity
        self.reserve = fleet.growth == "reserve"
        self.seats = fleet.profile.max_num_seqs
        if fleet.admission.enabled and fleet.admission.running_per_decode:
            self.seats = min(self.seats, fleet.admission.running_per_decode)
        self.chunk_tokens = fleet.mixed_tokens
        self.cache = cache
        self.convertible = False
        self.log = GapLog()
        self.running: dict[Request, None] = {}  # in order of joining
        self.context = 0  # tokens of the running ones
        self.committed = 0  # KV set aside beyond that: pulls, local prefills, output reserved
        self.steps = 0  # decode steps since the start
        self.tokens = 0  # output tokens streamed in completed runs
        self.waiting: deque[Request] = deque()  # handed over, or to be prefilled here; not reserved
        self.waiting_count = 0
        self.waiting_tokens = 0  # KV tokens they need
        self.local_tokens = 0  # prompt tokens to prefill here, waiting ones included
        self.transit: dict[Request, None] = {}  # being pulled
        self.prefills: deque[Request] = deque()
        self.chunks: list[tuple[Request, int]] = []
        self._joining: list[Request] = []
        self._leaving: list[Request] = []
        self._finishing: list[tuple[int, int, Request]] = []
        self._order = 0
        self._version = 0
        self._run_start = 0.0
        self._planned = 0  # steps of the current run
        self._base = 0.0
        self._grow = 0.0

    @property
    def load(self) -> int:
        """Requests on it in whatever state."""
        return len(self.running) + self.waiting_count + len(self.transit) + len(self.prefills) + len(self._joining)

    @property
    def seated(self) -> int:
        """Requests that have a seat and KV: running, pulled, joining or prefilled here."""
        return len(self.running) + len(self.transit) + len(self.prefills) + len(self._joining)

    @property
    def kv_used(self) -> int:
        """KV tokens in use or set aside, as of the last batch change."""
        return self.context + self.committed

    @property
    def empty(self) -> bool:
        """Nothing running, waiting or on its way."""
        return self.load == 0 and self.active_since < 0

    def joining(self) -> tuple[Request, ...]:
        """Pulled, and in the batch from the next step on."""
        return tuple(self._joining)

    # -- what comes in ------------------------------------------------------------------------------------------------

    def offer(self, request: Request) -> None:
        """A request to decode: its KV stands on P, or (`request.local`) it must be prefilled here."""
        request.decode = self
        request.phase = Phase.HANDOFF
        self._queue(request, front=False)
        self.admit()

    def _queue(self, request: Request, front: bool) -> None:
        if front:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)
        self.waiting_count += 1
        self.waiting_tokens += request.prompt + request.generated
        if request.local:
            self.local_tokens += request.left

    def make_local(self, request: Request) -> None:
        """The KV of a waiting request is gone: it is to be prefilled here."""
        request.local = True
        request.left = request.prompt + request.generated
        request.context = 0
        self.local_tokens += request.left
        self.admit()

    def drop_waiting(self, request: Request) -> None:
        """A waiting request has ended or goes elsewhere; it leaves the queue when its turn comes."""
        self.waiting_count -= 1
        self.waiting_tokens -= request.prompt + request.generated
        if request.local:
            self.local_tokens -= request.left

    def admit(self) -> None:
        """Reserve KV and a seat for waiting requests in order, and pull (or prefill) them."""
        waiting = self.waiting
        limit = self.kv_capacity - int(WATERMARK * self.kv_capacity)
        while waiting:
            request = waiting[0]
            if request.outcome != OPEN or request.phase != Phase.HANDOFF or request.decode is not self:
                waiting.popleft()
                continue
            need = request.prompt + (request.output if self.reserve else request.generated)
            used = self.kv_used
            if self.seated >= self.seats or (used + need > limit and not (used == 0 and need <= self.kv_capacity)):
                break
            if request.local and sum(one.left for one in self.prefills) >= self.chunk_tokens:
                break
            waiting.popleft()
            self.waiting_count -= 1
            self.waiting_tokens -= request.prompt + request.generated
            request.reserved = need
            self.committed += need
            if request.local:
                request.phase = Phase.LOCAL
                self.prefills.append(request)
                self.serving.reserved(request)
                self._soon()
            else:
                request.phase = Phase.TRANSFER
                self.transit[request] = None
                self.serving.reserved(request)

    def pulled(self, request: Request) -> None:
        """The transfer has ended: it joins at the next step (or its KV is freed, if it has ended meanwhile)."""
        del self.transit[request]
        if request.outcome != OPEN:
            self._free(request)
            self.admit()
            return
        request.phase = Phase.JOINING
        self._joining.append(request)
        self._soon()

    def leave(self, request: Request) -> None:
        """A request in the batch has ended early: it leaves at the next step."""
        self._leaving.append(request)
        self._soon()

    def abort_transit(self, request: Request) -> None:
        """A pull that will not end: free what was set aside for it."""
        del self.transit[request]
        self._free(request)

    def forget_transit(self, request: Request) -> None:
        """Its P is gone in mid-transfer: back to the queue's head, to be prefilled here."""
        self.abort_transit(request)
        request.phase = Phase.HANDOFF
        self._queue(request, front=True)
        self.make_local(request)

    def kill(self) -> list[Request]:
        """The node is gone: everything it had."""
        self._version += 1
        lost = [*self.running, *self._joining, *self.prefills, *self.transit]
        lost += [one for one in self.waiting if one.phase == Phase.HANDOFF and one.decode is self and one.outcome == OPEN]
        self.running, self.transit, self._joining, self._leaving, self._finishing = {}, {}, [], [], []
        self.waiting.clear()
        self.prefills.clear()
        self.chunks = []
        self.context = self.committed = self.waiting_count = self.waiting_tokens = self.local_tokens = 0
        self.idle()
        return lost

    def _free(self, request: Request) -> None:
        self.committed -= request.reserved
        request.reserved = 0

    # -- steps --------------------------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """The batch is to change: end the current run at the next step's end, or start if idle."""
        if self.active_since < 0:
            self.begin()
            self._version += 1
            self.clock.at(self.clock.now, self._end, self._version)
            self._planned = 0
        elif self._planned > 1:
            steps = self._completed(self.clock.now) + 1
            if steps < self._planned:
                self._planned = steps
                self._version += 1
                self.clock.at(self._run_start + self._seconds(steps), self._end, self._version)

    def _seconds(self, steps: int) -> float:
        return steps * self._base + self._grow * (steps * (steps - 1)) / 2

    def _completed(self, now: float) -> int:
        """Whole steps of the current run that have ended by `now`: the root of k base + grow k(k-1)/2 = elapsed."""
        elapsed = now - self._run_start
        grow = self._grow
        linear = self._base - grow / 2
        steps = int((sqrt(linear * linear + 2 * grow * elapsed) - linear) / grow) if grow > 1e-15 else int(elapsed / self._base)
        steps = max(0, min(steps, self._planned - 1))
        while steps > 0 and self._seconds(steps) > elapsed:
            steps -= 1
        while steps < self._planned - 1 and self._seconds(steps + 1) <= elapsed:
            steps += 1
        return steps

    def peek(self, now: float) -> tuple[int, int, float]:
        """(KV tokens in use, output tokens streamed so far, seconds of the present step) at `now`, in mid-run too."""
        if self.active_since < 0 or self._planned == 0 or not self.running:
            return self.kv_used, self.tokens, 0.0
        steps = self._completed(now) if self._planned > 1 else 0
        grown = 0 if self.reserve else steps * len(self.running)
        return self.kv_used + grown, self.tokens + steps * len(self.running), self._base + self._grow * steps

    def recent(self, since: float) -> tuple[Floats, Floats]:
        """Mean gaps and their weights (tokens) of the runs that ended at `since` or later, and of the present one so far."""
        means, weights = self.log.recent(since)
        steps = self._completed(self.clock.now) if self.running and self._planned > 1 else 0
        if steps:
            means = np.append(means, self._base + self._grow * (steps - 1) / 2)
            weights = np.append(weights, float(steps * len(self.running)))
        return means, weights

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        steps, batch = self._planned, len(self.running)
        if steps and batch:
            self.steps += steps
            self.context += steps * batch
            self.tokens += steps * batch
            if self.reserve:
                self.committed -= steps * batch  # output set aside becomes context; each request's part is counted in _remove
            self.log.add(steps, self._base, self._grow, batch, self.clock.now)
            self._finish()
        if self.chunks:
            self._advance_prefills()
        for request in self._leaving:
            if request in self.running:
                self._remove(request)
        self._leaving = []
        if self._joining:
            arrived, self._joining = self._joining, []
            for request in arrived:
                if request.outcome == OPEN:
                    self._join(request, first_token_now=False)
                else:
                    self._free(request)
        self._planned = 0
        self.admit()
        self._run()
        if not self.running:
            self.serving.settled(self)

    def _finish(self) -> None:
        finishing, steps = self._finishing, self.steps
        while finishing and finishing[0][0] <= steps:
            step, _, request = heappop(finishing)
            if request in self.running and request.finish_step == step:
                stay = step - request.first_step - request.gap_from
                if request.gaps is None:
                    request.itl = self.log.p95(request.first_segment, request.gap_from, stay)
                else:
                    request.gaps.extend(self.log.gaps(request.first_segment, request.gap_from))
                    request.itl = p95(np.array(request.gaps))
                self._remove(request)
                if request.outcome == OPEN:
                    self.serving.complete(request)

    def _remove(self, request: Request) -> None:
        del self.running[request]
        stayed = self.steps - request.first_step
        self.context -= request.prompt + request.generated + stayed
        if self.reserve:
            request.reserved -= stayed
        self._free(request)

    def _join(self, request: Request, first_token_now: bool) -> None:
        """Into the batch. `first_token_now`: its local prefill has just yielded a token, else the next step does."""
        if request.generated == 0 and first_token_now:
            request.generated = 1
            request.first_token = self.clock.now
            self.tokens += 1
            self.serving.streamed(request)
        elif first_token_now and request.last_token != NEVER:
            request.generated += 1
            self.tokens += 1
            if request.gaps is not None:
                request.gaps.append(self.clock.now - request.last_token)
        total = request.prompt + request.generated
        if self.reserve:
            self.committed -= total
            request.reserved -= total
        else:
            self._free(request)
        self.running[request] = None
        self.context += total
        request.phase = Phase.DECODE
        request.first_step = self.steps
        request.first_segment = len(self.log)
        request.gap_from = 1 if request.first_token == NEVER else 0
        request.finish_step = self.steps + request.output - request.generated
        self._order += 1
        heappush(self._finishing, (request.finish_step, self._order, request))
        if request.finish_step == self.steps:
            self._finish()

    def _run(self) -> None:
        """Plan the next run of steps."""
        if not self.reserve and self.running:
            self._make_room()
        batch = len(self.running)
        base, slope = self.serving.step_law[batch]
        self._version += 1
        self._run_start = self.clock.now
        self._base = base + slope * self.context
        self._grow = slope * batch
        if self.prefills:
            self._plan_chunks(batch)
        elif batch == 0:
            self.idle()
            return
        else:
            steps = self._finishing_in()
            if not self.reserve:
                steps = min(steps, (self.kv_capacity - self.kv_used) // batch)
            self._planned = steps
        self.clock.at(self._run_start + self._seconds(self._planned), self._end, self._version)
        for request in reversed(self.running):
            if request.first_token != NEVER:
                break
            request.first_token = self._run_start + self._base
            self.serving.streamed(request)

    def _finishing_in(self) -> int:
        finishing = self._finishing
        while True:
            step, _, request = finishing[0]
            if request in self.running and request.finish_step == step:
                return step - self.steps
            heappop(finishing)

    def _make_room(self) -> None:
        """Preempt the newest requests until one step's growth fits; they are prefilled here again later."""
        while self.running and self.kv_capacity - self.kv_used < len(self.running):
            request = next(reversed(self.running))
            request.gaps = request.gaps or []
            request.gaps.extend(self.log.gaps(request.first_segment, request.gap_from))
            stayed = self.steps - request.first_step
            self._remove(request)
            request.generated += stayed
            request.last_token = self.clock.now if request.generated else NEVER
            request.phase = Phase.HANDOFF
            request.local = True
            request.left, request.context = request.prompt + request.generated, 0
            self._queue(request, front=True)
            self.serving.preempted(request)

    # -- prefill on this replica --------------------------------------------------------------------------------------

    def _plan_chunks(self, batch: int) -> None:
        """One step that carries prompt tokens besides the decodes."""
        profile = self.serving.fleet.profile
        budget = self.chunk_tokens
        seconds = self._base if batch else profile.a
        self.chunks = []
        for request in self.prefills:
            if budget <= 0:
                break
            chunk = min(request.left, budget)
            budget -= chunk
            seconds += profile.b * chunk + profile.c * chunk * (2 * request.context + chunk)
            self.chunks.append((request, chunk))
        self._planned, self._base, self._grow = 1, seconds, 0.0

    def _advance_prefills(self) -> None:
        computed = 0
        for request, chunk in self.chunks:
            request.left -= chunk
            request.context += chunk
            request.computed += chunk
            computed += chunk
            self.local_tokens -= chunk
            if request.outcome != OPEN or request.left == 0:
                if self.cache is not None and request.left == 0:
                    self.cache.add(request)
                self.prefills.remove(request)
                self.local_tokens -= request.left
                if request.outcome != OPEN:
                    self._free(request)
                else:
                    self._join(request, first_token_now=True)
        self.chunks = []
        self.serving.computed_locally(computed)
