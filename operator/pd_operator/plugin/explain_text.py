"""The text of `kubectl pdd explain`."""

from __future__ import annotations

from collections.abc import Iterator

from pd_operator.core.names import ROLES, Role
from pd_operator.core.pool_status import sentence
from pd_operator.core.scaling.decision import Reason, RoleDecision
from pd_operator.core.scaling.estimate import kv_batch
from pd_operator.core.scaling.outlook import AS_IT_IS, Move, WhatIf
from pd_operator.core.scaling.record import Record
from pd_operator.plugin.explanation import MEANING, MODES, Explanation, Pool
from pd_operator.plugin.terminal import Paint, age, columns, number

STEADY = (Reason.HOLD, Reason.DEMAND, Reason.BACKLOG)


def text(told: Explanation, paint: Paint) -> str:
    """Lines for people: the answer, then per role the formula, limits and what would change it, then inputs and what is unknown."""
    lines = [*_head(told, paint)]
    for role in ROLES:
        lines += ["", *_role(told, role, paint)]
    if told.record:
        lines += ["", *_inputs(told, paint), "", *_learned(told.record, told, paint)]
    if told.warnings:
        lines += ["", *(f"{paint('doubt', 'note')}  {w}" for w in told.warnings)]
    return "\n".join(lines) + "\n"


def _head(told: Explanation, paint: Paint) -> Iterator[str]:
    name = paint("strong", f"{told.namespace}/{told.name}")
    if told.record is None:
        yield f"{name} {MODES[told.mode]}"
        yield f"  {told.why_not}"
        return
    meaning = {"None": "good", "Unknown": "doubt"}.get(told.record.decision.bottleneck.value, "bad")
    yield f"{name} bottleneck: {paint(meaning, told.bottleneck)}"
    yield f"  {MODES[told.mode]}"
    yield f"  as of a tick {age(told.age)} ago; an operator that runs writes a changed answer at once, so it still stands"
    yield from (f"  {paint('bad', 'not load')}: {alert}" for alert in told.alerts)


def _role(told: Explanation, role: Role, paint: Paint) -> Iterator[str]:
    pool, answer = next(p for p in told.pools if p.role == role), told.answer(role)
    there = f"{pool.ready or 0} of {pool.replicas or 0} ready" if pool.replicas is not None else "no replica is told"
    if answer is None:
        yield f"{paint('strong', role)}: {pool.number if pool.number is not None else '?'} replicas, {there}"
        yield from _last(pool)
        return
    move = f"stays at {answer.desired}" if answer.desired == answer.current else f"{answer.current} -> {answer.desired}"
    reason = paint("good" if answer.reason in STEADY else "doubt", answer.reason.value)
    others = f"; its number is {pool.number}" if told.mode in ("External", "Advisory") and pool.number is not None else ""
    yield f"{paint('strong', role)}: {move} ({reason}); {there}{others}"
    if told.record is not None:
        yield from _formula(told.record, answer, pool)
    yield from (f"  limit     {limit.reason.value}: {limit.before} -> {limit.after}, {limit.detail}" for limit in answer.limits)
    for type_, status, why, message in pool.conditions:
        if type_ == "ScalingLimited" and status == "True" and why not in {x.reason.value for x in answer.limits}:
            yield f"  limit     {why}: {message}"
    yield from (f"  {'change' if n == 0 else '':8}  {change(w, told.age or 0.0)}" for n, w in enumerate(told.changes.get(role, ())))
    yield from _last(pool, sentence(answer))


def _formula(record: Record, answer: RoleDecision, pool: Pool) -> Iterator[str]:
    symbol = "n_P" if answer.role == "prefill" else "n_D"
    if answer.need is None:
        yield f"  need      {symbol} cannot be told: the number is kept"
    else:
        dead = record.law.dead_band
        rounded = f"; ceil({answer.need:.3g} - {dead:g}), at least the minimum: {answer.wanted} wanted"
        yield f"  need      {symbol} = {answer.formula} = {answer.need:.3g}{rounded}"
    if answer.role == "decode":
        yield f"  where     {_batch(record)}"
    bounds = record.bounds.prefill if answer.role == "prefill" else record.bounds.decode
    of = "GPUs of a shared budget" if record.bounds.shared else "maxGPUs"
    cap = f", {of} {record.bounds.max_gpus} for both" if record.bounds.max_gpus is not None else ""
    lead = (
        f"; a start takes {pool.lead_time}"
        if pool.lead_time
        else f"; a start is taken to need {bounds.lead_time:g}s, none was measured"
    )
    yield f"  bounds    minReplicas {bounds.minimum}, maxReplicas {bounds.maximum}{cap}{lead}"


