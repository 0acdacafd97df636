"""Pool status: how a PDPool tells its scaling: the decision, what was learned, and the two conditions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from pd_operator.api.conditions import Condition, PoolType
from pd_operator.core.names import Role
from pd_operator.core.pools import Mode, PoolPlan
from pd_operator.core.scaled import Scaled
from pd_operator.core.scaling import codec
from pd_operator.core.scaling.decision import Reason, RoleDecision
from pd_operator.core.scaling.learned import Learned

MAX_STATE = 8192  # characters of the learned numbers in a status


def pool_scaling(
    mode: Mode, mine: PoolPlan, scaled: Scaled | None, previous: Mapping[str, Any], role: Role, short: int
) -> dict[str, Any]:
    """desiredReplicas, lastDecision, learned and the two conditions of a pool's status.

    Nothing here changes while a decision, a bound and what was learned stay what they are (invariant I2).
    """
    answer = scaled.decision.of(role) if scaled and scaled.decision and mode != "Static" else None
    told: dict[str, Any] = {"desiredReplicas": answer.desired if answer else mine.desired}
    decision = _last_decision(answer, scaled, previous) if answer and scaled else previous.get("lastDecision")
    if decision:
        told["lastDecision"] = decision
    learned = _learned(scaled, previous.get("learned") or {}, role) if mode != "Static" else previous.get("learned")
    if learned:
        told["learned"] = learned
    told["conditions"] = [_active(mode, scaled, answer), _limited(mine, answer, mode, short)]
    return told


def _last_decision(answer: RoleDecision, scaled: Scaled, previous: Mapping[str, Any]) -> dict[str, Any]:
    """The decision; the one told before stands while the answer and its reason are the same."""
    before = previous.get("lastDecision") or {}
    if before.get("toReplicas") == answer.desired and before.get("reason") == answer.reason.value:
        return dict(before)
    return {
        "time": _instant(scaled.time),
        "fromReplicas": answer.current,
        "toReplicas": answer.desired,
        "reason": answer.reason.value,
        "message": sentence(answer),
        "inputs": {k: "unknown" if v is None else f"{v:.5g}" for k, v in list(answer.inputs.items())[:32]},
    }


def sentence(answer: RoleDecision) -> str:
    """One sentence for people."""
    need = "" if answer.need is None else f": need {answer.need:.2f} = {answer.formula}"
    limits = "".join(f"; {limit.reason.value}: {limit.detail}" for limit in answer.limits)
    return f"{answer.current} -> {answer.desired} ({answer.reason.value}){need}{limits}"[:1000]


def _learned(scaled: Scaled | None, before: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """What was learned, told anew when a number that people read moved by more than a tenth, or the counts' past did."""
    if scaled is None or scaled.decision is None:
        return dict(before)
    learned = scaled.decision.learned
    told: dict[str, Any] = {}
    number = learned.prefill.throughput if role == "prefill" else learned.decode.kv_per_request
    if role == "prefill" and number:
        told["throughput"] = round(float(f"{number:.2g}"))
    lead = scaled.lead.get(role)
    if lead:
        told["leadTime"] = f"p50 {lead.p50:.2g}s, p90 {lead.p90:.2g}s"
    elif before.get("leadTime"):
        told["leadTime"] = before["leadTime"]
    told["digest"] = digest(learned, role, scaled.decision.of(role))
    if before.get("digest") == told["digest"] and before.get("leadTime", "") == told.get("leadTime", ""):
        return dict(before)
    told["state"] = state_of(learned, role)
    return told


def digest(learned: Learned, role: Role, answer: RoleDecision) -> str:
    """The learned numbers that a restart must not lose, to two digits: equal digests are not worth a write."""
    if role == "prefill":
        numbers: list[float | None] = [learned.prefill.throughput]
    else:
        d = learned.decode
        numbers = [d.kv_per_request, d.kv_capacity, d.itl_batch, d.output, float(any(g.congested for g in d.gates))]
    return ",".join("-" if n is None else f"{n:.2g}" for n in (*numbers, float(answer.desired)))


def _active(mode: Mode, scaled: Scaled | None, answer: RoleDecision | None) -> Condition:
    type_ = PoolType.SCALING_ACTIVE
    if mode == "Static":
        return Condition(type_, "False", "Static", "spec.scaling is absent: the number is that of the spec")
    if mode == "External":
        return Condition(type_, "False", "External", "an HPA, KEDA or a person writes the scale of this PDPool")
    if scaled is None or answer is None:
        why = scaled.why_not if scaled and scaled.why_not else "no signal was read yet"
        return Condition(type_, "False", "NotScraped", f"the number is kept: {why}")
    if scaled.unknown:
        reason = "NoSeries" if answer.need is None and not any(v is not None for v in answer.inputs.values()) else "SignalsUnknown"
        if answer.reason is Reason.SIGNALS_UNKNOWN:
            return Condition(type_, "False", reason, f"the number is kept: {scaled.unknown}")
    if mode == "Advisory":
        return Condition(type_, "False", "Advisory", "decides and reports in desiredReplicas; writes nothing")
    return Condition(type_, "True", "Deciding", "follows what arrives, runs and waits")


def _limited(mine: PoolPlan, answer: RoleDecision | None, mode: Mode, short: int) -> Condition:
    type_ = PoolType.SCALING_LIMITED
    if short:
        text = f"{short} of {mine.desired} replicas find no room: see the condition Placed of the PDDeployment"
        return Condition(type_, "True", "NoCapacity", text)
    if mine.limit:
        return Condition(type_, "True", mine.limit, mine.limit_message)
    shown = (Reason.MAX_REPLICAS, Reason.MAX_GPUS, Reason.NO_CAPACITY, Reason.GATED_BY_DECODE, Reason.COOLDOWN)
    if answer and mode != "External" and answer.limits and answer.limits[-1].reason in shown:
        # A cool-down comes and goes with each tick's need, so it is told without its numbers.
        last = answer.limits[-1]
        text = "fewer would do; a step down waits for its window" if last.reason is Reason.COOLDOWN else last.detail
        return Condition(type_, "True", last.reason.value, text)
    return Condition(type_, "False", "AsExpected")


def state_of(learned: Learned, role: Role) -> str:
    """Learned numbers of one role as text for its status."""
    mine = learned.prefill if role == "prefill" else learned.decode
    text = json.dumps({"time": learned.time, "learned": codec.encode(mine)}, sort_keys=True, separators=(",", ":"))
    return text if len(text) <= MAX_STATE else ""


def _instant(seconds: float) -> str:
    return (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=int(seconds))).strftime("%Y-%m-%dT%H:%M:%SZ")
