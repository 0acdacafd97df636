"""View: what a policy may see at a tick, and Targets: what it answers. The simulator makes one, every policy reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

Role = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class ReplicaView:
    """One replica as its last scrape showed it (up to `age` seconds ago)."""

    name: str
    role: Role
    slice: str
    state: Literal["starting", "ready", "draining", "blocked"]
    created: float  # simulated seconds
    ready_at: float | None
    age: float = 0.0  # seconds since the sample
    known: bool = True  # False: the scrape was lost, the numbers below mean nothing
    running: int = 0  # requests in prefill, or decoding
    running_tokens: int = 0  # P: uncached prompt tokens left of those running; D: KV tokens in use
    waiting: int = 0  # P: accepted, not running; D: handed over, not reserved
    waiting_tokens: int = 0  # P: uncached prompt tokens of those; D: KV tokens they need
    held: int = 0  # P: prefilled, KV kept for D
    held_tokens: int = 0
    oldest_held: float = 0.0  # seconds
    kv_used: int = 0  # tokens, on P held ones included
    kv_capacity: int = 0
    busy: float = 0.0  # share of the last scrape interval with work running: what "GPU utilization" shows
    itl: float = 0.0  # seconds, mean gap now (D)


@dataclass(frozen=True, slots=True)
class Counters:
    """Cumulative since the start, over all slices, as of the sample."""

    offered: int = 0  # requests that came to the router, rejected ones included
    offered_tokens: int = 0  # their prompt tokens
    offered_uncached: int = 0  # their prompt tokens that no prefix hit covers
    accepted: int = 0
    rejected: int = 0
    prefilled: int = 0  # requests whose prefill ended
    prefill_tokens: int = 0  # uncached prompt tokens computed
    prefill_seconds: float = 0.0  # seconds with prefill running, summed over replicas
    decode_starts: int = 0
    output_tokens: int = 0
    finished: int = 0
    finished_output: int = 0  # output tokens of finished requests
    finished_prompt: int = 0
    cancelled: int = 0
    timed_out: int = 0
    expired: int = 0
    recomputed: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Of requests whose first token (TTFT, handoff wait) or gap (ITL) fell into the window. Seconds; NaN when none did."""

    window: float
    mean: float
    p50: float
    p90: float
    p95: float
    count: int


@dataclass(frozen=True, slots=True)
class View:
    """All that a policy may see. Rates come from differences of counters between two views that the policy kept."""

    now: float
    replicas: tuple[ReplicaView, ...]
    counters: Counters
    counters_known: bool  # False: the router's scrape was lost
    counters_age: float
    ttft: Latency  # over the last 60 s
    itl: Latency
    prefill_latency: Latency
    handoff_wait: Latency
    desired: dict[Role, int]  # what was asked for last
    gpus: dict[Role, int]  # GPUs of one replica
    minimum: dict[Role, int]
    maximum: dict[Role, int]
    budget: int  # GPUs in all
    lead_time: dict[Role, float]  # seconds, p90 as measured so far (the mean given at the start before any)
    slo_ttft: float  # seconds at zero prompt tokens
    slo_ttft_per_token: float  # seconds per uncached prompt token on top
    slo_itl: float
    router_queue: int = 0  # requests that wait in the router
    router_queue_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Targets:
    """A policy's answer. The simulator clamps to minimum, maximum and budget (trimming the larger rise) and counts that."""

    prefill: int
    decode: int
    note: str = ""
    convertible: int = 0  # TokenScale: decoders that may prefill in bursts


class Policy(Protocol):
    """One scaling policy with its state. Deterministic: same views, same answers."""

    name: str
    tick: float  # seconds between calls

    def decide(self, view: View) -> Targets:
        """Counts to have; called every `tick` simulated seconds in order."""
        ...


@dataclass(frozen=True, slots=True)
class Profile:
    """What an operator of a peer could have measured in advance: the engine's step times and sizes. Ours gets none of it.

    prefill(n) = max(floor, a + b n + c n^2) seconds of one prompt of n uncached tokens: below the floor a step only reads the
    weights. step(B, S) = d + e B + f S seconds of one decode step of B requests with S tokens of context in all, or, with
    `knots`, alpha(B) + beta(B) S, both linear between the knots (MoE models need that; d, e, f are then the straight fit).
    """

    name: str
    a: float
    b: float
    c: float
    d: float
    e: float
    f: float
    kv_capacity: int  # tokens of one D replica
    prefill_kv_capacity: int
    max_num_seqs: int
    kv_bytes_per_token: int
    gpus_prefill: int = 1
    gpus_decode: int = 1
    floor: float = 0.0
    knots: tuple[tuple[float, float, float], ...] = ()  # (B, alpha seconds, beta seconds per token of context)

    def prefill(self, tokens: float) -> float:
        """Seconds to prefill one prompt of so many uncached tokens."""
        return max(self.floor, self.a + self.b * tokens + self.c * tokens * tokens)

    def step(self, requests: float, context: float) -> float:
        """Seconds of one decode step."""
        base, slope = self.step_law(requests)
        return base + slope * context

    def step_law(self, requests: float) -> tuple[float, float]:
        """(alpha, beta) of a step of so many requests; beyond the last knot the last segment goes on."""
        if len(self.knots) < 2:
            return self.d + self.e * requests, self.f
        last = len(self.knots) - 2
        at = next((i for i in range(last) if requests < self.knots[i + 1][0]), last)
        (low, alpha, beta), (high, alpha_high, beta_high) = self.knots[at], self.knots[at + 1]
        share = max(0.0, (requests - low) / (high - low))
        return alpha + share * (alpha_high - alpha), beta + share * (beta_high - beta)
