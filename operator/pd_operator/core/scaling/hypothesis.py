"""Hypothesis: a recorded decision's world with one thing changed, and what `decide` says in it, now or some ticks ahead."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pd_operator.core.names import Role
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Decision, RoleDecision
from pd_operator.core.scaling.estimate import known
from pd_operator.core.scaling.learned import Learned, Rate
from pd_operator.core.scaling.readings import Readings, Signal
from pd_operator.core.scaling.record import Record

MAX_TICKS = 1000  # that are run ahead


@dataclass(frozen=True, slots=True)
class World:
    """What a decision is made from."""

    readings: Readings
    learned: Learned
    bounds: Bounds
    record: Record

    def decide(self) -> Decision:
        """The decision in this world."""
        return decide(self.readings, self.learned, self.bounds, self.record.now, self.record.law)

    def ahead(self, role: Role, horizon: float, moves: Callable[[RoleDecision], bool]) -> tuple[float, RoleDecision] | None:
        """Seconds until the answer for a role moves while the readings stay as they are, and that answer; None within `horizon`."""
        learned, now, tick = self.learned, self.record.now, self.bounds.tick
        for n in range(min(MAX_TICKS, 1 + math.ceil(horizon / tick))):
            decision = decide(self.readings, learned, self.bounds, now + n * tick, self.record.law)
            if moves(decision.of(role)):
                return n * tick, decision.of(role)
            learned = decision.learned
        return None


@dataclass(frozen=True, slots=True)
class Load:
    """One thing that a role's need goes by: how to read it, and how to have another amount of it."""

    words: str
    unit: str
    now: Callable[[World], float | None]
    at: Callable[[World, float], World]


def _running(world: World) -> float | None:
    running, waiting = known(world.readings.running), known(world.readings.handoff_waiting)
    return None if running is None or waiting is None else running + waiting


def _running_at(world: World, total: float) -> World:
    """So many in decode, as many of them waiting as now; each holds the KV that one holds now."""
    readings = world.readings
    waiting, running, kv = known(readings.handoff_waiting) or 0.0, known(readings.running) or 0.0, known(readings.kv_tokens)
    rest = max(0.0, total - waiting)
    each = kv / running if kv and running else world.learned.decode.kv_per_request
    changed = replace(readings, running=amount(readings.running, rest))
    if each is not None and kv is not None:
        changed = replace(changed, kv_tokens=amount(readings.kv_tokens, rest * each))
    mine = world.learned.decode
    if mine.running is not None:  # for as long as the tail looks back; its spread stays, as with what is offered
        mine = replace(mine, running=replace(mine.running, mean=rest))
    return replace(world, readings=changed, learned=replace(world.learned, decode=mine))


def _offered(world: World) -> float | None:
    rate = world.record.decision.learned.prefill.prompt_rate
    return rate.mean if rate else None


def _offered_at(world: World, total: float) -> World:
    """So many prompt tokens a second, for as long as the average takes; as many to a request as now."""
    mine = world.learned.prefill
    before = _offered(world) or 0.0
    factor = total / before if before else 1.0
    requests = (known(world.readings.request_rate) or 0.0) * factor
    readings = replace(
        world.readings,
        prompt_rate=amount(world.readings.prompt_rate, total),
        request_rate=amount(world.readings.request_rate, requests)
        if world.readings.request_rate.known
        else world.readings.request_rate,
    )
    mine = replace(mine, prompt_rate=_steady(mine.prompt_rate, total), request_rate=_steady(mine.request_rate, requests))
    return replace(world, readings=readings, learned=replace(world.learned, prefill=mine))


def _steady(rate: Rate | None, mean: float) -> Rate | None:
    """A rate that has been so for long. Its variance stays: more load does not make it calmer."""
    return None if rate is None else Rate(mean, rate.variance, mean, 0.0)


def _queued(world: World) -> float | None:
    return known(world.readings.queued_tokens)


def _queued_at(world: World, total: float) -> World:
    return replace(world, readings=replace(world.readings, queued_tokens=amount(world.readings.queued_tokens, total)))


IN_DECODE = Load("R + H", "requests", _running, _running_at)
OFFERED = Load("A", "prompt tokens/s", _offered, _offered_at)
QUEUED = Load("Q", "queued prompt tokens", _queued, _queued_at)
LOADS: dict[Role, tuple[Load, ...]] = {"prefill": (OFFERED, QUEUED), "decode": (IN_DECODE,)}


def amount(signal: Signal, value: float) -> Signal:
    """The reading with another value."""
    return Signal.of(value, signal.age, signal.quality, signal.source)
