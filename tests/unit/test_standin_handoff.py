"""The handoff between two engine stand-ins: bytes cross a socket, and the decode engine's text depends on them."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from standin import shapes
from standin.conformance import prompt_of
from standin.local import Local, Running, handoff, until

pytestmark = pytest.mark.timeout(60)
SHORT_LEASE = {"kv_connector_extra_config": {"kv_lease_duration": 1}}
FAST_FAILURE = {"STANDIN_HANDSHAKE_TIMEOUT_S": "0.5"}
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass
class Trio:
    """A pair and an engine without connectors."""

    prefill: Running
    decode: Running
    unified: Running


@pytest.fixture(scope="module")
def trio() -> Iterator[Trio]:
    """Shared by tests that leave the engines as they were."""
    with Local() as local:
        made = Trio(
            local.engine("kv_producer", wait=False),
            local.engine("kv_consumer", wait=False, **FAST_FAILURE),
            local.engine(wait=False),
        )
        for running in (made.prefill, made.decode, made.unified):
            running.ready()
        yield made


@pytest.fixture
def local() -> Iterator[Local]:
    """For tests that need engines of their own."""
    with Local() as made:
        yield made


def pair(local: Local, *flags: str, kv: dict[str, Any] | None = None, **decode: str) -> tuple[Running, Running]:
    """P and D, started side by side; `decode` are variables of D."""
    prefill = local.engine("kv_producer", *flags, kv=kv, wait=False)
    consumer = local.engine("kv_consumer", *flags, kv=kv, wait=False, **decode)
    return prefill.ready(), consumer.ready()


def value(running: Running, name: str, **labels: str) -> float:
    """A metric of an engine now."""
    return shapes.total(running.client.page(), f"vllm:{name}", **labels)


def sources(running: Running) -> dict[str, float]:
    """Prompt tokens by source."""
    page = running.client.page()
    return {name: shapes.total(page, "vllm:prompt_tokens_by_source_total", source=name) for name in SOURCES}


def complete(running: Running, prompt: str, **request: Any) -> dict[str, Any]:
    """One completion of 16 tokens that ends as asked."""
    answer = running.client.json(
        "POST", "/v1/completions", {"prompt": prompt, "max_tokens": 16, "return_token_ids": True, **request}
    )
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 16
    return dict(answer)


def tokens(answer: dict[str, Any]) -> list[int]:
    """Token ids of the first choice."""
    return list(answer["choices"][0]["token_ids"])


def hand_over(prefill: Running, decode: Running, prompt: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both legs of one completion."""
    return handoff(prefill, decode, prompt=prompt, max_tokens=16, return_token_ids=True)