def _batch(record: Record) -> str:
    """b, in words: which of its bounds holds."""
    learned, bounds, law = record.decision.learned.decode, record.bounds, record.law
    b = record.decision.decode.inputs.get("b")
    shown = "unknown" if b is None else f"{b:.4g}"
    held = kv_batch(learned, bounds, law)
    if learned.itl_batch is not None and learned.itl_batch < held:
        return f"b {shown}: requests at which one replica holds the ITL objective; its KV would hold {held:.4g}"
    if not learned.kv_capacity:
        return f"b {shown} = max_num_seqs: the KV capacity of a replica is not known"
    each = learned.kv_per_request
    tokens = f"c {each:.5g}" if each else f"c {law.kv_prior:g}, assumed: none was measured"
    return f"b {shown} = min(max_num_seqs {bounds.max_num_seqs}, {law.kv_share:g} x C {learned.kv_capacity:.6g} / {tokens})"


def change(w: WhatIf, gone: float) -> str:
    """One what-if in words, with the time that it takes; `gone` seconds of it have passed since the tick."""
    if w.seconds is None:
        return w.text
    if w.when == AS_IT_IS:
        left = w.seconds - gone
        due = f"was due {age(-left)} ago: more was needed meanwhile, or no operator runs"
        return f"{w.text}, {f'in {age(left)}' if left > 0 else due}"
    if w.seconds == 0:
        return f"{w.text}, at once"
    return f"{w.text}, {'for' if w.move is Move.FALLS else 'in'} {age(w.seconds)}"


def _last(pool: Pool, this: str = "") -> Iterator[str]:
    """The decision that stands in the status: the last one that changed the count, or its reason."""
    message = pool.last.get("message", "")
    if message:
        yield f"  last      {age(pool.last_age)} ago: {'the same' if message == this else message}"


def _inputs(told: Explanation, paint: Paint) -> list[str]:
    header = ("INPUT", "", "VALUE", "AGE", "QUALITY", "FROM")
    rows = [header]
    for item in told.inputs:
        value = "unknown" if item.value is None else number(item.value)
        rows.append((item.symbol or "-", MEANING[item.name], value, age(item.age), item.quality, item.source))
    lines = columns(rows)
    shown = [x if item.value is not None else paint("doubt", x) for x, item in zip(lines[1:], told.inputs, strict=True)]
    return [paint("faint", lines[0]), *shown]


def _learned(record: Record, told: Explanation, paint: Paint) -> Iterator[str]:
    """The gates, what was learned, and what is not known."""
    decode, law = record.decision.learned.decode, record.law
    wait, budget = record.decision.decode.inputs.get("wait"), record.decision.decode.inputs.get("wait_budget")
    shown = "not known" if wait is None else f"{wait:.3g} s"
    limit = "" if budget is None else f", congested above {law.gate_share * budget:.3g} s"
    for gate in decode.gates:
        need = law.gate_leave if gate.congested else law.gate_enter
        state = paint("bad", "congested: prefill may not rise, decode does") if gate.congested else "open"
        turning = f"; {gate.streak} of {need} ticks towards the other" if gate.streak else ""
        yield f"gate      {gate.slice or 'the only slice'}: {state}{turning}; the longest wait of a handoff is {shown}{limit}"
    numbers = {
        "V": (record.decision.learned.prefill.throughput, "prompt tokens/s of one prefill replica"),
        "c": (decode.kv_per_request, "KV tokens of one request"),
    }
    for symbol, (value, meaning) in numbers.items():
        yield f"learned   {symbol} {'unknown' if value is None else number(value)}  {meaning}"
    missing = ", ".join(item.symbol or item.name for item in told.inputs if item.value is None)
    if missing:
        yield f"{paint('doubt', 'unknown')}   {missing}: a role whose need rests on one of them keeps its number"
