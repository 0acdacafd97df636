"""What evidence proves, case by case: each cause has its own reason, and only counters that moved are a proof."""

from __future__ import annotations

from typing import Any

import pytest
from builders import deep

from pd_operator.api.conditions import Reason
from pd_operator.core.proof import Evidence, judge_handoff, judge_offload, read

# Three prompts of 137 tokens through a pair that works, chunks of 64.
GOOD: dict[str, Any] = {
    "sent": 3,
    "tokens": 411,
    "chunks": 6,
    "cached": True,
    "prefill": {"answered": 3, "computed": 411},
    "decode": {"answered": 3, "received": 411, "transfers": 3, "transferred": 245760},
    "cache": {"lookups": 3, "written": 6, "objects": 6},
    "output": {"compared": 3, "same": 3},
    "reuse": {"skipped": "not offered"},
}
FELL_BACK = {"decode": {"computed": 411, "received": 0, "transfers": 0, "transferred": 0}}


def evidence(**changes: Any) -> Evidence:
    return Evidence.model_validate(deep(GOOD, changes))


@pytest.mark.parametrize(
    ("changes", "reason", "words"),
    [
        (FELL_BACK, Reason.NO_TRANSFER, ["0 transfers", "411 of 411"]),
        ({"decode": {"transferred": 0}}, Reason.NO_TRANSFER, ["0 bytes"]),
        ({"decode": {"received": 120}}, Reason.NO_TRANSFER, ["120 of 411"]),
        ({**FELL_BACK, "passed": 3}, Reason.SILENT_FALLBACK, ["router passed 3", "no connector"]),
        ({"decode": {"computed": 137, "received": 274, "transfers": 2}}, Reason.SILENT_FALLBACK, ["137 of 411"]),
        (deep(FELL_BACK, {"decode": {"failed": 3}}), Reason.TRANSFER_FAILED, ["3 transfers", "411 of 411"]),
        ({"failures": 1, "failure": "answered 500"}, Reason.REQUEST_FAILED, ["1 of 3", "answered 500"]),
        ({"failures": 1, "failure": "answered 500", "decode": {"failed": 2}}, Reason.REQUEST_FAILED, ["2 transfers failed"]),
        ({"sent": 0}, Reason.REQUEST_FAILED, []),
        ({"problem": "waited 30 s for http://x"}, Reason.CANARY_FAILED, ["waited 30 s"]),
        ({"versions": ["0.31.0", "0.32.0"]}, Reason.VERSION_MISMATCH, ["0.31.0 and 0.32.0"]),
        ({"output": {"same": 0, "shown": "'a' instead of 'b'"}}, Reason.OUTPUT_DIFFERS, ["3 of 3", "'a' instead of 'b'"]),
        ({"output": {"same": 1}}, Reason.OUTPUT_DIFFERS, ["2 of 3"]),
        ({"output": {"compared": 0, "same": 0, "shown": "p-0 alone: 500"}}, Reason.REQUEST_FAILED, ["p-0 alone: 500"]),
        # Others use the engines: what decode computed for them is no fallback of ours, unless it is most of everything.
        ({"shared": True, "decode": {"computed": 900, "received": 800}}, Reason.SILENT_FALLBACK, ["900"]),
    ],
)
def test_what_went_wrong_with_a_handoff(changes: dict[str, Any], reason: Reason, words: list[str]) -> None:
    verdict = judge_handoff(evidence(**changes))
    assert (verdict.proven, verdict.reason) == (False, reason), verdict
    assert all(word in verdict.sentence for word in words), verdict.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"output": {"same": 2}},  # rounding
        {"decode": {"failed": 1}},  # and it was tried again
        {"decode": {"computed": 16}},  # the last block
        {"shared": True, "decode": {"answered": 9, "computed": 300, "received": 900, "transfers": 7, "failed": 1}},
    ],
)
def test_what_proves_a_handoff(changes: dict[str, Any]) -> None:
    verdict = judge_handoff(evidence(**changes))
    assert (verdict.proven, verdict.reason) == (True, Reason.VERIFIED), verdict


@pytest.mark.parametrize(
    ("changes", "proven", "reason", "words"),
    [
        ({}, True, Reason.VERIFIED, ["6 chunks stored"]),
        ({"cache": {"objects": 0}}, True, Reason.VERIFIED, []),  # evicted meanwhile: the chunks were written
        ({"cache": {"written": 0, "objects": 0}}, False, Reason.NOT_SUBMITTING, ["3 lookups", "0 of 6"]),
        ({"cache": {"written": 5, "objects": 5}}, False, Reason.NOT_SUBMITTING, ["5 of 6"]),
        ({"cache": {"written": 0, "objects": 0, "lookups": 0}}, False, Reason.NOT_SUBMITTING, ["never asked"]),
        ({"cache": {"down": "waited 10 s for http://y"}}, False, Reason.SERVER_DOWN, ["waited 10 s"]),
        ({"reuse": {"skipped": "", "hit": 128, "expected": 64}}, True, Reason.VERIFIED, ["128 tokens came back"]),
        ({"reuse": {"skipped": "", "hit": 0, "expected": 64}}, False, Reason.NOT_SUBMITTING, ["0 of 64"]),
        ({"cache": {"apart": "p-0 is unregistered"}}, False, Reason.PEERS_MISSING, ["p-0 is unregistered"]),
        ({"cache": {"apart": "x", "written": 0, "objects": 0}}, False, Reason.NOT_SUBMITTING, []),  # the graver one
        ({"cache": {"borrowed": 384}}, True, Reason.VERIFIED, ["384 tokens found on another server"]),
        ({"failures": 1, "failure": "answered 500"}, None, Reason.NOT_YET_RUN, ["answered 500"]),
        ({"problem": "waited"}, None, Reason.NOT_YET_RUN, ["waited"]),
        ({"chunks": 0}, None, Reason.NOT_YET_RUN, ["shorter than one chunk"]),
    ],
)
def test_what_evidence_says_of_the_offload(changes: dict[str, Any], proven: bool | None, reason: Reason, words: list[str]) -> None:
    verdict = judge_offload(evidence(**changes))
    assert (verdict.proven, verdict.reason) == (proven, reason), verdict
    assert all(word in verdict.sentence for word in words), verdict.sentence


def test_no_evidence_is_no_proof() -> None:
    assert judge_handoff(Evidence()).proven is False
    assert judge_offload(Evidence()).proven is not True
    assert read("Traceback (most recent call last):") is None
    assert read("") is None


def test_a_newer_canary_may_say_more() -> None:
    assert read('{"sent": 3, "weather": "fine"}') == Evidence(sent=3)
