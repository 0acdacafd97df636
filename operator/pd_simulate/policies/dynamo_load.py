"""Load loop of the Dynamo planner: one replica at a time, from each worker's forward-pass metrics, every 5 s.

Source read: ai-dynamo 1.6.1 dynamo/planner/core/load_scaling.py. A worker's latest sample counts however old, as there.
Differences: a P's queue counts uncached tokens (the source's engines count whole prompts); the perf model is the profile itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pd_simulate.policies.capacity import HIT_RATE_MAX, chunked_seconds
from pd_simulate.policies.signals import Pool
from pd_simulate.view import Profile, ReplicaView, View

Target = Literal["throughput", "latency", "load", "sla"]

# (up, down) of queued prefill tokens / context length and of (scheduled + queued) decode KV / KV size.
PREFILL_THRESHOLDS = {"throughput": (1.0, 0.1), "latency": (0.1, 0.0)}
DECODE_THRESHOLDS = {"throughput": (1.0, 0.6), "latency": (0.4, 0.1)}


@dataclass(frozen=True, slots=True)
class LoadSettings:
    """The loop's settings; defaults are the source's, but for `load`, whose thresholds a user must give (tokens, percent)."""

    target: Target = "throughput"
    context_length: int = 131_072
    max_batched_tokens: int = 8192
    down_sensitivity: float = 80.0
    prefill_up_tokens: float = 16_384.0
    prefill_down_tokens: float = 1_024.0
    decode_up_kv: float = 80.0
    decode_down_kv: float = 50.0
    slo_scale: float = 1.0  # the headroom knob of `sla`
    threshold_scale: float = 1.0  # the headroom knob of the threshold modes: < 1 scales up earlier


def by_thresholds(values: list[float], count: int, up: float, down: float, inclusive_up: bool, inclusive_down: bool) -> int:
    """+1 when ANY value is above `up`, -1 when ALL are below `down` and the rest could carry the greatest, else 0."""
    if any(v >= up if inclusive_up else v > up for v in values):
        return 1
    if count > 1 and all(v <= down if inclusive_down else v < down for v in values):
        return 0 if max(values) * count / (count - 1) >= up else -1
    return 0


@dataclass(slots=True)
class LoadLoop:
    """Decides -1, 0 or +1 for each pool."""

    profile: Profile
    settings: LoadSettings = field(default_factory=LoadSettings)
    seen: dict[str, ReplicaView] = field(default_factory=dict)  # the newest sample of each worker, without an age check
    mean_isl: float = 0.0  # of the last forward passes
    mean_context: float = 0.0

    def observe(self, pools: tuple[Pool, Pool], isl: float | None) -> None:
        """Keeps samples; means decay over 64 samples as the source's moving averages do."""
        live = {r.name: r for p in pools for r in p.ready if r.known}
        names = {r.name for p in pools for r in p.ready}
        self.seen = {name: sample for name, sample in {**self.seen, **live}.items() if name in names}
        if isl:
            self.mean_isl = isl if not self.mean_isl else self.mean_isl + (isl - self.mean_isl) / 64
        contexts = [r.running_tokens / r.running for r in live.values() if r.role == "decode" and r.running]
        if contexts:
            context = sum(contexts) / len(contexts)
            self.mean_context = context if not self.mean_context else self.mean_context + (context - self.mean_context) / 64

    def samples(self, group: Pool) -> list[ReplicaView] | None:
        """Samples of all ready workers, None when one never reported (`worker_count_mismatch`: both pools hold)."""
        found = [self.seen[r.name] for r in group.ready if r.name in self.seen]
        return found if len(found) == len(group.ready) else None

    def step_prefill(self, workers: list[ReplicaView], view: View, hit_rate: float) -> int:
        """-1, 0 or +1 for P."""
        s = self.settings
        count = len(workers)
        if not count:
            return 0
        if s.target == "sla":
            return self._sla_prefill(workers, view, hit_rate)
        if s.target == "load":
            values = [float(w.waiting_tokens) for w in workers]
            return by_thresholds(values, count, s.prefill_up_tokens * s.threshold_scale, s.prefill_down_tokens, True, True)
        up, down = PREFILL_THRESHOLDS[s.target]
        ratios = [w.waiting_tokens / s.context_length for w in workers]
        return by_thresholds(ratios, count, up * s.threshold_scale, down * s.threshold_scale, True, s.target == "latency")

    def step_decode(self, workers: list[ReplicaView], view: View) -> int:
        """-1, 0 or +1 for D."""
        s = self.settings
        count = len(workers)
        if not count:
            return 0
        if s.target == "sla":
            return self._sla_decode(workers, view)
        usage = [(w.running_tokens + w.waiting_tokens) / w.kv_capacity for w in workers if w.kv_capacity]
        if not usage:
            return 0
        if s.target == "load":
            up, down = s.decode_up_kv / 100, s.decode_down_kv / 100
        else:
            up, down = DECODE_THRESHOLDS[s.target]
        scale = s.threshold_scale
        return by_thresholds(usage, count, up * scale, down * scale, s.target == "load", s.target == "load")

    def _sla_prefill(self, workers: list[ReplicaView], view: View, hit_rate: float) -> int:
        """+1 when ALL predicted TTFT break the SLO; -1 when for ALL the queue's part, N/(N-1) times, stays in the margin."""
        isl = self.mean_isl
        if not isl:
            return 0
        keep = 1 - min(HIT_RATE_MAX, max(0.0, hit_rate))
        slo = (view.slo_ttft + view.slo_ttft_per_token * isl * keep) * self.settings.slo_scale

        def ttft(queue: float) -> float:
            # The source discounts whole prompts by the hit rate; the queue here is uncached tokens already.
            return chunked_seconds(self.profile, max(1, int(queue + isl * keep)), self.settings.max_batched_tokens)

        if all(ttft(w.waiting_tokens) > slo for w in workers):
            return 1
        share = len(workers) / (len(workers) - 1) if len(workers) > 1 else 0.0
        own = ttft(0)
        margin = (slo - own) * self.settings.down_sensitivity / 100
        fits = margin > 0 and all(ttft(w.waiting_tokens * share) - own < margin for w in workers)
        return -1 if len(workers) > 1 and fits else 0

    def _sla_decode(self, workers: list[ReplicaView], view: View) -> int:
        """+1 when ALL predicted ITL break the SLO; -1 when for ALL, N/(N-1) times loaded, KV fits and ITL < sensitivity * SLO."""
        slo = view.slo_itl * self.settings.slo_scale
        context = self.mean_context

        def itl(worker: ReplicaView, scale: float) -> float:
            requests = scale * (worker.running + worker.waiting) + 1
            return self.profile.step(requests, scale * (worker.running_tokens + worker.waiting_tokens) + context)

        if all(itl(w, 1.0) > slo for w in workers):
            return 1
        if len(workers) < 2:
            return 0
        share = len(workers) / (len(workers) - 1)
        fits = all(
            int((w.running_tokens + w.waiting_tokens) * share) < w.kv_capacity
            and itl(w, share) < slo * self.settings.down_sensitivity / 100
            for w in workers
        )
        return -1 if fits else 0
