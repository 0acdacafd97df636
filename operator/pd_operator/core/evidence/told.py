"""Told: how status tells the evidence. Nothing is written anew while no finding changes and no count moves by much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pd_operator.api.conditions import Condition, Reason, Type
from pd_operator.core.evidence.finding import instant, read, record, seconds_of
from pd_operator.core.evidence.watch import Evidence
from pd_operator.core.names import Role

STEP: Final = 0.1  # a count is told anew when it grew by this share
POINTS: Final = 2.0  # percentage points
OFTEN: Final = 600.0  # seconds between two new values of lastVerified


def handoff(evidence: Evidence | None, previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.handoff; what was told before while no look was made."""
    before: Mapping[str, Any] = previous.get("handoff") or {}
    if evidence is None:
        return dict(before)
    told: dict[str, Any] = {
        "fallbackRequests": _counted(evidence.totals.get("fallbacks", 0.0), before.get("fallbackRequests")),
        "expired": _counted(evidence.totals.get("expired", 0.0), before.get("expired")),
    }
    if evidence.last_verified is not None:
        old = seconds_of(str(before.get("lastVerified", "")))
        stands = old is not None and 0 <= evidence.last_verified - old < OFTEN
        told["lastVerified"] = before["lastVerified"] if stands else instant(evidence.last_verified)
    if evidence.unverified:
        told["unverified"] = list(evidence.unverified)
    if evidence.findings:
        told["findings"] = record(evidence.findings)
    return told


def _counted(number: float, before: Any) -> int:
    old = before if isinstance(before, int) else None
    return old if old is not None and old > 0 and old <= number <= old * (1 + STEP) else round(number)


def attainment(evidence: Evidence | None, previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.attainment: told anew when a share moved by more than `POINTS`, met its percentile or ceased to, or is not known any
    more; what was told before while no look was made."""
    before: Mapping[str, Any] = previous.get("attainment") or {}
    if evidence is None:
        return dict(before)
    found = evidence.attained
    if found.ttft is None and found.itl is None:
        return {}
    shares = {"ttft": found.ttft, "itl": found.itl}
    if before and not any(_moved(str(before.get(name, "")), share, found.percentile) for name, share in shares.items()):
        return dict(before)
    told: dict[str, Any] = {name: percent(share) for name, share in shares.items() if share is not None}
    if found.goodput is not None:
        told["goodputMin"], told["goodputMax"] = (percent(bound) for bound in found.goodput)
    return {**told, "window": f"{found.window:.0f}s", "age": f"{found.age:.0f}s"}


def _moved(before: str, share: float | None, percentile: int) -> bool:
    if share is None or not before:
        return (share is None) != (not before)
    old = float(before.removesuffix("%"))
    return abs(100 * share - old) > POINTS or (old >= percentile) != (round(100 * share, 1) >= percentile)


def percent(share: float) -> str:
    """0.975 -> 97.5%."""
    return f"{100 * share:.1f}%"


def verified(evidence: Evidence | None, previous: Mapping[str, Any], role: Role) -> int:
    """verifiedReplicas of a role; what was told before while no look was made."""
    if evidence is not None:
        return evidence.verified.get(role, 0)
    before: Mapping[str, Any] = next((r for r in previous.get("roles") or () if r.get("name") == role), {})
    return int(before.get("verifiedReplicas") or 0)


def degraded(evidence: Evidence | None, previous: Mapping[str, Any], others: Sequence[tuple[Reason, str]] = ()) -> Condition:
    """The condition Degraded: the gravest finding, then what others found, each with its reason."""
    findings = evidence.findings if evidence is not None else read(previous.get("handoff") or {})
    wrong = [(f.reason, f.sentence, f"{f.reason.value} {f.subject}") for f in findings]
    wrong += [(reason, sentence, reason.value) for reason, sentence in others]
    if not wrong:
        return Condition(Type.DEGRADED, "False", Reason.AS_EXPECTED)
    more = f" (and {len(wrong) - 1} more: {', '.join(name for *_, name in wrong[1:4])})" if len(wrong) > 1 else ""
    return Condition(Type.DEGRADED, "True", wrong[0][0], wrong[0][1] + more)


def gist(told: Mapping[str, Any], evidence: Evidence) -> tuple[object, ...]:
    """What of a look status tells, as a value to compare: asks for a reconcile when it differs."""
    mine = told.get("handoff") or {}
    return (
        mine.get("fallbackRequests"), mine.get("expired"), mine.get("lastVerified"), evidence.unverified,
        tuple(sorted(evidence.verified.items())), tuple(f.key for f in evidence.findings),
        bool(evidence.lead), tuple(sorted(told.get("attainment", {}).items())),
    )  # fmt: skip
