"""What each router and engine does with more than it can take, and which of their flags `backpressure.maxQueueTime` sets.

"Measured" means smg 1.13.0, vllm-router 0.1.17 and vLLM 0.32.0 under load. Limits are constants per replica: they grow with the
pool by themselves, and no change of a pool rolls a router.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from pd_operator.api.scalars import ceil_seconds, seconds
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.backpressure import Contract
from pd_operator.upstream import vllm
from pd_operator.upstream.flags import value_of

PREFILL_BOUND: Final = "--prefill-max-inflight-requests-per-worker"
PREFILL_TIME: Final = "--prefill-queue-timeout-secs"
DOOR_TIME: Final = "--queue-timeout-secs"
DOOR_BOUND: Final = "--max-concurrent-requests"
QUEUE: Final = "--prefill-queue-size"
DEFAULT_QUEUE: Final = "100"  # smg's own
ENGINE_FLAGS: Final = ("--max-num-queued-reqs", "--max-num-queued-tokens")


def router_limits(router: str, max_queue_time: str, prefill_args: Sequence[str]) -> list[tuple[str, ...]]:
    """Flags of a router that keep `maxQueueTime`, which the user's own replace; none where no flag does.

    smg: a prefill replica gets as many requests at once as it runs; more wait in the router, so long, and are then refused.
    """
    if router != "smg":
        return []
    time = str(max(1, ceil_seconds(max_queue_time)))
    return [(PREFILL_BOUND, str(vllm.running_bound(prefill_args))), (PREFILL_TIME, time), (DOOR_TIME, time)]


def contract(spec: PDDeploymentSpec) -> Contract:
    """The four answers for this router and engine."""
    lease = ceil_seconds(spec.handoff.lease_duration)
    kept = f"{lease}s after prefill ended, renewed by decode every {lease / 6:g}s from the moment that it has the request"
    freed = "decode, when it has read it; else prefill, when the lease ends. No router tells prefill that a client left"
    parts = _smg(spec) if spec.router.type == "smg" else _vllm_router(spec)
    where, code, lacking = parts
    engine = [f"{flag}={value}" for flag in ENGINE_FLAGS if (value := value_of(flag, _prefill_args(spec)))]
    if engine:
        breaker = "when many open its circuit breaker, 503 no_available_workers with Retry-After 1"
        through = (
            f"smg tries again and then hands it on; {breaker}" if spec.router.type == "smg" else "vllm-router turns it into 500"
        )
        where = f"prefill engine ({', '.join(engine)}); {where}"
        code = f"prefill engine: 503 without Retry-After ({through}); {code}"
    lacking.append("the wait on decode: the router sends on what prefill ended, and decode queues it without a limit of time")
    return Contract(where, code, kept, freed, tuple(lacking))


def _prefill_args(spec: PDDeploymentSpec) -> list[str]:
    return [*spec.engine.args, *spec.prefill.args]


def _smg(spec: PDDeploymentSpec) -> tuple[str, str, list[str]]:
    asked = spec.backpressure.max_queue_time
    ours = {limit[0]: limit[1] for limit in router_limits("smg", asked, _prefill_args(spec))}
    given = {flag: value_of(flag, spec.router.args) or value for flag, value in ours.items()}
    queue = value_of(QUEUE, spec.router.args) or DEFAULT_QUEUE
    door = value_of(DOOR_BOUND, spec.router.args)
    where = (
        f"router smg, each of its pods by itself: {given[PREFILL_BOUND]} requests at once for each prefill replica, {queue} more "
        f"wait at most {given[PREFILL_TIME]}s; {door or 'over 1024 a core (at least 4096)'} requests at once at its door"
    )
    code = (
        "429 pd_prefill_queue_full or pd_prefill_queue_timeout, without Retry-After; at the door 429 admission_queue_full or 503 "
        "admission_queue_timeout, Retry-After 2; without a ready prefill or decode 503 no_available_workers, Retry-After 1"
    )
    lacking = [
        f"backpressure.maxQueueTime={asked} inside prefill engines: up to {given[PREFILL_BOUND]} requests of each router pod wait "
        "there without a limit of time"
    ]
    if seconds(asked) != int(seconds(asked)) or seconds(asked) < 1:
        lacking.append(f"backpressure.maxQueueTime={asked} to parts of a second: smg counts whole ones, {ours[PREFILL_TIME]}s here")
    if own := [flag for flag in ours if value_of(flag, spec.router.args)]:
        lacking.append(f"backpressure.maxQueueTime={asked} where spec.router.args sets {', '.join(own)}")
    return where, code, lacking


def _vllm_router(spec: PDDeploymentSpec) -> tuple[str, str, list[str]]:
    asked = spec.backpressure.max_queue_time
    if bound := value_of(DOOR_BOUND, spec.router.args):
        where = f"router vllm-router, each of its pods by itself: {DOOR_BOUND} {bound}, a rate and no bound of streams"
        code = "408 or 429 with an empty body; without a ready prefill or decode 503 text/plain without Retry-After"
    else:
        where = "nobody: vllm-router lets 32768 requests in, and engines queue without a limit"
        code = "none; without a ready prefill or decode 503 text/plain without Retry-After"
    return where, code, [f"backpressure.maxQueueTime={asked}: no queue of vllm-router keeps its time (measured)"]
