"""Continuous batching: which requests take part in the next step, and what the step gives them.

The order of things is that of vllm/v1/core/sched/scheduler.py: running requests first, one token each (the youngest is
preempted when blocks run out); then waiting ones in order of arrival, as long as there are run slots, blocks and token
budget. Requests whose KV comes from elsewhere take their blocks first and wait for it beside the queue.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from standin import model
from standin.args import EngineArgs
from standin.engine_metrics import FETCH_STAGES, EngineMetrics
from standin.kv import BlockPool
from standin.sequence import Output, Sequence, State
from standin.settings import Settings

IDLE_LOOK = 0.05  # seconds between two looks when nothing can run and no event has come


class Transfers(Protocol):
    """What the scheduler asks of the connectors (standin.transfers)."""

    def on_arrival(self, sequence: Sequence) -> None: ...

    def looked_up(self, sequence: Sequence) -> bool: ...

    def start_fetch(self, sequence: Sequence, done: Callable[[bool], None]) -> None: ...

    def after_step(self, sequence: Sequence) -> None: ...

    def finished(self, sequence: Sequence, reason: str) -> tuple[bool, dict[str, Any] | None]: ...

    def external_tokens(self, sequence: Sequence, local: int) -> int: ...


@dataclass
class Step:
    """One forward pass."""

    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    decodes: list[Sequence] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.prefills or self.decodes)


class Scheduler:
    """Runs the steps; `submit` and `abort` are called by the HTTP side."""

    def __init__(self, args: EngineArgs, settings: Settings, pool: BlockPool, metrics: EngineMetrics, transfers: Transfers) -> None:
        self._args = args
        self._settings = settings
        self._pool = pool
        self._metrics = metrics
        self._transfers = transfers
        self._dice = random.Random(settings.seed)
        self._wake = asyncio.Event()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.on_fatal: Callable[[str], None] = lambda reason: None
        metrics.registry.before_scrape.append(self._set_gauges)

    @property
    def unfinished(self) -> int:
        """Requests that wait or run."""
        return len(self.waiting) + len(self.running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens of requests that have no first token yet."""
        return sum(len(sequence.prompt) for sequence in (*self.waiting, *self.running) if not sequence.output)

    def submit(self, sequence: Sequence) -> None:
        """Queues a request."""
        sequence.arrival = time.monotonic()
        self.waiting.append(sequence)
        self._transfers.on_arrival(sequence)
        self._wake.set()

    def wake(self) -> None:
        """Something changed that may let a request run."""
        self._wake.set()

    def abort(self, sequence: Sequence, reason: str = "abort") -> None:
        """Ends a request from outside: a client that left, a load that failed, a shutdown without drain."""
        if sequence.state is State.DONE:
            return
        fetching = sequence.state is State.FETCHING
        self._finish(sequence, Output((), "", reason), reason, keep_blocks=fetching)

    async def run(self) -> None:
        """The engine loop; ends only by cancellation."""
        while True:
            step = Step() if self._settings.faults.stall else self._plan()
            if not step:
                self._wake.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._wake.wait(), IDLE_LOOK if self.unfinished else None)
                continue
            prefill_tokens = sum(count for _, count in step.prefills)
            context = sum(sequence.tokens for sequence in step.decodes)
            law = self._settings.law
            seconds = law.seconds(prefill_tokens, len(step.decodes), context, self._dice) * self._settings.faults.slow
            await asyncio.sleep(seconds)
            self._complete(step, prefill_tokens)

    def _plan(self) -> Step:
        step = Step()
        budget = self._args.max_num_batched_tokens
        preempted = False
        for sequence in list(self.running):
            if sequence.state is not State.RUNNING or budget == 0:
                continue
            count = min(sequence.tokens - sequence.computed, budget)
            while not self._grow(sequence, sequence.computed + count):
                preempted = True
                victim = self.running[-1]
                self._preempt(victim)
                step.decodes = [other for other in step.decodes if other is not victim]
                step.prefills = [item for item in step.prefills if item[0] is not victim]
                if victim is sequence:
                    break
            if sequence.state is State.RUNNING:
                budget -= self._enter(step, sequence, count)
        if not preempted:
            self._admit(step, budget)
        return step

    def _enter(self, step: Step, sequence: Sequence, count: int) -> int:
        sequence.scheduled_tokens += count
        if sequence.output and count == 1:
            step.decodes.append(sequence)
        else:
            step.prefills.append((sequence, count))
        return count

    def _admit(self, step: Step, budget: int) -> None:
        # What has arrived from elsewhere holds its blocks already, so it goes first.
        for sequence in sorted(self.waiting, key=lambda one: one.state is not State.FETCHED):
            if budget <= 0 or len(self.running) >= self._args.max_num_seqs:
                return
            if sequence.state is State.FETCHING:
                continue
            if sequence.state is not State.FETCHED:
                if not self._transfers.looked_up(sequence):
                    sequence.state = State.LOOKING_UP
                    continue
                sequence.state = State.WAITING
                if not self._take_blocks(sequence):
                    return
                if sequence.external_hit:
                    self._fetch(sequence)
                    continue
            self.waiting.remove(sequence)
            self.running.append(sequence)
            sequence.state = State.RUNNING
            sequence.first_scheduled = sequence.first_scheduled or time.monotonic()
            # A prompt that is wholly in the cache still needs its last token computed to draw the next one.
            sequence.computed = min(sequence.computed, sequence.tokens - 1)
            budget -= self._enter(step, sequence, min(sequence.tokens - sequence.computed, budget))

    def _take_blocks(self, sequence: Sequence) -> bool:
        """Takes the blocks of the whole prompt, cached ones included; False if there are not enough."""
        size = self._pool.block_size
        cached = self._pool.lookup(sequence.full_keys((sequence.tokens - 1) // size))
        local = len(cached) * size
        fresh = sequence.blocks_for(sequence.tokens) - len(cached)
        if not self._pool.can_allocate(fresh, cached):
            return False
        self._pool.hold(cached)
        sequence.blocks = [*cached, *self._pool.allocate(fresh)]
        sequence.committed = len(cached)
        sequence.local_hit = local
        sequence.external_hit = 0 if sequence.recompute else self._transfers.external_tokens(sequence, local)
        sequence.computed = local + sequence.external_hit
        sequence.scheduled_tokens = 0
        if not sequence.preemptions:
            connected = self._args.kv.connected
            self._metrics.count_lookup(sequence.tokens, local, sequence.external_hit, connected=connected)
        return True

    def _fetch(self, sequence: Sequence) -> None:
        sequence.state = State.FETCHING

        def done(success: bool) -> None:
            if sequence.state is State.DONE:  # aborted meanwhile: the blocks were kept for the transfer
                self._pool.release(sequence.blocks)
                sequence.blocks = []
            elif success:
                sequence.state = State.FETCHED
                self._commit(sequence, len(sequence.prompt) // sequence.block_size)
            elif self._args.kv.policy == "fail":
                if self._args.kv.fails_hard:
                    self.on_fatal("assert req_id in self.requests")
                self._pool.release(sequence.blocks)
                sequence.blocks = []
                self._finish(sequence, Output((), "", "error"), "error", keep_blocks=True)
            else:
                self._pool.release(sequence.blocks)
                sequence.blocks, sequence.computed, sequence.recompute = [], 0, True
                sequence.state = State.WAITING
            self._wake.set()

        self._transfers.start_fetch(sequence, done)

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        missing = sequence.blocks_for(tokens) - len(sequence.blocks)
        if missing > 0:
            if missing > self._pool.free:
                return False
            sequence.blocks += self._pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.blocks, sequence.computed, sequence.committed = [], 0, 0
        sequence.preemptions += 1
        sequence.state = State.WAITING
        sequence.recompute = True
        self.waiting.insert(0, sequence)
        self._metrics.counter["num_preemptions"].inc()

    def _commit(self, sequence: Sequence, full_blocks: int) -> None:
        """Gives full blocks their final contents and makes them findable for later prompts."""
        keys = sequence.full_keys(full_blocks)
        loaded = len(sequence.prompt) // sequence.block_size
        for index in range(sequence.committed, full_blocks):
            block = sequence.blocks[index]
            if index >= loaded or (block.seed is None and block.raw is None):
                self._pool.fill(block, keys[index])
            self._pool.cache(block, keys[index])
        sequence.committed = max(sequence.committed, full_blocks)

    def _complete(self, step: Step, prefill_tokens: int) -> None:
        now = time.monotonic()
        drawn = 0
        for sequence, count in (*step.prefills, *((decode, 1) for decode in step.decodes)):
            if sequence.state is not State.RUNNING:
                continue  # aborted or preempted during the step
            sequence.computed += count
            self._commit(sequence, sequence.computed // sequence.block_size)
            if sequence.computed == sequence.tokens:
                if sequence.generation_state is None:
                    self._end_prefill(sequence)
                drawn += 1
            self._transfers.after_step(sequence)
            if sequence.computed == sequence.tokens:
                self._draw(sequence, now)
        self._metrics.histogram["iteration_tokens_total"].observe(prefill_tokens + drawn)

    def _end_prefill(self, sequence: Sequence) -> None:
        keys = sequence.prompt_keys()
        blocks = sequence.blocks[: len(keys)]
        for block, key in zip(blocks, keys, strict=True):
            if block.seed is None and block.raw is None:
                self._pool.fill(block, key)
        sequence.generation_state = model.state_of(self._pool.digest(block) for block in blocks)
        said = sequence.params.get("remote_prefill_cached_tokens") if sequence.params.get("do_remote_prefill") else None
        self._metrics.count_prompt(len(sequence.prompt), sequence.local_hit, sequence.external_hit, said)

    def _draw(self, sequence: Sequence, now: float) -> None:
        token, finish, stop, text = sequence.next_output()
        self._metrics.counter["generation_tokens"].inc()
        if sequence.first_token:
            self._metrics.histogram["inter_token_latency_seconds"].observe(now - sequence.last_token)
        else:
            sequence.first_token = now
            self._metrics.histogram["time_to_first_token_seconds"].observe(now - sequence.arrival)
        sequence.last_token = now
        if finish is None:
            sequence.outputs.put_nowait(Output((token,), text))
        else:
            self._finish(sequence, Output((token,), text, finish, stop), finish, keep_blocks=False)

    def _finish(self, sequence: Sequence, output: Output, reason: str, *, keep_blocks: bool) -> None:
        for queue in (self.running, self.waiting):
            if sequence in queue:
                queue.remove(sequence)
        sequence.state = State.DONE
        sequence.finish_reason = reason
        held, params = self._transfers.finished(sequence, reason)
        if not held and not keep_blocks:
            self._pool.release(sequence.blocks)
            sequence.blocks = []
        sequence.outputs.put_nowait(Output(output.tokens, output.text, reason, output.stop_reason, params))
        self._count(sequence, reason)
        self._wake.set()

    def _count(self, sequence: Sequence, reason: str) -> None:
        now = time.monotonic()
        histogram = self._metrics.histogram
        self._metrics.counter["request_success"].inc(finished_reason=reason)
        histogram["e2e_request_latency_seconds"].observe(now - sequence.arrival)
        histogram["request_prompt_tokens"].observe(len(sequence.prompt))
        histogram["request_generation_tokens"].observe(len(sequence.output))
        histogram["request_params_max_tokens"].observe(sequence.limits.max_tokens)
        histogram["request_max_num_generation_tokens"].observe(len(sequence.output))
        histogram["request_params_n"].observe(1)
        histogram["request_num_preemptions"].observe(sequence.preemptions)
        if sequence.first_scheduled:
            histogram["request_queue_time_seconds"].observe(sequence.first_scheduled - sequence.arrival)
        if sequence.first_token:
            decoding = sequence.last_token - sequence.first_token
            histogram["request_prefill_time_seconds"].observe(sequence.first_token - sequence.first_scheduled)
            histogram["request_decode_time_seconds"].observe(decoding)
            histogram["request_inference_time_seconds"].observe(sequence.last_token - sequence.first_scheduled)
            per_token = decoding / (len(sequence.output) - 1) if len(sequence.output) > 1 else 0.0
            histogram["request_time_per_output_token_seconds"].observe(per_token)

    def _set_gauges(self) -> None:
        gauge = self._metrics.gauge
        gauge["num_requests_running"].set(len(self.running))
        gauge["num_requests_waiting"].set(len(self.waiting))
        for reason in ("capacity", "deferred"):
            count = sum(sequence.waiting_reason == reason for sequence in self.waiting)
            gauge["num_requests_waiting_by_reason"].set(count, reason=reason)
        gauge["kv_cache_usage_perc"].set(self._pool.usage)
        if "num_requests_kv_fetch_by_stage" in gauge:
            stages = dict.fromkeys(FETCH_STAGES, 0)
            for sequence in self.waiting:
                if sequence.state is State.FETCHING:
                    stages["in_progress"] += 1
                elif sequence.state is State.FETCHED:
                    stages["completed_waiting"] += 1
                elif sequence.remote is not None and not sequence.recompute:
                    stages["waiting_to_start"] += 1
            for stage, count in stages.items():
                gauge["num_requests_kv_fetch_by_stage"].set(count, stage=stage)
