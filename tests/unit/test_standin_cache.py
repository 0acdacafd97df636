"""The LMCache stand-ins: a cache server beside each engine, and the coordinator of a P2P group."""

import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from standin import conformance, shapes
from standin.conformance import prompt_of
from standin.local import Local, Running, free_port, handoff, until, with_cache

pytestmark = pytest.mark.timeout(60)


@dataclass
class Stack:
    """The five processes but the router, and an engine without connectors."""

    prefill: Running
    decode: Running
    prefill_cache: Running
    decode_cache: Running


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    """Shared by tests that only add chunks."""
    with Local() as local:
        caches = [local.cache(wait=False), local.cache(wait=False)]
        roles = ("kv_producer", "kv_consumer")
        engines = [local.engine(r, kv=with_cache(r, c.ports["data"]), wait=False) for r, c in zip(roles, caches, strict=True)]
        for running in (*caches, *engines):
            running.ready()
        yield Stack(engines[0], engines[1], caches[0], caches[1])


@pytest.fixture
def local() -> Iterator[Local]:
    """For tests that need processes of their own."""
    with Local() as made:
        yield made


def objects(cache: Running) -> int:
    """Chunks that the server holds."""
    status = cache.client.json("GET", "/status")
    return int(status["storage_manager"]["l1_manager"]["total_object_count"])


def counter(cache: Running, name: str, **labels: str) -> float:
    """A counter of the server; 0 while it is absent."""
    return shapes.total(cache.client.page(), f"lmcache_mp_{name}", **labels)


def external(engine: Running) -> float:
    """Prompt tokens that came by a connector."""
    return shapes.total(engine.client.page(), "vllm:prompt_tokens_by_source_total", source="external_kv_transfer")


