"""I4: unknown never shrinks a pool, whatever was known before and however long it lasts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_builders import BOUNDS, SIGNALS, any_bounds, any_readings, learned, readings
from scaling_fluid import Fluid, Pool

from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import UNKNOWN, Readings

NOW = 1000.0
PREFILL = ("prompt_rate", "queued_tokens")
DECODE = ("running", "handoff_waiting")


def lost(tick: Readings, names: tuple[str, ...]) -> Readings:
    return replace(tick, **dict.fromkeys(names, UNKNOWN))


def within(tick: Readings, bounds: Bounds) -> bool:
    """The counts that are asked for now, raised to the minimums, break no bound themselves: a bound shrinks, known or not."""
    p, d = max(tick.prefill.desired, bounds.prefill.minimum), max(tick.decode.desired, bounds.decode.minimum)
    fits = bounds.max_gpus is None or bounds.gpus_of(p, d) <= bounds.max_gpus
    return p <= bounds.prefill.maximum and d <= bounds.decode.maximum and fits


@settings(max_examples=150, deadline=None)
@given(
    st.lists(any_readings(), max_size=3),
    any_readings(),
    any_bounds(),
    st.sampled_from([PREFILL[:1], PREFILL[1:], DECODE[:1], DECODE[1:], SIGNALS]),
)
def test_unknown_never_shrinks(past: list[Readings], tick: Readings, bounds: Bounds, names: tuple[str, ...]) -> None:
    """A role whose load is not known keeps its count, even where the other role wants its GPUs."""
    state = Learned()
    for i, before in enumerate(past):
        state = decide(before, state, bounds, NOW + 15 * i).learned
    tick = lost(tick, names)
    decision = decide(tick, state, bounds, NOW + 15 * len(past))
    if not within(tick, bounds):
        return
    if set(names) & set(PREFILL):
        assert decision.prefill.desired >= min(tick.prefill.desired, bounds.prefill.maximum)
        assert decision.prefill.reason in (Reason.SIGNALS_UNKNOWN, Reason.MAX_GPUS)
    if set(names) & set(DECODE):
        assert decision.decode.desired >= min(tick.decode.desired, bounds.decode.maximum)
        assert decision.decode.reason in (Reason.SIGNALS_UNKNOWN, Reason.MAX_GPUS)


@settings(max_examples=150, deadline=None)
@given(st.lists(any_readings(), max_size=3), any_readings(), any_bounds(), st.sampled_from(["prefill", "decode"]))
def test_a_replica_that_nobody_has_read_yet_keeps_both_pools(
    past: list[Readings], tick: Readings, bounds: Bounds, role: str
) -> None:
    """Also where the other role wants its GPUs, and where all that the others show is known."""
    state = Learned()
    for i, before in enumerate(past):
        state = decide(before, state, bounds, NOW + 15 * i).learned
    pool = replace(getattr(tick, role), ready=3).without(1)
    assert (pool.ready, pool.unread) == (2, 1)
    tick = replace(tick, **{role: pool})
    decision = decide(tick, state, bounds, NOW + 15 * len(past))
    if within(tick, bounds):
        assert decision.prefill.desired >= tick.prefill.desired
        assert decision.decode.desired >= tick.decode.desired


@pytest.mark.parametrize("names", [PREFILL, DECODE, SIGNALS])
def test_an_hour_without_signals_moves_nothing_and_neither_does_the_first_tick_after(names: tuple[str, ...]) -> None:
    state = learned()
    for i in range(240):
        decision = decide(lost(readings(6, 6), names), state, BOUNDS, NOW + 15 * i)
        state = decision.learned
        assert [d.desired for d in (decision.prefill, decision.decode) if d.reason is Reason.SIGNALS_UNKNOWN] == [6] * (
            2 if names == SIGNALS else 1
        )
    back = decide(readings(6, 6), state, BOUNDS, NOW + 15 * 240)
    for role, mine in ((back.prefill, PREFILL), (back.decode, DECODE)):
        if set(names) & set(mine):
            assert (role.desired, role.reason) == (6, Reason.COOLDOWN)  # a whole window must be seen first


@pytest.mark.parametrize(
    "name",
    [
        "kv_tokens",
        "kv_capacity",
        "itl",
        "decode_starts",
        "output_tokens",
        "request_rate",
        "prefill_rate",
        "prefill_seconds",
        "ttft",
    ],
)
def test_a_number_that_only_teaches_may_be_missing(name: str) -> None:
    """Its learned value goes on; nothing shrinks because of it."""
    whole = decide(readings(2, 2, running=200.0), learned(), BOUNDS, NOW)
    part = decide(lost(readings(2, 2, running=200.0), (name,)), learned(), BOUNDS, NOW)
    assert (part.prefill.desired, part.decode.desired) == (whole.prefill.desired, whole.decode.desired)


def test_five_minutes_of_lost_signals_under_load() -> None:
    bounds = Bounds(RoleBounds(1, 16, lead_time=60.0), RoleBounds(1, 16, lead_time=60.0), slo_ttft=2.0, slo_itl=0.05)
    world = Fluid(
        bounds, Pool(3, 3, 60.0), Pool(2, 2, 60.0), rate=lambda t: 15.0, prompt=lambda t: 2000.0, output=lambda t: 500.0,
        blind=lambda t: 1200 <= t < 1500,
    )  # fmt: skip
    world.run(2400)
    before = world.between(0, 1199)[-1]
    dark = world.between(1199, 1499)
    assert len(dark) == 20
    for decision in dark:
        assert (decision.prefill.desired, decision.decode.desired) == (before.prefill.desired, before.decode.desired)
        assert (decision.prefill.reason, decision.decode.reason) == (Reason.SIGNALS_UNKNOWN, Reason.SIGNALS_UNKNOWN)
    for decision in world.between(1499, 1780):  # recovery needs no hand, and nothing falls at once
        assert decision.prefill.reason is not Reason.SIGNALS_UNKNOWN
        assert decision.prefill.desired >= before.prefill.desired
        assert decision.decode.desired >= before.decode.desired
