"""Fleet: the settings of one run: engines, counts, bounds, links, SLO, lead times, scrapes, faults, admission, routers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pd_simulate.view import Profile, Role


@dataclass(frozen=True)
class Slo:
    """TTFT limit = `ttft` + `ttft_per_token` x uncached prompt tokens (seconds); p95 of a request's own gaps <= `itl` seconds.

    The client gives up before its first token after `patience` times its TTFT limit (facts/autoscaling.md section 8).
    """

    ttft: float = 1.0
    ttft_per_token: float = 0.1e-3
    itl: float = 0.050
    patience: float = 10.0

    def ttft_limit(self, uncached: float) -> float:
        """Seconds to the first token that still are good."""
        return self.ttft + self.ttft_per_token * uncached


# The classes of facts/autoscaling.md section 8.
CHAT = Slo(1.0, 0.10e-3, 0.050)
LONG_CONTEXT = Slo(2.0, 0.15e-3, 0.050)
STRICT = Slo(0.5, 0.06e-3, 0.030)


@dataclass(frozen=True)
class LeadTime:
    """Seconds from creating a replica to Ready: lognormal with this mean and coefficient of variation (cv 0: constant)."""

    mean: float = 60.0
    cv: float = 0.2


@dataclass(frozen=True)
class Link:
    """KV transfer of one P replica: `setup` seconds, then bytes at `bandwidth` bytes/s shared fairly by its active transfers."""

    bandwidth: float = 25e9
    setup: float = 0.002


@dataclass(frozen=True)
class Slice:
    """One transfer domain: its link, and its share of replicas and of traffic (relative weight)."""

    name: str = "slice-0"
    link: Link = Link()
    weight: float = 1.0


@dataclass(frozen=True)
class Scrape:
    """How a policy sees the world: a sample every `interval` +- `jitter` seconds, visible `delay` seconds later; each replica's
    (and the router's) sample is lost with probability `loss`, and is then unknown until the next one."""

    interval: float = 15.0
    jitter: float = 2.0
    delay: float = 0.0
    loss: float = 0.05


@dataclass(frozen=True)
class Outage:
    """All samples of `what` taken in [start, end) seconds are lost."""

    start: float
    end: float
    what: Literal["all", "prefill", "decode", "router"] = "all"


@dataclass(frozen=True)
class NodeLoss:
    """At `at` seconds the share `fraction` of a role's ready replicas (at least one) ends at once; others replace it later."""

    at: float
    role: Role
    fraction: float = 0.25


@dataclass(frozen=True)
class LinkChange:
    """From `at` seconds every link's bandwidth (or that of the slice named) is `factor` times its setting."""

    at: float
    factor: float
    slice: str = ""


@dataclass(frozen=True)
class QuotaChange:
    """From `at` seconds only `gpus` can be bound: what is created beyond that stays blocked (running replicas are not ended)."""

    at: float
    gpus: int


@dataclass(frozen=True)
class Admission:
    """Limits per replica, constants as in DESIGN section 8. All off: nothing is rejected.

    `max_queue_time` seconds: a request is rejected when every P of its slice has this much prefill work queued (as tokens:
    x the profile's tokens/s at 2,048 tokens). `running_per_decode`: requests one D runs, at most (0: the engine's own
    max_num_seqs). `handoffs_per_decode`: rejected when more handoffs than this per ready D wait in the slice (0: no bound).
    """

    enabled: bool = False
    max_queue_time: float = 5.0
    running_per_decode: int = 0
    handoffs_per_decode: int = 0


@dataclass(frozen=True)
class Router:
    """`choice` of replicas; `per_prefill`: requests outstanding on one P before the router keeps the rest in its own queue
    (0: none are kept while a P is ready). `pairs`: whether D is chosen when prefill has ended, or with P when the request comes,
    as smg does: a D that comes later then takes nothing of what waits."""

    choice: Literal["least_loaded", "round_robin"] = "least_loaded"
    per_prefill: int = 0
    pairs: Literal["handoff", "arrival"] = "handoff"


@dataclass(frozen=True)
class Fleet:
    """One run. Counts are replicas; `budget` GPUs bounds both roles together. Times in seconds.

    `mode` aggregated: no P/D; `decode` counts are engines that prefill and decode in mixed steps of `mixed_tokens` at most.
    `prefix`: `off` ignores prefixes; `given` uses Workload.cached; `shared` one cache per slice, `local` one per P replica,
    both LRU of `prefix_blocks` blocks, filled when a prefill ends (only with Workload.prefix; else as `given`).
    `growth`: D reserves `output` too before it admits (`reserve`), or only the prompt and preempts the newest request when
    it is full (`grow`, as vLLM does; the request is then prefilled again by D).
    `on_lease_end`: D prefills itself (`recompute`) or the request ends as expired (`fail`).
    `horizon`: seconds that may pass after the last arrival until what still runs ends as `unfinished`.
    """

    profile: Profile
    prefill: int = 2
    decode: int = 2
    minimum: dict[Role, int] = field(default_factory=lambda: {"prefill": 1, "decode": 1})
    maximum: dict[Role, int] = field(default_factory=lambda: {"prefill": 64, "decode": 64})
    budget: int = 16
    slo: Slo = CHAT
    mode: Literal["disaggregated", "aggregated"] = "disaggregated"
    slices: tuple[Slice, ...] = (Slice(),)
    lead_prefill: LeadTime = LeadTime()
    lead_decode: LeadTime = LeadTime()
    router: Router = Router()
    admission: Admission = Admission()
    scrape: Scrape = Scrape()
    outages: tuple[Outage, ...] = ()
    losses: tuple[NodeLoss, ...] = ()
    link_changes: tuple[LinkChange, ...] = ()
    quotas: tuple[QuotaChange, ...] = ()
    lease: float = 30.0
    on_lease_end: Literal["recompute", "fail"] = "recompute"
    drain_timeout: float = 120.0
    step_tokens: int = 8192  # of one prefill step (vLLM's max_num_batched_tokens)
    step_requests: int = 64  # prompts in one prefill step
    mixed_tokens: int = 2048  # prompt tokens that a decoding engine adds to one step (aggregated, recompute)
    convertible_tokens: int = 512  # the same in a convertible decoder (TokenScale restricts it)
    prefix: Literal["off", "given", "shared", "local"] = "given"
    prefix_blocks: int = 50_000
    growth: Literal["reserve", "grow"] = "grow"
    warmup: float = 600.0
    horizon: float = 600.0

    def __post_init__(self) -> None:
        for role in ("prefill", "decode"):
            count = getattr(self, role)
            if count < 0 or (count == 0 and not (self.mode == "aggregated" and role == "prefill")):
                raise ValueError(f"fleet.{role}: {count}; accepted: 1 or more replicas at the start")
        if not self.slices:
            raise ValueError("fleet.slices: none; accepted: one or more")
        if self.lease <= 0 or self.scrape.interval <= 0:
            raise ValueError(f"fleet.lease {self.lease}, scrape.interval {self.scrape.interval}; accepted: above 0 seconds")

    def gpus(self, role: Role) -> int:
        """GPUs of one replica of the role."""
        return self.profile.gpus_prefill if role == "prefill" else self.profile.gpus_decode
