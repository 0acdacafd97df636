"""Clairvoyant oracle: the counts that the true future needs, ordered one lead time ahead, idle replicas kept when that is cheaper.

It knows every arrival and length and the profile. It is no proof of an optimum: need is a bound from work and deadlines, swept by a
knob like everybody's. Given the needs, the plan is the cheapest: the k-th replica is kept through a gap exactly when the gap is
shorter than the lead time that a restart would waste (the dynamic program separates by replica, since costs are linear).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from pd_simulate.policies.capacity import decode_batch
from pd_simulate.view import Profile, Role, Targets, View
from pd_simulate.workload import Floats, Ints, Workload

WINDOWS = (1, 2, 4, 8, 16, 32, 64)  # seconds of work compared with its deadline


def prefill_need(load: Workload, profile: Profile, slack: float) -> Floats:
    """P busy at 100 % that each second needs: max over windows w of (prefill seconds arriving in w) / (w + slack)."""
    seconds = int(np.ceil(load.duration)) + 1
    uncached = np.maximum(load.prompt - load.cached, 1).astype(np.float64)
    work = _prefill(profile, uncached)
    per_second = np.bincount(np.minimum(load.arrival.astype(np.int64), seconds - 1), weights=work, minlength=seconds)
    total = np.concatenate(([0.0], np.cumsum(per_second)))
    need = np.zeros(seconds)
    for window in WINDOWS:
        sums = total[np.minimum(np.arange(seconds) + window, seconds)] - total[:-1]
        # Only windows whose first second brings at least the rate: one that begins early would order for what comes later.
        rate = np.where(per_second >= sums / (window + slack), sums / (window + slack), 0.0)
        for shift in range(min(window + int(slack), seconds)):
            np.maximum(need[shift:], rate[: seconds - shift], out=need[shift:])
    return need


def decode_need(load: Workload, profile: Profile, slo_itl: float) -> Floats:
    """D that each second needs: requests in decode / the batch inside the SLO at their mean context, or KV tokens / its size."""
    seconds = int(np.ceil(load.duration)) + 1
    if len(load) == 0:
        return np.zeros(seconds)
    context = load.prompt + load.output / 2
    batch = decode_batch(profile, float(np.average(context, weights=load.output)), slo_itl, kv_share=1.0)
    gap = profile.step(batch, batch * float(context.mean()))
    uncached = np.maximum(load.prompt - load.cached, 1).astype(np.float64)
    start = load.arrival + _prefill(profile, uncached)
    end = start + load.output * gap
    size = max(seconds, int(np.ceil(end.max())) + 2)
    held = _mean_level(start, end, context, size)[:seconds]
    count = _mean_level(start, end, np.ones(len(load)), size)[:seconds]
    # At the batch inside the SLO the step takes alpha + beta S: what is over alpha is shared by the tokens in proportion.
    alpha, beta = profile.step_law(batch)
    alone = profile.step_law(1)[0]
    per_request = (alpha - alone) / max(1, batch - 1)
    by_time = (per_request * count + beta * held) / max(1e-9, slo_itl - alone + per_request)
    return np.asarray(np.maximum(np.maximum(by_time, held / profile.kv_capacity), count / profile.max_num_seqs))


def _prefill(profile: Profile, tokens: Floats) -> Floats:
    """Profile.prefill of many prompts."""
    return np.maximum(profile.floor, profile.a + profile.b * tokens + profile.c * tokens**2)


def _mean_level(start: Floats, end: Floats, weight: Floats, size: int) -> Floats:
    """Mean over each second of the sum of `weight` of the intervals [start, end)."""
    change = np.zeros(size + 1)
    for at, sign in ((start, 1.0), (end, -1.0)):
        second = at.astype(np.int64)
        part = at - second
        np.add.at(change, second, sign * weight * (1 - part))
        np.add.at(change, second + 1, sign * weight * part)
    return np.cumsum(change)


def cheapest(need: Ints, lead: float, bin_seconds: float) -> Ints:
    """Least-cost counts >= need: gaps of the k-th replica shorter than `lead` seconds are filled."""
    plan = need.copy()
    longest = int(lead / bin_seconds)
    for level in range(1, int(need.max(initial=0)) + 1):
        busy = np.flatnonzero(need >= level)
        for left, right in pairwise(busy):
            if 1 < right - left <= longest + 1:
                plan[left:right] = np.maximum(plan[left:right], level)
    return plan


@dataclass(slots=True)
class Oracle:
    """`utilization` < 1 leaves headroom (the knob). The plan is made at the first tick, when lead times and the SLO are known."""

    future: Workload
    profile: Profile
    utilization: float = 0.85
    name: str = "oracle"
    tick: float = 5.0
    plans: dict[Role, Ints] | None = None

    def decide(self, view: View) -> Targets:
        """The greatest planned count between now and one lead time (and one tick) on, for each pool."""
        if self.plans is None:
            self.plans = self._plans(view)
        counts: dict[Role, int] = {}
        for role, plan in self.plans.items():
            start = min(int(view.now), len(plan) - 1)
            end = min(len(plan), int(view.now + view.lead_time[role] + self.tick) + 1)
            counts[role] = max(view.minimum[role], min(view.maximum[role], int(plan[start : max(end, start + 1)].max())))
        prefill, decode = _fit(counts["prefill"], counts["decode"], view)
        return Targets(prefill, decode, "planned from the true future")

    def _plans(self, view: View) -> dict[Role, Ints]:
        mean = float(np.maximum(self.future.prompt - self.future.cached, 1).mean()) if len(self.future) else 1.0
        slack = max(0.25, view.slo_ttft + view.slo_ttft_per_token * mean - self.profile.prefill(mean))
        needs: dict[Role, Floats] = {
            "prefill": prefill_need(self.future, self.profile, slack),
            "decode": decode_need(self.future, self.profile, view.slo_itl),
        }
        plans: dict[Role, Ints] = {}
        for role, need in needs.items():
            whole = np.maximum(1, np.ceil(need / self.utilization - 1e-9)).astype(np.int64)
            plans[role] = cheapest(whole, view.lead_time[role], 1.0)
        return plans


def _fit(prefill: int, decode: int, view: View) -> tuple[int, int]:
    """Both pools in proportion when they do not fit the budget, each at least its minimum."""
    p_gpu, d_gpu = view.gpus["prefill"], view.gpus["decode"]
    used = prefill * p_gpu + decode * d_gpu
    if used <= view.budget:
        return prefill, decode
    least = view.minimum["decode"]
    p = max(view.minimum["prefill"], min((view.budget - least * d_gpu) // p_gpu, round(prefill * view.budget / used)))
    return p, max(least, (view.budget - p * p_gpu) // d_gpu)
