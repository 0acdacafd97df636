"""Law: every constant of the scaling law in one place, with its source, and a switch for each term beyond the smallest law."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Law:
    """Constants and switches of `decide`. Seconds, shares of 1, replicas.

    The first block is the recommended small law ("l0s6" of the study that this one starts from; its sources are named). A switch
    at 0 or False is off. docs/design/scaling-law.md says what each switch won and lost in the simulator.
    """

    # Rates
    rate_window: float = 30.0  # s, EWMA of A, lam, x and OSL (l0s6)
    throughput_window: float = 120.0  # s, decay of prompt tokens and of prefill seconds, whose ratio is V (l0s6)
    saturated_window: float = 60.0  # s, EWMA of the rate seen while every P had work waiting (l0s6)
    # Capacity
    prefill_load: float = 0.60  # rho_P: share of V that the flow may take; 0.70 lost 5 points of attainment (l0s6 ablation)
    decode_load: float = 0.85  # rho_D: share of b that R may take (l0s6)
    kv_share: float = 0.8  # u: share of a decode replica's KV that running requests may hold (l0s6)
    kv_prior: float = 6000.0  # tokens per request before anything was seen (l0s6)
    kv_window: float = 30.0  # s, EWMA of c; 0 takes the last tick
    kv_min_running: float = 4.0  # R below which KV per request is noise (l0s6)
    drain_time: float = 60.0  # s in which queued prompt tokens are to be gone (l0s6)
    # Gate
    gate_enter: int = 2  # ticks (l0s6)
    gate_leave: int = 4  # ticks (l0s6)
    gate_share: float = 0.5  # of W_max, the share of the TTFT budget that a handoff may wait (DESIGN §7)
    min_handoff_budget: float = 0.5  # s, W_max at least (l0s6)
    gate_min_waiting: float = 2.0  # requests: one request seen twice is no queue
    # Size
    dead_band: float = 0.1  # N = ceil(n - 0.1) (l0s6)
    up_add: int = 4  # up at most by so many, or
    up_factor: float = 2.0  # by this factor a tick, whichever is more (l0s6)
    down_window: float = 300.0  # s; HPA's stabilisation window, and ski rental for lead times up to 200 s
    down_lead_times: float = 1.5  # the window is at least so many lead times (l0s6)
    down_interval: float = 60.0  # s between two steps down (l0s6)
    prefill_fits: float = 0.80  # load of the replicas left, below which a P may go (l0s6)
    decode_fits: float = 0.85  # the same for D (l0s6)
    queue_fits: float = 0.5  # s of queued work of the replicas left, below which a P may go (l0s6)
    # b under an ITL objective
    itl_high: float = 1.0  # of the objective: b falls above it
    itl_margin: float = 0.9  # of the objective: b may grow again below it
    itl_floor: float = 0.5  # b falls at most by this factor a tick
    itl_recovery: float = 600.0  # s in which b grows by e while ITL is below the margin
    # Terms that had to win in the simulator
    decode_flow: float = 0.0  # > 1: R counts clamp(lam / x, 1, this) times: what decode will hold once prefill delivers
    decode_little: bool = False  # n_D at least lam OSL ITL / (rho_D b): Little's law
    backlog_damped: bool = False  # H counts min(1, G / drain time), G = R / x seconds in decode
    drain_lead_time: bool = False  # a backlog need not be gone sooner than a new replica could help: drain time >= lead time
    backlog_frozen: bool = False  # while replicas start, the backlog that ordered them orders no more
    forecast: bool = False  # damped Holt on A at lead time + tick; never below A
    jump: float = 1.3  # > 1: a rate off by this factor replaces its average at once
    jump_deviations: float = 0.0  # > 0: and only if it is off by so many standard deviations of its ticks
    tail: float = 0.0  # z: A counts with z standard deviations of its ticks on top
    decode_tail: float = 0.0  # z: D goes down only if mean R + z standard deviations of its ticks fits into what stays
    decode_tail_window: float = 300.0  # s, EWMA of that mean and variance: the down window's length
    decode_memory: float = 0.0  # decode's down window is at least so many lead times: see size.window_of_decode
    decode_memory_most: float = 3600.0  # s, at most this by that rule; a bound, not measured
    hold_decode: float = 0.0  # s of queued prefill above which no D goes down (D looks idle while P is short)
    split_hysteresis: bool = False  # at the cap, a split within one replica of the present one is kept
    gate_fullness: float = 0.6  # share of b that R must take before a waiting handoff counts as a full D (else: the link)
    prefill_gate: bool = True  # queued prompts order no P while D is congested
    gate_holds: bool = True  # P may not rise at all while D is congested, not by what arrives either
    gate_smooth: bool = True  # the gate sees x averaged over the rate window, not the last tick's
    split_window: float = 120.0  # s, EWMA of the flows that key the split
    split_flow_max: bool = True  # f_D is the larger of R / (rho b) and lam OSL ITL / (rho b), not the smaller of that and n_D
    split_step: bool = True  # a split takes one replica a down interval from a role, not all at once
    split_best: bool = True  # the split serves the largest share of both flows, instead of rounding the proportion
    down_share: float = 0.0  # a step down is this share of the replicas, at least one
    reversal_factor: float = 0.0  # > 1: the down window grows by it when a step down had to be taken back, to at most 8 times
    latency_ticks: int = 0  # > 0: P rises by one after so many ticks of TTFT above its objective while D is not congested


DEFAULT = Law(decode_memory=15.0)  # what won after the first records were written is switched on here: see record.Record.law


def with_headroom(law: Law, headroom: float) -> Law:
    """The law with its two loads divided by `headroom` (1 = as it is): above 1 buys attainment with GPUs, below 1 the reverse.

    The knob of the comparison with other policies, and `scaling.headroomPercent` / 100. Decode's load is at most 1: more requests
    than its KV holds do not run.
    """
    if headroom == 1:
        return law
    return replace(law, prefill_load=law.prefill_load / headroom, decode_load=min(1.0, law.decode_load / headroom))
