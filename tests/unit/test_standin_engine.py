"""The engine stand-in alone: its HTTP interface, batching, limits, faults, aborts and drains."""

import json
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from standin import shapes
from standin.conformance import Client
from standin.local import NAME, Local, Running, until

pytestmark = pytest.mark.timeout(60)
SLOW = {"STANDIN_DECODE_BASE_S": "0.03"}


@pytest.fixture(scope="module")
def engine() -> Iterator[Running]:
    """Shared by tests that leave it as it was."""
    with Local() as local:
        yield local.engine()


@pytest.fixture
def local() -> Iterator[Local]:
    """For tests that need an engine of their own."""
    with Local() as made:
        yield made


def value(running: Running, name: str, **labels: str) -> float:
    """A metric of the engine now."""
    return shapes.total(running.client.page(), f"vllm:{name}", **labels)


def post(running: Running, **body: Any) -> tuple[int, Any]:
    """A completion: status and decoded answer."""
    status, _, text = running.client.call("POST", "/v1/completions", {"prompt": "one two three", **body})
    return status, json.loads(text)


def test_it_starts_fast_and_small(local: Local) -> None:
    fresh = local.engine()
    # Processor time, not the clock: a test machine may do many things at once.
    assert fresh.processor_seconds() < 1.0
    assert fresh.resident_bytes() < 60 * 2**20


def test_probes_version_and_models(engine: Running) -> None:
    assert engine.client.call("GET", "/health") == (200, "", "")
    assert engine.client.json("GET", "/version") == {"version": "0.32.0"}
    card = engine.client.json("GET", "/v1/models")["data"][0]
    assert (card["id"], card["root"], card["owned_by"], card["max_model_len"]) == (NAME, "standin/tiny", "vllm", 4096)


def test_answers_end_as_asked(engine: Running) -> None:
    _, answer = post(engine, max_tokens=7)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"] | {"prompt_tokens_details": None} == answer["usage"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 7)
    words = answer["choices"][0]["text"].split()
    _, stopped = post(engine, max_tokens=7, stop=[words[3]])
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["choices"][0]["stop_reason"] == words[3]
    assert stopped["choices"][0]["text"].split() == words[:3]
    _, several = post(engine, max_tokens=3, n=2, temperature=1.0)
    assert [choice["index"] for choice in several["choices"]] == [0, 1]
    assert several["choices"][0]["text"] != several["choices"][1]["text"]
    _, lists = post(engine, prompt=["one two three", [1, 2, 3]], max_tokens=7)
    assert lists["choices"][0]["text"].split() == words
    assert post(engine)[1]["usage"]["completion_tokens"] == 16
    chat = {"messages": [{"role": "user", "content": "hello"}]}
    free = engine.client.json("POST", "/v1/chat/completions", chat)
    assert free["choices"][0]["finish_reason"] == "stop"
    assert 64 <= free["usage"]["completion_tokens"] < 256


def test_a_stream_has_the_same_text_and_says_how_it_ended(engine: Running) -> None:
    body = {"model": NAME, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 9}
    whole = engine.client.json("POST", "/v1/chat/completions", body)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    _, kind, text = engine.client.call("POST", "/v1/chat/completions", {**body, **options})
    events = [line for line in text.split("\n") if line.startswith("data: ")]
    assert kind == "text/event-stream"
    assert events[-1] == "data: [DONE]"
    assert "".join(shapes.stream_texts(text)) == whole["choices"][0]["message"]["content"]
    chunks = [json.loads(line[6:]) for line in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:-1]][-1] == "length"
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 9
    assert {chunk["id"] for chunk in chunks} == {chunks[0]["id"]}


