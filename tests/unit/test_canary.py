"""The canary's program against engine and LMCache stand-ins on loopback, behind a router of a few lines."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pd_operator import canary
from pd_operator.api.conditions import Reason
from pd_operator.core import proof
from pd_operator.core.canary_case import DEADLINE, KEY_VARIABLE, MOST_REQUESTS, REQUESTS, VARIABLE, Case, Engine
from pd_operator.core.proof import Evidence
from pd_operator.upstream import canary_counters
from pd_operator.upstream.signals_table import Kind, Series
from standin.door import Answering, door
from standin.local import NAME, Local, Running, free_port, handoff, until, with_cache

pytestmark = pytest.mark.timeout(120)
CHUNK = 64


@dataclass
class Pair:
    """A prefill and a decode, each with its LMCache server."""

    prefill: Running
    decode: Running
    caches: tuple[Running, Running]

    def two_legs(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """What a router does."""
        return 200, handoff(self.prefill, self.decode, **body)[1]

    def decode_only(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """A router that passes requests through: prefill works for nothing."""
        self.prefill.client.json("POST", "/v1/completions", {**body, "max_tokens": 1})
        return 200, self.decode.client.json("POST", "/v1/completions", body)

    def case(self, url: str, **changes: Any) -> Case:
        values = {
            "mark": "pdd-canary-chat-1",
            "url": url,
            "model": NAME,
            "engine": "vllm",
            "engine_version": "0.32.0",
            "router": "vllm-router",
            "chunk": CHUNK,
            "prefill": [Engine(pod="p-0", url=self.prefill.url, cache=self.caches[0].url)],
            "decode": [Engine(pod="d-0", url=self.decode.url, cache=self.caches[1].url)],
        }
        return Case.model_validate({**values, **changes})


@pytest.fixture(scope="module")
def local() -> Iterator[Local]:
    with Local() as made:
        yield made


def pair_of(local: Local, *, cache_port: int = 0, caches: Any = (), prefill: Any = None, **variables: str) -> Pair:
    """`cache_port`: where prefill looks for its LMCache server, if not where it is; `prefill`: its variables."""
    caches = caches or (local.cache(wait=False), local.cache(wait=False))
    ports = [cache_port or caches[0].ports["data"], caches[1].ports["data"]]
    for cache in caches:
        cache.ready()
    producer = local.engine("kv_producer", kv=with_cache("kv_producer", ports[0]), wait=False, **(prefill or {}))
    decode = local.engine(
        "kv_consumer", kv=with_cache("kv_consumer", ports[1]), wait=False, STANDIN_HANDSHAKE_TIMEOUT_S="0.5", **variables
    )
    return Pair(producer.ready(), decode.ready(), caches)


@pytest.fixture(scope="module")
def pair(local: Local) -> Pair:
    return pair_of(local)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of stand-ins are there at once, and nothing that is not there comes later."""
    monkeypatch.setattr(canary, "LATE", 0.4)
    monkeypatch.setattr(canary, "PAGE", 1.0)
    monkeypatch.setattr(canary, "CONNECT", 1.0)


def seen(pair: Pair, answer: Answering | None = None, **changes: Any) -> Evidence:
    with door(answer or pair.two_legs) as (url, _):
        return canary.Canary(pair.case(url, **changes)).run()


def counted(pair: Pair) -> int:
    """Requests that prefill answered."""
    page = pair.prefill.client.call("GET", "/metrics")[2]
    lines = (page if isinstance(page, bytes) else page.encode()).decode().splitlines()
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines if line.startswith("vllm:request_success_total"))


