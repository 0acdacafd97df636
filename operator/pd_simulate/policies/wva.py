"""llm-d WVA v2 (saturation analyzer), one analyzer for each pool: token demand against token capacity, pending supply counted.

Source read: llm-d-workload-variant-autoscaler (deprecated upstream) internal/engines/analyzers/saturation_v2/analyzer.go and
pipeline/cost_aware_optimizer.go. It knows no P/D roles: for P the output length is taken as 1, as its queue model does there.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from pd_simulate.policies.signals import RateWindow, ceil, desired, pool
from pd_simulate.view import Profile, ReplicaView, Role, Targets, View

HISTORY = 10  # observations in the rolling average of k2


@dataclass(frozen=True, slots=True)
class WvaSettings:
    """Thresholds with the source's defaults; `margin` scales demand (the headroom knob)."""

    kv_threshold: float = 0.80
    queue_threshold: int = 5
    up_threshold: float = 0.85
    down_boundary: float = 0.70
    max_batched_tokens: int = 8192
    margin: float = 1.0


def derived_capacity(batched: int, max_seqs: int, isl: float, osl: float) -> float:
    """k2 from arguments: min(B O / (I + O), S) (I + O/2); 0 when it cannot be told."""
    if batched <= 0 or osl <= 0:
        return 0.0
    return float(int(min(batched * osl / (isl + osl), max_seqs) * (isl + osl / 2)))


def bucket(osl: float) -> str:
    """Output-length class of the history of k2."""
    return "short" if osl < 100 else "medium" if osl < 500 else "long"


@dataclass(slots=True)
class Analyzer:
    """One pool's analyzer with its history of observed compute-bound capacity."""

    settings: WvaSettings
    max_seqs: int
    history: dict[str, deque[float]] = field(default_factory=dict)
    last_capacity: float = 0.0

    def capacity(self, replica: ReplicaView, isl: float, osl: float) -> float:
        """min(k1, k2): k1 = 0.80 C; k2 observed while the queue is long, else its average, else derived, else k1."""
        k1 = float(int(replica.kv_capacity * self.settings.kv_threshold))
        seen = self.history.setdefault(bucket(osl), deque(maxlen=HISTORY))
        if replica.waiting >= self.settings.queue_threshold and replica.kv_used > 0:
            seen.append(float(replica.kv_used))
            return min(k1, float(replica.kv_used))
        if seen:
            return min(k1, float(int(sum(seen) / len(seen))))
        return min(k1, derived_capacity(self.settings.max_batched_tokens, self.max_seqs, isl, osl) or k1)

    def change(self, replicas: tuple[ReplicaView, ...], ready: int, pending: int, router: float, isl: float, osl: float) -> int:
        """Replicas to add or remove: ceil(required / capacity) unless some are pending, or -floor(spare / capacity)."""
        usable = [r for r in replicas if r.kv_capacity > 0]
        if usable:
            self.last_capacity = float(median(self.capacity(r, isl, osl) for r in usable))
        if self.last_capacity <= 0:
            return 0
        demand = (sum(r.kv_used + r.waiting * isl for r in usable) + router) * self.settings.margin
        required = demand / self.settings.up_threshold - (ready + pending) * self.last_capacity
        if required > 0:
            return 0 if pending else ceil(required / self.last_capacity)
        spare = ready * self.last_capacity - demand / self.settings.down_boundary
        return -math.floor(max(0.0, spare) / self.last_capacity + 1e-9)


@dataclass(slots=True)
class Wva:
    """WVA v2 on both pools, every 30 s, metrics the maximum over the last minute (here: the last sample)."""

    profile: Profile
    settings: WvaSettings = field(default_factory=WvaSettings)
    name: str = "wva-v2"
    tick: float = 30.0
    analyzers: dict[Role, Analyzer] = field(init=False)
    window: RateWindow = field(default_factory=lambda: RateWindow(300.0))
    isl: float = 0.0
    osl: float = 0.0

    def __post_init__(self) -> None:
        """One analyzer a pool."""
        self.analyzers = {r: Analyzer(self.settings, self.profile.max_num_seqs) for r in ("prefill", "decode")}

    def decide(self, view: View) -> Targets:
        """Analyze and apply both pools."""
        self.window.update(view)
        rates = self.window.rates(view.now)
        if rates:
            self.isl = rates.isl or self.isl
            self.osl = rates.osl or self.osl
        hit = rates.hit_rate if rates else 0.0
        router = view.router_queue * self.isl * (1 - hit)
        prefill = self._one(view, "prefill", router, 1.0)
        decode = self._one(view, "decode", 0.0, self.osl)
        return Targets(prefill, decode, f"ISL {self.isl:.0f} OSL {self.osl:.0f}")

    def _one(self, view: View, role: Role, router: float, osl: float) -> int:
        group = pool(view, role)
        current = desired(view, role)
        if group.ready and not group.known:
            return current
        pending = max(0, current - len(group.ready))
        change = self.analyzers[role].change(group.known, len(group.ready), pending, router, self.isl, osl)
        return max(view.minimum[role], min(view.maximum[role], current + change))
