"""Scaled: replicas counted from pods, lead times, and what a restart finds in the status of the pools."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import NOW, pod, revision_of, unschedulable
from scaling_builders import learned

from pd_operator.core.names import Role
from pd_operator.core.observed import LOST_AFTER, ContainerFact, PodFact
from pd_operator.core.pool_status import state_of
from pd_operator.core.scaled import LeadTime, Missing, lead_text, lead_time, read_lead, replicas_of, restore, start_time
from pd_operator.core.scaling.learned import DecodeLearned, Gate, Learned, Memory, PrefillLearned, Rate
from pd_operator.core.scaling.readings import Replicas

REV = revision_of()
SERVING = frozenset({f"chat-{REV}-0"})


def decode(number: int, *, ready: bool = True, **fields: Any) -> PodFact:
    """A decode pod of the serving slice that is 100 s old."""
    return pod(REV, "decode", number, ready=ready, **{"created": NOW - timedelta(seconds=100), **fields})


def waiting(reason: str) -> dict[str, Any]:
    """A pod whose container waits for that reason."""
    return {"ready": False, "containers": (ContainerFact("engine", waiting_reason=reason),)}


NOTHING = Missing()


def count(*pods: PodFact, missing: Missing = NOTHING) -> Replicas:
    return replicas_of(pods, SERVING, 7, NOW, missing)


LATE = NOW - timedelta(seconds=LOST_AFTER + 1)
CASES: dict[str, tuple[PodFact, Replicas]] = {
    "ready": (decode(0), Replicas(7, 1)),
    "ready in a dark slice starts": (pod("feedbeef", "decode", created=NOW - timedelta(seconds=9)), Replicas(7, 0, 1, 0, 0, 9.0)),
    "starting": (decode(0, ready=False), Replicas(7, 0, 1, 0, 0, 100.0)),
    "restarted once, starting": (
        decode(0, ready=False, containers=(ContainerFact("engine", restarts=1),)),
        Replicas(7, 0, 1, 0, 0, 100.0),
    ),
    "not created yet, as far as is known": (decode(0, ready=False, created=None), Replicas(7, 0, 1)),
    "gated waits for a queue": (
        decode(0, ready=False, scheduled=False, scheduling_reason="SchedulingGated"),
        Replicas(7, 0, 1, 0, 0, 100.0),
    ),
    "unschedulable": (unschedulable(REV, "decode"), Replicas(7, 0, 0, 1)),
    "image": (decode(0, **waiting("ImagePullBackOff")), Replicas(7, 0, 0, 1)),
    "configuration": (decode(0, **waiting("CreateContainerConfigError")), Replicas(7, 0, 0, 1)),
    "crash": (decode(0, **waiting("CrashLoopBackOff")), Replicas(7, 0, 0, 1)),
    "draining": (decode(0, deleting=True, grace_ends=NOW), Replicas(7, 0, 0, 0, 1)),
    "on a dead node": (decode(0, deleting=True, grace_ends=LATE), Replicas(7, 0)),
    "evicted": (decode(0, ready=False, phase="Failed"), Replicas(7, 0)),
}


@pytest.mark.parametrize(("found", "expected"), CASES.values(), ids=CASES)
def test_one_replica(found: PodFact, expected: Replicas) -> None:
    assert count(found) == expected


def test_several_replicas() -> None:
    pods = [decode(0), decode(1), decode(2, ready=False), decode(3, ready=False, created=NOW - timedelta(seconds=500))]
    assert count(*pods, unschedulable(REV, "decode", 4), decode(5, deleting=True)) == Replicas(7, 2, 2, 1, 1, 500.0)


def test_replicas_without_room_are_blocked_once() -> None:
    """Two have no room: both as pods that the scheduler refused, one not refused yet, and none made yet."""
    refused = [unschedulable(REV, "decode", n) for n in (1, 2)]
    fresh = pod(REV, "decode", 3, ready=False, scheduled=False)
    assert count(decode(0), *refused, missing=Missing(short=2)) == Replicas(7, 1, 0, 2)
    assert count(decode(0), refused[0], fresh, missing=Missing(short=2)) == Replicas(7, 1, 0, 2)
    assert count(decode(0), missing=Missing(short=2)) == Replicas(7, 1, 0, 2)
    assert count(decode(0), fresh, replace(fresh, name="x", uid="x"), missing=Missing(short=1)) == Replicas(7, 1, 1, 1)


def test_pods_that_the_server_refuses_are_blocked() -> None:
    assert count(decode(0), unschedulable(REV, "decode", 1), missing=Missing(refused=3)) == Replicas(7, 1, 0, 4)


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 40.0),
        ({"ready": False}, None),
        ({"created": None}, None),
        ({"ready_since": None}, None),
        ({"containers": (ContainerFact("engine", restarts=1),)}, None),
        ({"created": NOW + timedelta(seconds=1)}, None),  # clocks
        ({"created": NOW - timedelta(seconds=7201)}, None),
    ],
)
def test_start_time(changes: dict[str, Any], seconds: float | None) -> None:
    given = {"created": NOW - timedelta(seconds=40), "ready_since": NOW, **changes}
    assert start_time(decode(0, **given)) == seconds


def test_lead_time_takes_the_nearest_rank() -> None:
    assert lead_time([]) is None
    assert lead_time([30.0]) == LeadTime(30.0, 30.0, 1)
    assert lead_time([float(n) for n in range(10, 0, -1)]) == LeadTime(5.0, 9.0, 10)


@pytest.mark.parametrize(
    ("lead", "text"),
    [
        (LeadTime(0.412, 3.26, 2), "p50 0.41s, p90 3.3s"),
        (LeadTime(118.3, 1234.0, 2), "p50 120s, p90 1200s"),
        (LeadTime(7200.0, 7200.0, 1), "p50 7200s, p90 7200s"),
    ],
)
def test_lead_time_as_text_and_back(lead: LeadTime, text: str) -> None:
    assert lead_text(lead) == text and len(text) <= 32
    back = read_lead(text)
    assert back is not None and lead_text(back) == text


@pytest.mark.parametrize("text", ["", "soon", "p50 -1s, p90 3s", "p50 1s", "p50 nans, p90 1s"])
def test_what_is_no_lead_time(text: str) -> None:
    assert read_lead(text) is None


BUSY = replace(
    learned(1000.0, Memory(((990.0, 3),), 950.0), Memory(((900.0, 5),))),
    decode=DecodeLearned(
        *(1000.0, 250_000.0, 40.0, 300.0, 10.0, Rate(150.0, 100.0), 970.0),
        gates=(Gate("s", True, 1, 10.0), Gate("t")),
        memory=Memory(((900.0, 5),), 940.0),
    ),
)


def statuses(value: Learned) -> dict[Role, dict[str, Any]]:
    """What both pools' status say after a write."""
    return {r: {"learned": {"state": state_of(value, r)}} for r in ("prefill", "decode")}  # type: ignore[misc]


