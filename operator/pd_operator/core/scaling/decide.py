"""decide: readings, learned numbers, bounds and time in; counts with their reasons and the next learned numbers out (DESIGN §7).

Pure: the same arguments always give the same decision, so that a recorded one can be replayed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pd_operator.core.scaling import budget as caps
from pd_operator.core.scaling import estimate
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.budget import Claim
from pd_operator.core.scaling.decision import Alert, Bottleneck, Decision, Limit, Reason, RoleDecision
from pd_operator.core.scaling.estimate import batch, known
from pd_operator.core.scaling.gate import gates, handoff_budget
from pd_operator.core.scaling.law import DEFAULT, Law
from pd_operator.core.scaling.learned import DecodeLearned, Learned, Memory, PrefillLearned, average, significant
from pd_operator.core.scaling.need import Need, need_of_decode, need_of_prefill, tail_of_decode
from pd_operator.core.scaling.readings import Readings, State
from pd_operator.core.scaling.size import Guards, Sized, hold, size, window_of_decode


@dataclass(frozen=True, slots=True)
class _Seen:
    """What this tick's readings mean, before any need."""

    prefill: PrefillLearned
    decode: DecodeLearned
    congested: bool
    stuck: bool
    stalled: bool
    budget: float  # W_max
    wait: float | None  # of a handoff, the longest of the slices


def decide(readings: Readings, learned: Learned, bounds: Bounds, now: float, law: Law = DEFAULT) -> Decision:
    """Counts of both roles for one PDDeployment. `now` in seconds; any origin that does not change while `learned` lives."""
    seen = _see(readings, learned, bounds, law, now)
    need_d = need_of_decode(readings, seen.decode, seen.prefill, bounds, law, seen.stuck)
    queue_counts = not need_d.missing and not seen.stalled and not (seen.congested and law.prefill_gate)
    need_p = need_of_prefill(readings, seen.prefill, bounds, law, queue_counts)
    sized = (
        _size_prefill(readings, seen, need_p, bounds, law, now),
        _size_decode(readings, seen, need_d, bounds, law, now),
    )
    replicas = (readings.prefill, readings.decode)
    flows = _split_flows(readings, seen, need_p, need_d, bounds, law, estimate.elapsed(learned, now, bounds))
    held = readings.rollout or readings.unread > 0
    claims = (
        _claim(sized[0], replicas[0].desired, flows[0], bool(need_p.missing) or held, law, now),
        _claim(sized[1], replicas[1].desired, flows[1], bool(need_d.missing) or held, law, now),
    )
    counts, limits = caps.apply(claims, replicas, 1 if seen.congested else 0, bounds, law)
    prefill = _answer("prefill", readings, need_p, sized[0], counts[0], limits[0])
    decode = _answer("decode", readings, need_d, sized[1], counts[1], limits[1])
    decode.inputs.update(wait=seen.wait, wait_budget=seen.budget)
    return Decision(
        prefill=prefill,
        decode=decode,
        bottleneck=_bottleneck(readings, need_p, need_d, seen),
        learned=_next(seen, sized, (prefill, decode), flows, now),
        congested=tuple(g.slice for g in seen.decode.gates if g.congested),
        alerts=_alerts(seen, bounds, now),
    )


def _see(readings: Readings, learned: Learned, bounds: Bounds, law: Law, now: float) -> _Seen:
    seconds = estimate.elapsed(learned, now, bounds)
    prefill = estimate.prefill_rates(readings, learned.prefill, law, seconds)
    decode = estimate.decode_numbers(readings, learned.decode, bounds, law, seconds)
    waiting, running = known(readings.handoff_waiting), known(readings.running)
    stuck = bool(waiting) and running == 0 and not known(readings.decode_starts) and readings.decode.ready > 0
    since = decode.stuck_since
    if not stuck:
        since = None
    elif since is None or since > now:
        since = round(now, 3)
    wait_budget = handoff_budget(readings, prefill, bounds, law)
    after, wait = gates(readings, decode, wait_budget, batch(decode, bounds, law), law, seconds, stuck)
    congested = any(g.congested for g in after)
    prefill = estimate.throughput(readings, prefill, law, seconds, estimate.held_back(readings, congested))
    late = known(readings.ttft) is not None and bounds.slo_ttft is not None and _is_late(readings, prefill, bounds)
    ticks = prefill.late + 1 if late and not congested else 0
    prefill = prefill if ticks == prefill.late else replace(prefill, late=ticks)
    decode = replace(decode, gates=after, stuck_since=since)
    return _Seen(prefill, decode, congested, stuck, _is_stalled(readings, waiting), wait_budget, wait)