def test_a_good_pair_is_proven_with_eight_requests_at_most(pair: Pair) -> None:
    before = counted(pair)
    with door(pair.two_legs) as (url, ids):
        found = canary.Canary(pair.case(url)).run()
    handed, stored = proof.judge_handoff(found), proof.judge_offload(found)
    assert (handed.proven, handed.reason) == (True, Reason.VERIFIED), handed
    assert (stored.proven, stored.reason) == (True, Reason.VERIFIED), stored
    assert ids == [f"pdd-canary-chat-1-{n}" for n in range(REQUESTS)]
    assert counted(pair) - before == 2 * REQUESTS <= MOST_REQUESTS
    assert found.decode.transfers == REQUESTS and found.decode.transferred > 0 and found.decode.computed == 0
    assert found.decode.received == found.tokens
    per_prompt = found.tokens / REQUESTS
    assert per_prompt > 2 * CHUNK and found.chunks >= 2 * REQUESTS, "longer than two chunks"
    assert found.cache.written == found.cache.objects == found.chunks
    assert found.output.compared == found.output.same == REQUESTS
    assert not found.shared
    assert len(canary.report(found).encode()) <= proof.MAX_BYTES


def test_prompts_end_inside_a_block(pair: Pair) -> None:
    with door(pair.two_legs) as (url, _):
        program = canary.Canary(pair.case(url))
        for _ in range(5):
            count, _ = program._tokens(program._prompt().split())
            assert count % 2 == 1 and count > 2 * CHUNK


def test_a_short_context_bounds_the_prompt(local: Local) -> None:
    """max_model_len 160: two chunks and the answer do not fit, so the prompt is what fits."""
    engine = local.engine(None, "--max-model-len", "160")
    case = Pair(engine, engine, (engine, engine)).case("http://127.0.0.1:1")
    program = canary.Canary(case)
    count, longest = program._tokens(program._prompt().split())
    assert longest == 160 and count % 2 == 1 and count + canary.ANSWER_TOKENS <= 160


def test_a_decode_that_computes_everything_is_seen_although_every_answer_is_right(pair: Pair) -> None:
    found = seen(pair, pair.decode_only)
    verdict = proof.judge_handoff(found)
    assert (verdict.proven, verdict.reason) == (False, Reason.NO_TRANSFER), verdict
    assert found.failures == 0 and found.output.same == REQUESTS and found.decode.computed == found.tokens
    assert str(found.tokens) in verdict.sentence


def test_prefill_that_refuses_to_be_read_is_a_failed_transfer(pair: Pair) -> None:
    pair.prefill.fault(refuse_transfer=True)
    try:
        verdict = proof.judge_handoff(seen(pair))
    finally:
        pair.prefill.fault(refuse_transfer=False)
    assert verdict.reason is Reason.TRANSFER_FAILED, verdict


