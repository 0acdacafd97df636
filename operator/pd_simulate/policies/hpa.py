"""HPA: the arithmetic of the Kubernetes HorizontalPodAutoscaler (autoscaling/v2), shared by every policy that runs on it.

Source: kubernetes pkg/controller/podautoscaler/{replica_calculator,horizontal}.go; the tests rebuild cases of its own test tables.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pd_simulate.policies.signals import ceil

SYNC = 15.0  # seconds, --horizontal-pod-autoscaler-sync-period
TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class PodValues:
    """One per-pod metric: values of pods that have it, pods that lack it, and pods that are not ready."""

    values: tuple[float, ...]
    missing: int = 0
    unready: int = 0


def per_pod(current: int, metric: PodValues, target: float, tolerance: float = TOLERANCE) -> int | None:
    """Replicas for a per-pod target (Resource and Pods metrics); None without any value: the HPA then keeps the count.

    Missing pods count as `target` when the rest asks for less and as 0 when it asks for more; pods that are not ready count as 0
    when it asks for more; a correction that turns the direction round keeps the count.
    """
    if not metric.values:
        return None
    ratio = sum(metric.values) / len(metric.values) / target
    unready = metric.unready if ratio > 1.0 else 0
    if not unready and not metric.missing:
        return current if abs(ratio - 1.0) <= tolerance else ceil(ratio * len(metric.values))
    filled = sum(metric.values) + (metric.missing * target if ratio < 1.0 else 0.0)
    count = len(metric.values) + metric.missing + unready
    corrected = filled / count / target
    if abs(corrected - 1.0) <= tolerance or (ratio < 1.0 < corrected) or (corrected < 1.0 < ratio):
        return current
    replicas = ceil(corrected * count)
    if (corrected < 1.0 and replicas > current) or (corrected > 1.0 and replicas < current):
        return current
    return replicas


def average_value(current: int, total: float, target: float, tolerance: float = TOLERANCE) -> int:
    """Replicas for an External or Object metric with an AverageValue target (the shape KEDA makes): ceil(total / target)."""
    if current and abs(total / (target * current) - 1.0) <= tolerance:
        return current
    return ceil(total / target)


def largest(proposals: Iterable[int | None], current: int) -> int:
    """Several metrics: the largest proposal. Metrics that failed are left out, but then there is no scale-down."""
    given = list(proposals)
    valid = [p for p in given if p is not None]
    if not valid or (len(valid) < len(given) and max(valid) < current):
        return current
    return max(valid)


@dataclass(frozen=True, slots=True)
class Step:
    """One entry of spec.behavior.*.policies: `value` pods, or percent of the count at the period's start, per `period` seconds."""

    kind: Literal["Pods", "Percent"]
    value: int
    period: float


@dataclass(frozen=True, slots=True)
class Behavior:
    """spec.behavior with its defaults: up at once by max(100 %, 4 pods) a 15 s, down to the maximum of the last 300 s."""

    up: tuple[Step, ...] = (Step("Percent", 100, 15.0), Step("Pods", 4, 15.0))
    up_window: float = 0.0
    down: tuple[Step, ...] = (Step("Percent", 100, 15.0),)
    down_window: float = 300.0


@dataclass(slots=True)
class Hpa:
    """One HPA object: recommendations and scale events it remembers. Selects the policy with the largest change (the default)."""

    behavior: Behavior = field(default_factory=Behavior)
    recommendations: deque[tuple[float, int]] = field(default_factory=deque)
    events: deque[tuple[float, int]] = field(default_factory=deque)  # (time, change)

    def settle(self, now: float, current: int, proposal: int, minimum: int, maximum: int) -> int:
        """The count to set: `proposal` after stabilization, rate policies and bounds; `current` is spec.replicas."""
        stable = self._stabilize(now, current, proposal)
        if stable > current:
            count = min(stable, max(current, self._up_limit(now, current)), maximum)
        elif stable < current:
            count = max(stable, min(current, self._down_limit(now, current)), minimum)
        else:
            count = stable
        count = max(minimum, min(maximum, count))
        if count != current:
            self.events.append((now, count - current))
        self._forget(now)
        return count

    def _stabilize(self, now: float, current: int, proposal: int) -> int:
        if not self.recommendations:
            self.recommendations.append((now, current))  # horizontal.go: recordInitialRecommendation
        up, down = proposal, proposal
        for at, past in self.recommendations:
            if at > now - self.behavior.up_window:
                up = min(up, past)
            if at > now - self.behavior.down_window:
                down = max(down, past)
        self.recommendations.append((now, proposal))
        return min(max(current, up), down)

    def _added(self, now: float, period: float, sign: int) -> int:
        return sum(abs(change) for at, change in self.events if change * sign > 0 and at > now - period)

    def _up_limit(self, now: float, current: int) -> int:
        limits = []
        for step in self.behavior.up:
            start = current - self._added(now, step.period, 1) + self._added(now, step.period, -1)
            limits.append(start + step.value if step.kind == "Pods" else ceil(start * (1 + step.value / 100)))
        return max(limits)

    def _down_limit(self, now: float, current: int) -> int:
        limits = []
        for step in self.behavior.down:
            start = current - self._added(now, step.period, 1) + self._added(now, step.period, -1)
            limits.append(start - step.value if step.kind == "Pods" else int(start * (1 - step.value / 100)))
        return min(limits)

    def _forget(self, now: float) -> None:
        window = max(self.behavior.up_window, self.behavior.down_window)
        while self.recommendations and self.recommendations[0][0] <= now - window:
            self.recommendations.popleft()
        period = max((s.period for s in (*self.behavior.up, *self.behavior.down)), default=0.0)
        while self.events and self.events[0][0] <= now - period:
            self.events.popleft()


def pod_values(values: Sequence[float], missing: int, unready: int) -> PodValues:
    """PodValues from any sequence."""
    return PodValues(tuple(values), missing, unready)
