"""Readings: what one tick knows of one PDDeployment's load, each number with its state, age and quality."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any


class State(StrEnum):
    """What is known of a signal."""

    VALUE = "value"
    IDLE = "idle"  # the series is there and zero
    UNKNOWN = "unknown"  # absent, stale or failed


class Quality(StrEnum):
    """How a signal was had."""

    EXACT = "Exact"
    DERIVED = "Derived"


@dataclass(frozen=True, slots=True)
class Signal:
    """One reading. `value` means nothing while the state is unknown; `age` is seconds since the sample was taken."""

    state: State
    value: float = 0.0
    age: float = 0.0
    quality: Quality = Quality.EXACT
    source: str = ""  # what it was read from, or why it is unknown, for people

    @classmethod
    def of(cls, value: float, age: float = 0.0, quality: Quality = Quality.EXACT, source: str = "") -> Signal:
        """A known reading; zero is idle."""
        return cls(State.VALUE if value else State.IDLE, value, age, quality, source)

    @property
    def known(self) -> bool:
        """Whether a decision may rest on it."""
        return self.state is not State.UNKNOWN

    def clean(self) -> Signal:
        """The same, or unknown where the number is none that a load can have: NaN, infinite, negative."""
        if not self.known or (math.isfinite(self.value) and self.value >= 0):
            return self
        return Signal(State.UNKNOWN, 0.0, self.age, self.quality, f"{self.source or 'a source'} said {self.value}")


UNKNOWN = Signal(State.UNKNOWN)


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas of one role at one instant, over all its slices."""

    desired: int  # what the PDPool asks for now
    ready: int
    starting: int = 0  # created, not ready, no cause that says it never will be
    blocked: int = 0  # created, not ready, with such a cause (Unschedulable, image, crash)
    draining: int = 0
    oldest_starting: float = 0.0  # seconds since the oldest starting replica was created
    unread: int = 0  # of the starting: ready, and too new for their signals to have been read

    def without(self, unread: int) -> Replicas:
        """With so many of the ready as starting: the load that is known is that of the others, so it is divided by their number."""
        count = min(unread, self.ready)
        return replace(self, ready=self.ready - count, starting=self.starting + count, unread=count) if count else self


@dataclass(frozen=True, slots=True)
class SliceHandoff:
    """Handoff of one slice: the gate is per slice, since a request cannot leave its slice."""

    name: str
    waiting: Signal = UNKNOWN  # H: requests handed over whose decode has not started
    starts: Signal = UNKNOWN  # x: decode starts per second

    def clean(self) -> SliceHandoff:
        """The same with both signals clean."""
        waiting, starts = self.waiting.clean(), self.starts.clean()
        return self if waiting is self.waiting and starts is self.starts else SliceHandoff(self.name, waiting, starts)


@dataclass(frozen=True, slots=True)
class Readings:
    """One tick's readings of one PDDeployment; totals over its serving slices. Symbols: DESIGN §7."""

    prefill: Replicas
    decode: Replicas
    prompt_rate: Signal = UNKNOWN  # A: uncached prompt tokens per second offered (accepted and rejected for capacity)
    request_rate: Signal = UNKNOWN  # lam: requests per second offered
    queued_tokens: Signal = UNKNOWN  # Q: uncached prompt tokens accepted and not yet running prefill
    prefill_rate: Signal = UNKNOWN  # prompt tokens per second computed by all P
    prefill_seconds: Signal = UNKNOWN  # seconds of prefill per second, summed over P: prefill_rate / it = tokens per busy second
    every_prefill_waiting: bool = False  # every ready P had work waiting at both ends of the window
    running: Signal = UNKNOWN  # R: requests decoding
    handoff_waiting: Signal = UNKNOWN  # H
    decode_starts: Signal = UNKNOWN  # x, per second
    kv_tokens: Signal = UNKNOWN  # KV tokens in use on all D
    kv_capacity: Signal = UNKNOWN  # C: KV tokens of one D
    output_tokens: Signal = UNKNOWN  # OSL: mean output tokens of finished requests
    itl: Signal = UNKNOWN  # seconds between tokens at D, median: a large batch slows every token, a stall only some
    prefill_latency: Signal = UNKNOWN  # mean seconds of prefill of a request
    ttft: Signal = UNKNOWN  # seconds at the SLO's percentile
    slices: tuple[SliceHandoff, ...] = field(default=())
    rollout: bool = False  # a rollout is under way

    @property
    def unread(self) -> int:
        """Ready replicas of both roles whose load nobody has read yet: nothing goes down meanwhile (invariant I4)."""
        return self.prefill.unread + self.decode.unread

    def clean(self) -> Readings:
        """The same with every signal clean, so that a record of them is JSON; itself where they all are."""
        signals: dict[str, Any] = {name: s for name in _SIGNALS if (s := getattr(self, name).clean()) is not getattr(self, name)}
        slices = tuple(s.clean() for s in self.slices)
        if not signals and all(a is b for a, b in zip(slices, self.slices, strict=True)):
            return self
        return replace(self, slices=slices, **signals)


_SIGNALS = tuple(f.name for f in fields(Readings) if f.default is UNKNOWN)