def _is_late(readings: Readings, prefill: PrefillLearned, bounds: Bounds) -> bool:
    tokens = 0.0
    if prefill.prompt_rate and prefill.request_rate and prefill.request_rate.mean > 0:
        tokens = prefill.prompt_rate.mean / prefill.request_rate.mean
    return readings.ttft.value > (bounds.slo_ttft or 0.0) + bounds.slo_ttft_per_thousand * tokens / 1000


def _is_stalled(readings: Readings, waiting: float | None) -> bool:
    """Prompts wait, prefill is there and runs nothing, and no held KV is the reason: an engine that stands still is no demand."""
    idle = readings.prefill_rate.state is State.IDLE and readings.prefill_seconds.state is State.IDLE
    return idle and bool(known(readings.queued_tokens)) and readings.prefill.ready > 0 and not waiting


def _size_prefill(readings: Readings, seen: _Seen, need: Need, bounds: Bounds, law: Law, now: float) -> Sized:
    memory, replicas = seen.prefill.memory, readings.prefill
    if need.missing:
        return hold(replicas, bounds.prefill, law, memory, now, f"not known: {', '.join(need.missing)}")
    guards = _keep(readings, seen)
    if seen.congested and law.prefill_gate and law.gate_holds:
        guards = replace(guards, may_rise=False)
    if 0 < law.latency_ticks <= seen.prefill.late and replicas.starting == 0:
        # The model says enough and TTFT says no; decode is not the reason, or `late` would be 0.
        need = replace(need, backlog=max(need.backlog, replicas.desired + 1 - (need.flow or 0.0)))
    v, left = seen.prefill.throughput or 0.0, replicas.desired - 1
    fits = left * v > 0 and need.inputs["A"] is not None
    if fits:
        offered, queue = need.inputs["A"] or 0.0, need.inputs["Q"] or 0.0
        fits = offered / (left * v) < law.prefill_fits and queue <= law.queue_fits * v * left
    idle = not need.inputs["A"] and not need.inputs["Q"]
    sized = size(need, fits or idle, replicas, bounds.prefill, guards, law, memory, now)
    return _gated(sized, need, replicas.desired, v, law) if seen.congested and law.prefill_gate else sized


def _gated(sized: Sized, need: Need, current: int, v: float, law: Law) -> Sized:
    """Say so where only the gate keeps the queue of prompts from ordering prefill."""
    queue = need.inputs["Q"] or 0.0
    wanted = math.ceil((need.flow or 0.0) + (queue / (law.drain_time * v) if v > 0 else 0.0) - law.dead_band)
    if sized.count != current or sized.reason is Reason.GATED_BY_DECODE or wanted <= current:
        return sized
    limit = Limit(Reason.GATED_BY_DECODE, wanted, current, "decode is congested: the queue of prompts would only become held KV")
    return replace(sized, wanted=wanted, reason=Reason.GATED_BY_DECODE, limits=(limit,))


def _size_decode(readings: Readings, seen: _Seen, need: Need, bounds: Bounds, law: Law, now: float) -> Sized:
    memory, replicas, window = seen.decode.memory, readings.decode, window_of_decode(bounds.decode, law)
    if need.missing:
        return hold(replicas, bounds.decode, law, memory, now, f"not known: {', '.join(need.missing)}", window)
    guards = replace(_keep(readings, seen), window=window)
    queue, v = known(readings.queued_tokens), seen.prefill.throughput
    if guards.keep is None and law.hold_decode > 0 and queue and v and queue > law.hold_decode * v * readings.prefill.ready:
        guards = replace(guards, keep=Reason.HOLD, keep_detail="prefill is short: decode only looks idle")
    if seen.congested and not replicas.blocked:
        guards = replace(guards, floor=replicas.ready + 1)
    b, left = batch(seen.decode, bounds, law), replicas.desired - 1
    load = (need.inputs["R"] or 0.0) + (0.0 if seen.stuck else need.inputs["H"] or 0.0)
    most = tail_of_decode(seen.decode, law)
    fits = load == 0 or (left > 0 and load / (left * b) < law.decode_fits and (most is None or most <= left * b))
    return size(need, fits, replicas, bounds.decode, guards, law, memory, now)


