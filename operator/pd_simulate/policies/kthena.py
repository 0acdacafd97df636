"""kthena: each role by its own metrics, then the P:D ratio clamp as the last guard.

Source read: volcano-sh/kthena pkg/autoscaler/algorithm/{disaggregated_ratio,recommendation}.go; the tests rebuild the cases of its
disaggregated_ratio_test.go. Behaviour between the two is the HPA's defaults (its own has the same fields and windows).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from pd_simulate.policies.hpa import SYNC, Hpa, per_pod
from pd_simulate.policies.hpa_pools import in_flight, values_of
from pd_simulate.policies.signals import desired, kv_usage, pool
from pd_simulate.view import ReplicaView, Role, Targets, View

Bounds = tuple[int, int]  # (minimum, maximum)


def enforce_ratio(prefill: int, decode: int, p_bounds: Bounds, d_bounds: Bounds, low: Fraction, high: Fraction) -> tuple[int, int]:
    """The pair inside low <= P / D <= high and the bounds that first raises the deficient role.

    Raises ValueError when no whole pair fits.
    """
    p, d = max(p_bounds[0], min(p_bounds[1], prefill)), max(d_bounds[0], min(d_bounds[1], decode))
    if p == 0 and d == 0:
        return p, d
    if not 0 <= low <= high or high <= 0:
        raise ValueError(f"ratio: {low}..{high}; accepted: 0 <= low <= high and high > 0")
    p = p or max(p_bounds[0], min(p_bounds[1], 1))
    d = d or max(d_bounds[0], min(d_bounds[1], 1))
    if d and low <= Fraction(p, d) <= high:
        return p, d
    return _closest(p, d, p_bounds, d_bounds, low, high)


def _closest(p: int, d: int, p_bounds: Bounds, d_bounds: Bounds, low: Fraction, high: Fraction) -> tuple[int, int]:
    least = max(1, d_bounds[0], math.ceil(p_bounds[0] / high))
    most = min(d_bounds[1], math.floor(p_bounds[1] / low)) if low > 0 else d_bounds[1]
    if least > most:
        raise ValueError(f"ratio: no whole pair inside P {p_bounds}, D {d_bounds} has {low} <= P/D <= {high}")
    start = max(least, min(most, d))
    if d and Fraction(p, d) > high:
        start = min(most, max(start, math.ceil(p / high)))
    for candidate in (*range(start, most + 1), *range(start - 1, least - 1, -1)):
        bottom = max(p_bounds[0], math.ceil(low * candidate))
        top = min(p_bounds[1], math.floor(high * candidate))
        if bottom <= top:
            return max(bottom, min(top, p)), candidate
    raise ValueError(f"ratio: no whole pair inside P {p_bounds}, D {d_bounds} has {low} <= P/D <= {high}")


@dataclass(slots=True)
class Kthena:
    """P on requests in flight, D on KV usage, P/D kept in [low, high]."""

    low: float = 0.25
    high: float = 2.0
    prefill_target: float = 4.0
    decode_target: float = 0.70
    name: str = "kthena-ratio"
    tick: float = SYNC
    hpas: dict[Role, Hpa] = field(default_factory=lambda: {"prefill": Hpa(), "decode": Hpa()})

    def decide(self, view: View) -> Targets:
        """Without a metric of either role the whole cycle is skipped, as there."""
        prefill = self._one(view, "prefill", in_flight, self.prefill_target)
        decode = self._one(view, "decode", kv_usage, self.decode_target)
        if prefill is None or decode is None:
            return Targets(desired(view, "prefill"), desired(view, "decode"), "a role without metrics: cycle skipped")
        bounds = [(view.minimum[r], view.maximum[r]) for r in ("prefill", "decode")]
        low, high = (Fraction(x).limit_denominator(1000) for x in (self.low, self.high))
        try:
            pair = enforce_ratio(prefill, decode, bounds[0], bounds[1], low, high)
        except ValueError as exc:
            return Targets(desired(view, "prefill"), desired(view, "decode"), str(exc))
        return Targets(*pair, f"metrics ask {prefill}, {decode}")

    def _one(self, view: View, role: Role, read: Callable[[ReplicaView], float], target: float) -> int | None:
        current = desired(view, role)
        proposal = per_pod(current, values_of(pool(view, role), read), target)
        if proposal is None:
            return None
        return self.hpas[role].settle(view.now, current, proposal, view.minimum[role], view.maximum[role])
