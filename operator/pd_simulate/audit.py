"""audit(): what must hold after every event: each request in one place, KV and tokens conserved, nothing negative."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pd_simulate.decode import DecodeEngine
from pd_simulate.pools import Pools
from pd_simulate.prefill import PrefillEngine
from pd_simulate.request import OPEN, Phase, Request
from pd_simulate.serving import Serving


def audit(serving: Serving, pools: Pools, arrived: Sequence[Request]) -> None:
    """Raise AssertionError that names the rule and the replica."""
    places: Counter[int] = Counter()
    for replica in pools.replicas:
        if isinstance(replica, PrefillEngine):
            _prefill(replica, places)
        elif isinstance(replica, DecodeEngine):
            _decode(replica, places)
    for number, lane in enumerate(serving.router.lanes):
        waiting = [one for one in lane.queue if one.outcome == OPEN]
        assert lane.queued == len(waiting), f"router queue of slice {number}: counted {lane.queued}, waiting {len(waiting)}"
        assert lane.queued_tokens == sum(one.uncached for one in waiting), f"router queue tokens of slice {number}"
        places.update(one.index for one in waiting)
        places.update(one.index for one in lane.orphans if one.outcome == OPEN and one.decode is None)
    still = [one for one in arrived if one.outcome == OPEN]
    assert serving.tally.open == len(still), f"open requests: counted {serving.tally.open}, are {len(still)}"
    for request in still:
        assert places[request.index] == 1, f"request {request.index} in {request.phase.name} is in {places[request.index]} places"
    gpus = sum(serving.fleet.gpus(one.role) for one in pools.replicas if one.state != "blocked")
    assert gpus <= max(serving.fleet.budget, pools.quota), f"{gpus} GPUs in use, budget {serving.fleet.budget}"


def _prefill(one: PrefillEngine, places: Counter[int]) -> None:
    queue = [request for request in one.queue if request.outcome == OPEN and request.phase == Phase.QUEUED]
    assert one.queued == len(queue), f"{one.name}: queue counted {one.queued}, is {len(queue)}"
    assert one.queued_tokens == sum(request.left for request in queue), f"{one.name}: queued tokens"
    running = [request for request, _ in one.batch]
    assert one.running_tokens == sum(request.left for request in running), f"{one.name}: running tokens"
    assert one.held_tokens == sum(request.prompt for request in one.held), f"{one.name}: held tokens"
    kv = one.held_tokens + sum(request.prompt for request in running)
    assert one.kv_used == kv, f"{one.name}: KV counted {one.kv_used}, is {kv}"
    assert 0 <= one.kv_used <= one.kv_capacity, f"{one.name}: KV {one.kv_used} of {one.kv_capacity}"
    assert all(request.held for request in one.held), f"{one.name}: holds KV of a request that does not know"
    places.update(request.index for request in queue + running)


def _decode(one: DecodeEngine, places: Counter[int]) -> None:
    waiting = [
        request for request in one.waiting if request.outcome == OPEN and request.phase == Phase.HANDOFF and request.decode is one
    ]
    joining = one.joining()
    assert one.waiting_count == len(waiting), f"{one.name}: waiting counted {one.waiting_count}, are {len(waiting)}"
    tokens = sum(request.prompt + request.generated for request in waiting)
    assert one.waiting_tokens == tokens, f"{one.name}: waiting tokens counted {one.waiting_tokens}, are {tokens}"
    stays = [request.prompt + request.generated + one.steps - request.first_step for request in one.running]
    assert one.context == sum(stays), f"{one.name}: context counted {one.context}, is {sum(stays)}"
    reserved = sum(request.reserved for request in [*one.transit, *one.prefills, *joining])
    if one.reserve:
        reserved += sum(request.reserved - (one.steps - request.first_step) for request in one.running)
    assert one.committed == reserved, f"{one.name}: committed {one.committed}, is {reserved}"
    assert 0 <= one.kv_used <= one.kv_capacity, f"{one.name}: KV {one.kv_used} of {one.kv_capacity}"
    local = sum(request.left for request in [*one.prefills, *(request for request in waiting if request.local)])
    assert one.local_tokens == local, f"{one.name}: local tokens counted {one.local_tokens}, are {local}"
    seated = len(one.running) + len(one.transit) + len(one.prefills) + len(joining)
    assert seated <= one.seats, f"{one.name}: {seated} requests on {one.seats} seats"
    places.update(request.index for request in [*waiting, *one.running, *one.transit, *one.prefills, *joining])
