"""Losses: a replica is gone with all it had; what becomes of its requests."""

from __future__ import annotations

from pd_simulate.decode import DecodeEngine
from pd_simulate.prefill import PrefillEngine
from pd_simulate.request import NEVER, OPEN, Phase, Request
from pd_simulate.result import FAILED
from pd_simulate.serving import Serving


def lose_prefill(serving: Serving, engine: PrefillEngine) -> None:
    """A P is gone, with its KV: what was on its way in starts again once, what was handed over is prefilled by D."""
    for request in engine.kill():
        request.held = False
        if request.outcome != OPEN:
            if request.decode is not None and request in request.decode.transit:
                request.decode.abort_transit(request)
        elif request.phase in (Phase.HANDOFF, Phase.TRANSFER):
            request.transfer += 1
            serving.lost(request)
        else:
            retry(serving, request)


def lose_decode(serving: Serving, engine: DecodeEngine) -> int:
    """A D is gone: what streamed has failed; what P still holds goes to another D. Returns the number that failed."""
    failed = 0
    for request in engine.kill():
        if request.outcome != OPEN:
            if request.held and request.prefill is not None:
                request.prefill.release(request)
            continue
        request.reserved = 0
        if request.held and request.phase in (Phase.HANDOFF, Phase.TRANSFER):
            request.transfer += 1
            serving.hand_over(request)
            if serving.clock.now >= request.lease_until and request.phase == Phase.HANDOFF:
                serving.lease_over(request)
        elif request.first_token <= serving.clock.now:
            request.decode = None
            request.phase = Phase.ROUTER
            failed += 1
            serving.end(request, FAILED)
        else:
            retry(serving, request)
    return failed


def retry(serving: Serving, request: Request) -> None:
    """Once more from the router; the second loss fails it."""
    request.decode = request.prefill = None
    request.phase = Phase.ROUTER
    if request.retried:
        serving.end(request, FAILED)
        return
    request.retried = True
    serving.tally.retries += 1
    request.local, request.first_token, request.generated, request.gaps = False, NEVER, 0, None
    request.left, request.context = request.uncached, request.prompt - request.uncached
    request.prefill_start = request.prefilled_at = request.reserved_at = NEVER
    serving.router.dispatch(request)
