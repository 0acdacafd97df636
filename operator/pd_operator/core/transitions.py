"""Which changes of conditions are worth an Event: those that a person would want to find in `kubectl describe`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pd_operator.api.conditions import Reason, Type

REPORTED = (Type.ACCEPTED, Type.PLACED, Type.PROGRESSING, Type.DEGRADED, Type.READY)
QUIET = frozenset(
    {Reason.STARTING, Reason.AS_EXPECTED, Reason.ROLLING_OUT, Reason.SUSPENDED, Reason.READY, Reason.BOUND, Reason.UPDATED}
)


@dataclass(frozen=True, slots=True)
class Transition:
    """One event to record."""

    type: Literal["Normal", "Warning"]
    reason: str
    note: str


def transitions(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> list[Transition]:
    """Events for the reported conditions whose status or reason changed."""
    old = {c["type"]: (c["status"], c["reason"]) for c in before}
    found = []
    for condition in after:
        type_, status, reason = condition["type"], condition["status"], condition["reason"]
        if type_ not in REPORTED or old.get(type_) == (status, reason):
            continue
        if type_ not in old and reason in QUIET:
            continue  # a new object starts: nothing has turned
        bad = "True" if type_ == Type.DEGRADED else "False"
        warning = status == bad and reason not in QUIET
        note = f"{type_}={status}: {condition['message']}" if condition["message"] else f"{type_}={status}"
        found.append(Transition("Warning" if warning else "Normal", str(reason), note))
    return found
