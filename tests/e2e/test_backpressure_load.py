"""Load beyond what one prefill replica runs, on the real routers: the excess gets what status says, and nobody hangs."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

import aiohttp
import pytest

from served import Served
from traffic.load import connections, prompt

pytestmark = pytest.mark.timeout(600)
BOUND = 2  # requests that prefill runs at once
SECONDS = 3  # of one prefill
LONG, WAIT = 7, 6  # seconds of one prefill and backpressure.maxQueueTime: nobody's time is over before all have come
QUEUE = 4  # requests that wait
COUNT = 14
HANG = 60.0  # seconds; nothing here takes a quarter of that on an idle machine
Answer = tuple[int, str | None, str, float]  # status, Retry-After, body, seconds


async def answers(url: str, model: str, count: int) -> list[Answer]:
    """Requests at once. A client that waits longer than HANG seconds is an error."""

    async def one(session: aiohttp.ClientSession, number: int) -> Answer:
        body = {"model": model, "messages": [{"role": "user", "content": prompt(number)}], "max_tokens": 2, "ignore_eos": True}
        begin = time.monotonic()
        async with session.post(f"{url}/v1/chat/completions", json=body, timeout=aiohttp.ClientTimeout(total=HANG)) as response:
            return response.status, response.headers.get("Retry-After"), await response.text(), time.monotonic() - begin

    async with connections() as session:
        return await asyncio.gather(*(one(session, time.time_ns() % 10**9 + n) for n in range(count)))


def apply(served: Served, router: dict[str, Any], seconds: int = SECONDS, **spec: Any) -> None:
    slow = {"args": [f"--max-num-seqs={BOUND}"], "env": [{"name": "STANDIN_PREFILL_BASE_S", "value": str(seconds)}]}
    served.apply(prefill=slow, router={"replicas": 1, **router}, **spec)
    served.ready()


async def test_smg_refuses_what_is_too_much_as_status_says(served: Served) -> None:
    apply(served, {"type": "smg", "args": ["--prefill-queue-size", str(QUEUE)]}, LONG, backpressure={"maxQueueTime": f"{WAIT}s"})
    told = served.object()["status"]["backpressure"]
    assert f"{BOUND} requests at once for each prefill replica, {QUEUE} more wait at most {WAIT}s" in told["rejectedAt"]
    found = await answers(served.load().url, served.name, COUNT)
    print(Counter((status, again) for status, again, *_ in found), [f"{seconds:.1f}" for *_, seconds in found])
    good = [a for a in found if a[0] == 200]
    refused = [a for a in found if a[0] != 200]
    # Two run at once; of the four that wait some may still get their turn before their time is over.
    assert BOUND <= len(good) <= BOUND + QUEUE and len(refused) >= COUNT - BOUND - QUEUE
    for status, again, body, _ in refused:
        assert status == 429 and again is None and "pd_prefill_queue" in body, (status, again, body)
    codes = Counter("full" if "pd_prefill_queue_full" in body else "timeout" for _, _, body, _ in refused)
    assert codes["full"] == COUNT - BOUND - QUEUE and all(code in told["code"] for code in ("429", "pd_prefill_queue_full"))
    at_once = [seconds for _, _, body, seconds in refused if "pd_prefill_queue_full" in body]
    assert max(at_once) < HANG / 2
    again = await answers(served.load().url, served.name, 1)
    assert again[0][0] == 200  # and afterwards it serves


async def test_vllm_router_refuses_nobody_as_status_says(served: Served) -> None:
    apply(served, {"type": "vllm-router"}, backpressure={"maxQueueTime": f"{WAIT}s"})
    told = served.object()["status"]["backpressure"]
    assert told["rejectedAt"].startswith("nobody") and told["code"].startswith("none")
    assert any(line.startswith(f"backpressure.maxQueueTime={WAIT}s") for line in told["notEnforced"])
    found = await answers(served.load().url, served.name, 8)
    assert [status for status, *_ in found] == [200] * 8, found


async def test_an_engine_that_refuses_by_itself(served: Served) -> None:
    """--max-num-queued-reqs: 503 through smg, 500 through vllm-router."""
    for kind, expected in (("smg", 503), ("vllm-router", 500)):
        one = Served(served.cluster, served.namespace, kind)
        slow = {
            "args": [f"--max-num-seqs={BOUND}", f"--max-num-queued-reqs={BOUND}"],
            "env": [{"name": "STANDIN_PREFILL_BASE_S", "value": str(SECONDS)}],
        }
        args = ["--prefill-max-inflight-requests-per-worker", "64"] if kind == "smg" else []
        one.apply(prefill=slow, router={"type": kind, "replicas": 1, "args": args})
        one.ready()
        told = one.object()["status"]["backpressure"]
        assert told["rejectedAt"].startswith(f"prefill engine (--max-num-queued-reqs={BOUND})")
        found = await answers(one.load().url, kind, 8)
        print(kind, Counter((status, again) for status, again, *_ in found))
        refused = [(status, again) for status, again, *_ in found if status != 200]
        assert refused and {status for status, _ in refused} == {expected}, found
        assert (expected, None) in refused  # what the engine said, handed on
        # smg's circuit breaker may open under so many: then it refuses by itself, with Retry-After.
        assert {again for _, again in refused} <= ({None, "1"} if kind == "smg" else {None})