def test_a_wrong_side_channel_address_is_a_failed_transfer(local: Local) -> None:
    pair = pair_of(local)  # decode keeps what it knows of an engine
    nobody = free_port()

    def astray(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        params = pair.prefill.client.json("POST", "/v1/completions", first)["kv_transfer_params"]
        wrong = {**params, "remote_port": nobody}
        return 200, pair.decode.client.json("POST", "/v1/completions", {**body, "kv_transfer_params": wrong})

    verdict = proof.judge_handoff(seen(pair, astray))
    assert verdict.reason is Reason.TRANSFER_FAILED and "itself" in verdict.sentence, verdict


def test_wrong_bytes_show_in_the_answer(pair: Pair) -> None:
    pair.prefill.fault(wrong_blob=True)
    try:
        found = seen(pair)
    finally:
        pair.prefill.fault(wrong_blob=False)
    verdict = proof.judge_handoff(found)
    assert found.decode.transfers == REQUESTS and found.decode.computed == 0, "every counter is as it should be"
    assert (verdict.proven, verdict.reason) == (False, Reason.OUTPUT_DIFFERS), verdict


def test_errors_of_the_engine_are_shown_and_the_rest_is_not_sent(pair: Pair) -> None:
    with door(lambda body: (500, {"error": {"message": "EngineCore died, api_key=abcdef123456"}})) as (url, ids):
        found = canary.Canary(pair.case(url)).run()
    verdict = proof.judge_handoff(found)
    assert verdict.reason is Reason.REQUEST_FAILED
    assert "answered 500" in verdict.sentence and "EngineCore died" in verdict.sentence
    assert "abcdef123456" not in canary.report(found), "invariant I10"
    assert len(ids) == 1
    assert proof.judge_offload(found).proven is None


def test_a_service_that_nobody_answers_is_named_with_the_time(pair: Pair) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    verdict = proof.judge_handoff(canary.Canary(pair.case(url)).run())
    assert verdict.reason is Reason.CANARY_FAILED
    assert url in verdict.sentence and "waited 1 s" in verdict.sentence


def test_an_engine_that_is_gone_is_named(pair: Pair) -> None:
    gone = Engine(pod="d-0", url=f"http://127.0.0.1:{free_port()}")
    verdict = proof.judge_handoff(seen(pair, decode=[gone]))
    assert verdict.reason is Reason.CANARY_FAILED
    assert gone.url in verdict.sentence and "waited 1 s" in verdict.sentence


def test_counters_that_a_version_does_not_have_prove_nothing_and_the_ways_out_are_named(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Invariant I8: field, value, and what would be accepted."""
    renamed = {**canary_counters.VLLM, "computed": Series(Kind.COUNTER, ("vllm:renamed_total",))}
    monkeypatch.setitem(canary_counters.PROGRAMS, "vllm", (renamed, canary_counters.VLLM_RECEIVED))  # type: ignore[index]
    canary_counters.tables.cache_clear()
    try:
        verdict = proof.judge_handoff(seen(pair))
    finally:
        canary_counters.tables.cache_clear()
    assert verdict.reason is Reason.CANARY_FAILED
    assert verdict.sentence.startswith("spec.engine.version=0.32.0: ") and "vllm:renamed_total" in verdict.sentence
    assert verdict.sentence.endswith("accepted: a version that has them (measured with vLLM 0.32.0, LMCache 0.5.5, smg 1.13.0), "
                                     "or spec.verification: Advisory or Disabled")  # fmt: skip


def test_an_engine_whose_counters_nobody_knows_is_named_with_the_ways_out(pair: Pair) -> None:
    verdict = proof.judge_handoff(seen(pair, engine="sglang"))
    assert verdict.reason is Reason.CANARY_FAILED
    assert verdict.sentence.startswith("spec.engine.type=sglang: ")
    assert "accepted: vllm, or spec.verification: Advisory or Disabled" in verdict.sentence


def test_two_versions_are_named(local: Local, pair: Pair) -> None:
    other = local.engine(None, STANDIN_VERSION="0.31.0")
    both = [*pair.case("http://x").decode, Engine(pod="d-1", url=other.url)]
    verdict = proof.judge_handoff(seen(pair, decode=both))
    assert verdict.reason is Reason.VERSION_MISMATCH
    assert "0.31.0 and 0.32.0" in verdict.sentence


def test_an_lmcache_server_that_is_down_is_named_and_the_handoff_judged_apart(pair: Pair) -> None:
    down = Engine(pod="p-0", url=pair.prefill.url, cache=f"http://127.0.0.1:{free_port()}")
    found = seen(pair, prefill=[down])
    assert proof.judge_handoff(found).proven is True
    verdict = proof.judge_offload(found)
    assert verdict.reason is Reason.SERVER_DOWN
    assert down.cache in verdict.sentence


def test_a_server_that_nobody_stores_in_is_named(pair: Pair, local: Local) -> None:
    """The engine talks to another server than the one beside it."""
    idle = local.cache()
    verdict = proof.judge_offload(seen(pair, prefill=[Engine(pod="p-0", url=pair.prefill.url, cache=idle.url)]))
    assert verdict.reason is Reason.NOT_SUBMITTING
    assert "0 lookups" in verdict.sentence


def test_servers_that_do_not_see_each_other_are_named(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary, "PEERS", 2.0)
    coordinator = local.coordinator("--instance-timeout", "1", "--health-check-interval", "0.2")
    members = [local.member(coordinator, name) for name in ("p", "d")]
    group = pair_of(local, caches=tuple(members))
    found = seen(group, p2p=True)
    verdict = proof.judge_offload(found)
    assert verdict.proven is True and found.cache.borrowed > 0 and "found on another server" in verdict.sentence
    coordinator.signal(signal.SIGKILL)
    coordinator.wait()
    until(lambda: all(m.client.json("GET", "/status")["p2p_state"] != "registered" for m in members), "a heartbeat that fails")
    found = seen(group, p2p=True)
    assert proof.judge_handoff(found).proven is True
    verdict = proof.judge_offload(found)
    assert verdict.reason is Reason.PEERS_MISSING, verdict
    assert "pod p-0 is unregistered and sees 0 of 1 others" in verdict.sentence and "waited 2 s" in verdict.sentence


def test_what_was_stored_is_found_again_where_the_engine_drops_its_own_cache(local: Local) -> None:
    found = seen(pair_of(local, prefill={"VLLM_SERVER_DEV_MODE": "1"}))
    assert (found.reuse.skipped, found.reuse.hit) == ("", 2 * CHUNK), found.reuse
    verdict = proof.judge_offload(found)
    assert verdict.proven is True and f"{2 * CHUNK} tokens came back from it" in verdict.sentence


def test_an_engine_that_cannot_drop_its_cache_is_no_proof_of_reuse(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    group = pair_of(local, prefill={"VLLM_SERVER_DEV_MODE": "1"})
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    held = {"model": NAME, "prompt": "a prompt that nobody takes " * 20, "max_tokens": 1, "kv_transfer_params": asked}
    group.prefill.client.json("POST", "/v1/completions", held)
    found = seen(group)
    assert "did not drop its cache" in found.reuse.skipped and proof.judge_offload(found).proven is True


def test_others_at_the_same_engines_do_not_make_a_fallback_of_a_good_pair(pair: Pair) -> None:
    def busy(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        handoff(pair.prefill, pair.decode, **{**body, "prompt": f"somebody else {body['prompt']}"})
        pair.decode.client.json("POST", "/v1/completions", {**body, "prompt": "a short one"})
        return pair.two_legs(body)

    found = seen(pair, busy, dark=False)
    assert found.shared
    assert proof.judge_handoff(found).proven is True


def test_the_program_leaves_evidence_and_an_exit_code(pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "termination-log"
    with door(pair.two_legs) as (url, _):
        code = canary.main({VARIABLE: pair.case(url).model_dump_json()}, str(log))
    assert code == 0
    found = proof.read(log.read_text())
    assert found is not None and proof.judge_handoff(found).proven is True
    assert "handoff: Verified" in capsys.readouterr().out
    with door(pair.decode_only) as (url, _):
        assert canary.main({VARIABLE: pair.case(url).model_dump_json()}, str(log)) == 1
    assert canary.main({}, str(log)) == 2
    assert "PDD_CANARY" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["zq9-violet.harbour", 'with "quotes" inside', "zq9-violet.harbour\n"])
def test_a_key_that_somebody_repeats_is_in_nothing_that_the_program_leaves(
    pair: Pair, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str
) -> None:
    """Invariant I10: what it leaves is status, a log and an event. No rule of what keys look like finds these."""
    log = tmp_path / "termination-log"
    with door(lambda _: (401, {"error": f"nobody {key} is known here, and no key of {60 * '.'} {key}"})) as (url, _):
        assert canary.main({VARIABLE: pair.case(url).model_dump_json(), KEY_VARIABLE: key}, str(log)) == 1
    left = log.read_text() + capsys.readouterr().out
    assert "[redacted]" in left
    assert not [form for form in (key.strip(), json.dumps(key.strip())[1:-1], "violet", "quotes") if form in left], left


def test_the_program_ends_before_its_job_does() -> None:
    assert canary.BUDGET + canary.LATE + 2 * canary.PAGE < DEADLINE
