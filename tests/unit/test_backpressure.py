"""The back-pressure contract: four answers for each router and engine, limits that keep maxQueueTime, and who enforces nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import (
    by_name,
    containers,
    deep,
    make_snapshot,
    make_spec,
    pod_specs,
    rendered,
    revision_of,
    serving,
    stored,
    whole_slice,
)
from test_core_status import status_of

from pd_operator.api.status import BackpressureStatus
from pd_operator.core import backpressure
from pd_operator.core.backpressure import Contract
from pd_operator.core.plan import make_plan
from pd_operator.core.scaled import LeadTime
from pd_operator.render.bundle import render
from pd_operator.upstream.backpressure import contract

LIMITS = ["--prefill-max-inflight-requests-per-worker", "--prefill-queue-timeout-secs", "--queue-timeout-secs"]


def router_flags(changes: dict[str, Any]) -> dict[str, str]:
    """The limits in the router's arguments."""
    _, _, bundle = rendered(changes)
    (template,) = (t for name, t in pod_specs(bundle).items() if name.endswith("-router"))
    args = containers(template)["router"]["args"]
    return {flag: args[args.index(flag) + 1] for flag in LIMITS if flag in args}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ["256", "5", "5"]),
        ({"backpressure": {"maxQueueTime": "90s"}}, ["256", "90", "90"]),
        ({"backpressure": {"maxQueueTime": "1500ms"}}, ["256", "2", "2"]),
        ({"backpressure": {"maxQueueTime": "100ms"}}, ["256", "1", "1"]),
        ({"prefill": {"args": ["--max-num-seqs=2"]}}, ["2", "5", "5"]),
        ({"engine": {"args": ["--max_num_seqs", "64"]}, "decode": {"args": ["--max-num-seqs=9"]}}, ["64", "5", "5"]),
        ({"router": {"args": ["--prefill-queue-timeout-secs", "7"]}}, ["256", "7", "5"]),
        ({"router": {"type": "vllm-router"}}, []),
    ],
)
def test_limits_are_constants_of_a_replica(changes: dict[str, Any], expected: list[str]) -> None:
    assert list(router_flags(changes).values()) == expected


def test_the_limits_are_those_of_the_slice_s_own_revision() -> None:
    """An edit of maxQueueTime makes a new slice and changes no router of the one that serves."""
    old = {"backpressure": {"maxQueueTime": "9s"}, "prefill": {"args": ["--max-num-seqs=3"]}}
    _, _, before = rendered(old)
    kept = stored(next(m for m in by_name(before).values() if m["kind"] == "ControllerRevision"))
    children, pods = whole_slice(revision_of(old), front=True)
    for edit, expected in (({"prefill": {"args": ["--max-num-seqs=4"]}}, ["4", "5", "5"]), ({}, ["256", "5", "5"])):
        now = make_snapshot(edit, children=children, pods=pods, revisions=(kept,))
        found = {}
        for name, template in pod_specs(render(now, make_plan(now))).items():
            if name.endswith("-router"):
                args = containers(template)["router"]["args"]
                found[name.split("-")[1]] = [args[args.index(flag) + 1] for flag in LIMITS]
        assert found[revision_of(edit)] == expected
        assert found.get(revision_of(old), ["3", "9", "9"]) == ["3", "9", "9"]


SMG = contract(make_spec({}))
ROUTER = contract(make_spec({"router": {"type": "vllm-router"}}))


def test_smg_refuses_before_prefill_and_says_how() -> None:
    assert "256 requests at once for each prefill replica, 100 more wait at most 5s" in SMG.rejected_at
    assert "429 pd_prefill_queue_full" in SMG.code and "without Retry-After" in SMG.code and "503 no_available_workers" in SMG.code
    assert SMG.kept_for.startswith("30s after prefill ended") and "every 5s" in SMG.kept_for
    assert "decode" in SMG.freed_by and "lease" in SMG.freed_by
    assert any("inside prefill engines: up to 256" in line for line in SMG.not_enforced)
    assert any("decode queues it without a limit" in line for line in SMG.not_enforced)


def test_vllm_router_refuses_nobody_and_says_so() -> None:
    assert ROUTER.rejected_at.startswith("nobody") and ROUTER.code.startswith("none")
    assert ROUTER.not_enforced[0].startswith("backpressure.maxQueueTime=5s: no queue of vllm-router")
    limited = contract(make_spec({"router": {"type": "vllm-router", "args": ["--max-concurrent-requests=8"]}}))
    assert "408 or 429" in limited.code and "no bound of streams" in limited.rejected_at


@pytest.mark.parametrize(("kind", "words"), [("smg", "circuit breaker"), ("vllm-router", "turns it into 500")])
def test_an_engine_s_own_limit_is_named_with_what_the_client_gets(kind: str, words: str) -> None:
    found = contract(make_spec({"router": {"type": kind}, "prefill": {"args": ["--max-num-queued-reqs=12"]}}))
    assert found.rejected_at.startswith("prefill engine (--max-num-queued-reqs=12)") and words in found.code


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backpressure": {"maxQueueTime": "1500ms"}}, "maxQueueTime=1500ms to parts of a second: smg counts whole ones, 2s here"),
        ({"router": {"args": ["--queue-timeout-secs=60"]}}, "where spec.router.args sets --queue-timeout-secs"),
    ],
)
def test_what_is_kept_only_in_part_is_named(changes: dict[str, Any], words: str) -> None:
    assert any(words in line for line in contract(make_spec(changes)).not_enforced)
    assert not any(words in line for line in SMG.not_enforced)


def test_status_has_the_contract_and_the_measured_lead_times() -> None:
    base = serving()
    told = status_of(base)["backpressure"]
    assert BackpressureStatus.model_validate(told).model_dump(by_alias=True, exclude_unset=True) == told
    assert "scaleOutP50" not in told and told["rejectedAt"] == SMG.rejected_at and told["notEnforced"] == list(SMG.not_enforced)
    lead = {"prefill": LeadTime(40.0, 60.0, 3), "decode": LeadTime(50.0, 55.0, 2)}
    first = backpressure.status(SMG, lead, {})  # type: ignore[arg-type]
    assert (first["scaleOutP50"], first["scaleOutP90"]) == ("50s", "60s")
    near = {**lead, "decode": LeadTime(58.0, 55.0, 9)}
    assert backpressure.status(SMG, near, {"backpressure": first}) == first  # type: ignore[arg-type]
    assert backpressure.status(SMG, {}, {"backpressure": first}) == first  # a restart forgets none
    far = {"decode": LeadTime(90.0, 118.3, 9)}
    assert backpressure.status(SMG, far, {"backpressure": first})["scaleOutP90"] == "120s"  # type: ignore[arg-type]


def test_texts_fit_the_schema() -> None:
    for kind in ("smg", "vllm-router"):
        for more in ({}, {"prefill": {"args": ["--max-num-queued-reqs=12", "--max-num-queued-tokens=100000"]}}):
            found: Contract = contract(make_spec(deep({"router": {"type": kind, "args": ["--queue-timeout-secs=1"]}}, more)))
            texts = (found.rejected_at, found.code, found.kept_for, found.freed_by, *found.not_enforced)
            assert all(len(text) <= 1024 for text in texts) and len(found.not_enforced) <= 16


def test_an_accepted_queue_time_is_no_refusal() -> None:
    for kind in ("smg", "vllm-router"):
        snapshot = make_snapshot({"router": {"type": kind}, "backpressure": {"maxQueueTime": "7s"}})
        assert make_plan(snapshot).refusal is None
        assert "7s" in " ".join(status_of(replace(snapshot))["backpressure"]["notEnforced"])
