"""Request: one request on its way through the fleet."""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pd_simulate.decode import DecodeEngine
    from pd_simulate.intake import Intake
    from pd_simulate.prefill import PrefillEngine

OPEN = -1  # outcome of a request that has none yet
NEVER = float("inf")


class Phase(IntEnum):
    """Where a request is. Each request is in exactly one place."""

    ROUTER = 0  # waits in the router
    QUEUED = 1  # accepted by P, not running
    PREFILL = 2  # in a step of P (or between two chunks)
    HANDOFF = 3  # prefilled, waits for D to reserve (or to prefill it again)
    TRANSFER = 4  # D has reserved and pulls
    LOCAL = 5  # D prefills it itself
    JOINING = 6  # KV is on D, joins at the next step
    DECODE = 7
    DONE = 8


class Request:
    """Mutable state of one request. Times in simulated seconds, sizes in tokens."""

    __slots__ = (
        "arrival",
        "computed",
        "context",
        "decode",
        "finish_step",
        "first_step",
        "first_token",
        "gap_from",
        "gaps",
        "generated",
        "held",
        "index",
        "itl",
        "last_token",
        "lease_until",
        "left",
        "local",
        "outcome",
        "output",
        "paired",
        "phase",
        "prefill",
        "prefill_start",
        "prefilled_at",
        "prefix",
        "prompt",
        "recomputed",
        "reserved",
        "reserved_at",
        "retried",
        "slice",
        "transfer",
        "ttft_limit",
        "uncached",
    )

    def __init__(self, index: int, arrival: float, prompt: int, output: int) -> None:
        self.index = index
        self.arrival = arrival
        self.prompt = prompt
        self.output = output
        self.prefix: tuple[int, ...] | None = None
        self.uncached = prompt
        self.ttft_limit = NEVER
        self.outcome = OPEN
        self.phase = Phase.ROUTER
        self.slice = 0
        self.prefill: PrefillEngine | None = None
        self.decode: Intake | None = None
        self.paired: DecodeEngine | None = None  # D that the router chose with P
        self.left = prompt  # tokens to prefill where it is now
        self.context = 0  # tokens in KV before those
        self.computed = 0  # prompt tokens computed for it so far, anywhere
        self.held = False  # its KV stands on P
        self.local = False  # D must prefill it
        self.reserved = 0  # KV tokens that D set aside and that are not in its running context
        self.transfer = 0  # number of the current pull; an older one is void
        self.lease_until = NEVER
        self.prefill_start = NEVER
        self.prefilled_at = NEVER
        self.reserved_at = NEVER
        self.first_token = NEVER
        self.last_token = NEVER  # of a preempted one
        self.generated = 0  # tokens streamed before the current stay in a batch
        self.first_step = 0  # D's step count when it joined
        self.gap_from = 0  # 1 if the first step after joining yields its first token, which is no gap
        self.finish_step = 0
        self.gaps: list[float] | None = None  # of earlier stays, after a preemption
        self.itl = float("nan")
        self.recomputed = False
        self.retried = False
