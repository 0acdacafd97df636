"""llm-d SLO-aware KEDA law, split: P90 TTFT drives P, P90 TPOT drives D.

Source read: llm-d/llm-d guides/workload-autoscaling/README.slo-aware.md; it names this split "future work", so it is our reading.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from pd_simulate.policies.hpa import SYNC, Behavior, Hpa, Step
from pd_simulate.policies.signals import MeanWindow, RateWindow, desired, pool
from pd_simulate.view import Latency, Role, Targets, View

CLAMP = 2.0
SMOOTHING = 45.0  # seconds
BEHAVIOR = Behavior(
    up=(Step("Percent", 100, 60.0), Step("Pods", 4, 60.0)), up_window=30.0, down=(Step("Pods", 1, 120.0),), down_window=180.0
)


def wanted(saturation: float, provisioned: int, ready: int, up: float = 0.55, down: float = 0.40) -> int:
    """d = n + ceil(n (s c / up - 1)) if s > up, n - floor(n (1 - s / down)) if s < down, else n; c = r/n when 0 < r < n, else 1."""
    n = provisioned
    if saturation > up:
        credit = ready / n if 0 < ready < n else 1.0
        return n + math.ceil(n * (saturation * credit / up - 1) - 1e-9)
    if saturation < down:
        return n - math.floor(n * (1 - saturation / down) + 1e-9)
    return n


def ratio(latency: Latency, slo: float) -> float:
    """P90 / SLO clamped to 2; no traffic maps to 0, as the recording rule does."""
    return 0.0 if latency.count == 0 or math.isnan(latency.p90) else min(CLAMP, latency.p90 / slo)


@dataclass(slots=True)
class SloAware:
    """The law for both pools. `band` scales both thresholds: the headroom knob."""

    band: float = 1.0
    up: float = 0.55
    down: float = 0.40
    name: str = "llmd-slo"
    tick: float = SYNC
    hpas: dict[Role, Hpa] = field(default_factory=lambda: {"prefill": Hpa(BEHAVIOR), "decode": Hpa(BEHAVIOR)})
    signals: dict[Role, MeanWindow] = field(
        default_factory=lambda: {"prefill": MeanWindow(SMOOTHING), "decode": MeanWindow(SMOOTHING)}
    )
    window: RateWindow = field(default_factory=lambda: RateWindow(60.0))

    def decide(self, view: View) -> Targets:
        """One evaluation of both formulas."""
        self.window.update(view)
        rates = self.window.rates(view.now)
        # The SLO of this simulator has a part per prompt token; the rule knows one number, so it gets the mean prompt's.
        slo = view.slo_ttft + view.slo_ttft_per_token * (rates.uncached_isl if rates and rates.uncached_isl else 0.0)
        prefill, s_p = self._one(view, "prefill", ratio(view.ttft, slo))
        decode, s_d = self._one(view, "decode", ratio(view.itl, view.slo_itl))
        return Targets(prefill, decode, f"saturation TTFT {s_p:.2f}, TPOT {s_d:.2f}")

    def _one(self, view: View, role: Role, sample: float) -> tuple[int, float]:
        # A lost scrape leaves the average with the samples it has; the P90 itself is a rate over 1 min and survives one loss.
        if view.counters_known:
            self.signals[role].add(view.now, sample)
        saturation = self.signals[role].mean(view.now) or 0.0
        current, ready = desired(view, role), len(pool(view, role).ready)
        proposal = wanted(saturation, current, ready, self.up * self.band, self.down * self.band)
        return self.hpas[role].settle(view.now, current, proposal, view.minimum[role], view.maximum[role]), saturation