@pytest.mark.parametrize(
    ("body", "status", "kind"),
    [
        ({"model": "other"}, 404, "NotFoundError"),
        ({"max_tokens": 0}, 400, "BadRequestError"),
        ({"max_tokens": "x"}, 400, "Bad Request"),
        ({"max_tokens": 5000}, 400, "BadRequestError"),
        ({"prompt": [1] * 4096}, 400, "BadRequestError"),
        ({"prompt": None}, 400, "BadRequestError"),
        ({"n": 2, "temperature": 0}, 400, "BadRequestError"),
        ({"stream_options": {"include_usage": True}}, 400, "BadRequestError"),
    ],
)
def test_bad_requests_are_refused(engine: Running, body: dict[str, Any], status: int, kind: str) -> None:
    answered, error = post(engine, **body)
    assert (answered, error["error"]["type"], error["error"]["code"]) == (status, kind, status)


def test_what_is_no_request_is_a_400(engine: Running) -> None:
    assert engine.client.call("POST", "/v1/completions", raw=b"{")[0] == 400
    assert engine.client.call("GET", "/nothing")[0] == 404
    assert engine.client.call("GET", "/v1/completions")[0] == 405
    with socket.create_connection(("127.0.0.1", engine.ports["http"]), 5) as preface:
        preface.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert preface.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_keyed_engine_wants_the_key(local: Local) -> None:
    keyed = local.engine(None, "--api-key", "secret")
    assert keyed.client.call("GET", "/v1/models")[0] == 401
    assert keyed.client.call("GET", "/health")[0] == 200


def test_requests_share_steps(engine: Running) -> None:
    began = time.monotonic()
    post(engine, max_tokens=50)
    alone = time.monotonic() - began
    with ThreadPoolExecutor(8) as pool:
        began = time.monotonic()
        answers = list(pool.map(lambda _: post(engine, max_tokens=50), range(8)))
        together = time.monotonic() - began
    assert all(answer["usage"]["completion_tokens"] == 50 for _, answer in answers)
    assert together < 5 * alone, "eight requests in a batch take far less than eight times one"


def test_requests_wait_for_run_slots_and_excess_is_rejected(local: Local) -> None:
    small = local.engine(None, "--max-num-seqs", "1", "--max-num-queued-reqs", "2", **SLOW)
    with ThreadPoolExecutor(2) as pool:
        two = [pool.submit(post, small, max_tokens=40) for _ in range(2)]
        until(lambda: value(small, "num_requests_waiting") == 1, "a waiting request")
        assert value(small, "num_requests_running") == 1
        assert value(small, "num_requests_waiting_by_reason", reason="capacity") == 1
        status, error = post(small, max_tokens=1)
        assert (status, error["error"]["type"]) == (503, "Service Unavailable")
        assert [future.result(20)[0] for future in two] == [200, 200]
    assert value(small, "admission_rejections_total", reason="max_num_queued_reqs") == 1
    assert value(small, "request_queue_time_seconds_sum") > 0.5


