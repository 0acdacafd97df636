"""AIBrix PodAutoscaler: KPA (stable and panic windows, totals) and APA (use per pod with tolerance and rate limits).

Source read: vllm-project/aibrix pkg/controller/podautoscaler/algorithm/{kpa,apa}.go, context.go, metrics/client.go; the tests
rebuild the cases of its kpa_test.go. P is scaled on requests in flight, D on KV usage (the metrics of its P/D samples).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from pd_simulate.policies.hpa_pools import in_flight
from pd_simulate.policies.signals import MeanWindow, desired, kv_usage, pool
from pd_simulate.view import ReplicaView, Role, Targets, View

TICK = 10.0  # seconds between reconciles


@dataclass(frozen=True, slots=True)
class Limits:
    """Defaults of context.go and of the annotations."""

    up_rate: float = 2.0
    down_rate: float = 2.0
    tolerance: float = 0.1
    panic_threshold: float = 2.0
    stable_window: float = 180.0
    panic_window: float = 60.0
    down_window: float = 300.0


def kpa_pods(total: float, count: int, target: float, limits: Limits) -> int:
    """ceil(total / target) within [floor(N / down), ceil(up N)]; unchanged inside the tolerance band around N."""
    most = max(1, math.ceil(limits.up_rate * count - 1e-9))
    least = math.floor(count / limits.down_rate)
    if count and abs(total / (target * count) - 1) <= limits.tolerance:
        return count
    return max(least, min(most, math.ceil(total / target - 1e-9)))


def kpa_target(stable: float, panic: float, count: int, target: float, high: int | None, limits: Limits) -> tuple[int, int | None]:
    """(desired, high mark): in panic (panic / stable > threshold, or no stable load) the larger of both, never below the mark."""
    wanted = kpa_pods(stable, count, target, limits)
    if stable > 0 and panic / stable <= limits.panic_threshold:
        return wanted, None
    mark = max(wanted, kpa_pods(panic, count, target, limits), high if high is not None else 0)
    return mark, mark


def apa_target(use: float, count: int, target: float, limits: Limits) -> int:
    """ceil(N use / target) outside the band of 1 +- tolerance, at most ceil(up N), at least floor(N / down)."""
    ratio = use / target
    wanted = math.ceil(count * ratio - 1e-9)
    if ratio > 1 + limits.tolerance:
        return min(wanted, math.ceil(limits.up_rate * count - 1e-9))
    if ratio < 1 - limits.tolerance:
        return max(wanted, math.floor(count / limits.down_rate))
    return count


@dataclass(slots=True)
class _PoolState:
    """One PodAutoscaler."""

    window: MeanWindow
    recommendations: MeanWindow
    high: int | None = None


@dataclass(slots=True)
class Aibrix:
    """Two PodAutoscalers of one strategy."""

    strategy: Literal["KPA", "APA"]
    prefill_target: float = 4.0  # requests in flight on one P
    decode_target: float = 0.70  # KV usage of one D
    limits: Limits = field(default_factory=Limits)
    tick: float = TICK
    states: dict[Role, _PoolState] = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """Windows and the name."""
        self.name = f"aibrix-{self.strategy.lower()}"
        roles: tuple[Role, ...] = ("prefill", "decode")
        self.states = {r: _PoolState(MeanWindow(self.limits.stable_window), MeanWindow(self.limits.down_window)) for r in roles}

    def decide(self, view: View) -> Targets:
        """Both pools on their own."""
        prefill = self._one(view, "prefill", in_flight, self.prefill_target)
        decode = self._one(view, "decode", kv_usage, self.decode_target)
        return Targets(prefill, decode, self.strategy)

    def _one(self, view: View, role: Role, read: Callable[[ReplicaView], float], target: float) -> int:
        group = pool(view, role)
        current, state, limits = desired(view, role), self.states[role], self.limits
        # One pod that cannot be scraped fails the whole collection: no recommendation this time.
        if not group.ready or len(group.known) < len(group.ready):
            return current
        values = [read(r) for r in group.known]
        if self.strategy == "APA":
            use = sum(values) / len(values)
            wanted = _guarded_apa(apa_target(use, current, target, limits), use, current, len(values), target)
        else:
            state.window.add(view.now, sum(values))
            stable = state.window.mean(view.now) or 0.0
            panic = state.window.mean(view.now, limits.panic_window) or 0.0
            wanted, state.high = kpa_target(stable, panic, current, target, state.high, limits)
        state.recommendations.add(view.now, float(wanted))
        if wanted < current:
            wanted = min(current, int(state.recommendations.maximum(view.now) or wanted))
        return max(view.minimum[role], min(view.maximum[role], wanted))


def _guarded_apa(wanted: int, use: float, current: int, ready: int, target: float) -> int:
    """Pending pods: counted as idle on a rise and as at target on a fall (applyPendingReplicaGuard)."""
    pending = current - ready
    if pending <= 0 or wanted == current:
        return wanted
    if wanted > current:
        return min(wanted, max(current, math.ceil(use * ready / target - 1e-9)))
    return max(wanted, min(current, math.ceil((use * ready + target * pending) / target - 1e-9)))


def aibrix_kpa(prefill_target: float = 4.0, decode_target: float = 0.70) -> Aibrix:
    """KPA on both pools."""
    return Aibrix("KPA", prefill_target, decode_target)


def aibrix_apa(prefill_target: float = 4.0, decode_target: float = 0.70) -> Aibrix:
    """APA on both pools."""
    return Aibrix("APA", prefill_target, decode_target)
