"""What holds for any readings: one answer, and more load never asks for less."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_builders import BOUNDS, any_bounds, any_readings, learned, readings

from pd_operator.core.scaling import codec
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.explain import explain
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Readings, Signal


@settings(max_examples=100, deadline=None)
@given(st.lists(any_readings(), min_size=1, max_size=4), any_bounds())
def test_the_same_arguments_give_the_same_answer_through_json_too(ticks: list[Readings], bounds: Bounds) -> None:
    state = Learned()
    for i, tick in enumerate(ticks):
        first = decide(tick, state, bounds, 15.0 * i)
        again = decide(tick, codec.loads(Learned, codec.dumps(state)), bounds, 15.0 * i)
        assert codec.dumps(first) == codec.dumps(again)
        assert explain(first, bounds) == explain(again, bounds)
        state = first.learned


@settings(max_examples=150, deadline=None)
@given(any_readings(), any_bounds(), st.floats(0, 1e8), st.floats(0, 1e8))
def test_more_queued_prompts_never_ask_for_less_prefill(tick: Readings, bounds: Bounds, queue: float, more: float) -> None:
    free = replace(bounds, max_gpus=None)  # at a cap, more of one role can be less of the other
    few = decide(replace(tick, queued_tokens=Signal.of(queue)), learned(), free, 1000.0)
    many = decide(replace(tick, queued_tokens=Signal.of(queue + more)), learned(), free, 1000.0)
    assert many.prefill.desired >= few.prefill.desired


@settings(max_examples=100, deadline=None)
@given(st.floats(0, 1e5), st.floats(0, 1e5), st.floats(0, 1e4), st.floats(0, 1e4))
def test_more_requests_in_decode_never_ask_for_less_decode(running: float, more: float, waiting: float, wait_more: float) -> None:
    per_request = 1000.0
    few = decide(readings(running=running, handoff_waiting=waiting, kv_tokens=running * per_request), learned(), BOUNDS, 1000.0)
    most = running + more
    many = decide(
        readings(running=most, handoff_waiting=waiting + wait_more, kv_tokens=most * per_request), learned(), BOUNDS, 1000.0
    )
    if not few.learned.decode.stuck_since and not many.learned.decode.stuck_since:
        assert many.decode.desired >= few.decode.desired


@settings(max_examples=150, deadline=None)
@given(st.lists(any_readings(), min_size=1, max_size=4), any_bounds())
def test_prefill_never_rises_while_decode_is_congested_and_reasons_fit_the_move(ticks: list[Readings], bounds: Bounds) -> None:
    state = Learned()
    for i, tick in enumerate(ticks):
        decision = decide(tick, state, bounds, 15.0 * i)
        state = decision.learned
        if decision.congested:
            assert decision.prefill.desired <= max(tick.prefill.desired, bounds.prefill.minimum)
        for role, least in ((decision.prefill, bounds.prefill.minimum), (decision.decode, bounds.decode.minimum)):
            if role.desired > max(role.current, least):
                assert role.reason not in (Reason.HOLD, Reason.GATED_BY_DECODE, Reason.NO_CAPACITY, Reason.ROLLOUT)
