"""Pool record: the last tick with everything that it was made from, in the status of both PDPools, for `kubectl pdd explain`.

Readings belong to metrics and not to status, so the record is no mirror of the ticks. It is written anew with every new answer
(count, reason, bottleneck), when the status is written anyway, and when a need has moved so far that the numbers would mislead,
at most once in REFRESH seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pd_operator.core.names import ROLES
from pd_operator.core.scaled import Scaled

MAX_RECORD = 16384  # characters; one slice is about 3,000, each further one 300
REFRESH = 300.0  # seconds between two writes that only the record asks for
MOVED = (0.5, 0.1)  # replicas, and share of the need: what both have to exceed


@dataclass(frozen=True, slots=True)
class Needs:
    """Fractional replicas that a tick found needed; None where it could not tell. `time` is that of the tick, seconds."""

    time: float
    prefill: float | None
    decode: float | None
    answer: tuple[object, ...] = ()  # bottleneck, then count and reason of both roles

    def stale(self, later: Needs) -> bool:
        """Whether a record of these needs should give way to that of a later tick."""
        if self.answer != later.answer:
            return True
        if later.time - self.time < REFRESH:
            return False
        return any(_moved(old, new) for old, new in ((self.prefill, later.prefill), (self.decode, later.decode)))


def needs_of(scaled: Scaled) -> Needs:
    """What a tick found."""
    roles = [scaled.decision.of(role) for role in ROLES]
    answer = (scaled.decision.bottleneck.value, *((role.desired, role.reason.value) for role in roles))
    return Needs(scaled.time, roles[0].need, roles[1].need, answer)


def pool_record(status: Mapping[str, Any], previous: Mapping[str, Any], scaled: Scaled | None) -> str:
    """The record for a status that is otherwise `status`; "" when no tick has been."""
    before = str(previous.get("record", ""))
    if scaled is None or scaled.record is None:
        return before
    changed = any(previous.get(key) != value for key, value in status.items())
    old = _needs(before)
    if not (changed or old is None or old.stale(needs_of(scaled))):
        return before
    line = scaled.record.line()
    return line if len(line) <= MAX_RECORD else before


def _needs(record: str) -> Needs | None:
    """Needs of a stored record; None where there is none that can be read."""
    try:
        data = json.loads(record)
        decision = data["decision"]
        roles = [decision[role] for role in ROLES]
        needs = [None if "flow" not in role else float(role["flow"]) + float(role.get("backlog") or 0.0) for role in roles]
        answer = (decision["bottleneck"], *((role["desired"], role["reason"]) for role in roles))
        return Needs(float(data["now"]), needs[0], needs[1], answer)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _moved(old: float | None, new: float | None) -> bool:
    if old is None or new is None:
        return (old is None) != (new is None)
    return abs(new - old) > max(MOVED[0], MOVED[1] * old)
