"""The protocols of both sources of signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from pd_operator.core.evidence.counters import Counters
from pd_operator.signals.fleet import Key
from pd_operator.signals.load import Load


class Source(Protocol):
    """Where signals come from. Every deployment of the fleet that scales is in the answer; what is
    not known says so and never raises."""

    async def read(self, now: float) -> Mapping[Key, Load]:
        """The load of every PDDeployment of the fleet at `now` (seconds since 1970)."""
        ...

    async def run(self) -> None:
        """Whatever has to go on between reads, until cancelled."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...


class Pages(Protocol):
    """Where the counters of each pod come from: the same two sources."""

    async def counters(self, now: float) -> Mapping[Key, tuple[Counters, ...]]:
        """The newest page of every target of every deployment of the fleet; what cannot be had says so and never raises."""
        ...


class Both(Source, Pages, Protocol):
    """A source of signals and of counters."""
