"""The source `prometheus` before a server that misbehaves: everything that is not a plain answer is unknown, named, and bounded."""

from __future__ import annotations

import asyncio
import re
import ssl
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from monitor.answering import Answering, Rows
from monitor.pods import Pod, deployment
from pd_operator.signals.fleet import Deployment
from pd_operator.signals.load import Load
from pd_operator.signals.prometheus import Options, Prometheus
from pd_operator.upstream import signals_labels as labels

P, D, R = Pod("prefill"), Pod("decode"), Pod("router")
FLEET = deployment(P, D, R)


def group(pod: Pod, **extra: str) -> dict[str, str]:
    """Labels of the pod's group."""
    return {k: v for k, v in pod.labels().items() if k in labels.GROUP} | extra


def answer(query: str) -> Rows:
    """Every pod scraped 7 s ago; every number of every group is 2."""
    if query.startswith("max by"):
        return [(pod.labels(), time.time() - 7) for pod in (P, D, R)]
    info = {"num_gpu_blocks": "1000", "block_size": "16"} if "cache_config_info" in query else {}
    role = re.search(r'pdserve_dev_role="(\w+)"', query)
    router = "smg_" in query
    pods = [R] if router else [p for p in (P, D) if role is None or role.group(1) == p.side]
    return [(group(pod, **info), 2.0) for pod in pods]


async def read(url: str, fleet: Deployment = FLEET, times: int = 1, **options: Any) -> Load:
    """The load as Prometheus at this URL has it."""
    source = Prometheus(lambda: (fleet,), Options(url, **options))
    try:
        for _ in range(times):
            loads = await source.read(time.time())
    finally:
        await source.close()
    return loads[fleet.key]


def known(load: Load) -> set[str]:
    return {name for name, s in load.signals().items() if s.known}


def sources(load: Load) -> set[str]:
    return {s.source for s in load.signals().values() if not s.known}


async def test_numbers_ages_and_the_number_of_queries() -> None:
    with Answering(answer) as server:
        load = await read(server.url)
    assert {n: s.value for n, s in load.signals().items()} == {
        "request_rate": 2.0, "prompt_rate": 2.0, "queued_tokens": 4.0, "prefill_rate": 2.0, "prefill_seconds": 2.0,
        "prefill_latency": 1.0, "running": 2.0, "handoff_waiting": 2.0, "decode_starts": 2.0, "kv_tokens": 32_000.0,
        "kv_capacity": 32_000.0, "output_tokens": 1.0, "itl": 1.0, "ttft": 3.0,
    }  # fmt: skip
    assert all(s.age == pytest.approx(7, abs=1) for s in load.signals().values())
    assert load.every_prefill_waiting
    assert len(server.requests) == 23
    assert {path.partition("?")[0] for path, _, _ in server.requests} == {"/api/v1/query"}


async def test_the_age_is_by_the_server_s_clock() -> None:
    """A server whose clock is 10 minutes behind: ages are differences of its own times."""

    def behind(query: str) -> Rows:
        return [(m, float(v) - 600 if query.startswith("max by") else v) for m, v in answer(query)]

    with Answering(behind) as server:
        server.evaluated = time.time() - 600
        load = await read(server.url)
    assert load.running.age == pytest.approx(7, abs=1)
    assert len(known(load)) == 14


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("500", "query pods: ServerError: HTTP Status Code 500"),
        ("503", "query pods: ServerError: HTTP Status Code 503"),
        ("400", "query pods: Refused: HTTP Status Code 400"),
        ("401", "query pods: Refused: HTTP Status Code 401"),
        ("302", "query pods: Refused: HTTP Status Code 302"),
        ("reset", "query pods: ConnectionError"),
        ("cut", "query pods: ConnectionError: the answer broke off"),
        ("html", "query pods: JSONDecodeError"),
        ("scalar", "query pods: Refused: a vector is expected and the answer is 5"),
        ("empty", "query pods: pod chat-1a2b3c4d-0-"),
        ("nan", "query pods: pod chat-1a2b3c4d-0-"),
    ],
)
async def test_a_server_that_fails(fault: str, text: str) -> None:
    with Answering(answer, fault) as server:
        load = await read(server.url)
    assert known(load) == set()
    assert all(text in source and source.startswith(f"Prometheus {server.url}: ") for source in sources(load)), sources(load)
    assert not load.every_prefill_waiting
    assert not load.slices[0].waiting.known


@pytest.mark.parametrize("fault", ["500", "reset", "cut"])
async def test_one_failure_is_tried_again(fault: str) -> None:
    with Answering(answer, fault, None) as server:
        load = await read(server.url)
    assert len(known(load)) == 14
    assert len(server.requests) == 24


@pytest.mark.parametrize(("fault", "requests"), [("400", 1), ("html", 1), ("500", 2)])
async def test_without_the_roll_call_nothing_else_is_asked(fault: str, requests: int) -> None:
    with Answering(answer, fault) as server:
        await read(server.url)
    assert len(server.requests) == requests


