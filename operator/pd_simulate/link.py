"""Nic: KV transfers that leave one P replica, sharing its link fairly (facts/autoscaling.md 4.4)."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush

from pd_simulate.clock import Clock
from pd_simulate.request import Request


class Nic:
    """Processor sharing: with n active transfers each moves at bandwidth / n. `done(request, number)` is called at the end.

    Kept in virtual bytes: all active transfers advance alike, so the one that ends first is the top of a heap.
    """

    __slots__ = ("_flows", "_last", "_order", "_version", "_virtual", "bandwidth", "clock", "done", "setup")

    def __init__(self, clock: Clock, bandwidth: float, setup: float, done: Callable[[Request, int], None]) -> None:
        self.clock = clock
        self.bandwidth = bandwidth
        self.setup = setup
        self.done = done
        self._flows: list[tuple[float, int, int, Request]] = []
        self._virtual = 0.0
        self._order = 0
        self._last = 0.0
        self._version = 0

    @property
    def active(self) -> int:
        """Transfers that move bytes now."""
        return len(self._flows)

    def start(self, request: Request, size: float) -> None:
        """Begin to move `size` bytes of the request after the set-up time."""
        flow = (request, request.transfer, size)
        if self.setup > 0:
            self.clock.at(self.clock.now + self.setup, self._join, flow)
        else:
            self._join(flow)

    def change(self, bandwidth: float) -> None:
        """From now on this bandwidth."""
        self._advance()
        self.bandwidth = bandwidth
        self._schedule()

    def _join(self, flow: tuple[Request, int, float]) -> None:
        request, number, size = flow
        self._advance()
        self._order += 1
        heappush(self._flows, (self._virtual + size, self._order, number, request))
        self._schedule()

    def _advance(self) -> None:
        now = self.clock.now
        if self._flows:
            self._virtual += (now - self._last) * self.bandwidth / len(self._flows)
        self._last = now

    def _schedule(self) -> None:
        self._version += 1
        if self._flows:
            left = max(0.0, self._flows[0][0] - self._virtual) * len(self._flows) / self.bandwidth
            self.clock.at(self.clock.now + left, self._end, self._version)

    def _end(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        end, _, number, request = heappop(self._flows)
        self._virtual = end  # exact: no drift from the rounding of time
        self._schedule()
        self.done(request, number)