def test_bytes_move_and_the_text_is_that_of_one_engine(trio: Trio) -> None:
    prompt = prompt_of(100)
    before = sources(trio.decode)
    moved = value(trio.decode, "nixl_bytes_transferred_sum")
    params, answer = hand_over(trio.prefill, trio.decode, prompt)
    length = answer["usage"]["prompt_tokens"]
    blocks = -(-length // 32)
    assert [len(group) for group in params["remote_block_ids"]] == [blocks]
    assert params["remote_num_tokens"] == length
    assert (params["do_remote_prefill"], params["do_remote_decode"], params["transfer_mode"]) == (True, False, "pull")
    assert value(trio.decode, "nixl_bytes_transferred_sum") - moved == blocks * 32 * 512
    after = sources(trio.decode)
    assert after["external_kv_transfer"] - before["external_kv_transfer"] == length
    assert after["local_compute"] == before["local_compute"]
    assert tokens(answer) == tokens(complete(trio.unified, prompt))
    assert tokens(answer) != tokens(complete(trio.unified, prompt_of(100)))
    assert len(set(tokens(answer))) > 10
    assert value(trio.prefill, "kv_cache_usage_perc") == 0, "P frees the blocks when D has read them"
    assert value(trio.decode, "kv_cache_usage_perc") == 0
    assert answer["kv_transfer_params"] is None


def test_chat_and_streams_are_handed_over_too(trio: Trio) -> None:
    chat = {"messages": [{"role": "user", "content": prompt_of(50)}], "max_tokens": 12}
    path = "/v1/chat/completions"
    whole = trio.unified.client.json("POST", path, chat)["choices"][0]["message"]["content"]
    _, answer = handoff(trio.prefill, trio.decode, path, **chat)
    assert answer["choices"][0]["message"]["content"] == whole
    first = {**chat, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = trio.prefill.client.json("POST", path, first)["kv_transfer_params"]
    status, kind, text = trio.decode.client.call("POST", path, {**chat, "stream": True, "kv_transfer_params": params})
    assert (status, kind) == (200, "text/event-stream")
    assert text.rstrip().endswith("data: [DONE]")
    assert "".join(shapes.stream_texts(text)) == whole


def test_a_repeated_prompt_is_partly_in_the_prefix_cache(trio: Trio) -> None:
    prompt = prompt_of(100)
    hand_over(trio.prefill, trio.decode, prompt)
    before, on_p = sources(trio.decode), sources(trio.prefill)
    moved = value(trio.decode, "nixl_bytes_transferred_sum")
    params, answer = hand_over(trio.prefill, trio.decode, prompt)
    cached = (answer["usage"]["prompt_tokens"] - 1) // 32 * 32
    assert params["remote_prefill_cached_tokens"] == cached
    assert sources(trio.prefill)["local_cache_hit"] - on_p["local_cache_hit"] == cached
    after = sources(trio.decode)
    assert after["local_cache_hit"] - before["local_cache_hit"] == cached
    assert after["local_compute"] == before["local_compute"]
    assert value(trio.decode, "nixl_bytes_transferred_sum") - moved == 32 * 512
    assert tokens(answer) == tokens(complete(trio.unified, prompt))


def test_without_parameters_decode_computes_the_prompt_itself(trio: Trio) -> None:
    prompt = prompt_of(40)
    before = sources(trio.decode)
    answer = complete(trio.decode, prompt)
    after = sources(trio.decode)
    assert after["local_compute"] - before["local_compute"] == answer["usage"]["prompt_tokens"]
    assert after["external_kv_transfer"] == before["external_kv_transfer"]
    incomplete = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_host": "127.0.0.1"}
    assert tokens(complete(trio.decode, prompt, kv_transfer_params=incomplete)) == tokens(answer)


def test_a_wrong_blob_gives_another_text(trio: Trio) -> None:
    prompt = prompt_of(60)
    trio.prefill.fault(wrong_blob=True)
    try:
        _, answer = hand_over(trio.prefill, trio.decode, prompt)
    finally:
        trio.prefill.fault(wrong_blob=False)
    assert tokens(answer) != tokens(complete(trio.unified, prompt))


def test_a_silent_fault_moves_nothing_and_fails_nothing(trio: Trio) -> None:
    prompt = prompt_of(60)
    before, failed = sources(trio.decode), value(trio.decode, "nixl_num_failed_transfers_total")
    trio.prefill.fault(no_transfer=True)
    try:
        params, answer = hand_over(trio.prefill, trio.decode, prompt)
    finally:
        trio.prefill.fault(no_transfer=False)
    assert params is None
    assert sources(trio.decode)["local_compute"] - before["local_compute"] == answer["usage"]["prompt_tokens"]
    assert value(trio.decode, "nixl_num_failed_transfers_total") == failed


def test_refused_reads_are_recomputed_and_counted(trio: Trio) -> None:
    prompt = prompt_of(60)
    before, failed = sources(trio.decode), value(trio.decode, "nixl_num_failed_transfers_total")
    trio.prefill.fault(refuse_transfer=True)
    try:
        _, answer = hand_over(trio.prefill, trio.decode, prompt)
    finally:
        trio.prefill.fault(refuse_transfer=False)
    assert tokens(answer) == tokens(complete(trio.unified, prompt))
    assert value(trio.decode, "nixl_num_failed_transfers_total") == failed + 1
    assert sources(trio.decode)["local_compute"] - before["local_compute"] == answer["usage"]["prompt_tokens"]


def test_a_wrong_address_of_the_side_channel_costs_the_handshake_timeout(local: Local) -> None:
    prefill, decode = pair(local, **FAST_FAILURE)
    prefill.fault(wrong_address=True)
    began = time.monotonic()
    params, answer = hand_over(prefill, decode, prompt_of(60))
    assert params["remote_port"] != prefill.ports["side"] and time.monotonic() - began > 0.5
    assert answer["usage"]["prompt_tokens"] > 0 and value(decode, "nixl_num_failed_transfers_total") == 1

    prefill.fault(wrong_address=False)
    hand_over(prefill, decode, prompt_of(60))
    prefill.fault(wrong_address=True)  # an engine that is known is not looked for again
    hand_over(prefill, decode, prompt_of(60))
    assert value(decode, "nixl_num_failed_transfers_total") == 1 and value(decode, "nixl_bytes_transferred_count") == 2


def test_a_prefill_engine_that_dies_in_a_transfer(local: Local) -> None:
    prefill, decode = pair(local, **FAST_FAILURE)
    hand_over(prefill, decode, prompt_of(60))
    prefill.fault(die_in_transfer=True)
    prompt = prompt_of(60)
    _, answer = hand_over(prefill, decode, prompt)
    assert prefill.wait() == 1 and value(decode, "nixl_num_failed_transfers_total") == 1
    assert tokens(answer) == tokens(complete(local.engine(), prompt)), "decode computed it, and the answer is right"


@pytest.mark.parametrize("stale", [False, True])
def test_another_engine_at_a_known_address(local: Local, stale: bool) -> None:
    first, decode = pair(local, **FAST_FAILURE)
    hand_over(first, decode, prompt_of(60))
    decode.fault(stale_peers=stale)
    first.signal(signal.SIGKILL)
    first.wait()
    second = local.engine("kv_producer", VLLM_NIXL_SIDE_CHANNEL_PORT=str(first.ports["side"]))
    for _ in range(2):
        hand_over(second, decode, prompt_of(60))
    assert value(decode, "nixl_num_failed_transfers_total") == (2 if stale else 0)
    assert value(decode, "nixl_bytes_transferred_count") == (1 if stale else 3)


def test_a_prefill_engine_that_is_gone_costs_the_handshake_timeout(trio: Trio) -> None:
    params = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]], "remote_engine_id": "x", "remote_request_id": "y"}
    params |= {"remote_host": "127.0.0.1", "remote_port": 1}
    began = time.monotonic()
    complete(trio.decode, prompt_of(40), kv_transfer_params=params)
    assert time.monotonic() - began > 0.5


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_another_version_cannot_hand_over(local: Local, trio: Trio, policy: str) -> None:
    old = local.engine("kv_producer", STANDIN_VERSION="0.31.0")
    new = trio.decode if policy == "recompute" else local.engine("kv_consumer", kv={"kv_load_failure_policy": "fail"})
    assert old.client.json("GET", "/version") == {"version": "0.31.0"}
    prompt = prompt_of(60)
    failed = value(new, "nixl_num_failed_transfers_total")
    first = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = old.client.json("POST", "/v1/completions", first)["kv_transfer_params"]
    second = {"prompt": prompt, "max_tokens": 16, "kv_transfer_params": params}
    status, _, text = new.client.call("POST", "/v1/completions", second)
    assert value(new, "nixl_num_failed_transfers_total") == failed + 1
    assert status == (200 if policy == "recompute" else 500), text
    assert "compatibility hash mismatch" in new.output()
    if policy == "fail":
        assert value(new, "request_success_total", finished_reason="error") == 1
        complete(new, prompt)  # the engine lives on
    assert value(old, "kv_cache_usage_perc") > 0, "P keeps the blocks until the lease ends"


