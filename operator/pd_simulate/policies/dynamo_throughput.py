"""Throughput loop of the Dynamo planner: forecast requests, ISL and OSL of the next interval and size both pools for their rate.

Source read: ai-dynamo 1.6.1 dynamo/planner/core/throughput_scaling.py. Every 180 s; no headroom, no queue term, no lead time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_simulate.policies.capacity import decode_capacity, prefill_capacity
from pd_simulate.policies.forecast import Predictor, predictor
from pd_simulate.policies.signals import RateWindow, ceil
from pd_simulate.view import Profile, View

MAX_CHANGE = 8  # replicas of one pool per observation (max_throughput_scaling_replicas)


@dataclass(slots=True)
class ThroughputLoop:
    """State: predictors and the traffic window."""

    profile: Profile
    kind: str = "arima"
    interval: float = 180.0
    headroom: float = 1.0  # the knob: demand is multiplied by it; the source has none (1)
    max_batched_tokens: int = 8192
    window: RateWindow = field(init=False)
    requests: Predictor = field(init=False)
    isl: Predictor = field(init=False)
    osl: Predictor = field(init=False)
    hit_rate: float = 0.0

    def __post_init__(self) -> None:
        """Makes the predictors, one a series."""
        self.window = RateWindow(self.interval)
        self.requests, self.isl, self.osl = predictor(self.kind), predictor(self.kind), predictor(self.kind)

    def observe(self, view: View) -> None:
        """Keeps counters; call at every tick."""
        self.window.update(view)

    def plan(self, view: View, current: tuple[int, int]) -> tuple[int, int] | None:
        """The pair for the interval to come, before floors of the load loop and the budget; None without traffic data (hold)."""
        rates = self.window.rates(view.now, self.interval, stale=self.interval)
        if rates is None:
            return None
        self.requests.add(rates.requests * self.interval)
        # In idle windows ISL and OSL carry forward.
        if rates.isl is not None:
            self.isl.add(rates.isl)
            self.hit_rate = rates.hit_rate
        if rates.osl is not None:
            self.osl.add(rates.osl)
        demand = self.requests.predict() / self.interval * self.headroom
        isl, osl = self.isl.predict(), self.osl.predict()
        ttft = view.slo_ttft + view.slo_ttft_per_token * isl * (1 - self.hit_rate)
        p = prefill_capacity(self.profile, isl, self.hit_rate, ttft, self.max_batched_tokens)
        d = decode_capacity(self.profile, isl, osl, view.slo_itl)
        if p is None or d is None:
            return current
        return (
            self._bounded(ceil(demand / p.rps), current[0], view.minimum["prefill"]),
            self._bounded(ceil(demand / d.rps), current[1], view.minimum["decode"]),
        )

    @staticmethod
    def _bounded(count: int, current: int, minimum: int) -> int:
        return max(minimum, min(max(count, 0, current - MAX_CHANGE), current + MAX_CHANGE))
