"""The record in a pool's status: exact, fresh where something is written anyway, by itself a write only for a need that moved."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import serving
from scaling_builders import BOUNDS, learned, readings, replicas

from pd_operator.api.pool import PDPoolStatus
from pd_operator.core.plan import make_plan
from pd_operator.core.pool_record import MAX_RECORD, REFRESH, Needs
from pd_operator.core.scaled import Scaled
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Readings, SliceHandoff
from pd_operator.core.scaling.record import make, parse, replay
from pd_operator.core.status import build_pool_status

AT = 1_000_000.0
SCALING = {"scaling": {"mode": "Auto", "prefill": {"maxReplicas": 16}, "decode": {"maxReplicas": 16}}}


def tick(given: Readings, time: float = AT, before: Learned | None = None) -> Scaled:
    made = make("demo/chat", given, before or learned(time - 15), BOUNDS, time)
    return Scaled(time, made.decision, record=made)


def status(scaled: Scaled | None, previous: dict[str, Any] | None = None, spec: dict[str, Any] = SCALING) -> dict[str, Any]:
    """Status of decode, checked against the schema."""
    snapshot = replace(serving(spec), scaled=scaled)
    found = build_pool_status(snapshot, make_plan(snapshot), "decode", previous or {}, 1)
    assert PDPoolStatus.model_validate(found).model_dump(by_alias=True, exclude_unset=True, mode="json").keys() == found.keys()
    return found


def test_what_is_stored_replays_to_what_is_told() -> None:
    told = status(tick(readings(running=500.0, kv_tokens=500_000.0)))
    assert replay(told["record"]) == []
    answer = parse(told["record"]).decision.decode
    assert (answer.desired, answer.reason.value) == (told["desiredReplicas"], told["lastDecision"]["reason"])


def test_a_tick_with_the_same_answer_is_no_write() -> None:
    """For twenty minutes, whatever the readings do below what a need has to move by."""
    first = status(tick(readings()))
    for n in range(1, 81):
        running = 100.0 + n % 50
        later = tick(readings(running=running, kv_tokens=running * 1000), AT + 15 * n)
        assert status(later, first) == first
    assert parse(first["record"]).now == AT


def test_a_new_answer_is_a_new_record() -> None:
    """After a rise the count is right: no other field says so, and the bottleneck is gone."""
    rose = status(tick(readings(running=500.0, kv_tokens=500_000.0)))
    calm = tick(readings(running=500.0, kv_tokens=500_000.0, decode=replicas(3)), AT + 15)
    after = status(calm, rose)
    assert {k for k in after if after[k] != rose.get(k)} == {"record"}
    assert parse(after["record"]).decision.decode.reason.value == "Hold"
    assert after["lastDecision"]["reason"] == "Demand"


def test_a_write_that_comes_anyway_takes_the_newest_record_along() -> None:
    first = status(tick(readings()))
    later = tick(readings(running=101.0), AT + 60)
    other = status(later, {**first, "readyReplicas": 0})
    assert parse(other["record"]).now == AT + 60


@pytest.mark.parametrize(
    ("running", "seconds", "fresh"),
    [
        (100.0, REFRESH, False),
        (180.0, REFRESH, False),  # 0.59 -> 1.06: a tenth, and less than half a replica
        (186.0, REFRESH, True),  # 0.59 -> 1.09: half a replica
        (186.0, REFRESH - 1, False),
    ],
)
def test_a_need_that_moved(running: float, seconds: float, fresh: bool) -> None:
    first = status(tick(readings()))
    later = tick(readings(running=running, kv_tokens=running * 1000), AT + seconds)
    again = {**status(later, first)}
    assert (parse(again["record"]).now > AT) is fresh
    again.pop("record")
    assert again == {k: v for k, v in first.items() if k != "record"}


def test_needs_of_large_pools_move_by_a_tenth() -> None:
    small = Needs(0.0, 100.0, None)
    assert not small.stale(Needs(REFRESH, 109.0, None)) and small.stale(Needs(REFRESH, 111.0, None))
    assert small.stale(Needs(REFRESH, 100.0, 1.0)) and Needs(0.0, 1.0, 1.0).stale(Needs(REFRESH, 1.0, None))


@pytest.mark.parametrize("before", ["", "{", "[]", "{}", '{"now": "x"}', '{"now": 1, "decision": {"prefill": 3}}'])
def test_what_cannot_be_read_is_replaced(before: str) -> None:
    first = status(tick(readings()))
    assert parse(status(tick(readings(), AT + 15), {**first, "record": before})["record"]).now == AT + 15


def test_no_tick_keeps_what_is_there() -> None:
    """A start, a spec that is Static now: the record of the past stays, as lastDecision does."""
    first = status(tick(readings()))
    assert status(None, first)["record"] == first["record"]
    assert status(tick(readings(), AT + 900), first, spec={})["record"] == first["record"]
    assert "record" not in status(None)


def test_one_that_is_too_long_is_left_out() -> None:
    """More slices than a status should hold: the decision log has it."""
    many = readings(slices=tuple(SliceHandoff(f"chat-1a2b3c4d-{n}") for n in range(400)))
    made = tick(many)
    assert made.record is not None and len(made.record.line()) > MAX_RECORD and "record" not in status(made)


def test_a_record_of_a_large_deployment_fits() -> None:
    """32 slices, and a down window full of peaks."""
    many = readings(slices=tuple(SliceHandoff(f"chat-1a2b3c4d-{n}", *[readings().itl] * 2) for n in range(32)))
    state = learned(AT - 15)
    for n in range(40):
        made = make("demo/chat", readings(running=900.0 - 20 * n, slices=many.slices), state, BOUNDS, AT + 15 * n)
        state = made.decision.learned
    assert len(made.line()) < MAX_RECORD