def test_a_lease_expires_and_a_late_read_is_counted(local: Local) -> None:
    prefill, decode = pair(local, kv=SHORT_LEASE)
    prompt = prompt_of(60)
    first = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = prefill.client.json("POST", "/v1/completions", first)["kv_transfer_params"]
    assert value(prefill, "kv_cache_usage_perc") > 0
    assert value(prefill, "num_requests_running") == 0
    until(lambda: value(prefill, "nixl_num_kv_expired_reqs_total") == 1, "the expiry")
    assert value(prefill, "kv_cache_usage_perc") == 0
    complete(decode, prompt, kv_transfer_params=params)  # the blocks have not been reused yet: no failure
    assert value(decode, "nixl_bytes_transferred_count") == 1
    assert value(prefill, "nixl_num_notifications_after_expiry_total") == 1


def test_blocks_that_were_reused_give_another_text(local: Local) -> None:
    flags = ("--max-model-len", "256", "--num-gpu-blocks-override", "8")
    unified = local.engine(None, *flags, wait=False)
    prefill, decode = pair(local, *flags)
    prefill.fault(expire_leases=True)
    prompt = prompt_of(60)
    first = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = prefill.client.json("POST", "/v1/completions", first)["kv_transfer_params"]
    until(lambda: value(prefill, "nixl_num_kv_expired_reqs_total") == 1, "the expiry")
    for _ in range(2):
        complete(prefill, prompt_of(60))
    answer = complete(decode, prompt, kv_transfer_params=params)
    assert tokens(answer) != tokens(complete(unified.ready(), prompt))