def test_a_restart_within_a_minute_goes_on_where_it_was() -> None:
    assert restore(statuses(BUSY), 1060.0) == BUSY


@pytest.mark.parametrize("now", [1061.0, 1e9, 999.0])
def test_a_past_that_is_over_is_dropped_and_what_was_learned_stays(now: float) -> None:
    found = restore(statuses(BUSY), now)
    assert found.time is None
    assert found.prefill == PrefillLearned(BUSY.prefill.throughput, BUSY.prefill.tokens, BUSY.prefill.seconds, BUSY.prefill.gain)
    assert found.decode == DecodeLearned(1000.0, 250_000.0, 40.0, 300.0, gates=(Gate("s", True), Gate("t")))


@pytest.mark.parametrize(
    "broken",
    [
        "",
        "{",
        "[]",
        "7",
        "null",
        '"x"',
        '{"time": "x", "learned": {}}',
        '{"time": 1000, "learned": {"unheard": 1}}',
        '{"time": 1000, "learned": {"throughput": "fast"}}',
        '{"time": 1000, "learned": []}',
        '{"time": null, "learned": {}}',
    ],
)
def test_what_cannot_be_read_is_learned_anew(broken: str) -> None:
    good = statuses(BUSY)
    for role in ("prefill", "decode"):
        told = {**good, role: {"learned": {"state": broken}}}
        found = restore(told, 1e9)
        lost, kept = (found.prefill, found.decode) if role == "prefill" else (found.decode, found.prefill)
        assert lost == (PrefillLearned() if role == "prefill" else DecodeLearned())
        assert kept != type(kept)()


def test_nothing_is_restored_from_nothing() -> None:
    assert restore({}, 5.0) == Learned()
    assert restore({"prefill": {}, "decode": {"learned": None}}, 5.0) == Learned()


def test_a_state_is_json_that_fits_into_a_status() -> None:
    full = replace(BUSY, decode=replace(BUSY.decode, memory=Memory(tuple((1e9 + n, 99 - n) for n in range(32)))))
    for role in ("prefill", "decode"):
        text = state_of(full, role)  # type: ignore[arg-type]
        assert 0 < len(text) < 8192 and json.loads(text)["time"] == 1000.0
