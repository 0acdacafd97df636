"""Outlook: what would change a recorded decision. Every answer is one of `decide` itself, asked again with other inputs.

No second formula: a threshold is found by bisection over `decide`, and what time brings by running it ahead with the same readings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum

from pd_operator.core.names import ROLES, Role
from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.decision import Reason, RoleDecision
from pd_operator.core.scaling.hypothesis import LOADS, Load, World, amount
from pd_operator.core.scaling.readings import Readings, Replicas
from pd_operator.core.scaling.record import Record
from pd_operator.core.scaling.size import window_of, window_of_decode

AS_IT_IS = "if the load stays as it is"
DOUBLINGS = 40  # of a load, before it is said that no load does it


class Move(StrEnum):
    """What the count of a role does."""

    RISES = "rises"
    FALLS = "falls"
    STAYS = "stays"


@dataclass(frozen=True, slots=True)
class WhatIf:
    """One change of what a decision was made from, and the answer that `decide` gives to it. `seconds`: after so long."""

    role: Role
    move: Move
    count: int
    when: str
    reason: Reason
    seconds: float | None = None

    @property
    def text(self) -> str:
        """In words; the time is the reader's to add."""
        return (
            f"stays at {self.count} {self.when} ({self.reason.value})"
            if self.move is Move.STAYS
            else f"{self.move} to {self.count} {self.when}"
        )


def outlook(record: Record) -> dict[Role, tuple[WhatIf, ...]]:
    """What would change the answer for each role, the likeliest first."""
    world = World(record.readings, record.learned, record.bounds, record)
    return {role: tuple(_of(world, role, record.decision.of(role))) for role in ROLES}


def _of(world: World, role: Role, answer: RoleDecision) -> list[WhatIf]:
    if answer.need is None:
        return []  # what is missing is named beside the inputs; no number can be told before it is there
    found = [_time(world, role, answer)]
    ups = [_rise(world, role, answer, load) for load in LOADS[role]]
    found += ups
    if not any(ups):
        found.append(_no_load(world, role, answer))
    found += [_fall(world, role, answer), *_without_limits(world, role, answer)]
    return list(dict.fromkeys(w for w in found if w is not None))


# --- time -----------------------------------------------------------------------------------------------------------------


def _horizon(world: World, role: Role) -> float:
    """Seconds after which a down window, however patient, has passed."""
    law, bounds = world.record.law, world.bounds
    memory = world.learned.prefill.memory if role == "prefill" else world.learned.decode.memory
    window = window_of(bounds.prefill, law) if role == "prefill" else window_of_decode(bounds.decode, law)
    return window * max(1.0, memory.patience) + law.down_interval + 2 * bounds.tick


def _time(world: World, role: Role, answer: RoleDecision) -> WhatIf | None:
    """What comes by itself while the load stays as it is: the end of a cool-down, the next step of a rise."""
    later = _applied(world, answer)
    found = later.ahead(role, _horizon(world, role), lambda a: a.desired != answer.desired)
    if found is None:
        return None
    seconds, then = found
    move = Move.RISES if then.desired > answer.desired else Move.FALLS
    return WhatIf(role, move, then.desired, AS_IT_IS, then.reason, seconds)


def _applied(world: World, answer: RoleDecision) -> World:
    """The same world after the answer was carried out as an order: what was asked for is desired, and starts."""
    mine = _replicas(world.readings, answer.role)
    after = replace(mine, desired=answer.desired, starting=mine.starting + max(0, answer.desired - answer.current))
    return replace(world, readings=_with_replicas(world.readings, answer.role, after))


# --- load --------------------------------------------------------------------------------------------------------------------


def _rise(world: World, role: Role, answer: RoleDecision, load: Load) -> WhatIf | None:
    """The smallest load of which the answer, once carried out, would be more."""
    world, now = _applied(world, answer), load.now(world)
    if now is None:
        return None
    step = _step(max(now, 1.0))
    low, high = math.floor(now / step), None
    for n in range(DOUBLINGS):
        probe = max(low + 1, math.ceil(max(now, step) / step)) * 2**n
        if load.at(world, probe * step).decide().of(role).desired > answer.desired:
            high = probe
            break
        low = probe
    if high is None:
        return None
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        if load.at(world, middle * step).decide().of(role).desired > answer.desired:
            high = middle
        else:
            low = middle
    told = _rounded(high * step)
    if (then := load.at(world, told).decide().of(role)).desired <= answer.desired:
        told = high * step
        then = load.at(world, told).decide().of(role)
    return WhatIf(role, Move.RISES, then.desired, f"when {load.words} >= {told:,.10g} {load.unit} (now {_whole(now)})", then.reason)


