"""Back-pressure: who refuses a request, how long state is kept, who frees it, how long more takes (DESIGN §8).

Nobody is an answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pd_operator.core.names import ROLES, Role
from pd_operator.core.scaled import LeadTime, two_digits

STEP = 0.2  # a lead time is told anew when it moved by this share


@dataclass(frozen=True, slots=True)
class Contract:
    """What a router and an engine at their versions do with more than they can take; upstream/backpressure.py makes it."""

    rejected_at: str
    code: str
    kept_for: str
    freed_by: str
    not_enforced: tuple[str, ...] = ()


def status(contract: Contract, lead: Mapping[Role, LeadTime], previous: Mapping[str, Any]) -> dict[str, Any]:
    """status.backpressure. Lead times are measured, so they are absent before the first; the slower role counts."""
    told: dict[str, Any] = {
        "rejectedAt": contract.rejected_at,
        "code": contract.code,
        "keptFor": contract.kept_for,
        "freedBy": contract.freed_by,
    }
    if contract.not_enforced:
        told["notEnforced"] = list(contract.not_enforced)
    before = previous.get("backpressure") or {}
    known = [lead[role] for role in ROLES if role in lead]
    for field, values in (("scaleOutP50", [k.p50 for k in known]), ("scaleOutP90", [k.p90 for k in known])):
        text = _told(max(values), str(before.get(field, ""))) if values else str(before.get(field, ""))
        if text:
            told[field] = text
    return told


def _told(seconds: float, before: str) -> str:
    try:
        old = float(before.removesuffix("s"))
    except ValueError:
        old = 0.0
    return before if old and abs(seconds - old) <= STEP * old else f"{two_digits(seconds)}s"