@pytest.mark.parametrize("fault", ["hang", "drip"])
async def test_a_server_that_hangs_takes_one_deadline_and_no_more(fault: str) -> None:
    with Answering(answer, fault) as server:
        load = await read(server.url, timeout=0.3, deadline=0.5)
    assert known(load) == set()
    assert all("query pods: no answer in time" in source for source in sources(load))
    assert len(server.requests) == 1


async def test_queries_that_hang_share_the_deadline_and_the_rest_is_not_asked() -> None:
    with Answering(answer, *[None] * 3, "hang") as server:
        load = await read(server.url, timeout=0.4, deadline=0.9)
    assert known(load) == {"running"}
    assert 2 <= len(server.requests) <= 6  # on a busy machine the first ones may take the whole deadline
    assert "query prefill_seconds: no answer in time (the 0.9 s of a tick are over)" in load.prefill_latency.source


async def test_a_query_that_hangs_hides_only_what_is_made_of_it() -> None:
    with Answering(answer, *[None] * 3, "hang", None) as server:  # the fourth query: fetching
        load = await read(server.url, timeout=0.5)
    assert {n for n, s in load.signals().items() if not s.known} == {"handoff_waiting"}
    assert "query fetching: no answer in time" in load.handoff_waiting.source


async def test_nobody_listens() -> None:
    load = await read("http://127.0.0.1:1")
    assert known(load) == set()
    assert all("query pods: ConnectionError" in source for source in sources(load))


@pytest.mark.parametrize(
    ("value", "text"), [("NaN", "nan is no number"), ("+Inf", "inf is no number"), (None, "no series for team/chat decode")]
)
async def test_one_number_that_is_none(value: str | None, text: str) -> None:
    def spoiled(query: str) -> Rows:
        if "num_requests_running" not in query:
            return answer(query)
        return [] if value is None else [(m, value) for m, _ in answer(query)]

    with Answering(spoiled) as server:
        load = await read(server.url)
    assert {n for n, s in load.signals().items() if not s.known} == {"running"}
    assert f"query running: {text}" in load.running.source


async def test_recovery_needs_no_hand() -> None:
    with Answering(answer, "500", "500", None) as server:
        assert known(await read(server.url)) == set()
        assert len(known(await read(server.url))) == 14


def pods(rows: list[tuple[Mapping[str, str], float]]) -> Any:
    """An answer whose roll call is this."""
    return lambda query: rows if query.startswith("max by") else answer(query)


async def test_a_ready_pod_that_was_not_scraped_lately() -> None:
    now = time.time()
    rows = [(P.labels(), now - 7), (D.labels(), now - 61), (R.labels(), now - 7)]
    with Answering(pods(rows)) as server:
        load = await read(server.url)
    assert {"request_rate", "prefill_rate", "queued_tokens"} <= known(load)
    assert not load.running.known
    assert f"query pods: pod {D.pod}: last scraped 61 s ago" in load.running.source
    assert load.running.age == pytest.approx(61, abs=1)


async def test_half_of_the_pods_missing() -> None:
    fleet = deployment(P, R, *(D.but(name=f"d-{n}") for n in range(4)))
    rows = [(pod.labels(), time.time() - 7) for pod in (P, R, D.but(name="d-0"), D.but(name="d-3"))]
    with Answering(pods(rows)) as server:
        load = await read(server.url, fleet)
    assert "query pods: pod d-1: not scraped (2 of 4 pods are missing)" in load.running.source


@pytest.mark.parametrize(("ago", "known"), [(29, True), (31, False), (-29, True), (-31, False)])
async def test_an_engine_that_has_just_become_ready_is_not_missed(ago: float, known: bool) -> None:
    """A scrape and a tick long; the clock of its node may be wrong by that."""
    fleet = deployment(P, R, D, D.but(name="d-new", since=time.time() - ago))
    with Answering(answer) as server:
        load = await read(server.url, fleet)
    assert (load.running.known, load.unread) == (known, {"decode": 1} if known else {})
    assert known or "query pods: pod d-new: not scraped" in load.running.source


async def test_i4_a_new_engine_is_missed_where_no_other_was_scraped_or_it_was_scraped_before() -> None:
    new = D.but(name="d-new", since=time.time() - 5)
    with Answering(pods([(P.labels(), time.time() - 7), (R.labels(), time.time() - 7)])) as server:
        assert "pod d-new: not scraped" in (await read(server.url, deployment(P, R, new))).running.source
    rows = [(pod.labels(), time.time() - 7) for pod in (P, D, R)]
    with Answering(pods([*rows, (new.labels(), time.time() - 70)])) as server:
        load = await read(server.url, deployment(P, R, D, new))
    assert "pod d-new: last scraped 70 s ago" in load.running.source and load.unread == {}


