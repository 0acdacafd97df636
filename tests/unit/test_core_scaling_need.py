"""Need of each role: the formulas with values computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from scaling_builders import BOUNDS, learned, readings

from pd_operator.core.scaling.law import DEFAULT, Law
from pd_operator.core.scaling.learned import PrefillLearned, Rate
from pd_operator.core.scaling.need import Need, need_of_decode, need_of_prefill
from pd_operator.core.scaling.readings import UNKNOWN

BASIC = Law()  # the smallest law


def decode(law: Law = DEFAULT, stuck: bool = False, **changes: Any) -> Need:
    """Need of decode with b = min(256, 0.8 x 250,000 / 1,000) = 200."""
    state = learned()
    return need_of_decode(readings(**changes), state.decode, state.prefill, BOUNDS, law, stuck)


def prefill(law: Law = DEFAULT, queue_counts: bool = True, **changes: Any) -> Need:
    """Need of prefill with A = 20,000 and V = 20,000."""
    return need_of_prefill(readings(**changes), learned().prefill, BOUNDS, law, queue_counts)


SMALL = replace(
    DEFAULT, decode_flow=0.0, decode_little=False, backlog_damped=False, drain_lead_time=False, forecast=False, tail=0.0
)


@pytest.mark.parametrize(
    ("changes", "law", "flow", "backlog"),
    [
        ({"running": 170.0}, SMALL, 1.0, 0.0),  # 170 / (0.85 x 200)
        ({"running": 170.0, "handoff_waiting": 85.0}, SMALL, 1.0, 0.5),
        ({"running": 0.0}, SMALL, 0.0, 0.0),
        # lam / x = 10 / 10: nothing more is coming
        ({"running": 170.0}, replace(SMALL, decode_flow=4.0), 1.0, 0.0),
        # lam OSL ITL = 10 x 300 x 0.068 = 204 > R
        ({"running": 170.0, "itl": 0.068}, replace(SMALL, decode_little=True), 1.2, 0.0),
        ({"running": 170.0, "itl": UNKNOWN}, replace(SMALL, decode_little=True), 1.0, 0.0),
        # G = 170 / 10 = 17 s of 60: H counts 17 / 60
        ({"running": 170.0, "handoff_waiting": 60.0}, replace(SMALL, backlog_damped=True), 1.0, 0.1),
        # lead time 120 s: 17 / 120
        ({"running": 170.0, "handoff_waiting": 120.0}, replace(SMALL, backlog_damped=True, drain_lead_time=True), 1.0, 0.1),
    ],
)
def test_need_of_decode(changes: dict[str, Any], law: Law, flow: float, backlog: float) -> None:
    need = decode(law, **changes)
    assert (need.flow, need.backlog, need.missing) == (pytest.approx(flow), pytest.approx(backlog), ())


def test_what_prefill_holds_back_will_come_to_decode() -> None:
    state = learned()
    slow = replace(state.decode, starts=4.0)  # lam 10, x 4
    law = replace(SMALL, decode_flow=2.0)
    need = need_of_decode(readings(running=170.0), slow, state.prefill, BOUNDS, law, False)
    assert need.flow == pytest.approx(2.0)  # 2.5, at most 2
    assert "x 2.00 (lam / x)" in need.formula


def test_handoffs_that_nothing_takes_are_no_load() -> None:
    assert decode(stuck=True, running=0.0, handoff_waiting=500.0).total == 0.0


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"running": UNKNOWN}, ("running",)), ({"handoff_waiting": UNKNOWN, "running": UNKNOWN}, ("running", "handoff_waiting"))],
)
def test_decode_cannot_be_told_without_its_requests(changes: dict[str, Any], missing: tuple[str, ...]) -> None:
    need = decode(**changes)
    assert (need.total, need.missing) == (None, missing)


@pytest.mark.parametrize(
    ("changes", "law", "queue_counts", "flow", "backlog"),
    [
        ({}, SMALL, True, 1 / 0.6, 0.0),
        ({"queued_tokens": 600_000.0}, SMALL, True, 1 / 0.6, 0.5),  # 600,000 / (60 x 20,000)
        ({"queued_tokens": 600_000.0}, SMALL, False, 1 / 0.6, 0.0),
        ({"queued_tokens": 600_000.0}, replace(SMALL, drain_lead_time=True), True, 1 / 0.6, 0.25),  # / (120 x 20,000)
        ({}, replace(SMALL, tail=2.0), True, 1 / 0.6, 0.0),  # no variance yet
        ({}, replace(SMALL, forecast=True), True, 1 / 0.6, 0.0),  # no trend: never below A
    ],
)
def test_need_of_prefill(changes: dict[str, Any], law: Law, queue_counts: bool, flow: float, backlog: float) -> None:
    need = prefill(law, queue_counts, **changes)
    assert (need.flow, need.backlog, need.missing) == (pytest.approx(flow), pytest.approx(backlog), ())


def test_tail_and_forecast_add_to_the_flow() -> None:
    seen = replace(learned().prefill, prompt_rate=Rate(12_000.0, 9e6, 12_000.0, 1000.0))
    tail = need_of_prefill(readings(), seen, BOUNDS, replace(SMALL, tail=2.0), True)
    assert tail.flow == pytest.approx(1.5)  # (12,000 + 2 x 3,000) / (0.6 x 20,000)
    ahead = need_of_prefill(readings(), seen, BOUNDS, replace(SMALL, forecast=True), True)
    # lead time + tick = 135 s = 9 ticks
    assert ahead.flow == pytest.approx((12_000 + 1000 * sum(0.95**i for i in range(1, 10))) / 12_000)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [({"prompt_rate": UNKNOWN}, ("prompt_rate",)), ({"queued_tokens": UNKNOWN}, ("queued_tokens",))],
)
def test_prefill_cannot_be_told_without_its_load(changes: dict[str, Any], missing: tuple[str, ...]) -> None:
    assert prefill(**changes).missing == missing


def test_no_throughput_was_measured_yet() -> None:
    fresh = PrefillLearned(prompt_rate=Rate(5.0))
    assert need_of_prefill(readings(), fresh, BOUNDS, DEFAULT, True).missing == ("throughput",)
    idle = need_of_prefill(readings(prompt_rate=0.0), fresh, BOUNDS, DEFAULT, True)
    assert (idle.total, idle.missing) == (0.0, ())
