"""llm-d token-aware KEDA: N_P = ceil(backlog seconds / theta), N_D = ceil(sum of KV usage / 0.8), the pools independent.

Source read: llm-d/llm-d guides/workload-autoscaling/keda-epp-token-aware/pd-disaggregation (both ScaledObjects, README).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pd_simulate.policies.capacity import prefill_velocity
from pd_simulate.policies.hpa import SYNC, Behavior, Hpa, Step, average_value
from pd_simulate.policies.signals import RateWindow, desired, kv_usage, pool
from pd_simulate.view import Profile, Role, Targets, View

# Shipped: at most one pod up per 180 s and one down per 300 s, 300 s window down.
SHIPPED = Behavior(up=(Step("Pods", 1, 180.0),), down=(Step("Pods", 1, 300.0),))
FAST = Behavior()  # the HPA's defaults: what a user gets who deletes the behavior block


def backlog_seconds(view: View, velocity: float) -> float:
    """Uncached prompt tokens dispatched and not yet prefilled / V_P. A lost scrape of the router reads 0 (`or vector(0)`)."""
    if not view.counters_known:
        return 0.0
    group = pool(view, "prefill")
    tokens = sum(r.running_tokens + r.waiting_tokens for r in group.known) + view.router_queue_tokens
    return tokens / velocity


def kv_in_use(view: View) -> float:
    """Pods' worth of full KV over decode pods; a pod whose scrape was lost adds nothing."""
    return sum(kv_usage(r) for r in pool(view, "decode").known)


def threshold(slo_ttft: float, isl: float, velocity: float) -> float:
    """theta = TTFT SLO - ISL / V_P in seconds: the queue's share of the TTFT budget (the guide's README)."""
    return slo_ttft - isl / velocity


@dataclass(slots=True)
class TokenAware:
    """Both ScaledObjects. `theta` None: from the SLO and the mean uncached ISL seen, times `share` (shave to 0.6-0.7 for tails)."""

    profile: Profile
    name: str
    behavior: Behavior
    theta: float | None = 1.5
    share: float = 1.0
    decode_threshold: float = 0.8
    velocity: float | None = None  # V_P; None: measured on the profile at one chunk
    tick: float = SYNC
    hpas: dict[Role, Hpa] = field(init=False)
    window: RateWindow = field(default_factory=lambda: RateWindow(300.0))

    def __post_init__(self) -> None:
        """One HPA a pool."""
        self.hpas = {"prefill": Hpa(self.behavior), "decode": Hpa(self.behavior)}
        if self.velocity is None:
            self.velocity = prefill_velocity(self.profile)

    def decide(self, view: View) -> Targets:
        """Each pool by its own metric."""
        self.window.update(view)
        velocity = self.velocity or prefill_velocity(self.profile)
        seconds, usage, theta = backlog_seconds(view, velocity), kv_in_use(view), self._theta(view, velocity)
        prefill = self._one(view, "prefill", seconds, theta)
        decode = self._one(view, "decode", usage, self.decode_threshold)
        return Targets(
            prefill, decode, f"backlog {seconds:.3g} s of {theta:.3g}, KV {usage:.3g} pods of {self.decode_threshold:.3g}"
        )

    def _theta(self, view: View, velocity: float) -> float:
        if self.theta is not None:
            return max(0.05, self.theta * self.share)
        rates = self.window.rates(view.now)
        isl = rates.uncached_isl if rates and rates.uncached_isl else 0.0
        slo = view.slo_ttft + view.slo_ttft_per_token * isl
        return max(0.05, threshold(slo, isl, velocity) * self.share)

    def _one(self, view: View, role: Role, total: float, target: float) -> int:
        current = desired(view, role)
        proposal = average_value(current, total, target)
        return self.hpas[role].settle(view.now, current, proposal, view.minimum[role], view.maximum[role])


def token_aware_shipped(profile: Profile, share: float = 1.0, theta: float = 1.5, decode_threshold: float = 0.8) -> TokenAware:
    """The manifests as shipped, V_P calibrated on the profile."""
    return TokenAware(profile, "llmd-tokens-shipped", SHIPPED, theta, share, decode_threshold)


def token_aware_fast(profile: Profile, share: float = 0.65, decode_threshold: float = 0.8) -> TokenAware:
    """Theta from the SLO, HPA default behavior."""
    return TokenAware(profile, "llmd-tokens-fast", FAST, None, share, decode_threshold)
