"""TokenScale: token velocities. N_P = ceil(input tokens/s / min(V_P, V_N)), N_D = ceil(tokens/s / V_D), some decoders convertible.

Evidence: digest of arXiv:2512.03416 (facts/autoscaling.md §1.6). The paper sums D over input x output buckets with an output-length
predictor; a View has totals only, so there is one bucket at the mean lengths (outputs of finished requests stand for a prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pd_simulate.policies.capacity import decode_rate, prefill_velocity
from pd_simulate.policies.signals import RateWindow, bounded, ceil, desired
from pd_simulate.view import Profile, Targets, View


def decode_velocity(profile: Profile, isl: float, osl: float, slo_itl: float) -> float:
    """V_D: tokens (prompt and output) of requests that one D completes per second, at the batch inside the SLO."""
    return (isl + osl) * decode_rate(profile, isl, osl, slo_itl)


def convertible_decoders(tokens: Sequence[float], velocity: float, restricted: float, quantile: float = 0.99) -> int:
    """How many decoders to make convertible, fixed offline: the burst over the mean / what one decoder prefills on the side.

    `tokens` input tokens/s per second of the training half; `velocity` V_P; `restricted` prompt tokens/s of a convertible decoder.
    The paper fixes the number from the burst ratio; this reading is ours: what ceil(mean / V_P) prefillers leave of the `quantile`.
    """
    if not tokens:
        return 0
    ordered = sorted(tokens)
    burst = ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]
    mean = sum(ordered) / len(ordered)
    return max(0, ceil((burst - ceil(mean / velocity) * velocity) / restricted))


@dataclass(slots=True)
class TokenScale:
    """Both scalers. `convertible` decoders are kept whatever N_D is; `headroom` > 1 buys more of both (knob; the paper has 1)."""

    profile: Profile
    headroom: float = 1.0
    convertible: int = 0
    link: float = 25e9  # bytes/s of one P's link
    window_seconds: float = 15.0
    tick: float = 5.0
    window: RateWindow = field(init=False)
    isl: float = 0.0
    osl: float = 0.0
    name: str = field(init=False)

    def __post_init__(self) -> None:
        """The rate window and the name."""
        self.window = RateWindow(60.0)
        self.name = "tokenscale-convertible" if self.convertible else "tokenscale"

    def velocity(self) -> float:
        """min(V_P, V_N) in prompt tokens/s of one P."""
        return min(prefill_velocity(self.profile), self.link / self.profile.kv_bytes_per_token)

    def decide(self, view: View) -> Targets:
        """Sizes both pools for the tokens that arrive now."""
        self.window.update(view)
        rates = self.window.rates(view.now, self.window_seconds)
        slow = self.window.rates(view.now)
        if rates is None or slow is None:
            return Targets(desired(view, "prefill"), desired(view, "decode"), "no counters, kept", self.convertible)
        self.isl, self.osl = slow.isl or self.isl, slow.osl or self.osl
        prefill = ceil(rates.uncached * self.headroom / self.velocity())
        decode = desired(view, "decode")
        if self.isl and self.osl:
            tokens = rates.requests * (self.isl + self.osl)
            decode = ceil(tokens * self.headroom / decode_velocity(self.profile, self.isl, self.osl, view.slo_itl))
        decode = max(decode, self.convertible)
        note = f"{rates.uncached:.0f} tokens/s in, ISL {self.isl:.0f} OSL {self.osl:.0f}"
        return Targets(bounded(view, "prefill", prefill), bounded(view, "decode", decode), note, self.convertible)