def test_requests_wait_for_kv_blocks_and_the_youngest_is_preempted(local: Local) -> None:
    tight = local.engine(None, "--max-model-len", "256", "--num-gpu-blocks-override", "8", "--no-enable-prefix-caching")
    prompts = [[number] * 90 for number in (1, 2, 3)]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda prompt: post(tight, prompt=prompt, max_tokens=80), prompts))
    assert [answer["usage"]["completion_tokens"] for _, answer in answers] == [80, 80, 80]
    assert value(tight, "num_preemptions_total") > 0
    alone = [post(tight, prompt=prompt, max_tokens=80)[1]["choices"][0]["text"] for prompt in prompts]
    assert [answer["choices"][0]["text"] for _, answer in answers] == alone
    assert value(tight, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_request(local: Local, stream: bool) -> None:
    slow = local.engine(None, **SLOW)
    body = json.dumps({"prompt": "hello", "max_tokens": 2000, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", slow.ports["http"]), 5) as leaving:
        leaving.sendall(head.encode() + body)
        until(lambda: value(slow, "num_requests_running") == 1, "the request")
        if stream:
            assert leaving.recv(1000).startswith(b"HTTP/1.1 200 OK")
    until(lambda: value(slow, "num_requests_running") == 0, "the abort", 2)
    assert value(slow, "request_success_total", finished_reason="abort") == 1
    assert value(slow, "kv_cache_usage_perc") == 0


def test_faults(local: Local) -> None:
    broken = local.engine(None, STANDIN_FAULTS='{"error_status": 500}')
    assert post(broken)[0] == 500
    broken.fault(error_status=0, unhealthy=True)
    assert broken.client.call("GET", "/health")[0] == 503
    assert post(broken)[0] == 200
    broken.fault(unhealthy=False, dead=True)
    assert broken.client.call("GET", "/health")[0] == 503
    assert post(broken)[0] == 500
    broken.fault(dead=False, stall=True)
    impatient = Client(broken.url, 0.4)
    with pytest.raises(OSError, match="timed out"):
        impatient.call("POST", "/v1/completions", {"prompt": "x"})
    broken.fault(stall=False, slow=20.0)
    began = time.monotonic()
    post(broken, max_tokens=5)
    assert time.monotonic() - began > 0.4
    assert broken.client.call("POST", "/standin/fault", {"nonsense": 1})[0] == 400
    with pytest.raises(OSError, match=r".*"):
        broken.fault(crash=True)
    assert broken.wait() == 1


def test_a_start_can_be_slow_or_fail(local: Local) -> None:
    late = local.engine(None, STANDIN_START_DELAY_S="1.0")
    assert late.started_s > 1.0
    failing = local.engine(None, wait=False, STANDIN_EXIT_AT_START="3")
    assert failing.wait() == 3
    waiting = local.engine(None, wait=False, STANDIN_START_DELAY_S="30")
    until(lambda: "starts" in waiting.output(), "the start")
    waiting.signal(signal.SIGTERM)
    assert waiting.wait() == 0


def test_sigterm_drains_within_the_timeout(local: Local) -> None:
    draining = local.engine(None, "--shutdown-timeout", "20", **SLOW)
    with ThreadPoolExecutor(2) as pool:
        whole = pool.submit(post, draining, max_tokens=200)
        stream = pool.submit(draining.client.call, "POST", "/v1/completions", {"prompt": "x", "max_tokens": 200, "stream": True})
        until(lambda: value(draining, "num_requests_running") == 2, "two requests")
        draining.signal(signal.SIGTERM)
        until(lambda: post(draining)[0] == 500, "the refusal of new requests")
        assert post(draining)[1]["error"]["message"] == "cannot schedule new futures after shutdown"
        assert draining.client.call("GET", "/health")[0] == 200
        assert whole.result(60)[1]["choices"][0]["finish_reason"] == "length"
        text = stream.result(60)[2]
    assert text.count('"finish_reason":"length"') == 1
    assert text.rstrip().endswith("data: [DONE]")
    assert draining.wait() == 0


def test_sigterm_without_a_timeout_aborts(local: Local) -> None:
    aborting = local.engine(None, **SLOW)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, aborting, max_tokens=1000)
        until(lambda: value(aborting, "num_requests_running") == 1, "a request")
        began = time.monotonic()
        aborting.signal(signal.SIGTERM)
        status, answer = running.result(10)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "abort")
    assert aborting.wait() == 0
    assert time.monotonic() - began < 5


def test_a_prefill_engine_drains_its_leases(local: Local) -> None:
    short = {"kv_connector_extra_config": {"kv_lease_duration": 2}}
    prefill = local.engine("kv_producer", "--shutdown-timeout", "20", kv=short)
    params = {"kv_transfer_params": {"do_remote_decode": True}}
    assert post(prefill, max_tokens=1, **params)[1]["kv_transfer_params"]["remote_num_tokens"] == 3
    began = time.monotonic()
    prefill.signal(signal.SIGTERM)
    assert prefill.wait(15) == 0
    assert time.monotonic() - began > 1.0, "P waits until the lease has ended"
