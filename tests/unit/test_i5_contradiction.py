"""I5: what counters say after the proof takes Ready back, the slice keeps serving, and working handoffs give it again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import NAME, NOW, conditions
from test_i5_verification import GOOD, after, fronts, job, shown, up

from pd_operator.api.conditions import Reason
from pd_operator.core.evidence.finding import OFFLOAD, Finding
from pd_operator.core.evidence.watch import Evidence
from pd_operator.core.names import slice_name
from pd_operator.core.plan import make_plan
from pd_operator.core.revision import pairing_hash
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.status import build_status


def proven() -> Snapshot:
    """A slice that serves, whose canary proved it, as status tells."""
    snapshot = job(up(front=True), 1, GOOD)
    return after(snapshot, build_status(snapshot, make_plan(snapshot)))


def seen(reason: Reason, *, seconds: float = 60.0, all_of_it: bool = True, slice_: str = "") -> Evidence:
    """A look that found something so long after the proof."""
    name = slice_ or slice_name(NAME, pairing_hash(up().spec))
    since = (NOW + timedelta(seconds=seconds)).timestamp()
    found = Finding(reason, "a-pod", name, since, "decode computed 9 of 9 prompts itself")
    if not all_of_it:
        return Evidence(since, (found,))
    if reason in OFFLOAD:
        other = replace(found, subject=f"{name}-coordinator", sentence="the coordinator has no ready pod")
        return Evidence(since, (other, found), unstored=frozenset({"a-pod"}))
    return Evidence(since, (found,), disproved=frozenset({name}))


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        (Reason.SILENT_FALLBACK, "SilentFallback"),
        (Reason.REPLICA_NOT_TRANSFERRING, "TransferFailed"),
        (Reason.BROKEN_PATH, "TransferFailed"),
    ],
)
def test_a_proof_that_counters_speak_against_is_none(reason: Reason, told: str) -> None:
    snapshot = replace(proven(), evidence=seen(reason))
    status, why, message = shown(snapshot, "HandoffVerified")
    assert (status, why) == ("False", told) and "speak against it since: decode computed 9 of 9" in message
    assert shown(snapshot, "Ready")[:2] == ("False", told)
    assert fronts(make_plan(snapshot)) == [True]  # it serves all the same
    again = after(snapshot, build_status(snapshot, make_plan(snapshot)), 60.0)
    restarted = replace(again, evidence=None)  # no look was made yet
    assert shown(restarted, "HandoffVerified") == (status, why, message)
    mended = replace(again, evidence=Evidence(0.0))
    assert shown(mended, "HandoffVerified")[0] == "True" and shown(mended, "Ready")[0] == "True"


@pytest.mark.parametrize(("reason", "told"), [(Reason.CACHE_DOWN, "ServerDown"), (Reason.NOT_SUBMITTING, "NotSubmitting")])
def test_a_proof_of_offload_that_counters_speak_against_is_none(reason: Reason, told: str) -> None:
    changes: dict[str, Any] = {"lmcache": {}}
    snapshot = job(up(changes, front=True), 1, GOOD)
    snapshot = after(snapshot, build_status(snapshot, make_plan(snapshot)))
    assert shown(snapshot, "OffloadVerified")[:2] == ("True", "Verified") and shown(snapshot, "Ready")[0] == "True"
    slice_ = slice_name(NAME, pairing_hash(snapshot.spec))
    against = replace(snapshot, evidence=seen(reason, slice_=slice_))
    status, why, message = shown(against, "OffloadVerified")
    assert (status, why) == ("False", told) and "speak against it since: decode computed 9 of 9" in message
    assert shown(against, "HandoffVerified")[:2] == ("True", "Verified")
    assert shown(against, "Ready")[:2] == ("False", told) and fronts(make_plan(against)) == [True]
    again = after(against, build_status(against, make_plan(against)), 60.0)
    assert shown(replace(again, evidence=None), "OffloadVerified") == (status, why, message)
    assert shown(replace(again, evidence=Evidence(0.0)), "OffloadVerified")[0] == "True"
    one_of_two = replace(snapshot, evidence=seen(reason, slice_=slice_, all_of_it=False))
    assert shown(one_of_two, "OffloadVerified")[0] == "True" and shown(one_of_two, "Degraded")[1] == reason.value


@pytest.mark.parametrize(
    "evidence",
    [
        None,
        Evidence(0.0),
        seen(Reason.SILENT_FALLBACK, seconds=-60.0),  # the canary proved it after that
        seen(Reason.REPLICA_NOT_TRANSFERRING, all_of_it=False),  # another replica hands over
        seen(Reason.SILENT_FALLBACK, slice_="another-slice"),
        seen(Reason.CACHE_DOWN),
        seen(Reason.PAIR_LOST),
    ],
)
def test_what_does_not_contradict(evidence: Evidence | None) -> None:
    snapshot = replace(proven(), evidence=evidence)
    assert shown(snapshot, "HandoffVerified")[:2] == ("True", "Verified") and shown(snapshot, "Ready")[0] == "True"


def test_advisory_tells_and_does_not_hold_back_ready() -> None:
    snapshot = job(up({"verification": "Advisory"}, front=True), 1, GOOD)
    told = after(snapshot, build_status(snapshot, make_plan(snapshot)))
    name = slice_name(NAME, pairing_hash(snapshot.spec))
    found = conditions(build_status(replace(told, evidence=seen(Reason.SILENT_FALLBACK, slice_=name)), make_plan(told)))
    assert found["HandoffVerified"]["status"] == "False" and found["Ready"]["status"] == "True"
    assert found["Degraded"]["reason"] == "SilentFallback"
