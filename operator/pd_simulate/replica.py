"""Replica: what P and D engines have in common: a life, and time spent busy."""

from __future__ import annotations

from typing import Literal

from pd_simulate.clock import Clock
from pd_simulate.view import Role

State = Literal["blocked", "starting", "ready", "draining", "gone"]


class Replica:
    """One engine instance. `since` is when it entered its state; the pools move it from state to state."""

    __slots__ = ("active_since", "busy_seconds", "clock", "created", "name", "ready_at", "role", "since", "slice", "state")

    def __init__(self, clock: Clock, name: str, role: Role, slice_index: int) -> None:
        self.clock = clock
        self.name = name
        self.role: Role = role
        self.slice = slice_index
        self.state: State = "blocked"
        self.created = clock.now
        self.since = clock.now
        self.ready_at: float | None = None
        self.busy_seconds = 0.0
        self.active_since = -1.0  # negative: idle

    def begin(self) -> None:
        """Work runs from now on."""
        if self.active_since < 0:
            self.active_since = self.clock.now

    def idle(self) -> None:
        """No work runs from now on."""
        if self.active_since >= 0:
            self.busy_seconds += self.clock.now - self.active_since
            self.active_since = -1.0

    def busy(self) -> float:
        """Seconds with work running, so far."""
        return self.busy_seconds + (self.clock.now - self.active_since if self.active_since >= 0 else 0.0)
