"""DecodeEngine: a D replica: continuous batching, advanced in closed form between changes of its batch."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

from pd_simulate.cache import PrefixCache
from pd_simulate.gaps import GapLog, p95
from pd_simulate.intake import Intake
from pd_simulate.request import NEVER, OPEN, Phase, Request
from pd_simulate.run import Run
from pd_simulate.workload import Floats

if TYPE_CHECKING:
    from pd_simulate.serving import Serving


class DecodeEngine(Intake):
    """One step of B requests with S tokens of context takes alpha(B) + beta(B) S seconds, so k steps take
    k (alpha + beta S) + beta B k (k - 1) / 2: the engine jumps to the next finish, join, leave or full KV, whichever is first.

    While it prefills itself (recompute, aggregated, convertible) each step also carries a chunk of prompt tokens, which adds
    b n + c ((s + n)^2 - s^2) seconds, and steps are taken one by one until the prompts are done.
    """

    __slots__ = ("_finishing", "_leaving", "_order", "_run", "_version", "cache", "chunks", "log", "steps", "tokens")

    def __init__(self, serving: Serving, name: str, slice_index: int, cache: PrefixCache | None = None) -> None:
        super().__init__(serving, name, slice_index)
        self.cache = cache
        self.log = GapLog()
        self.steps = 0  # decode steps since the start
        self.tokens = 0  # output tokens streamed in completed runs
        self.chunks: list[tuple[Request, int]] = []
        self._run = Run()
        self._leaving: list[Request] = []
        self._finishing: list[tuple[int, int, Request]] = []
        self._order = 0
        self._version = 0

    def leave(self, request: Request) -> None:
        """A request in the batch has ended early: it leaves at the next step."""
        self._leaving.append(request)
        self._soon()

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

    # -- steps --------------------------------------------------------------------------------------------------------

    def _soon(self) -> None:
        """The batch is to change: end the current run at the next step's end, or start if idle."""
        if self.active_since < 0:
            self.begin()
            self._version += 1
            self.clock.at(self.clock.now, self._end, self._version)
            self._run.steps = 0
        elif self._run.steps > 1:
            steps = self._run.completed(self.clock.now) + 1
            if steps < self._run.steps:
                self._run.steps = steps
                self._version += 1
                self.clock.at(self._run.start + self._run.seconds(steps), self._end, self._version)

    def peek(self, now: float) -> tuple[int, int, float]:
        """(KV tokens in use, output tokens streamed so far, seconds of the present step) at `now`, in mid-run too."""
        if self.active_since < 0 or self._run.steps == 0 or not self.running:
            return self.kv_used, self.tokens, 0.0
        steps = self._run.completed(now) if self._run.steps > 1 else 0
        grown = 0 if self.reserve else steps * len(self.running)
        return self.kv_used + grown, self.tokens + steps * len(self.running), self._run.base + self._run.grow * steps

    def recent(self, since: float) -> tuple[Floats, Floats]:
        """Mean gaps and their weights (tokens) of the runs that ended at `since` or later, and of the present one so far."""
        means, weights = self.log.recent(since)
        steps = self._run.completed(self.clock.now) if self.running and self._run.steps > 1 else 0
        if steps:
            means = np.append(means, self._run.base + self._run.grow * (steps - 1) / 2)
            weights = np.append(weights, float(steps * len(self.running)))
        return means, weights

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        steps, batch = self._run.steps, len(self.running)
        if steps and batch:
            self.steps += steps
            self.context += steps * batch
            self.tokens += steps * batch
            if self.reserve:
                self.committed -= steps * batch  # output set aside becomes context; each request's part is counted in _remove
            self.log.add(steps, self._run.base, self._run.grow, batch, self.clock.now)
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
        self._run.steps = 0
        self.admit()
        self._plan()
        if not self.running:
            self.serving.settled(self)

    def _finish(self) -> None:
        finishing, steps = self._finishing, self.steps
        while finishing and finishing[0][0] <= steps:
            step, _, request = heappop(finishing)
            if request in self.running and request.finish_step == step:
                if request.gaps is None:
                    request.itl = self.log.p95(request.first_step + request.gap_from)
                else:
                    request.gaps.extend(self.log.gaps(request.first_step + request.gap_from))
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
        request.gap_from = 1 if request.first_token == NEVER else 0
        request.finish_step = self.steps + request.output - request.generated
        self._order += 1
        heappush(self._finishing, (request.finish_step, self._order, request))
        if request.finish_step == self.steps:
            self._finish()

    def _plan(self) -> None:
        """Plan the next run of steps."""
        if not self.reserve and self.running:
            self._make_room()
        batch, plan, now = len(self.running), self._run, self.clock.now
        base, slope = self.serving.step_law[batch]
        self._version += 1
        plan.start = now
        plan.base = base + slope * self.context
        plan.grow = slope * batch
        if self.prefills:
            self._plan_chunks(batch)
        elif batch == 0:
            self.idle()
            return
        else:
            steps = self._finishing_in()
            if not self.reserve:
                steps = min(steps, (self.kv_capacity - self.kv_used) // batch)
            plan.steps = steps
        self.clock.at(now + plan.seconds(plan.steps), self._end, self._version)
        for request in reversed(self.running):
            if request.first_token != NEVER:
                break
            request.first_token = now + plan.base
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
            request.gaps.extend(self.log.gaps(request.first_step + request.gap_from))
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
        seconds = self._run.base if batch else profile.a
        self.chunks = []
        for request in self.prefills:
            if budget <= 0:
                break
            chunk = min(request.left, budget)
            budget -= chunk
            seconds += profile.b * chunk + profile.c * chunk * (2 * request.context + chunk)
            self.chunks.append((request, chunk))
        self._run.steps, self._run.base, self._run.grow = 1, seconds, 0.0

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
