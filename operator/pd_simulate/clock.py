"""Clock: simulated time and the heap of what happens next."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """Events in order of time, then of creation, so that equal times are deterministic. A call that became void checks itself."""

    __slots__ = ("_count", "events", "heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._count = 0
        self.heap: list[tuple[float, int, Callable[[Any], None], Any]] = []

    def at(self, time: float, call: Callable[[Any], None], argument: Any) -> None:
        """Call `call(argument)` at `time` seconds (not before now)."""
        self._count += 1
        heappush(self.heap, (time, self._count, call, argument))

    def step(self) -> bool:
        """Run the next event; False when there is none."""
        if not self.heap:
            return False
        self.now, _, call, argument = heappop(self.heap)
        self.events += 1
        call(argument)
        return True