async def test_a_new_router_is_missed_at_once() -> None:
    fleet = deployment(P, D, R, R.but(name="r-new", since=time.time() - 5))
    with Answering(answer) as server:
        load = await read(server.url, fleet)
    assert "pod r-new: not scraped" in load.request_rate.source


async def test_a_pod_that_only_claims_to_be_ours() -> None:
    rows = [(pod.labels(), time.time() - 7) for pod in (P, D, R, D.but(name="stranger"))]
    with Answering(pods(rows)) as server:
        load = await read(server.url)
    assert "pod stranger carries the labels of chat and is none of its pods" in load.running.source
    assert load.request_rate.known


async def test_a_pod_that_left_the_fleet_is_no_stranger() -> None:
    rows = [(pod.labels(), time.time() - 7) for pod in (P, D, R, D.but(name="gone"))]
    fleets = [deployment(P, D, R, D.but(name="gone")), FLEET]
    with Answering(pods(rows)) as server:
        source = Prometheus(lambda: (fleets.pop(0),), Options(server.url))
        first = (await source.read(time.time()))[FLEET.key]
        second = (await source.read(time.time()))[FLEET.key]
        await source.close()
    assert (first.running.known, second.running.known) == (True, True)


async def test_lmcache_s_page_is_no_proof_of_the_engine() -> None:
    rows = [(D.labels() | {"container": "lmcache"}, time.time()), (P.labels(), time.time()), (R.labels(), time.time())]
    with Answering(pods(rows)) as server:
        assert not (await read(server.url)).running.known


async def test_each_deployment_its_percentile() -> None:
    with Answering(answer) as server:
        source = Prometheus(lambda: (FLEET, deployment(Pod("decode", deployment="b"), percentile=50)), Options(server.url))
        loads = await source.read(time.time())
        await source.close()
    assert len(server.requests) == 24
    assert [q.partition("(")[2][:4].rstrip(", ") for _, _, q in server.requests if q.startswith("histogram")] == [
        "0.5",
        "0.95",
        "0.5",
    ]
    assert set(loads) == {("team", "chat"), ("team", "b")}
    assert not loads["team", "b"].running.known


async def test_token_tenant_and_rotation(tmp_path: Path) -> None:
    token = tmp_path / "token"
    with Answering(answer) as server:
        source = Prometheus(lambda: (FLEET,), Options(server.url, token_file=str(token), headers={"X-Scope-OrgID": "tenant-7"}))
        missing = (await source.read(time.time()))[FLEET.key]
        assert server.requests == []
        token.write_text("first\n")
        await source.read(time.time())
        token.write_text("second")
        await source.read(time.time())
        await source.close()
    assert f"{token}: No such file or directory" in missing.running.source
    seen = [(h["Authorization"], h["X-Scope-OrgID"]) for _, h, _ in server.requests]
    assert seen == [("Bearer first", "tenant-7")] * 23 + [("Bearer second", "tenant-7")] * 23


async def test_a_redirect_gets_no_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    with Answering(answer, "307") as server:
        load = await read(server.url, token_file=str(token))
    assert all("Code 307" in source and "secret" not in source for source in sources(load))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A self-signed certificate for 127.0.0.1, with its key, in one file."""
    folder = tmp_path_factory.mktemp("tls")
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=prometheus", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(argv, cwd=folder, check=True, capture_output=True, timeout=30)
    (folder / "both.pem").write_text((folder / "key.pem").read_text() + (folder / "cert.pem").read_text())
    yield folder


async def test_tls_and_a_client_s_certificate(certificate: Path) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate / "both.pem")
    context.load_verify_locations(certificate / "cert.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    ca = str(certificate / "cert.pem")
    with Answering(answer, context=context) as server:
        good = await read(server.url, ca_file=ca, certificate_file=ca, key_file=str(certificate / "key.pem"))
        unverified = await read(server.url)
        anonymous = await read(server.url, ca_file=ca)
    assert len(known(good)) == 14
    assert known(unverified) == known(anonymous) == set()
    assert all("SSLError" in s or "ConnectionError" in s for s in sources(unverified) | sources(anonymous))


async def test_an_answer_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_operator.signals.prometheus.MAX_BYTES", 200)
    with Answering(answer) as server:
        load = await read(server.url)
    assert all("the answer is larger than 200 bytes" in source for source in sources(load))


async def test_reads_do_not_pile_up() -> None:
    with Answering(answer, "hang") as server:
        source = Prometheus(lambda: (FLEET,), Options(server.url, timeout=1.0, deadline=1.0))
        first = asyncio.create_task(source.read(time.time()))
        while not server.requests:
            await asyncio.sleep(0.01)
        second = (await source.read(time.time()))[FLEET.key]
        await first
        await source.close()
    assert "query pods: the queries of the last tick still run" in second.running.source


def test_matchers_are_checked_at_once() -> None:
    with pytest.raises(ValueError, match="pod"):
        Prometheus(lambda: (), Options("http://x", matchers={"pod": "x"}))
