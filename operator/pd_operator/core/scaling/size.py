"""Size: from a fractional need to a count. Up at once, down slowly and only if the rest fits; unknown holds (invariant I4)."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pd_operator.core.scaling.bounds import RoleBounds
from pd_operator.core.scaling.decision import Limit, Reason
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import Memory
from pd_operator.core.scaling.need import Need
from pd_operator.core.scaling.readings import Replicas

MAX_PATIENCE = 8.0  # down windows


@dataclass(frozen=True, slots=True)
class Guards:
    """What forbids a move of one role in this tick."""

    may_rise: bool = True  # False: decode is congested and this is prefill
    floor: int = 0  # decode that is congested: one more than is ready
    keep: Reason | None = None  # why it may not go down
    keep_detail: str = ""
    window: float = 0.0  # s for which a need is remembered before a step down, at least


@dataclass(frozen=True, slots=True)
class Sized:
    """A count before the caps, with the memory it leaves."""

    count: int
    wanted: int
    reason: Reason
    limits: tuple[Limit, ...]
    memory: Memory


def window_of(bounds: RoleBounds, law: Law) -> float:
    """Seconds over which the highest recommendation counts before a step down."""
    return max(law.down_window, law.down_lead_times * bounds.lead_time)


def window_of_decode(bounds: RoleBounds, law: Law) -> float:
    """The same for decode, which no queue of prompts saves from a burst: what it has not got waits as held KV.

    Of a load that goes on as it was, any of equal stretches is as likely as another to hold the highest need. So what the last m
    lead times needed is too little in the next one, which is how long more takes to come, in one of m + 1 cases.
    """
    return max(window_of(bounds, law), min(law.decode_memory * bounds.lead_time, law.decode_memory_most))


def hold(replicas: Replicas, bounds: RoleBounds, law: Law, memory: Memory, now: float, detail: str, window: float = 0.0) -> Sized:
    """Unknown: the count stays, and the down window (of `window` seconds at least) starts anew (invariant I4)."""
    count = replicas.desired
    limit = Limit(Reason.SIGNALS_UNKNOWN, count, count, detail)
    peaks = memory.push(now, count, max(window, window_of(bounds, law)))
    return Sized(count, count, Reason.SIGNALS_UNKNOWN, (limit,), replace(memory, peaks=peaks))


def size(
    need: Need, fits: bool, replicas: Replicas, bounds: RoleBounds, guards: Guards, law: Law, memory: Memory, now: float
) -> Sized:
    """A count for a need that is known. `fits`: what is there fits into one replica fewer."""
    need, memory = _freeze(need, replicas, law, memory)
    total = need.total or 0.0
    wanted = max(bounds.minimum, math.ceil(total - law.dead_band), guards.floor)
    memory = _patience(memory, wanted > replicas.desired, window_of(bounds, law), law, now)
    least = window_of(bounds, law) * memory.patience
    window = max(least, guards.window * memory.patience)
    current = replicas.desired
    # No past is known: what there is counts as wanted, but no longer than in a plain window: it is no need that was seen.
    past = memory if memory.peaks else Memory(peaks=((round(now - window + least, 3), current),))
    peaks = past.push(now, wanted, window)
    memory = replace(memory, peaks=peaks)
    if wanted > current:
        by_flow = math.ceil((need.flow or 0.0) - law.dead_band)
        reason = Reason.DEMAND if max(by_flow, bounds.minimum) > current else Reason.BACKLOG
        count, limits = _rise(wanted, replicas, guards, law)
        return Sized(count, wanted, limits[-1].reason if limits and count == current else reason, limits, memory)
    if replicas.blocked and wanted > replicas.ready + replicas.starting:
        limit = Limit(Reason.NO_CAPACITY, wanted, current, f"{replicas.blocked} of {current} replicas cannot run")
        return Sized(current, wanted, Reason.NO_CAPACITY, (limit,), memory)
    if wanted < current:
        return _fall(wanted, max(n for _, n in peaks), fits, replicas, guards, law, memory, now)
    return Sized(current, wanted, Reason.HOLD, (), memory)


def _patience(memory: Memory, rises: bool, window: float, law: Law, now: float) -> Memory:
    """Longer after a step down that is taken back within two windows, shorter again after one that was not."""
    if law.reversal_factor <= 1 or memory.stepped_down is None:
        return memory
    since = now - memory.stepped_down
    if rises and since < 2 * window:
        return replace(memory, patience=min(MAX_PATIENCE, memory.patience * law.reversal_factor), stepped_down=None)
    if since > 2 * window * memory.patience and memory.patience > 1:
        return replace(memory, patience=max(1.0, memory.patience / law.reversal_factor), stepped_down=round(now, 3))
    return memory


def _freeze(need: Need, replicas: Replicas, law: Law, memory: Memory) -> tuple[Need, Memory]:
    """While replicas start, a backlog that grows because they are not there yet orders no more than it has."""
    if not law.backlog_frozen:
        return need, memory
    if replicas.starting <= 0 or memory.frozen_backlog is None:
        return need, replace(memory, frozen_backlog=float(f"{need.backlog:.6g}"))
    return replace(need, backlog=min(need.backlog, memory.frozen_backlog)), memory


def _rise(wanted: int, replicas: Replicas, guards: Guards, law: Law) -> tuple[int, tuple[Limit, ...]]:
    """Up at once, from what is ordered already: starting replicas count, so a slow start never orders twice."""
    current = replicas.desired
    if not guards.may_rise:
        return current, (Limit(Reason.GATED_BY_DECODE, wanted, current, "decode is congested: more prefill would only hold KV"),)
    if replicas.blocked:
        detail = f"{replicas.blocked} of {current} replicas cannot run: more would not either"
        return current, (Limit(Reason.NO_CAPACITY, wanted, current, detail),)
    base = max(current, replicas.ready + replicas.starting)
    most = max(base + law.up_add, math.floor(base * law.up_factor))
    if wanted > most:
        return most, (Limit(Reason.COOLDOWN, wanted, most, f"at most +{law.up_add} or x{law.up_factor:g} a tick"),)
    return wanted, ()


def _fall(wanted: int, highest: int, fits: bool, replicas: Replicas, guards: Guards, law: Law, memory: Memory, now: float) -> Sized:
    """Down by one a minute, to the highest recommendation of the window, and only if the rest still fits."""
    current = replicas.desired
    if guards.keep is not None:
        limit = Limit(guards.keep, wanted, current, guards.keep_detail)
        return Sized(current, wanted, guards.keep, (limit,), memory)
    waited = memory.stepped_down is None or now - memory.stepped_down >= law.down_interval or now < memory.stepped_down
    if highest >= current or not waited or not fits:
        if highest >= current:
            detail = f"{highest} were wanted within the down window"
        else:
            detail = "the rest would not fit" if not fits else f"one step in {law.down_interval:g} s"
        return Sized(current, wanted, Reason.COOLDOWN, (Limit(Reason.COOLDOWN, wanted, current, detail),), memory)
    step = max(1, math.floor(law.down_share * current))
    count = max(current - step, highest, wanted)
    limits = () if count == wanted else (Limit(Reason.COOLDOWN, wanted, count, f"{step} in {law.down_interval:g} s"),)
    return Sized(count, wanted, Reason.DEMAND, limits, replace(memory, stepped_down=round(now, 3)))
