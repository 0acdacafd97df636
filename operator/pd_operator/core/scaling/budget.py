"""Budget: caps over both roles. They only ever shrink a count, and desired totals never exceed a maximum (invariant I6).

Over maxGPUs the roles get GPUs in proportion to their flows. Never "take from prefill because decode is congested": that
starves prefill, empties decode and swings both (the study's collapse in scenario C).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decision import Limit, Reason
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.readings import Replicas


@dataclass(frozen=True, slots=True)
class Claim:
    """What one role asks of the budget."""

    count: int
    current: int
    flow: float | None  # replicas that its flow needs: the key of the split
    keep: bool  # it may not shrink in favour of the other (unknown signals, rollout)
    give: int = 10**9  # replicas that it may give to the other in this tick


Pair = tuple[int, int]
Limits = tuple[list[Limit], list[Limit]]


def apply(
    claims: tuple[Claim, Claim], replicas: tuple[Replicas, Replicas], first: int, bounds: Bounds, law: Law
) -> tuple[Pair, Limits]:
    """Counts (P, D) inside every cap, and the limits that shrank them. `first`: index of the role that rises first."""
    limits: Limits = ([], [])
    counts = [c.count for c in claims]
    roles = (bounds.prefill, bounds.decode)
    for i, role in enumerate(roles):
        if counts[i] > role.maximum:
            limits[i].append(Limit(Reason.MAX_REPLICAS, counts[i], role.maximum, f"maxReplicas is {role.maximum}"))
            counts[i] = role.maximum
        counts[i] = max(counts[i], role.minimum)
    if bounds.max_gpus is None:
        return (counts[0], counts[1]), limits
    if bounds.gpus_of(*counts) > bounds.max_gpus:
        share = split((counts[0], counts[1]), claims, bounds, law)
        detail = _cap(bounds) or (
            f"maxGPUs is {bounds.max_gpus}; {counts[0]} prefill and {counts[1]} decode need {bounds.gpus_of(*counts)}"
        )
        for i in (0, 1):
            if share[i] < counts[i]:
                limits[i].append(Limit(Reason.MAX_GPUS, counts[i], share[i], detail))
        counts = list(share)
    return _into_free(counts, claims, replicas, first, bounds, bounds.max_gpus, limits), limits


def _cap(bounds: Bounds) -> str:
    """What a shared budget leaves; its numbers move only when replicas do."""
    return f"{bounds.shared}; {bounds.max_gpus} are for this one" if bounds.shared else ""


def split(counts: Pair, claims: tuple[Claim, Claim], bounds: Bounds, law: Law) -> Pair:
    """Counts within maxGPUs, GPUs in proportion to the flows; no role above its count, none below its floor."""
    cap, (gp, gd) = bounds.max_gpus or 0, (bounds.prefill.gpus, bounds.decode.gpus)
    if gp == 0 or gd == 0:  # only one role uses GPUs: it gets what there is
        return (counts[0] if gp == 0 else min(counts[0], cap // gp), counts[1] if gd == 0 else min(counts[1], cap // gd))
    floor_p, floor_d = _floors(counts, claims, bounds, cap)
    flow_p, flow_d = _flows(counts, claims)
    exact = cap * flow_p / (flow_p * gp + flow_d * gd) if flow_p + flow_d > 0 else cap / (gp + gd)
    p = _best(exact, (flow_p, flow_d), (gp, gd), cap) if law.split_best else _round_half_up(exact)
    if law.split_hysteresis and abs(p - claims[0].current) <= 1 and bounds.gpus_of(claims[0].current, claims[1].current) <= cap:
        p = claims[0].current
    p = min(max(p, floor_p), (cap - floor_d * gd) // gp)
    p = min(counts[0], max(p, (cap - counts[1] * gd) // gp))
    d = min(counts[1], (cap - p * gp) // gd)
    return min(counts[0], (cap - d * gd) // gp), d  # what is too small for one more decode may do for a prefill


def _floors(counts: Pair, claims: tuple[Claim, Claim], bounds: Bounds, cap: int) -> Pair:
    """A role that must not shrink keeps what it has, unless even that is over the cap: then the minimum."""
    least = (bounds.prefill.minimum, bounds.decode.minimum)
    kept_p, kept_d = (
        min(counts[i], claims[i].current if claims[i].keep else max(least[i], claims[i].current - claims[i].give)) for i in (0, 1)
    )
    if bounds.gpus_of(kept_p, kept_d) <= cap:
        return kept_p, kept_d
    return bounds.prefill.minimum, bounds.decode.minimum


def _flows(counts: Pair, claims: tuple[Claim, Claim]) -> tuple[float, float]:
    """The flows; where one is not known, the counts stand for both."""
    if claims[0].flow is None or claims[1].flow is None:
        return float(counts[0]), float(counts[1])
    return claims[0].flow, claims[1].flow


def _best(exact: float, flows: tuple[float, float], gpus: Pair, cap: int) -> int:
    """Of the two whole counts beside the exact share, the one whose scarcer role serves more of its flow."""

    def served(p: int) -> float:
        d = max(0, cap - p * gpus[0]) // gpus[1]
        return min(p / flows[0] if flows[0] > 0 else math.inf, d / flows[1] if flows[1] > 0 else math.inf)

    low = math.floor(exact)
    return low + 1 if served(low + 1) > served(low) else low


def _round_half_up(value: float) -> int:
    return math.floor(value + 0.5)


def _into_free(
    counts: list[int],
    claims: tuple[Claim, Claim],
    replicas: tuple[Replicas, Replicas],
    first: int,
    bounds: Bounds,
    cap: int,
    limits: Limits,
) -> Pair:
    """A rise takes only GPUs that are free now: a replica that drains, or that goes this tick, still holds its own (I6)."""
    gpus = (bounds.prefill.gpus, bounds.decode.gpus)
    there = [r.ready + r.starting + r.blocked for r in replicas]
    held = [max(there[i], min(counts[i], claims[i].current)) + replicas[i].draining for i in (0, 1)]
    free = cap - held[0] * gpus[0] - held[1] * gpus[1]
    for i in (first, 1 - first):
        rise = counts[i] - max(claims[i].current, there[i])
        if rise <= 0 or gpus[i] == 0:
            continue
        granted = min(rise, max(0, free) // gpus[i])
        free -= granted * gpus[i]
        if granted < rise:
            allowed = counts[i] - rise + granted
            detail = _cap(bounds) or f"{max(0, free)} of {cap} GPUs are free while others drain"
            limits[i].append(Limit(Reason.MAX_GPUS, counts[i], allowed, detail))
            counts[i] = allowed
    return counts[0], counts[1]
