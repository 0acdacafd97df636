"""I6: desired totals never exceed a maximum, GPUs in use never exceed maxGPUs, and caps only ever shrink a role."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from scaling_builders import any_bounds, any_readings
from scaling_fluid import Fluid, Pool

from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.decide import decide
from pd_operator.core.scaling.decision import Decision, Reason
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Readings

FREE = 10**6


def last(ticks: list[Readings], bounds: Bounds) -> Decision:
    """The decision of the last of several ticks."""
    state = Learned()
    for i, tick in enumerate(ticks):
        decision = decide(tick, state, bounds, 15.0 * i)
        state = decision.learned
    return decision


@settings(max_examples=200, deadline=None)
@given(st.lists(any_readings(), min_size=1, max_size=4), any_bounds())
def test_no_maximum_is_exceeded(ticks: list[Readings], bounds: Bounds) -> None:
    decision = last(ticks, bounds)
    p, d = decision.prefill.desired, decision.decode.desired
    assert 0 <= p <= bounds.prefill.maximum
    assert 0 <= d <= bounds.decode.maximum
    if bounds.max_gpus is not None:
        assert bounds.gpus_of(p, d) <= bounds.max_gpus


@settings(max_examples=200, deadline=None)
@given(st.lists(any_readings(), min_size=1, max_size=4), any_bounds())
def test_a_rise_never_takes_gpus_that_are_in_use(ticks: list[Readings], bounds: Bounds) -> None:
    """What exists, drains or is ordered by this tick stays within maxGPUs, unless it was above before: then nothing rises."""
    decision = last(ticks, bounds)
    if bounds.max_gpus is None:
        return
    used, rises = 0, False
    for seen, answer, role in (
        (ticks[-1].prefill, decision.prefill, bounds.prefill),
        (ticks[-1].decode, decision.decode, bounds.decode),
    ):
        there = seen.ready + seen.starting + seen.blocked
        used += role.gpus * (max(there, answer.desired) + seen.draining)
        rises = rises or (answer.desired > max(there, answer.current) and role.gpus > 0)
    assert used <= bounds.max_gpus or not rises


@settings(max_examples=200, deadline=None)
@given(st.lists(any_readings(), min_size=1, max_size=3), any_bounds())
def test_caps_only_shrink(ticks: list[Readings], bounds: Bounds) -> None:
    """With the same past, a cap never makes a role larger than no cap does."""
    state = last(ticks[:-1], bounds).learned if len(ticks) > 1 else Learned()
    now = 15.0 * (len(ticks) - 1)
    capped = decide(ticks[-1], state, bounds, now)
    roles = {"prefill": replace(bounds.prefill, maximum=FREE), "decode": replace(bounds.decode, maximum=FREE)}
    free = decide(ticks[-1], state, replace(bounds, max_gpus=None, **roles), now)
    assert capped.prefill.desired <= free.prefill.desired
    assert capped.decode.desired <= free.decode.desired
    for role in (capped.prefill, capped.decode):
        caps = [limit for limit in role.limits if limit.reason in (Reason.MAX_REPLICAS, Reason.MAX_GPUS)]
        assert all(limit.after < limit.before for limit in caps)


def test_gpus_in_use_at_every_second_of_a_shock_at_the_cap() -> None:
    """Output lengths x3 at a cap of 12, chips of 1 and 2 GPUs: what exists never takes more than 12."""
    bounds = Bounds(RoleBounds(1, 12, 1, 120.0), RoleBounds(1, 12, 2, 120.0), max_gpus=12, slo_ttft=2.0, slo_itl=0.05)
    world = Fluid(
        bounds, Pool(3, 3, 120.0), Pool(3, 3, 120.0), rate=lambda t: 15.0, prompt=lambda t: 2000.0,
        output=lambda t: 1800.0 if 600 <= t < 1500 else 600.0,
    )  # fmt: skip
    most = 0
    for _ in range(160):
        world.run(15)
        most = max(most, bounds.gpus_of(world.prefill.desired, world.decode.desired))
        assert most <= 12
    assert most >= 11  # the cap was reached
