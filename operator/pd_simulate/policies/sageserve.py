"""SageServe: an hourly plan from a forecast of input tokens, and a reactive memory rule around it.

Evidence: code read (kjain1810/SageServe arbiter.py GlobalArbiterARIMAChecking, long_term_allocation.py; shashwatj07/SageServe
global_arbiter.py). With one model, one region and one GPU type its ILP has one answer: the least n with n TPS >= forecast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_simulate.policies.capacity import decode_rate, prefill_velocity
from pd_simulate.policies.forecast import ArimaLike
from pd_simulate.policies.signals import RateWindow, bounded, ceil, desired, kv_usage, pool
from pd_simulate.view import Profile, Role, Targets, View

HIGH, UP, DOWN = 0.9, 0.5, 0.25  # memory utilization: one over the plan, a planned rise, a planned fall
MINUTE = 60.0
ROLES: tuple[Role, Role] = ("prefill", "decode")


def reactive(memory: float, pending: int, ratio: float, threshold: float, high: float = HIGH) -> int:
    """-1, 0 or +1: `pending` steps of the plan not yet taken; `ratio` actual / forecast tokens of the last minute."""
    if pending == 0:
        return 1 if memory > high or ratio > threshold else 0
    if pending > 0:
        return 1 if memory > UP else 0
    return -1 if memory < DOWN else 0


@dataclass(slots=True)
class SageServe:
    """Forecast of input tokens per minute by the ARIMA stand-in; `history` are those of the training half, oldest first."""

    profile: Profile
    history: Sequence[float] = ()
    interval: float = 3600.0
    threshold: float = 1.5  # actual / forecast from which it adds one at once; the source leaves it to a setting
    high: float = HIGH  # the headroom knob
    utilization: float = 0.8  # of the profile's rate, for the plan
    tick: float = 15.0
    name: str = "sageserve"
    model: ArimaLike = field(init=False)
    window: RateWindow = field(default_factory=lambda: RateWindow(MINUTE))
    pending: dict[Role, int] = field(default_factory=lambda: {"prefill": 0, "decode": 0})
    next_plan: float = 0.0
    next_minute: float = 0.0
    forecast: float = 0.0
    isl: float = 0.0
    osl: float = 0.0

    def __post_init__(self) -> None:
        """Feeds the history to the model."""
        self.model = ArimaLike()
        for value in self.history:
            self.model.add(value)
        self.forecast = self.model.predict()

    def decide(self, view: View) -> Targets:
        """Plan when the interval is over, then one reactive step a pool while none of its replicas starts or drains."""
        self.window.update(view)
        rates = self.window.rates(view.now)
        if rates is not None:
            self.isl, self.osl = rates.isl or self.isl, rates.osl or self.osl
            if view.now >= self.next_minute:
                self.model.add(rates.prompt * MINUTE)
                self.next_minute = view.now + MINUTE
                self.forecast = self.model.predict()
        if view.now >= self.next_plan and self.isl and self.osl:
            self.next_plan = view.now + self.interval
            self._plan(view)
        ratio = rates.prompt * MINUTE / self.forecast if rates is not None and self.forecast > 0 else 0.0
        counts = [self._react(view, role, ratio) for role in ROLES]
        return Targets(counts[0], counts[1], f"forecast {self.forecast:.0f} tokens/min, plan left {self.pending}")

    def planned(self, role: Role, slo_itl: float) -> int:
        """Replicas that carry the forecast: n = ceil(forecast / TPS), TPS the input tokens/min of one replica."""
        if role == "prefill":
            rate = prefill_velocity(self.profile)
        else:
            rate = self.isl * decode_rate(self.profile, self.isl, self.osl, slo_itl)
        return max(1, ceil(self.forecast / (MINUTE * rate * self.utilization)))

    def _plan(self, view: View) -> None:
        for role in ROLES:
            self.pending[role] = bounded(view, role, self.planned(role, view.slo_itl)) - desired(view, role)

    def _react(self, view: View, role: Role, ratio: float) -> int:
        group, current = pool(view, role), desired(view, role)
        known = group.known
        if group.starting or group.draining or not known:
            return current
        memory = sum(kv_usage(r) for r in known) / len(known)
        step = reactive(memory, self.pending[role], ratio, self.threshold, self.high)
        count = bounded(view, role, current + step)
        self.pending[role] -= count - current
        return count
