"""The law in command of a small fluid world: the situations that it is made for. Counts are asserted, never seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from scaling_fluid import Fluid, Pool

from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.decision import Bottleneck, Decision, Reason


def steady(value: float) -> Callable[[float], float]:
    return lambda _: value


def step(before: float, after: float, start: float, end: float = 1e9) -> Callable[[float], float]:
    return lambda t: after if start <= t < end else before


def world(p: int = 2, d: int = 2, lead: float = 60.0, cap: int | None = None, least: int = 1, **changes: Any) -> Fluid:
    bounds = Bounds(RoleBounds(least, 20, lead_time=lead), RoleBounds(least, 20, lead_time=lead), cap, slo_ttft=2.0, slo_itl=0.05)
    values: dict[str, Any] = {"rate": steady(8.0), "prompt": steady(2000.0), "output": steady(500.0)}
    return Fluid(bounds, Pool(p, p, lead), Pool(d, d, lead), **(values | changes))


def path(decisions: list[Decision], role: str) -> list[int]:
    """Counts without repetitions."""
    counts = [getattr(d, role).desired for d in decisions]
    return counts[:1] + [b for a, b in pairwise(counts) if a != b]


def turns(counts: list[int]) -> int:
    """Changes of direction."""
    signs = [b > a for a, b in pairwise(counts)]
    return sum(a != b for a, b in pairwise(signs))


def test_a_decode_shortage_raises_decode_and_not_prefill() -> None:
    """Outputs five times as long: prefill's queue grows with held KV, and buying prefill would be the trap."""
    shock = world(p=3, d=2, rate=steady(15.0), output=step(300.0, 1500.0, 600.0))
    shock.run(1500)
    after = shock.between(600, 1500)
    assert max(d.prefill.desired for d in after) == 3
    gated = [d for d in after if d.congested]
    assert gated
    assert all(d.bottleneck is Bottleneck.DECODE for d in gated)
    # 30,000 / (0.6 x 20,000) + Q / (60 x 20,000): the queue alone would have ordered a fourth
    assert 2.5 + max(d.prefill.inputs["Q"] or 0.0 for d in gated) / 1_200_000 > 3.1
    assert Reason.GATED_BY_DECODE in {d.prefill.reason for d in gated}
    # 15 x 1500 x 0.022 s / (0.85 x 116) = 5, and what waited is worked off
    assert 5 <= max(d.decode.desired for d in after) <= 9
    assert not shock.history[-1][1].congested
    assert shock.held < 1


def test_a_prefill_burst_raises_prefill_in_one_tick() -> None:
    burst = world(d=1, output=steady(200.0), rate=step(8.0, 30.0, 600.0))
    burst.run(600)
    assert path(burst.between(300, 600), "prefill") == [2]
    burst.run(15)
    first = burst.history[-1][1]
    assert (first.prefill.current, first.prefill.reason, first.bottleneck) == (2, Reason.DEMAND, Bottleneck.PREFILL)
    assert first.prefill.desired >= 3
    burst.run(600)
    assert path(burst.between(600, 1215), "prefill")[-1] in (5, 6)  # 60,000 / (0.6 x 20,000)


def test_idle_shrinks_one_a_minute_after_the_window_and_never_below_the_minimum() -> None:
    idle = world(p=5, d=4, least=2, rate=step(8.0, 0.0, 600.0))
    idle.run(2400)
    for role in ("prefill", "decode"):
        counts = [getattr(d, role).desired for _, d in idle.history]
        falls = [t for (t, _), (a, b) in zip(idle.history[1:], pairwise(counts), strict=True) if b < a]
        assert all(a - b <= 1 for a, b in pairwise(counts))
        assert all(b - a >= 60 for a, b in pairwise(falls))
        assert falls[0] >= 300
        assert min(counts) == counts[-1] == 2


@pytest.mark.parametrize("factor", [3.0, 1 / 3])
def test_an_engine_of_another_speed_is_learned_within_ten_minutes_without_swinging(factor: float) -> None:
    """What was learned on one engine, then an engine three times faster or slower: V follows, the counts settle."""
    first = world(p=4, d=2, rate=steady(12.0))
    first.run(900)
    assert first.learned.prefill.throughput == pytest.approx(20_000, rel=0.01)
    other = world(p=4, d=2, rate=steady(12.0), v=20_000 * factor, learned=first.learned, now=first.now)
    other.run(2400)
    learned = [d.learned.prefill.throughput for t, d in other.history if t - first.now >= 600]
    assert learned[0] == pytest.approx(20_000 * factor, rel=0.05)
    right = 24_000 / (0.6 * 20_000 * factor)
    counts = [d.prefill.desired for t, d in other.history if t - first.now >= 600]
    assert counts[-1] == pytest.approx(right, abs=1.0)
    assert turns(path([d for _, d in other.history], "prefill")) <= 1


def test_a_wrong_prior_in_either_direction_is_corrected_while_saturated() -> None:
    for wrong in (2.0, 0.5):
        slow = world(p=1, d=2, rate=steady(8.0))
        slow.run(15)
        memory = slow.learned.prefill
        slow.learned = replace(slow.learned, prefill=replace(memory, tokens=memory.tokens * wrong, throughput=20_000 * wrong))
        slow.run(585)
        assert slow.learned.prefill.throughput == pytest.approx(20_000, rel=0.05)


@pytest.mark.parametrize("lead", [60.0, 120.0, 300.0])
def test_a_scale_out_slower_than_the_tick_does_not_cascade(lead: float) -> None:
    """A load that needs 3 decodes, and a new one that takes up to twenty ticks: 2 -> 3, not 2 -> 4 -> 8."""
    cold = world(p=3, d=2, lead=lead, rate=steady(10.0), output=step(500.0, 700.0, 300.0), step_base=0.035, step_slope=0.00001)
    cold.run(2400)
    assert path([d for _, d in cold.history], "decode") == [2, 3]
    assert cold.history[-1][1].decode.need == pytest.approx(2.17, abs=0.01)


def test_a_blocked_replica_is_no_capacity_and_the_other_role_stays() -> None:
    blocked = world(p=3, d=2, rate=steady(15.0), output=step(300.0, 1500.0, 600.0))
    blocked.decode.room = 3
    blocked.run(2400)
    after = blocked.between(900, 2400)
    assert {d.decode.reason for d in after} == {Reason.NO_CAPACITY}
    assert max(d.prefill.desired for d in after) == 3
    assert max(d.decode.desired for d in after) <= 6  # what was ordered before the cause was known; nothing since
    assert len({d.decode.desired for d in after}) == 1


def test_outputs_three_times_as_long_at_the_cap_do_not_starve_prefill() -> None:
    """The collapse of the study: decode asks for more than the cap holds, and must not take it all from prefill."""
    shock = world(p=4, d=5, lead=120.0, cap=12, rate=steady(20.0), output=step(500.0, 1500.0, 900.0, 1800.0))
    shock.run(3600)
    during = shock.between(900, 3600)
    assert max(d.decode.desired + d.prefill.desired for d in during) == 12
    assert min(d.prefill.desired for d in during) >= 2  # 40,000 tokens/s at V 20,000
    before = shock.done
    shock.run(300)
    assert (shock.done - before) / 300 == pytest.approx(20.0, rel=0.02)  # it serves again what arrives
    assert turns(path(during, "prefill")) <= 4
