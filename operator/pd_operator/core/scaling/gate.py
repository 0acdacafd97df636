"""Gate: is decode congested? Then more prefill only holds more KV, and decode must grow (DESIGN §7; the trap of this product).

Per slice, since a request cannot leave its slice: congested when a handoff waits longer than half of the time that the TTFT
objective leaves for it, two ticks in a row; free again after four ticks in a row below.
"""

from __future__ import annotations

from dataclasses import replace

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.estimate import known
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import DecodeLearned, Gate, PrefillLearned, average
from pd_operator.core.scaling.readings import Readings, SliceHandoff


def handoff_budget(readings: Readings, learned: PrefillLearned, bounds: Bounds, law: Law) -> float:
    """W_max: seconds that a handoff may wait, max(0.5 s, TTFT objective - prefill seen); without one, the queue-time limit."""
    if bounds.slo_ttft is None:
        return max(law.min_handoff_budget, bounds.max_queue_time)
    tokens = 0.0
    if learned.prompt_rate and learned.request_rate and learned.request_rate.mean > 0:
        tokens = learned.prompt_rate.mean / learned.request_rate.mean
    seen = known(readings.prefill_latency)
    if seen is None:
        seen = tokens / learned.throughput if learned.throughput else 0.0
    return max(law.min_handoff_budget, bounds.slo_ttft + bounds.slo_ttft_per_thousand * tokens / 1000 - seen)


def gates(
    readings: Readings, learned: DecodeLearned, budget: float, batch: float, law: Law, seconds: float, stuck: bool
) -> tuple[tuple[Gate, ...], float | None]:
    """The gate of every slice, and the longest wait seen (seconds; None when no slice tells).

    `stuck`: handoffs wait while nothing runs, which is a broken path and no full D.
    """
    slices = readings.slices or (SliceHandoff("", readings.handoff_waiting, readings.decode_starts),)
    before = {g.slice: g for g in learned.gates}
    room = stuck or not _is_full(readings, learned, batch, law)
    after, longest = [], None
    for part in slices:
        gate, wait = _gate(part, before.get(part.name, Gate(part.name)), budget, room, law, seconds)
        after.append(gate)
        longest = wait if longest is None else max(longest, wait if wait is not None else longest)
    return tuple(after), longest


def _is_full(readings: Readings, learned: DecodeLearned, batch: float, law: Law) -> bool:
    """Whether D runs enough for a waiting handoff to mean a full D; when it does not, the link is what is slow.

    Without a known KV capacity b is only a guess from above, and D counts as full: the gate errs towards holding prefill.
    """
    running = known(readings.running)
    return running is None or not learned.kv_capacity or running >= law.gate_fullness * batch * readings.decode.ready


def _gate(part: SliceHandoff, gate: Gate, budget: float, room: bool, law: Law, seconds: float) -> tuple[Gate, float | None]:
    waiting, starts = known(part.waiting), known(part.starts)
    if waiting is None or starts is None:
        return gate, None
    mean = average(gate.starts, starts, seconds, law.rate_window if law.gate_smooth else 0.0)
    # By Little's law H / x is the wait; a queue that nothing leaves has no end that could be told.
    wait = waiting / mean if mean > 0 else (None if waiting else 0.0)
    slow = waiting >= law.gate_min_waiting and (wait is None or wait > law.gate_share * budget) and not room
    streak = gate.streak + 1 if slow is not gate.congested else 0
    if streak >= (law.gate_leave if gate.congested else law.gate_enter):
        return replace(gate, congested=slow, streak=0, starts=mean), wait
    return replace(gate, streak=streak, starts=mean), wait
