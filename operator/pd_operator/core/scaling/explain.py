"""Explanations: a decision in words and numbers for people."""

from __future__ import annotations

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decision import Alert, Bottleneck, Decision, Reason, RoleDecision
from pd_operator.core.scaling.law import DEFAULT, Law

BOTTLENECK = {
    Bottleneck.PREFILL: "prefill: more arrives than it can prefill at the load it should have",
    Bottleneck.DECODE: "decode: what runs and waits does not fit into what is ready",
    Bottleneck.NONE: "none: both roles have room",
    Bottleneck.UNKNOWN: "unknown: a signal that would tell is missing",
}
ALERT = {
    Alert.BROKEN_PATH: "handoffs wait longer than the lease while decode runs nothing: the path is broken; this is no load",
    Alert.STALLED_ENGINE: "prompts wait while prefill runs nothing: an engine stands still; this is no load",
}
_CHANGE = {
    Reason.GATED_BY_DECODE: "handoffs that wait less than half of what they may, for some ticks",
    Reason.MAX_REPLICAS: "a higher maxReplicas",
    Reason.MAX_GPUS: "a higher maxGPUs, or less load on the other role or on those that share the budget",
    Reason.NO_CAPACITY: "room for the replicas that cannot run",
    Reason.SIGNALS_UNKNOWN: "the missing signals",
    Reason.COOLDOWN: "time: a step down needs the lower need for the whole window",
    Reason.ROLLOUT: "the end of the rollout",
}


def explain(decision: Decision, bounds: Bounds, law: Law = DEFAULT) -> list[str]:
    """Lines: bottleneck, then for each role the answer, the formula with its numbers, the limits, what would change it."""
    lines = [f"bottleneck: {BOTTLENECK[decision.bottleneck]}"]
    lines += [f"alert: {ALERT[a]}" for a in decision.alerts]
    if decision.congested:
        names = ", ".join(name or "the only one" for name in decision.congested)
        lines.append(f"decode is congested in slice {names}: {_wait(decision)}")
    for role in (decision.prefill, decision.decode):
        lines += _role(role, bounds, law)
    return lines


def _wait(decision: Decision) -> str:
    wait, budget = decision.decode.inputs.get("wait"), decision.decode.inputs.get("wait_budget")
    waits = "handoffs wait and none starts" if wait is None else f"a handoff waits {wait:.3g} s"
    return waits if budget is None else f"{waits}, of {budget:.3g} s that it may"


def _role(role: RoleDecision, bounds: Bounds, law: Law) -> list[str]:
    move = f"stays at {role.current}" if role.desired == role.current else f"{role.current} -> {role.desired}"
    lines = [f"{role.role}: {move} ({role.reason.value})"]
    if role.need is not None:
        lines.append(f"  need {role.need:.3f} = {role.formula}: {role.wanted} wanted")
    lines.append("  inputs " + ", ".join(f"{k} {'unknown' if v is None else f'{v:.5g}'}" for k, v in role.inputs.items()))
    lines += [f"  limit {limit.reason.value}: {limit.before} -> {limit.after}, {limit.detail}" for limit in role.limits]
    if (change := _change(role, bounds, law)) is not None:
        lines.append(f"  would change it: {change}")
    return lines


def _change(role: RoleDecision, bounds: Bounds, law: Law) -> str | None:
    if role.reason in _CHANGE:
        return _CHANGE[role.reason]
    own = bounds.prefill if role.role == "prefill" else bounds.decode
    if role.need is None:
        return None
    up = f"a need above {role.desired + law.dead_band:g}" if role.desired < own.maximum else "a higher maxReplicas"
    down = f"a need of at most {role.desired - 1 + law.dead_band:g} for the whole down window"
    return f"{up}, or {down}" if role.desired > own.minimum else up