def _keep(readings: Readings, seen: _Seen) -> Guards:
    """Why neither role may go down, if so."""
    if readings.rollout:
        return Guards(keep=Reason.ROLLOUT, keep_detail="a rollout is under way")
    if readings.unread:
        return Guards(keep=Reason.HOLD, keep_detail=f"replicas that are ready and were not read yet: {readings.unread}")
    if seen.congested:
        return Guards(keep=Reason.GATED_BY_DECODE, keep_detail="decode is congested")
    if seen.stuck:
        return Guards(keep=Reason.HOLD, keep_detail="handoffs wait while decode runs nothing: a broken path, not idleness")
    return Guards()


def _claim(sized: Sized, current: int, flow: float | None, keep: bool, law: Law, now: float) -> Claim:
    last = sized.memory.stepped_down
    rested = last is None or not 0 <= now - last < law.down_interval
    return Claim(sized.count, current, flow, keep, give=(1 if rested else 0) if law.split_step else current)


def _split_flows(
    readings: Readings, seen: _Seen, need_p: Need, need_d: Need, bounds: Bounds, law: Law, seconds: float
) -> tuple[float | None, float | None]:
    """Replicas that the flows of both roles need: what a split over maxGPUs goes by."""
    flows = (need_p.flow, _flow_of_decode(need_d, seen, readings, bounds, law))
    before = (seen.prefill.memory.flow, seen.decode.memory.flow)
    if law.split_window <= 0:
        return flows
    mean_p, mean_d = (
        old if new is None else average(old, new, seconds, law.split_window) for old, new in zip(before, flows, strict=True)
    )
    return mean_p, mean_d


def _flow_of_decode(need: Need, seen: _Seen, readings: Readings, bounds: Bounds, law: Law) -> float | None:
    """f_D of the split: a backlog must not buy decode a share that prefill needs, so H counts little or nothing."""
    total, rate = need.total, seen.prefill.request_rate
    itl, output = known(readings.itl), seen.decode.output
    if total is None or rate is None or itl is None or output is None:
        return need.flow if law.split_flow_max else total
    little = rate.mean * output * itl / (law.decode_load * batch(seen.decode, bounds, law))
    return max(need.flow or 0.0, little) if law.split_flow_max else min(total, little)


def _answer(role: str, readings: Readings, need: Need, sized: Sized, count: int, limits: list[Limit]) -> RoleDecision:
    current = readings.prefill.desired if role == "prefill" else readings.decode.desired
    reason = limits[-1].reason if limits else sized.reason
    return RoleDecision(
        role="prefill" if role == "prefill" else "decode",
        current=current,
        desired=count,
        reason=reason,
        wanted=sized.wanted,
        flow=need.flow,
        backlog=None if need.flow is None else need.backlog,
        formula=need.formula,
        inputs=dict(need.inputs),
        limits=(*sized.limits, *limits),
    )


def _bottleneck(readings: Readings, need_p: Need, need_d: Need, seen: _Seen) -> Bottleneck:
    """The role whose need exceeds what is ready by more; a congested decode is always it."""
    if seen.congested:
        return Bottleneck.DECODE
    if need_p.total is None or need_d.total is None:
        return Bottleneck.UNKNOWN
    short_p = need_p.total / max(readings.prefill.ready, 1)
    short_d = need_d.total / max(readings.decode.ready, 1)
    if max(short_p, short_d) <= 1:
        return Bottleneck.NONE
    return Bottleneck.PREFILL if short_p > short_d else Bottleneck.DECODE


def _alerts(seen: _Seen, bounds: Bounds, now: float) -> tuple[Alert, ...]:
    broken = seen.decode.stuck_since is not None and now - seen.decode.stuck_since > bounds.lease
    return (*((Alert.BROKEN_PATH,) if broken else ()), *((Alert.STALLED_ENGINE,) if seen.stalled else ()))


def _next(
    seen: _Seen,
    sized: tuple[Sized, Sized],
    answers: tuple[RoleDecision, RoleDecision],
    flows: tuple[float | None, float | None],
    now: float,
) -> Learned:
    """Learned for the next tick. A role that a cap shrank has stepped down as well."""
    memories = [_memory(s.memory, a, f, now) for s, a, f in zip(sized, answers, flows, strict=True)]
    return Learned(round(now, 3), replace(seen.prefill, memory=memories[0]), replace(seen.decode, memory=memories[1]))


def _memory(memory: Memory, answer: RoleDecision, flow: float | None, now: float) -> Memory:
    down = round(now, 3) if answer.desired < answer.current else memory.stepped_down
    return replace(memory, flow=None if flow is None else significant(flow), stepped_down=down)
