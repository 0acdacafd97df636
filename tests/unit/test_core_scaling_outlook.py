"""Outlook: what is said to change an answer does, by `decide`, and a little less does not."""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random

import pytest
from scaling_builders import BOUNDS, UNKNOWN, _bounds, _readings, learned, long_ago, readings, replicas

from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.outlook import Move, WhatIf, outlook
from pd_operator.core.scaling.readings import Readings
from pd_operator.core.scaling.record import make

NOW = 1000.0


def looked(given: Readings, before: Learned | None = None, bounds: Bounds = BOUNDS) -> dict[str, tuple[WhatIf, ...]]:
    return outlook(make("demo/chat", given, before or learned(), bounds, NOW))  # type: ignore[return-value]


def texts(given: Readings, role: str, before: Learned | None = None, bounds: Bounds = BOUNDS) -> list[str]:
    return [w.text for w in looked(given, before, bounds)[role]]


BUSY = {"running": 900.0, "kv_tokens": 900_000.0}


def test_thresholds_are_those_of_the_law() -> None:
    """b is 200: 3 replicas from 2.1 x 0.85 x 200 = 357 on; V is 20,000: 3 from 2.1 x 0.6 x 20,000 = 25,200 on."""
    assert "rises to 3 when R + H >= 358 requests (now 200)" in texts(readings(running=200.0, kv_tokens=200_000.0), "decode")
    assert "rises to 3 when A >= 25,200 prompt tokens/s (now 20,000)" in texts(readings(), "prefill")


@pytest.mark.parametrize("running", [200.0, 300.0, 340.0])
def test_a_rise_is_where_decide_rises(running: float) -> None:
    given = readings(running=running, kv_tokens=running * 1000, handoff_waiting=3.0)
    (rise,) = (w for w in looked(given)["decode"] if w.move is Move.RISES)
    total = float(re.search(r">= ([\d,]+)", rise.when)[1].replace(",", ""))  # type: ignore[index]

    def at(amount: float) -> int:
        other = readings(running=amount - 3, kv_tokens=(amount - 3) * 1000, handoff_waiting=3.0)
        return decide(other, learned(), BOUNDS, NOW).decode.desired

    assert (at(total), at(total - 1)) == (rise.count, 2) and rise.count == 3


def test_a_fall_is_where_decide_falls_after_the_window() -> None:
    given = readings(running=330.0, kv_tokens=330_000.0)
    (fall,) = (w for w in looked(given)["decode"] if w.move is Move.FALLS)
    total = float(re.search(r"stays at ([\d,]+)", fall.when)[1].replace(",", ""))  # type: ignore[index]

    def falls(amount: float) -> float | None:
        state = learned()
        for n in range(40):
            decision = decide(readings(running=amount, kv_tokens=amount * 1000), state, BOUNDS, NOW + 15 * n)
            if decision.decode.desired < 2:
                return 15.0 * n
            state = decision.learned
        return None

    assert falls(total) == fall.seconds == 300 and falls(total + 1) is None


def test_the_cool_down_that_is_left() -> None:
    """Of 15 lead times of 120 s, 1,699 s have passed: one more than 100 s is left, on the next tick."""
    before = learned(NOW - 15, d=replace(long_ago(2, NOW), peaks=((NOW - 1699.0, 2), (NOW - 150.0, 1))))
    found = looked(readings(running=10.0, kv_tokens=10_000.0), before)["decode"][0]
    assert (found.move, found.count, found.when, found.seconds) == (Move.FALLS, 1, "if the load stays as it is", 105.0)


def test_the_cool_down_that_is_left_of_the_plain_window() -> None:
    """Of 300 s, 199 s have passed."""
    before = learned(NOW - 15, d=replace(long_ago(2, NOW), peaks=((NOW - 199.0, 2), (NOW - 150.0, 1))))
    first = outlook(make("demo/chat", readings(running=10.0, kv_tokens=10_000.0), before, BOUNDS, NOW, Law()))["decode"][0]
    assert (first.move, first.count, first.seconds) == (Move.FALLS, 1, 105.0)


@pytest.mark.parametrize(
    ("given", "bounds", "expected"),
    [
        (
            readings(**BUSY),
            replace(BOUNDS, decode=replace(BOUNDS.decode, maximum=3)),
            "rises to 6 with scaling.decode.maxReplicas: 6",
        ),
        (
            readings(**BUSY),
            replace(BOUNDS, decode=replace(BOUNDS.decode, maximum=3)),
            "stays at 3 under any load: maxReplicas is 3 (MaxReplicas)",
        ),
        (readings(**BUSY), replace(BOUNDS, max_gpus=5), "rises to 4 with scaling.maxGPUs: 6 (now 5)"),
        (
            readings(**BUSY),
            replace(BOUNDS, max_gpus=5, shared="budget b"),
            "rises to 4 with 6 GPUs of the budget that it shares (now 5)",
        ),
        (readings(**BUSY, decode=replicas(2, ready=1, blocked=1)), BOUNDS, "rises to 6 when the replicas that cannot run can"),
    ],
)
def test_limits(given: Readings, bounds: Bounds, expected: str) -> None:
    assert expected in texts(given, "decode", bounds=bounds)


def test_the_end_of_a_rollout() -> None:
    before = learned(NOW - 15, d=long_ago(2, NOW))
    assert "falls to 1 after the rollout" in texts(readings(running=10.0, kv_tokens=10_000.0, rollout=True), "decode", before)


def test_prefill_behind_the_gate_needs_handoffs_to_go() -> None:
    full = readings(running=400.0, kv_tokens=400_000.0, handoff_waiting=60.0, queued_tokens=4_000_000.0, prompt_rate=60_000.0)
    once = decide(full, learned(), BOUNDS, NOW - 15).learned
    told = texts(full, "prefill", once)
    assert any(re.fullmatch(r"rises to \d+ when no handoff waits", t) for t in told), told
    assert any(t.startswith("stays at 2 under any load: decode is congested") for t in told), told


def test_nothing_is_said_of_a_role_whose_need_is_unknown() -> None:
    assert looked(readings(running=UNKNOWN))["decode"] == ()


def test_any_record_can_be_looked_at() -> None:
    """No record makes it fail, ask for ever or say a count outside the bounds; what it says of time is a tick's multiple."""
    random = Random(11)
    for _ in range(12):
        given, bounds = _readings(random), _bounds(random)
        for role, whats in outlook(make("x/y", given, Learned(), bounds, NOW)).items():
            mine = bounds.prefill if role == "prefill" else bounds.decode
            for w in whats:
                assert w.seconds is None or w.seconds % bounds.tick == 0
                assert w.count <= mine.maximum or "maxReplicas" in w.when
                assert w.reason in Reason and w.text
