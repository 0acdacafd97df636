"""The gate: when a waiting handoff means a full decode."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scaling_builders import BOUNDS, learned, readings

from pd_operator.core.scaling.gate import gates, handoff_budget
from pd_operator.core.scaling.law import DEFAULT, Law
from pd_operator.core.scaling.learned import DecodeLearned, Gate
from pd_operator.core.scaling.readings import UNKNOWN, Signal, SliceHandoff


@pytest.mark.parametrize(
    ("slo", "per_thousand", "prefill", "expected"),
    [
        (2.0, 0.0, 0.1, 1.9),
        (2.0, 0.1, 0.1, 2.1),  # 2,000 tokens a request at 0.1 s a thousand
        (0.3, 0.0, 0.2, 0.5),  # at least half a second
        (2.0, 0.0, UNKNOWN, 1.9),  # 2,000 tokens at V 20,000
        (None, 0.0, 0.1, 5.0),  # no objective: the queue-time limit
    ],
)
def test_handoff_budget(slo: float | None, per_thousand: float, prefill: Any, expected: float) -> None:
    bounds = replace(BOUNDS, slo_ttft=slo, slo_ttft_per_thousand=per_thousand)
    assert handoff_budget(readings(prefill_latency=prefill), learned().prefill, bounds, DEFAULT) == pytest.approx(expected)


def walk(waits: str, law: Law = DEFAULT, stuck: bool = False, capacity: float | None = 250_000.0, **changes: Any) -> str:
    """Ticks of a queue: `x` waits 3 s of a budget of 2 (limit 1 s), `.` 0.5 s, `?` unknown. Answer: `#` while congested."""
    decode, seen = DecodeLearned(starts=10.0, kv_capacity=capacity), ""
    for tick in waits:
        h = {"x": Signal.of(30.0), ".": Signal.of(5.0), "?": UNKNOWN}[tick]
        after, _ = gates(readings(**{"running": 200.0, **changes}, handoff_waiting=h), decode, 2.0, 100.0, law, 15.0, stuck)
        decode = replace(decode, gates=after)
        seen += "#" if after[0].congested else "-"
    return seen


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ("x.x.x", "-----"),  # one tick is not enough
        (".xx..x....xx", "--#######--#"),  # two in, four out, and a hot tick starts the four anew
        ("xx???....", "-#######-"),  # unknown keeps the gate and does not count
    ],
)
def test_two_ticks_in_four_out(waits: str, expected: str) -> None:
    assert walk(waits) == expected


def test_a_broken_path_is_no_full_decode() -> None:
    assert walk("xxxx", stuck=True, decode_starts=0.0, running=0.0) == "----"


def test_a_slow_link_is_no_full_decode() -> None:
    # 100 run on 2 replicas of b = 100: half full
    assert walk("xxx", Law(gate_fullness=0.6), running=100.0) == "---"
    assert walk("xxx", Law(gate_fullness=0.5), running=100.0) == "-##"
    assert walk("xxx", Law(gate_fullness=0.6), running=100.0, capacity=None) == "-##"  # b is a guess: prefill is held


def test_one_waiting_request_is_no_queue() -> None:
    decode = DecodeLearned()
    for _ in range(3):
        after, wait = gates(readings(handoff_waiting=1.0, decode_starts=0.1), decode, 2.0, 100.0, DEFAULT, 15.0, False)
        decode = replace(decode, gates=after)
    assert (after[0].congested, wait) == (False, 10.0)


def test_a_queue_that_nothing_leaves_is_congested_and_its_wait_is_unknown() -> None:
    before = DecodeLearned(gates=(Gate("", streak=1),))
    after, wait = gates(readings(handoff_waiting=5.0, decode_starts=0.0), before, 2.0, 100.0, DEFAULT, 15.0, False)
    assert (after[0].congested, wait) == (True, None)


def test_each_slice_has_its_own_gate_and_a_slice_that_is_gone_leaves_none() -> None:
    full = SliceHandoff("a", Signal.of(100.0), Signal.of(1.0))
    free = SliceHandoff("b", Signal.of(0.0), Signal.of(9.0))
    before = DecodeLearned(gates=(Gate("a", streak=1), Gate("gone", congested=True)))
    after, wait = gates(readings(slices=(full, free)), before, 2.0, 100.0, DEFAULT, 15.0, False)
    assert [(g.slice, g.congested, g.starts) for g in after] == [("a", True, 1.0), ("b", False, 9.0)]
    assert wait == 100.0
