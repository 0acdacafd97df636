"""What a reconcile can end with. Only an exception backs off."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Done:
    """The world is as planned; look again after `requeue_after` seconds, or only on the next event."""

    requeue_after: float | None = None


@dataclass(frozen=True, slots=True)
class Waiting:
    """Something outside the operator has to happen first; look again after `requeue_after` seconds at the latest."""

    reason: str
    requeue_after: float


@dataclass(frozen=True, slots=True)
class Terminal:
    """The user has to change the object: no retry until its next event."""

    reason: str


Result = Done | Waiting | Terminal
