"""HeteroScale: decode tokens/s sizes D, and P follows by a fixed P:D ratio that a stress test found.

Evidence: digest of arXiv:2508.19559 §3.3-3.6 (facts/autoscaling.md §1.5). Band and cooldowns (10 %, 180 s, 600 s) are those of a
public re-implementation, not confirmed by the paper. Soft scale-in (a draining replica is taken back) is not built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_simulate.policies.capacity import decode_batch
from pd_simulate.policies.signals import RateWindow, bounded, ceil, desired
from pd_simulate.policies.static import Run
from pd_simulate.view import Latency, Profile, Targets, View

MILD, SEVERE = 1.0, 1.2  # latency / SLO from which the safety step adds 10 % or 20 %


def stress_ratio(run: Run, replicas: int) -> float:
    """P per D with the greatest goodput among all splits of `replicas` replicas: the stress test, by a run callback.

    Run it at a load above capacity. Ties go to the split with more D.
    """
    if replicas < 2:
        raise ValueError(f"replicas: {replicas}; accepted: 2 or more")
    best = max(range(1, replicas), key=lambda p: (run(p, replicas - p).goodput, -p))
    return best / (replicas - best)


def target_rate(profile: Profile, isl: float, osl: float, slo_itl: float, utilization: float) -> float:
    """Decode tokens/s that one D is meant to run: `utilization` of b / step(b, b ctx) at the batch inside the SLO."""
    context = isl + osl / 2
    batch = decode_batch(profile, context, slo_itl, kv_share=1.0)
    return utilization * batch / profile.step(batch, batch * context)


@dataclass(slots=True)
class HeteroScale:
    """`per_instance` tokens/s of one D (from the stress test, at the mix of the training half); it stays as it is afterwards."""

    ratio: float
    per_instance: float
    utilization: float = 1.0  # the headroom knob: share of `per_instance` to aim at
    band: float = 0.10
    up_cooldown: float = 180.0
    down_cooldown: float = 600.0
    smoothing: float = 60.0
    name: str = "heteroscale"
    tick: float = 15.0
    window: RateWindow = field(init=False)
    last_up: float = -math.inf
    last_change: float = -math.inf

    def __post_init__(self) -> None:
        """The rate window."""
        self.window = RateWindow(self.smoothing)

    def decide(self, view: View) -> Targets:
        """D by TPS with latency as a safety step, then P by the ratio."""
        self.window.update(view)
        rates = self.window.rates(view.now)
        current = desired(view, "decode")
        if rates is None:
            return Targets(desired(view, "prefill"), current, "no counters, kept")
        need = rates.output / (self.per_instance * self.utilization)
        decode, note = self._decode(view, current, need)
        prefill = max(1, ceil(decode * self.ratio))
        return Targets(bounded(view, "prefill", prefill), bounded(view, "decode", decode), f"need {need:.2f} D, {note}")

    def _decode(self, view: View, current: int, need: float) -> tuple[int, str]:
        wanted = ceil(need)
        breach = max(_ratio(view.itl, view.slo_itl), _ratio(view.ttft, view.slo_ttft + view.slo_ttft_per_token * self._isl(view)))
        if breach > MILD:
            step = 0.2 if breach > SEVERE else 0.1
            wanted = max(wanted, ceil(current * (1 + step)))
        if wanted > current and (need > current * (1 + self.band) or breach > MILD):
            if view.now - self.last_up < self.up_cooldown:
                return current, "up cooldown"
            self.last_up = self.last_change = view.now
            return wanted, "up"
        if wanted < current and need < current * (1 - self.band):
            if view.now - self.last_change < self.down_cooldown:
                return current, "down cooldown"
            self.last_change = view.now
            return max(1, wanted), "down"
        return current, "inside the band"

    def _isl(self, view: View) -> float:
        rates = self.window.rates(view.now)
        return rates.uncached_isl if rates and rates.uncached_isl else 0.0


def _ratio(latency: Latency, slo: float) -> float:
    return 0.0 if latency.count == 0 or math.isnan(latency.p90) else latency.p90 / slo
