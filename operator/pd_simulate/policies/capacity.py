"""Capacity: what one replica sustains inside the SLO, from a profile taken in advance; peers' formulas divide by it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pd_simulate.view import Profile

CANDIDATES = 128  # batch sizes tried by the Dynamo planner's search (ai-dynamo 1.6.1, engine_query.py)
HIT_RATE_MAX = 0.95  # the same file: no discount beyond it


@dataclass(frozen=True, slots=True)
class Capacity:
    """Best point found: requests/s of one replica, the batch and the latency there, and whether it meets the SLO."""

    rps: float
    batch: int
    seconds: float
    eligible: bool


def batch_sizes(largest: int) -> list[int]:
    """1..largest, or 128 evenly spaced sizes of them (source: as CANDIDATES)."""
    if largest <= CANDIDATES:
        return list(range(1, largest + 1))
    return [1 + i * (largest - 1) // (CANDIDATES - 1) for i in range(CANDIDATES)]


def chunked_seconds(profile: Profile, tokens: int, chunk: int) -> float:
    """Seconds to prefill `tokens` in passes of `chunk` tokens, each priced as one prompt of its own (source: as CANDIDATES)."""
    full, tail = divmod(tokens, chunk)
    return full * profile.prefill(chunk) + (profile.prefill(tail) if tail else 0.0)


def _better(best: Capacity | None, new: Capacity) -> Capacity:
    if best is None or (new.eligible and not best.eligible):
        return new
    if best.eligible and not new.eligible:
        return best
    return new if new.rps > best.rps else best


def prefill_capacity(profile: Profile, isl: float, hit_rate: float, slo: float, chunk: int = 8192) -> Capacity | None:
    """mu_P = max over b of b / TTFT(b ISL'), TTFT <= SLO; ISL' = ceil(ISL (1 - hit)). None when nothing was asked for.

    Source read: ai-dynamo 1.6.1 engine_query.py. Above the SLO at every batch the best rate counts all the same.
    """
    if isl <= 0:
        return None
    tokens = max(1, math.ceil(isl * (1 - min(HIT_RATE_MAX, max(0.0, hit_rate)))))
    largest = 1 if tokens > chunk else min(profile.max_num_seqs, chunk // tokens)
    best: Capacity | None = None
    for batch in batch_sizes(largest):
        seconds = chunked_seconds(profile, tokens * batch, chunk)
        best = _better(best, Capacity(batch / seconds, batch, seconds, seconds <= slo))
    return best


def decode_capacity(profile: Profile, isl: float, osl: float, slo: float) -> Capacity | None:
    """mu_D = max over b of b / (OSL ITL(b, b ctx)), ITL <= SLO, ctx = ISL + OSL/2, b <= min(max_num_seqs, KV / ctx).

    Source read: ai-dynamo 1.6.1 engine_query.py.
    """
    if isl <= 0 or osl <= 0:
        return None
    context = max(1, int(isl) + int(osl) // 2)
    largest = min(profile.max_num_seqs, profile.kv_capacity // context)
    best: Capacity | None = None
    for batch in batch_sizes(largest):
        seconds = profile.step(batch, batch * context)
        best = _better(best, Capacity(batch / (osl * seconds), batch, seconds, seconds <= slo))
    return best


def prefill_velocity(profile: Profile, tokens: int = 8192) -> float:
    """V_P in prompt tokens/s: one chunk divided by its time on an idle engine (llm-d's calibration: chunk / median TTFT)."""
    return tokens / profile.prefill(tokens)


def decode_batch(profile: Profile, context: float, slo: float, kv_share: float = 0.8) -> int:
    """Requests one D holds inside the SLO: min(max_num_seqs, share C / context, the largest b with step(b, b context) <= SLO)."""
    low, high = 1, max(1, int(min(profile.max_num_seqs, kv_share * profile.kv_capacity / max(1.0, context))))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if profile.step(middle, middle * context) <= slo + 1e-12 else (low, middle - 1)
    return low


def decode_rate(profile: Profile, isl: float, osl: float, slo: float, kv_share: float = 0.8) -> float:
    """mu_D in requests/s at the operating point of `decode_batch`: b / (OSL step(b, b ctx)), ctx = ISL + OSL/2."""
    context = max(1.0, isl + osl / 2)
    batch = decode_batch(profile, context, slo, kv_share)
    return batch / (max(1.0, osl) * profile.step(batch, batch * context))