def test_heartbeats_keep_a_lease_while_decode_is_busy(local: Local) -> None:
    prefill, decode = pair(local, "--max-num-seqs", "1", kv=SHORT_LEASE, STANDIN_DECODE_BASE_S="0.05")
    with ThreadPoolExecutor(2) as pool:
        long = pool.submit(decode.client.json, "POST", "/v1/completions", {"prompt": "long", "max_tokens": 40})
        until(lambda: value(decode, "num_requests_running") == 1, "the long request")
        waiting = pool.submit(hand_over, prefill, decode, prompt_of(60))
        until(lambda: value(decode, "num_requests_kv_fetch_by_stage", stage="waiting_to_start") == 1, "the backlog")
        assert value(decode, "num_requests_waiting") == 1
        waiting.result(20)
        assert long.result(20)["usage"]["completion_tokens"] == 40
    assert value(prefill, "nixl_num_kv_expired_reqs_total") == 0
    assert sources(decode)["external_kv_transfer"] > 0


def test_a_client_that_leaves_before_the_transfer_frees_prefill_at_once(local: Local) -> None:
    prefill, decode = pair(local, "--max-num-seqs", "1", STANDIN_DECODE_BASE_S="0.05")
    with ThreadPoolExecutor(1) as pool:
        long = pool.submit(decode.client.json, "POST", "/v1/completions", {"prompt": "long", "max_tokens": 40})
        until(lambda: value(decode, "num_requests_running") == 1, "the long request")
        prompt = prompt_of(60)
        first = {"prompt": prompt, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
        params = prefill.client.json("POST", "/v1/completions", first)["kv_transfer_params"]
        impatient = decode.client
        impatient.timeout_s = 0.5
        with pytest.raises(OSError, match="timed out"):
            impatient.json("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 4, "kv_transfer_params": params})
        until(lambda: value(prefill, "kv_cache_usage_perc") == 0, "P's blocks", 2)
        long.result(20)
    assert value(decode, "request_success_total", finished_reason="abort") == 1
    assert value(prefill, "nixl_num_kv_expired_reqs_total") == 0


def test_a_request_that_decode_refuses_frees_prefill_at_once(trio: Trio) -> None:
    before = value(trio.prefill, "kv_cache_usage_perc")
    first = {"prompt": prompt_of(60), "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
    params = trio.prefill.client.json("POST", "/v1/completions", first)["kv_transfer_params"]
    assert value(trio.prefill, "kv_cache_usage_perc") > before
    refused = {"prompt": "x", "max_tokens": 0, "kv_transfer_params": params}
    assert trio.decode.client.call("POST", "/v1/completions", refused)[0] == 400
    until(lambda: value(trio.prefill, "kv_cache_usage_perc") <= before, "P's blocks", 2)
