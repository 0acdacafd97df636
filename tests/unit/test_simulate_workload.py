"""Workloads: what a change keeps and what it changes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from simulate_world import work

from pd_simulate.workload import Workload, cancelling, lengthened, merged, on_off, poisson, resampled, scaled, surged


def _long() -> Workload:
    load = poisson(5.0, 1200.0, 3)
    return replace(load, prefix=tuple((i % 7, 100 + i) for i in range(len(load))))


def test_arrays_that_do_not_fit_are_refused() -> None:
    load = work((0.0, 10, 1), (1.0, 10, 1))
    with pytest.raises(ValueError, match=r"workload.prompt: 1 entries; accepted: 2, one per arrival"):
        replace(load, prompt=load.prompt[:1])
    with pytest.raises(ValueError, match=r"workload.arrival: not sorted"):
        replace(load, arrival=load.arrival[::-1])
    with pytest.raises(ValueError, match=r"workload.output: 0; accepted: 1 or more tokens"):
        replace(load, output=np.array([1, 0]))
    with pytest.raises(ValueError, match=r"workload.prefix: 1 entries"):
        replace(load, prefix=((1,),))


def test_halves_are_by_time_and_start_at_zero() -> None:
    load = _long()
    first, second = load.half(1), load.half(2)
    assert len(first) + len(second) == len(load)
    assert first.duration == second.duration == 600.0
    assert second.arrival[0] == pytest.approx(load.arrival[len(first)] - 600.0)
    assert second.prefix is not None and second.prefix[0] == load.prefix[len(first)]  # type: ignore[index]
    with pytest.raises(ValueError, match="half: 3; accepted: 1 or 2"):
        load.half(3)


@pytest.mark.parametrize("factor", [0.3, 1.0, 2.5])
def test_scaling_changes_the_rate_not_the_time(factor: float) -> None:
    load = _long()
    more = scaled(load, factor, seed=1)
    assert len(more) == pytest.approx(factor * len(load), rel=0.06)
    assert more.duration == load.duration and more.arrival[-1] <= load.duration
    assert set(more.prompt.tolist()) <= set(load.prompt.tolist())
    assert more.arrival.tobytes() == scaled(load, factor, seed=1).arrival.tobytes()
    if factor > 1:
        assert more.arrival.tobytes() != scaled(load, factor, seed=2).arrival.tobytes()
        # A copy does not hit its original in the prefix cache: three quarters of the blocks at least are new ones.
        assert len({block for blocks in more.prefix or () for block in blocks}) > 2 * len(load)
    with pytest.raises(ValueError, match="factor: 0"):
        scaled(load, 0, seed=1)


def test_a_bootstrap_draw_keeps_the_shape_and_moves_lengths_in_blocks() -> None:
    load = lengthened(_long(), 600.0, 1200.0, output=4.0)
    drawn = resampled(load, seed=5, jitter=0.0)
    assert drawn.arrival.tobytes() == load.arrival.tobytes()
    assert drawn.output.tobytes() != load.output.tobytes()
    # Local blocks: the slow change of the mix is still there.
    early, late = drawn.output[drawn.arrival < 300].mean(), drawn.output[drawn.arrival > 900].mean()
    assert late > 3 * early
    # The pair of a request stays a pair.
    assert set(zip(drawn.prompt, drawn.output, strict=True)) <= set(zip(load.prompt, load.output, strict=True))
    assert resampled(load, seed=5).arrival.tobytes() == resampled(load, seed=5).arrival.tobytes()
    assert resampled(load, seed=5).output.tobytes() != resampled(load, seed=6).output.tobytes()


def test_shocks_touch_their_window_only() -> None:
    load = _long()
    inside = (load.arrival >= 300) & (load.arrival < 600)
    longer = lengthened(load, 300.0, 600.0, prompt=4.0, output=3.0)
    assert (longer.prompt[inside] == 4 * load.prompt[inside]).all()
    assert (longer.output[inside] == 3 * load.output[inside]).all()
    assert (longer.prompt[~inside] == load.prompt[~inside]).all()
    faster = surged(load, 300.0, 600.0, 3.0, seed=1)
    now_inside = (faster.arrival >= 300) & (faster.arrival <= 600)
    assert now_inside.sum() == 3 * inside.sum()
    assert (~now_inside).sum() == (~inside).sum()


def test_cancellations_are_a_share_of_all() -> None:
    load = cancelling(_long(), 0.1, seed=2)
    assert np.isfinite(load.cancel_after).mean() == pytest.approx(0.1, abs=0.02)


def test_merging_keeps_prefixes_only_if_all_have_them() -> None:
    load = _long()
    both = merged("both", [load, load])
    assert len(both) == 2 * len(load) and both.prefix is not None
    assert (np.diff(both.arrival) >= 0).all()
    assert merged("mixed", [load, poisson(1.0, 60.0, 1)]).prefix is None


def test_on_off_alternates() -> None:
    load = on_off(10.0, 1.0, 100.0, 1000.0, seed=1, prompt=(500.0, 0.0), output=(100.0, 0.3))
    high = (load.arrival % 100.0) >= 50.0
    assert high.sum() == pytest.approx(5000, rel=0.05)
    assert (~high).sum() == pytest.approx(500, rel=0.15)
    assert set(load.prompt.tolist()) == {500}
    assert load.output.mean() == pytest.approx(100, rel=0.03)