def _fall(world: World, role: Role, answer: RoleDecision) -> WhatIf | None:
    """The largest load under which the answer falls, once the window has passed. Decode: what runs; prefill: what arrives."""
    load, applied, horizon = LOADS[role][0], _applied(world, answer), _horizon(world, role)
    now = load.now(world)
    if now is None or now <= 0 or answer.desired <= _bounds(world.bounds, role).minimum:
        return None

    def falls(total: float) -> tuple[float, RoleDecision] | None:
        return load.at(applied, total).ahead(role, horizon, lambda a: a.desired < answer.desired)

    step = _step(now)
    low, high = 0, math.floor(now / step)
    if falls(high * step) is not None or (found := falls(0.0)) is None:
        return None  # it falls by time alone, or nothing makes it fall: both are told elsewhere
    while high - low > max(1, high // 1000):
        middle = (low + high) // 2
        if (then := falls(middle * step)) is not None:
            low, found = middle, then
        else:
            high = middle
    seconds, last = found
    when = f"when {load.words} stays at {low * step:,.10g} {load.unit} or less (now {_whole(now)})"
    return WhatIf(role, Move.FALLS, last.desired, when, last.reason, seconds)


def _no_load(world: World, role: Role, answer: RoleDecision) -> WhatIf:
    """No load raises it: the bound that a load a thousand times this one meets."""
    load, world = LOADS[role][0], _applied(world, answer)
    there = load.at(world, 1000 * max(load.now(world) or 0.0, 1.0)).decide().of(role)
    limit = there.limits[-1] if there.limits else None
    why = f": {limit.detail}" if limit else ""
    return WhatIf(role, Move.STAYS, there.desired, f"under any load{why}", there.reason)


# --- limits ---------------------------------------------------------------------------------------------------------------


def _without_limits(world: World, role: Role, answer: RoleDecision) -> list[WhatIf | None]:
    """The answer without each limit that shrank it."""
    asked: dict[Reason, Callable[[], WhatIf | None]] = {
        Reason.MAX_REPLICAS: lambda: _more_replicas(world, role, answer),
        Reason.MAX_GPUS: lambda: _more_gpus(world, role, answer),
        Reason.NO_CAPACITY: lambda: _if(world, role, answer, "when the replicas that cannot run can", _unblocked(world, role)),
        Reason.ROLLOUT: lambda: _later(
            replace(world, readings=replace(world.readings, rollout=False)), role, answer, "after the rollout"
        ),
        Reason.GATED_BY_DECODE: lambda: _later(_free(world), role, answer, "when no handoff waits"),
    }
    reasons = dict.fromkeys(limit.reason for limit in answer.limits)
    return [asked[reason]() for reason in reasons if reason in asked]


def _if(world: World, role: Role, answer: RoleDecision, when: str, other: World) -> WhatIf | None:
    then = other.decide().of(role)
    if then.desired == answer.desired:
        return WhatIf(role, Move.STAYS, then.desired, when, then.reason) if then.reason is not answer.reason else None
    return WhatIf(role, Move.RISES if then.desired > answer.desired else Move.FALLS, then.desired, when, then.reason)


def _later(world: World, role: Role, answer: RoleDecision, when: str) -> WhatIf | None:
    found = world.ahead(role, _horizon(world, role), lambda a: a.desired != answer.desired)
    if found is None:
        return None
    seconds, then = found
    return WhatIf(role, Move.RISES if then.desired > answer.desired else Move.FALLS, then.desired, when, then.reason, seconds)


def _more_replicas(world: World, role: Role, answer: RoleDecision) -> WhatIf | None:
    wanted = max(limit.before for limit in answer.limits if limit.reason is Reason.MAX_REPLICAS)
    bounds = _with_bounds(world.bounds, role, replace(_bounds(world.bounds, role), maximum=wanted))
    return _if(world, role, answer, f"with scaling.{role}.maxReplicas: {wanted}", replace(world, bounds=bounds))


def _more_gpus(world: World, role: Role, answer: RoleDecision) -> WhatIf | None:
    """The smallest maxGPUs that gives this role more."""
    cap = world.bounds.max_gpus or 0

    def at(gpus: int) -> World:
        return replace(world, bounds=replace(world.bounds, max_gpus=gpus))

    low, high = cap, max(1, cap)
    for _ in range(DOUBLINGS):
        high *= 2
        if at(high).decide().of(role).desired > answer.desired:
            break
        low = high
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle).decide().of(role).desired > answer.desired else (middle, high)
    when = f"with {high} GPUs of the budget that it shares" if world.bounds.shared else f"with scaling.maxGPUs: {high}"
    return _if(world, role, answer, f"{when} (now {cap})", at(high))


def _unblocked(world: World, role: Role) -> World:
    mine = _replicas(world.readings, role)
    return replace(
        world, readings=_with_replicas(world.readings, role, replace(mine, blocked=0, starting=mine.starting + mine.blocked))
    )


def _free(world: World) -> World:
    """No handoff waits, in any slice."""
    zero = amount(world.readings.handoff_waiting, 0.0)
    slices = tuple(replace(s, waiting=amount(s.waiting, 0.0)) for s in world.readings.slices)
    return replace(world, readings=replace(world.readings, handoff_waiting=zero, slices=slices))


# --- parts ----------------------------------------------------------------------------------------------------------------


def _whole(value: float) -> str:
    return f"{value:,.0f}" if value >= 10_000 else f"{value:,.5g}"


def _rounded(value: float) -> float:
    """Up to three digits, where that leaves whole numbers."""
    return math.ceil(value / _step(value)) * _step(value)


def _step(value: float) -> float:
    """Three digits of a number, and no less than one: how fine a threshold is told."""
    return max(1.0, 10.0 ** (math.floor(math.log10(value)) - 2))


def _bounds(bounds: Bounds, role: Role) -> RoleBounds:
    return bounds.prefill if role == "prefill" else bounds.decode


def _with_bounds(bounds: Bounds, role: Role, mine: RoleBounds) -> Bounds:
    return replace(bounds, prefill=mine) if role == "prefill" else replace(bounds, decode=mine)


def _replicas(readings: Readings, role: Role) -> Replicas:
    return readings.prefill if role == "prefill" else readings.decode


def _with_replicas(readings: Readings, role: Role, mine: Replicas) -> Readings:
    return replace(readings, prefill=mine) if role == "prefill" else replace(readings, decode=mine)
