"""The conditions HandoffVerified and OffloadVerified: what the canaries of the slices that status is about have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from pd_operator.api.conditions import REASONS, Condition, Reason, Type
from pd_operator.core.evidence.watch import contradiction, offload_contradiction
from pd_operator.core.names import canary
from pd_operator.core.plan import Plan
from pd_operator.core.proof import Verdict
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.verification import TRIES, Proven, Record, mode_of

OFF: Final = "spec.verification is Disabled: no canary runs, and Ready does not wait for one"
SINCE: Final = "it was proven, and counters speak against it since: "
# What counters accuse -> the reason of a condition that a canary had proven.
TAKEN_BACK: Final[Mapping[Reason, Reason]] = {
    Reason.SILENT_FALLBACK: Reason.SILENT_FALLBACK,
    Reason.CACHE_DOWN: Reason.SERVER_DOWN,
    Reason.NOT_SUBMITTING: Reason.NOT_SUBMITTING,
}
_GRAVITY: Final = {False: 0, None: 1, True: 2}


def verified(snapshot: Snapshot, plan: Plan, focus: Sequence[SlicePlan]) -> list[Condition]:
    """Both conditions; the second only with LMCache."""
    types = [Type.HANDOFF_VERIFIED] + ([Type.OFFLOAD_VERIFIED] if snapshot.spec.lmcache is not None else [])
    if mode_of(snapshot) == "Disabled":
        return [Condition(t, "Unknown", Reason.NOT_YET_RUN, OFF) for t in types]
    return [_condition(snapshot, plan, focus, t) for t in types]


def stands_in_the_way(snapshot: Snapshot, plan: Plan, focus: Sequence[SlicePlan], condition: Condition) -> bool:
    """Whether Ready waits for this condition: with Required, until it is True, or every slice is proven as far as it can be."""
    if mode_of(snapshot) != "Required" or condition.status == "True":
        return False
    known = [plan.verification.get(s.name, Record(s.name)) for s in focus]
    return condition.status == "False" or not known or any(record.proven is None for record in known)


def _condition(snapshot: Snapshot, plan: Plan, focus: Sequence[SlicePlan], type_: Type) -> Condition:
    found = [_verdict(snapshot, plan, s, type_ is Type.OFFLOAD_VERIFIED) for s in focus]
    if not found:
        return Condition(type_, "Unknown", Reason.NOT_YET_RUN, "there is no slice yet")
    worst = min(found, key=lambda v: _GRAVITY[v.proven])
    status = {True: "True", False: "False", None: "Unknown"}
    if worst.proven and len(found) > 1:
        return Condition(type_, "True", worst.reason, f"all {len(found)} slices are proven; {worst.sentence}")
    return Condition(type_, status[worst.proven], worst.reason, worst.sentence)  # type: ignore[arg-type]  # a dict of literals


def _verdict(snapshot: Snapshot, plan: Plan, slice_: SlicePlan, offload: bool) -> Verdict:
    """What is known of one slice. One that was proven stays so until its canary has failed as often as is tried at once."""
    record = plan.verification.get(slice_.name, Record(slice_.name))
    trial = record.trial
    refused = Verdict(False, Reason.CANARY_FORBIDDEN, plan.canary_refused) if plan.canary_refused else record.blocked
    if refused is not None and record.proven is None:
        found = Verdict(None, Reason.NOT_YET_RUN, refused.sentence) if offload else refused
    elif trial is not None and trial.failures >= TRIES:
        said = (trial.offload or trial.handoff) if offload else trial.handoff
        log = f" (Job {canary(slice_.name, trial.number)}, {trial.failures} failures in a row){_next(said)}"
        found = said if said.proven is True else replace(said, sentence=f"{said.sentence}{log}")
    elif record.proven is not None:
        found = _contradicted(snapshot, slice_, record.proven, offload) or _proven(record, record.proven, offload)
    else:
        found = Verdict(None, Reason.NOT_YET_RUN, _waiting(record, offload))
    return replace(found, sentence=f"{slice_.name}: {found.sentence}")


def _next(said: Verdict) -> str:
    """What the user does about it, as docs/reference/conditions.md says."""
    remedy = REASONS[said.reason].remedy
    return f". Next: {remedy[0].lower()}{remedy[1:]}" if said.proven is False and remedy else ""


def _contradicted(snapshot: Snapshot, slice_: SlicePlan, proven: Proven, offload: bool) -> Verdict | None:
    """What counters say since against the proof of a handoff or an offload (invariant I5); after a restart what was said before
    stands until the first look at them."""
    type_ = Type.OFFLOAD_VERIFIED if offload else Type.HANDOFF_VERIFIED
    if snapshot.evidence is None:
        before: Mapping[str, Any] = next((c for c in snapshot.status.get("conditions", ()) if c["type"] == type_), {})
        prefix = f"{slice_.name}: {SINCE}"
        told = before.get("status") == "False" and str(before.get("message", "")).startswith(prefix)
        return Verdict(False, Reason(before["reason"]), before["message"].removeprefix(f"{slice_.name}: ")) if told else None
    look = offload_contradiction if offload else contradiction
    against = look(snapshot.evidence, slice_.name, proven.at.timestamp())
    if against is None:
        return None
    return Verdict(False, TAKEN_BACK.get(against.reason, Reason.TRANSFER_FAILED), f"{SINCE}{against.sentence}")


def _proven(record: Record, proven: Proven, offload: bool) -> Verdict:
    said = record.trial.offload if record.trial is not None and not record.trial.failures else None
    if offload and said is not None and said.proven is None:
        return said
    again = "; its canary runs again" if record.running else ""
    seen = proven.offload if offload else proven.handoff
    return Verdict(True, Reason.VERIFIED, f"{seen} (Job {canary(record.slice, proven.number)}){again}")


def _waiting(record: Record, offload: bool) -> str:
    trial = record.trial
    if trial is not None and trial.failures:
        said = (trial.offload or trial.handoff) if offload else trial.handoff
        why = said.sentence if said.proven is None else f"{said.reason}: {said.sentence}"
        log = f"Job {canary(record.slice, trial.number)}"
        return f"run {trial.failures} of {TRIES} proved nothing: {why} ({log}); it is tried again"
    if record.running:
        return f"Job {record.running} runs"
    return "the canary starts when prefill, decode and router are ready"
