"""A fluid P/D world of one slice, small enough to be checked by eye: requests are real numbers, one step is one second.

prompts -> Q -> prefill (V tokens/s a replica, stops when held KV fills it) -> H -> decode (b places each, step d + e B) -> done
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Decision
from pd_operator.core.scaling.law import DEFAULT, Law
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import UNKNOWN, Readings, Replicas, Signal


@dataclass
class Pool:
    """Replicas of one role; `starting` holds the times at which they get ready."""

    ready: int
    desired: int
    lead: float
    starting: list[float] = field(default_factory=list)
    room: int = 10_000  # replicas that can be placed; the rest is blocked
    blocked: int = 0

    def set(self, count: int, now: float) -> None:
        """Scale: new ones start, or are blocked; the last ones go first."""
        self.desired = count
        while self.ready + len(self.starting) + self.blocked > count:
            if self.blocked:
                self.blocked -= 1
            elif self.starting:
                self.starting.pop()
            else:
                self.ready -= 1
        while self.ready + len(self.starting) + self.blocked < count:
            if self.ready + len(self.starting) < self.room:
                self.starting.append(now + self.lead)
            else:
                self.blocked += 1

    def step(self, now: float) -> None:
        """Those whose time has come are ready."""
        done = [t for t in self.starting if t <= now]
        self.ready += len(done)
        self.starting = [t for t in self.starting if t > now]

    def seen(self) -> Replicas:
        """As readings show it."""
        return Replicas(self.desired, self.ready, len(self.starting), self.blocked)


@dataclass
class Fluid:
    """The world and the law that scales it. Rates are functions of the time."""

    bounds: Bounds
    prefill: Pool
    decode: Pool
    rate: Callable[[float], float]  # requests/s
    prompt: Callable[[float], float]  # tokens
    output: Callable[[float], float]  # tokens
    v: float = 20_000.0  # prompt tokens/s of one P
    step_base: float = 0.010  # d, seconds
    step_slope: float = 0.0001  # e, seconds per request
    capacity: float = 400_000.0  # C, tokens
    held_limit: float = 40.0  # requests of held KV that one P bears
    blind: Callable[[float], bool] = lambda _: False
    law: Law = DEFAULT
    now: float = 0.0
    queue: float = 0.0
    held: float = 0.0
    running: float = 0.0
    learned: Learned = field(default_factory=Learned)
    history: list[tuple[float, Decision]] = field(default_factory=list)
    done: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def places(self) -> float:
        """Requests that one D can hold: all of its KV over the tokens of a request half way through."""
        return min(self.bounds.max_num_seqs, self.capacity / (self.prompt(self.now) + self.output(self.now) / 2))

    def itl(self) -> float:
        """Seconds of a decode step now."""
        return self.step_base + self.step_slope * self.running / max(self.decode.ready, 1)

    def second(self) -> None:
        """One second of the world."""
        self.prefill.step(self.now)
        self.decode.step(self.now)
        offered, prompt = self.rate(self.now), self.prompt(self.now)
        self.queue += offered * prompt
        free = max(0.0, self.prefill.ready * self.held_limit - self.held) * prompt
        work = min(self.queue, self.prefill.ready * self.v, free)
        self.queue -= work
        self.held += work / prompt
        finished = min(self.running, self.running / (self.output(self.now) * self.itl()))
        self.running -= finished
        starts = max(0.0, min(self.held, self.decode.ready * self.places() - self.running))
        self.held -= starts
        self.running += starts
        self.done += finished
        for key, value in {
            "offered": offered,
            "tokens": offered * prompt,
            "work": work,
            "busy": work / self.v,
            "starts": starts,
        }.items():
            self.sums[key] = self.sums.get(key, 0.0) + value
        self.now += 1

    def readings(self, before: float) -> Readings:
        """What a tick sees, rates over the tick; nothing while blind."""
        rates = {k: v / self.bounds.tick for k, v in self.sums.items()}
        self.sums = {}
        if self.blind(self.now):
            return Readings(self.prefill.seen(), self.decode.seen())
        tokens = self.running * (self.prompt(self.now) + self.output(self.now) / 2)
        return Readings(
            prefill=self.prefill.seen(),
            decode=self.decode.seen(),
            prompt_rate=Signal.of(rates["tokens"]),
            request_rate=Signal.of(rates["offered"]),
            queued_tokens=Signal.of(self.queue),
            prefill_rate=Signal.of(rates["work"]),
            prefill_seconds=Signal.of(rates["busy"]),
            every_prefill_waiting=min(before, self.queue) > self.prefill.ready * 1000,
            running=Signal.of(self.running),
            handoff_waiting=Signal.of(self.held),
            decode_starts=Signal.of(rates["starts"]),
            kv_tokens=Signal.of(tokens),
            kv_capacity=Signal.of(self.capacity),
            output_tokens=Signal.of(self.output(self.now)),
            itl=Signal.of(self.itl()) if self.running else UNKNOWN,
            prefill_latency=Signal.of(self.prompt(self.now) / self.v),
        )

    def run(self, seconds: float) -> None:
        """Tick after tick, `decide` in command."""
        for _ in range(int(seconds / self.bounds.tick)):
            before = self.queue
            for _ in range(int(self.bounds.tick)):
                self.second()
            decision = decide(self.readings(before), self.learned, self.bounds, self.now, self.law)
            self.learned = decision.learned
            self.prefill.set(decision.prefill.desired, self.now)
            self.decode.set(decision.decode.desired, self.now)
            self.history.append((self.now, decision))

    def between(self, start: float, end: float) -> list[Decision]:
        """Decisions of that time."""
        return [d for t, d in self.history if start < t <= end]
