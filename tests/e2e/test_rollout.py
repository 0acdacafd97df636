"""An edit of a pairing field under load: no request is lost, and no request is served by two revisions."""

from __future__ import annotations

import asyncio
from typing import Any

from served import Served
from traffic import steady

FAILED = "vllm:nixl_num_failed_transfers_total"
LOCAL = 'vllm:prompt_tokens_by_source_total{source="local_compute"}'


async def test_a_new_revision_takes_over_under_load(served: Served) -> None:
    served.apply()
    before = served.ready()["status"]["currentRevision"]
    load = served.load(tokens=8)
    async with steady(load, streams=10, stream_tokens=200):
        served.apply(engine={"env": [{"name": "MARK", "value": "2"}]})
        await asyncio.to_thread(
            served.until,
            "the new revision alone",
            lambda: (s := served.object()["status"]).get("currentRevision") not in ("", before) and len(s["slices"]) == 1,
            300,
        )
        # Engines that only ever met peers of their own slice: no failed handshake, no recomputed prompt.
        assert served.total("decode", FAILED) == 0
        assert served.total("decode", LOCAL) == 0
    assert not load.failed, load.summary()
    print(load.summary())


async def test_a_live_edit_ends_no_engine_pod(served: Served) -> None:
    served.apply()
    served.ready()
    uids = {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in served.pods(role)}
    edited: dict[str, Any] = {"router": {"replicas": 1}, "decode": {"replicas": 2}}
    served.apply(**edited)
    served.until("two decode pods", lambda: len(served.pods("decode")) == 2 and len(served.pods("router")) == 1)
    served.ready()
    assert uids <= {pod["metadata"]["uid"] for role in ("prefill", "decode") for pod in served.pods(role)}

    # The field goes, so its default holds, as after an upgrade from a version without it (invariant I12): what serves is verified
    # while it serves. Not a router pod is replaced, and no request fails.
    uids = {pod["metadata"]["uid"] for role in ("prefill", "decode", "router") for pod in served.pods(role)}
    load = served.load(tokens=4)
    async with steady(load, streams=2, stream_tokens=50, workers=2):
        served.apply(**edited, verification=None)
        assert served.object()["spec"]["verification"] == "Required"
        await asyncio.to_thread(served.until, "a proof", lambda: served.condition("HandoffVerified").get("status") == "True", 180)
        assert served.condition("Ready")["status"] == "True"
    assert not load.failed, load.summary()
    assert uids == {pod["metadata"]["uid"] for role in ("prefill", "decode", "router") for pod in served.pods(role)}
    print(load.summary())
