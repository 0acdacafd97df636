"""Pool status: how a PDPool tells its scaling: the decision, what was learned, and the two conditions."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any, cast

from pd_operator.api.conditions import MAX_MESSAGE, Condition, PoolType, Status
from pd_operator.core.names import Role
from pd_operator.core.pools import Mode, PoolPlan
from pd_operator.core.scaled import Scaled, lead_text, two_digits
from pd_operator.core.scaling import codec
from pd_operator.core.scaling.decision import Reason, RoleDecision
from pd_operator.core.scaling.learned import Learned

MAX_STATE = 8192  # characters of the learned numbers in a status
NUMBER = re.compile(r"\d+(?:\.\d+)?")
QUIET = (Reason.HOLD.value, Reason.COOLDOWN.value)
MOVES = (Reason.DEMAND.value, Reason.BACKLOG.value)
DECIDED: Mapping[Mode, tuple[str, ...]] = {
    "Auto": ("Deciding", "SignalsUnknown", "NoSeries"),
    "Advisory": ("Advisory", "SignalsUnknown", "NoSeries"),
    "External": (),
}
SHOWN = (Reason.MAX_REPLICAS, Reason.MAX_GPUS, Reason.NO_CAPACITY, Reason.GATED_BY_DECODE, Reason.COOLDOWN)
LAW = tuple(reason.value for reason in SHOWN)
READ = ("Q", "R", "H", "ITL", "TTFT")  # inputs that are readings of this tick: without any of them no series is there


def pool_scaling(
    mode: Mode, mine: PoolPlan, scaled: Scaled | None, previous: Mapping[str, Any], role: Role, short: int, conflict: str = ""
) -> dict[str, Any]:
    """desiredReplicas, lastDecision, learned and the two conditions of a pool's status.

    Nothing here changes while a decision, a bound and what was learned stay what they are (invariant I2).
    """
    answer = scaled.decision.of(role) if scaled and mode != "Static" else None
    before = {str(c.get("type")): c for c in previous.get("conditions") or ()}
    type_ = PoolType.SCALING_ACTIVE
    clash = Condition(type_, "False", "AutoscalerConflict", conflict) if conflict else None
    conditions = (clash or _active(mode, scaled, answer), _limited(mine, answer, mode, short, scaled.over if scaled else ""))
    told: dict[str, Any] = {"desiredReplicas": answer.desired if answer else mine.desired}
    if scaled is None and mode != "Static":  # this process has not looked yet: what was told before stands
        conditions = (_kept(conditions[0], before, DECIDED[mode]), _kept(conditions[1], before, () if mode == "External" else LAW))
        told["desiredReplicas"] = previous.get("desiredReplicas", mine.desired)
    decision = _last_decision(answer, scaled, previous) if answer and scaled else previous.get("lastDecision")
    if decision:
        told["lastDecision"] = decision
    learned = _learned(scaled, previous.get("learned") or {}, role) if mode != "Static" else previous.get("learned")
    if learned:
        told["learned"] = learned
    told["conditions"] = [_settled(c, before.get(c.type.value, {})) for c in conditions]
    return told


def _kept(condition: Condition, before: Mapping[str, Mapping[str, Any]], reasons: tuple[str, ...]) -> Condition:
    """The condition as it was told before, where a tick gave it one of these reasons and nothing else says more."""
    old = before.get(condition.type.value, {})
    if old.get("reason") not in reasons or condition.reason not in ("NotScraped", "AsExpected"):
        return condition
    return Condition(condition.type, cast(Status, old["status"]), str(old["reason"]), str(old.get("message", "")))


def _settled(condition: Condition, before: Mapping[str, Any]) -> Condition:
    """The message told before, where only numbers in it moved: ages and needs move with every tick, and are metrics.

    Those of a budget move when somebody's replicas do.
    """
    message = str(before.get("message", ""))
    same = (before.get("status"), before.get("reason")) == (condition.status, str(condition.reason))
    if same and not message.startswith("budget ") and NUMBER.sub("#", message) == NUMBER.sub("#", condition.message[:MAX_MESSAGE]):
        return replace(condition, message=message)
    return condition


def _last_decision(answer: RoleDecision, scaled: Scaled, previous: Mapping[str, Any]) -> dict[str, Any]:
    """The decision. The one told before stands while it asks for the same count for the same reason, or for none any more: that
    a count is right since is no news."""
    before = previous.get("lastDecision") or {}
    reason = answer.reason
    settled = reason in QUIET and before.get("reason") in (*QUIET, *MOVES)
    if before.get("toReplicas") == answer.desired and (before.get("reason") == reason.value or settled):
        return dict(before)
    return {
        "time": _instant(scaled.time),
        "fromReplicas": answer.current,
        "toReplicas": answer.desired,
        "reason": reason.value,
        "message": sentence(answer),
        "inputs": {k: "unknown" if v is None else f"{v:.5g}" for k, v in list(answer.inputs.items())[:32]},
    }


def sentence(answer: RoleDecision) -> str:
    """One sentence for people."""
    need = "" if answer.need is None else f": need {answer.need:.2f} = {answer.formula}"
    limits = "".join(f"; {limit.reason.value}: {limit.detail}" for limit in answer.limits)
    return f"{answer.current} -> {answer.desired} ({answer.reason.value}){need}{limits}"[:1000]


def _learned(scaled: Scaled | None, before: Mapping[str, Any], role: Role) -> dict[str, Any]:
    """What was learned, told anew when one of its numbers moved by more than a tenth, or a count changed."""
    if scaled is None:
        return dict(before)
    learned, lead = scaled.decision.learned, scaled.lead.get(role)
    told: dict[str, Any] = {"digest": digest(learned, role, scaled.decision.of(role), str(before.get("digest", "")))}
    shown = lead_text(lead) if lead else str(before.get("leadTime", ""))
    if shown:
        told["leadTime"] = shown
    if before.get("digest") == told["digest"] and before.get("leadTime", "") == shown:
        return dict(before)
    if role == "prefill" and learned.prefill.throughput:
        told["throughput"] = int(float(two_digits(learned.prefill.throughput)))
    told["state"] = state_of(learned, role)
    return told


def digest(learned: Learned, role: Role, answer: RoleDecision, before: str = "") -> str:
    """The learned numbers that a restart must not lose, to three digits; `before` itself while each is within a tenth of it."""
    exact: list[float | None] = [float(answer.desired)]
    if role == "prefill":
        numbers = [learned.prefill.throughput]
    else:
        d = learned.decode
        exact.append(float(any(g.congested for g in d.gates)))
        numbers = [d.kv_per_request, d.kv_capacity, d.itl_batch, d.output]
    text = ",".join("-" if n is None else f"{n:.3g}" for n in (*exact, *numbers))
    old, new = before.split(","), text.split(",")
    if len(old) != len(new) or old[: len(exact)] != new[: len(exact)]:
        return text
    return before if all(map(_near, old[len(exact) :], numbers)) else text


def _near(old: str, new: float | None) -> bool:
    if new is None or old in ("-", ""):
        return (new is None) == (old == "-")
    try:
        return abs(new - float(old)) <= 0.1 * abs(float(old))
    except ValueError:
        return False


def _active(mode: Mode, scaled: Scaled | None, answer: RoleDecision | None) -> Condition:
    type_ = PoolType.SCALING_ACTIVE
    if mode == "Static":
        return Condition(type_, "False", "Static", "spec.scaling is absent: the number is that of the spec, or stays what it is")
    if mode == "External":
        return Condition(type_, "False", "External", "an HPA, KEDA or a person writes the scale of this PDPool")
    if scaled is None or answer is None:
        return Condition(type_, "False", "NotScraped", "the number is kept: no signal was read yet")
    unknown = next((limit for limit in answer.limits if limit.reason is Reason.SIGNALS_UNKNOWN), None)
    if unknown is not None:
        nothing = not any(value is not None for name, value in answer.inputs.items() if name in READ)
        why = f"{unknown.detail}; {scaled.unknown}" if scaled.unknown else unknown.detail
        reason, since = "NoSeries" if nothing and scaled.unknown else "SignalsUnknown", scaled.since.get(answer.role)
        kept = f"the number is kept{f' since {_instant(since)}' if since is not None else ''}"
        return Condition(type_, "False", reason, f"{kept}: {why}")
    if mode == "Advisory":
        return Condition(type_, "False", "Advisory", "decides and reports in desiredReplicas; writes nothing")
    return Condition(type_, "True", "Deciding", "follows what arrives, runs and waits")


def _limited(mine: PoolPlan, answer: RoleDecision | None, mode: Mode, short: int, over: str) -> Condition:
    type_ = PoolType.SCALING_LIMITED
    if short:
        text = f"{short} of {mine.desired} replicas find no room: see the condition Placed of the PDDeployment"
        return Condition(type_, "True", "NoCapacity", text)
    if mine.limit:
        return Condition(type_, "True", mine.limit, mine.limit_message)
    if over and mode == "Auto":
        return Condition(type_, "True", Reason.MAX_GPUS.value, over)
    if answer and mode != "External" and answer.limits and answer.limits[-1].reason in SHOWN:
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