def complete(engine: Running, prompt: str) -> tuple[str, int]:
    """A completion of one token: (its text, whole chunks of the prompt)."""
    answer = engine.client.json("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 1})
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens"] // 64


def test_a_handoff_stores_the_whole_chunks_of_the_prompt_on_prefill(stack: Stack) -> None:
    before, on_d = objects(stack.prefill_cache), objects(stack.decode_cache)
    looked = counter(stack.decode_cache, "lookups_requests_total")
    _, answer = handoff(stack.prefill, stack.decode, prompt=prompt_of(120), max_tokens=8)
    chunks = answer["usage"]["prompt_tokens"] // 64
    assert chunks >= 2
    until(lambda: objects(stack.prefill_cache) == before + chunks, "the chunks of the prompt")
    assert counter(stack.prefill_cache, "l1_write_chunks_total") == objects(stack.prefill_cache)
    assert counter(stack.decode_cache, "lookups_requests_total") == looked + 1
    assert objects(stack.decode_cache) == on_d, "a short answer gives decode nothing to store"
    memory = stack.prefill_cache.client.json("GET", "/status")["storage_manager"]["l1_manager"]["memory_used_bytes"]
    assert memory == objects(stack.prefill_cache) * 64 * 512


def test_decode_stores_what_it_has_decoded(stack: Stack) -> None:
    before = objects(stack.decode_cache)
    handoff(stack.prefill, stack.decode, prompt=prompt_of(120), max_tokens=200)
    until(lambda: objects(stack.decode_cache) == before + 200 // 64, "the chunks of decode")


def test_a_prompt_of_before_a_restart_comes_from_the_cache(local: Local) -> None:
    cache = local.cache()
    kv = with_cache("kv_producer", cache.ports["data"])
    first = local.engine("kv_producer", kv=kv)
    prompt = prompt_of(120)
    text, chunks = complete(first, prompt)
    until(lambda: objects(cache) == chunks, "the chunks")
    first.signal(signal.SIGKILL)
    second = local.engine("kv_producer", kv=kv)
    assert complete(second, prompt) == (text, chunks)
    assert external(second) == chunks * 64
    assert shapes.total(second.client.page(), "vllm:external_prefix_cache_hits_total") == chunks * 64
    assert counter(cache, "lookup_hit_tokens_total") == chunks * 64
    liveness = cache.client.json("GET", "/status")["worker_liveness"]
    assert liveness["tracked_instances"] == 2, "a dead engine is counted until it is reaped"


def test_an_engine_survives_its_cache_server(local: Local) -> None:
    cache = local.cache()
    kv = with_cache("kv_producer", cache.ports["data"], mq_timeout=10.0, heartbeat=0.5)
    engine = local.engine("kv_producer", kv=kv)
    complete(engine, prompt_of(100))
    cache.signal(signal.SIGKILL)
    cache.wait()
    complete(engine, prompt_of(100))
    assert "degraded mode" in engine.output(), "the first request waits for the heartbeat to find the server gone"
    began = time.monotonic()
    complete(engine, prompt_of(100))
    assert time.monotonic() - began < 8, "it waits for no lookup, which takes 10 s"
    assert engine.client.call("GET", "/health")[0] == 200
    again = local.cache(data_port=cache.ports["data"])
    until(lambda: "healthy again" in engine.output(), "the recovery")
    _, chunks = complete(engine, prompt_of(100))
    until(lambda: objects(again) == chunks, "chunks after the recovery")


def test_an_engine_does_not_start_without_its_cache_server(local: Local) -> None:
    kv = with_cache("kv_producer", free_port(), mq_timeout=0.5)
    alone = local.engine("kv_producer", kv=kv, wait=False)
    assert alone.wait() == 1
    assert "not reachable" in alone.output()
    cache = local.cache()
    odd = local.engine("kv_producer", "--block-size", "48", kv=with_cache("kv_producer", cache.ports["data"]), wait=False)
    assert odd.wait() == 1
    assert "must be a multiple" in odd.output()


def test_a_wrong_port_is_as_no_server(local: Local) -> None:
    cache = local.cache()
    kv = with_cache("kv_producer", cache.ports["data"], mq_timeout=0.5)
    astray = local.engine("kv_producer", kv=kv, wait=False, STANDIN_FAULTS=f'{{"cache_port": {free_port()}}}')
    assert astray.wait() == 1 and "not reachable" in astray.output()


def test_lazy_offload_stores_when_enough_requests_have_ended(local: Local) -> None:
    cache = local.cache()
    kv = with_cache("kv_producer", cache.ports["data"])
    kv["kv_connector_extra_config"]["connectors"][1]["kv_connector_extra_config"] |= {
        "lmcache.mp.lazy_offload": True,
        "lmcache.mp.lazy_offload_threshold": 3,
    }
    engine = local.engine("kv_producer", kv=kv)
    chunks = [complete(engine, prompt_of(120))[1] for _ in range(2)]
    assert counter(cache, "lookups_requests_total") == 2 and objects(cache) == 0
    chunks.append(complete(engine, prompt_of(120))[1])
    until(lambda: objects(cache) == sum(chunks), "the chunks of all three")


def test_a_failed_load_ends_an_engine_that_fails_hard(local: Local) -> None:
    cache = local.cache()
    kv = {**with_cache("kv_consumer", cache.ports["data"]), "kv_load_failure_policy": "fail"}
    decode = local.engine("kv_consumer", kv=kv, STANDIN_HANDSHAKE_TIMEOUT_S="0.2")
    params = {"do_remote_prefill": True, "remote_block_ids": [[1]], "remote_engine_id": "x", "remote_request_id": "y"}
    params |= {"remote_host": "127.0.0.1", "remote_port": 1}
    status, _, _ = decode.client.call("POST", "/v1/completions", {"prompt": "hello", "kv_transfer_params": params})
    assert status == 500
    assert decode.client.call("GET", "/health")[0] == 503
    assert decode.wait(10) == 1


def test_servers_register_and_read_from_each_other(local: Local) -> None:
    coordinator = local.coordinator("--instance-timeout", "1", "--health-check-interval", "0.2")
    group = [local.member(coordinator, name) for name in ("one", "two")]
    for member in group:
        until(lambda member=member: _p2p(member) == ("registered", 1), "the registration")
    assert {one["instance_id"] for one in coordinator.client.json("GET", "/instances")["instances"]} == {"one", "two"}
    engines = [local.engine("kv_producer", kv=with_cache("kv_producer", member.ports["data"]), wait=False) for member in group]
    for engine in engines:
        engine.ready()
    prompt = prompt_of(120)
    text, chunks = complete(engines[0], prompt)
    until(lambda: objects(group[0]) == chunks, "the chunks")
    assert complete(engines[1], prompt) == (text, chunks)
    assert external(engines[1]) == chunks * 64
    assert counter(group[1], "lookup_hit_l2_tokens_total") == chunks * 64
    assert counter(group[1], "l2_load_completed_requests_total", l2_name="p2p") == 1
    group[1].signal(signal.SIGKILL)
    until(lambda: _p2p(group[0]) == ("registered", 0), "the expiry of a dead server")
    group[0].signal(signal.SIGTERM)
    assert group[0].wait() == 0
    assert coordinator.client.json("GET", "/instances") == {"instances": []}, "a server that stops leaves the group"


def _p2p(cache: Running) -> tuple[str, int]:
    status = cache.client.json("GET", "/status")
    return status["p2p_state"], status["p2p_peer_count"]


def test_a_server_that_does_not_ask_the_coordinator_stays_unregistered(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    coordinator = local.coordinator()
    monkeypatch.setenv("STANDIN_CACHE_FAULTS", '{"unregistered": true}')
    lonely = local.member(coordinator, "lonely")
    assert lonely.client.json("GET", "/status")["p2p_state"] == "unregistered"
    assert coordinator.client.json("GET", "/instances") == {"instances": []}


def test_the_coordinator_speaks_lmcaches_protocol(local: Local) -> None:
    client = local.coordinator().client
    assert client.json("GET", "/healthz") == {"status": "healthy"}
    assert client.call("PUT", "/instances/x/heartbeat")[0] == 404
    assert client.call("POST", "/instances", {"http_port": 8080})[0] == 422
    answer = client.json("POST", "/instances", {"ip": "10.0.0.1", "http_port": 8080, "instance_id": "x"})
    assert answer == {"instance_id": "x", "re_registered": False}
    assert client.json("PUT", "/instances/x/heartbeat") == {"instance_id": "x"}
    assert client.json("POST", "/instances", {"ip": "10.0.0.1", "http_port": 8080, "instance_id": "x"})["re_registered"]
    assert client.call("DELETE", "/instances/x")[0] == 204
    assert client.call("GET", "/metrics")[0] == 200


def test_a_server_without_coordinator_says_so(stack: Stack) -> None:
    status = stack.prefill_cache.client.json("GET", "/status")
    assert (status["p2p_enabled"], status["p2p_state"], status["is_healthy"]) == (False, "unregistered", True)
    assert stack.prefill_cache.client.json("GET", "/healthcheck") == {"status": "healthy"}
    assert stack.prefill_cache.client.json("GET", "/") == {"status": "ok", "service": "LMCache HTTP API"}
    assert stack.prefill_cache.client.json("GET", "/version").startswith("0.5.5-")


def test_two_records_of_the_stand_ins_do_not_differ(stack: Stack) -> None:
    records = [conformance.record_of(stack.prefill.url, stack.decode.url, stack.prefill_cache.url) for _ in range(2)]
    assert conformance.compare(records[0], records[1]) == []
    moved = records[0]["handoff"]["chat_moved"]
    assert moved == {"transfers": 1.0, "local_compute": 0.0}
