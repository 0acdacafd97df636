"""Negative controls on real vLLM, NIXL and LMCache that need engines of their own: collected with PDD_REAL_CONTROLS=1 only.

First pairs without a cluster, which the canary's own program asks as its Job does, through a router of a few lines; then, under the
operator, a slice with P2P that serves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from pd_operator import canary
from pd_operator.api.conditions import Reason
from pd_operator.core import proof
from pd_operator.core.canary_case import REQUESTS, Case, Engine
from pd_operator.upstream.lmcache import HTTP_PORT
from pd_operator.upstream.vllm import PORT, SIDE_CHANNEL_PORT
from real import ensure, local
from real.harm import closed
from real.test_serve_real import BYTES, COUNT, LOCAL, PROMPTS, READY_LIMIT_S, ask, findings, serving
from served.fixtures import install
from served.watched import NAMED, Object, asking
from standin.conformance import Client
from standin.door import Answering, door

__all__ = ["install"]  # a fixture
pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]
LIMIT_S = 120.0  # for one leg of a request
FAILED = "vllm:nixl_num_failed_transfers_total"


def two_legs(pair: local.Stack, port: int = 0) -> Answering:
    """What a router does; at `port`, when that is given, decode looks for prefill's side channel."""
    prefill, decode = (Client(engine.http, LIMIT_S) for engine in (pair.prefill, pair.decode))

    def answer(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        params = prefill.json("POST", "/v1/completions", first)["kv_transfer_params"]
        changed = {**params, "remote_port": port} if port else params
        return 200, decode.json("POST", "/v1/completions", {**body, "kv_transfer_params": changed})

    return answer


def verdicts(pair: local.Stack, answer: Answering) -> tuple[proof.Verdict, proof.Verdict]:
    """What the canary says of handoff and offload."""
    prefill, decode = ((Engine(pod=e.role, url=e.http, cache=e.lmcache),) for e in (pair.prefill, pair.decode))
    with door(answer) as (url, ids):
        case = Case(
            mark="pdd-canary-real-1",
            url=url,
            model=local.MODEL_NAME,
            engine="vllm",
            engine_version="0.32.0",
            router="vllm-router",
            cache_version="0.5.5",
            chunk=local.CHUNK,
            prefill=prefill,
            decode=decode,
        )
        seen = canary.Canary(case).run()
        assert len(ids) == REQUESTS, ids
    found = proof.judge_handoff(seen), proof.judge_offload(seen)
    for said in found:
        print(f"{said.reason}: {said.sentence}")
    return found


def test_lookups_without_stores_and_a_wrong_side_channel_are_named(tmp_path: Path) -> None:
    """Every answer is 200. Blocks do not reach LMCache, as before vLLM 0.26.0; at first decode does not find prefill either."""
    with local.real_stack(ensure(), tmp_path, module="emptied") as pair:
        handoff, offload = verdicts(pair, two_legs(pair, port=local.free_port()))
        assert (handoff.proven, handoff.reason) == (False, Reason.TRANSFER_FAILED), handoff
        assert "transfers to decode failed" in handoff.sentence and "itself" in handoff.sentence
        assert (offload.proven, offload.reason) == (False, Reason.NOT_SUBMITTING), offload
        handoff, offload = verdicts(pair, two_legs(pair))
        assert handoff.proven is True, handoff
        assert (offload.proven, offload.reason) == (False, Reason.NOT_SUBMITTING), offload
        assert "3 lookups" in offload.sentence and "0 of" in offload.sentence


def test_an_engine_that_looks_for_lmcache_at_a_wrong_port_ends(tmp_path: Path) -> None:
    """So its pod is in CrashLoop, and PrefillReady says so with the engine's own words."""
    with (
        pytest.raises(RuntimeError, match=r"prefill ended with status [^0]"),
        local.real_stack(ensure(), tmp_path, cache_port=local.free_port()),
    ):
        pass
    assert "Cannot reach the LMCache MP server" in (tmp_path / "prefill.log").read_text(errors="replace")


@pytest.fixture(scope="module")
def chat(install: Cluster) -> Iterator[Object]:
    """The example with P2P, serving."""
    with serving(install, "controls") as one:
        yield one


async def test_a_coordinator_that_stays_down_is_named(chat: Object) -> None:
    labels = "pdserve.dev/deployment=chat,app.kubernetes.io/component=coordinator"
    (pod,) = chat.cluster.json("get", "pods", "-n", chat.namespace, "-l", labels)["items"]
    stop = asyncio.Event()
    killing = asyncio.create_task(chat.keep_down(pod["metadata"]["name"], "coordinator", stop, "coordinator"))
    told = await asyncio.to_thread(chat.named, "CacheDown")
    print(f"\n{told}")
    assert "coordinator has no ready pod" in told and "Next: " in told
    assert chat.condition("HandoffVerified")["status"] == "True" and chat.condition("Ready")["status"] == "True", "handoffs go on"
    stop.set()
    await killing
    await asyncio.to_thread(chat.named, "AsExpected", READY_LIMIT_S)


async def test_a_handoff_from_a_prefill_that_is_gone_ends_with_its_lease(chat: Object) -> None:
    """No packet of prefill's comes any more, as when its node is lost. Decode computes the prompt itself, and nobody is accused."""
    (prefill,), url = chat.pods("prefill"), chat.load().url
    await ask(url, f"before {PROMPTS[0]}")
    before = {name: chat.total("decode", name) for name in (BYTES, LOCAL, FAILED)}
    began = time.monotonic()
    with closed(prefill["metadata"]["name"], "!", "--dports", f"{PORT},{HTTP_PORT}"):
        answer = await ask(url, f"gone {PROMPTS[0]}")
    print(f"\nanswered after {time.monotonic() - began:.1f} s")
    after = {name: chat.total("decode", name) for name in before}
    assert after[FAILED] == before[FAILED] + 1 and after[BYTES] == before[BYTES]
    assert after[LOCAL] == before[LOCAL] + answer["prompt_tokens"], "decode computed it"
    await asyncio.to_thread(chat.until, "the fallback", lambda: chat.object()["status"]["handoff"]["fallbackRequests"] >= 1, NAMED)
    assert not {"SilentFallback", "ReplicaNotTransferring", "BrokenPath"} & {*findings(chat)}, findings(chat)
    assert chat.condition("HandoffVerified")["status"] == "True"
    name = prefill["metadata"]["name"]
    chat.cluster.kubectl("delete", "pod", name, "-n", chat.namespace, "--grace-period=1", timeout=120)

    def others() -> list[str]:
        return [pod["metadata"]["name"] for pod in chat.ready_pods("prefill") if pod["metadata"]["name"] != name]

    await asyncio.to_thread(chat.until, "another prefill", others, READY_LIMIT_S)
    await asyncio.to_thread(chat.ready, READY_LIMIT_S)
    await ask(url, f"after {PROMPTS[0]}")
    assert chat.total("decode", BYTES) > after[BYTES], "with another prefill handoffs go on"


async def test_a_closed_side_channel_is_named_and_taken_back(chat: Object) -> None:
    """A decode that knows prefill asks its side channel no more, so it is a new decode that does not find it."""
    (prefill,), (decode,) = chat.pods("prefill"), chat.pods("decode")
    load = chat.load(tokens=4)
    with closed(prefill["metadata"]["name"], "--dports", str(SIDE_CHANNEL_PORT)):
        chat.cluster.kubectl("delete", "pod", decode["metadata"]["name"], "-n", chat.namespace, "--grace-period=5", timeout=120)
        await asyncio.to_thread(
            chat.until, "another decode", lambda: chat.condition("DecodeReady")["status"] == "True", READY_LIMIT_S
        )
        async with asking({"chat": load}):
            told = await asyncio.to_thread(chat.named, "ReplicaNotTransferring", READY_LIMIT_S)
            found = chat.condition("HandoffVerified")
    print(f"\n{told}")
    assert "transfers from prefill failed" in told and "side channel" in told and "Next: " in told
    assert (found["status"], found["reason"]) == ("False", "TransferFailed"), found
    async with asking({"chat": chat.load(tokens=4)}):
        await asyncio.to_thread(chat.named, "AsExpected", READY_LIMIT_S)
        await asyncio.to_thread(chat.ready, NAMED)
    assert chat.total("decode", COUNT) > 0 and chat.condition("HandoffVerified")["status"] == "True"
