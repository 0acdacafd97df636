"""Statistics of a comparison, against values computed by hand."""

from __future__ import annotations

import io
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_simulate.progress import Progress, duration
from pd_simulate.statistics import Point, bootstrap, front, kendall, matched, pareto, percentile, wins

SWEEP = [Point(0.85, 100.0), Point(0.93, 120.0), Point(0.97, 180.0), Point(0.96, 200.0), Point(0.98, 260.0)]


def test_pareto_drops_what_another_point_beats() -> None:
    assert pareto(SWEEP) == [SWEEP[0], SWEEP[1], SWEEP[2], SWEEP[4]]
    assert pareto([Point(0.9, 10.0), Point(0.9, 10.0), Point(0.9, 12.0)]) == [Point(0.9, 10.0)]
    assert pareto([]) == []
    assert front(["a", "b"], lambda name: Point(0.5, 1.0 if name == "b" else 2.0)) == ["b"]


def test_matched_attainment_is_interpolated_between_neighbours_of_the_front() -> None:
    at_90 = matched(SWEEP, 0.90)
    assert (at_90.state, at_90.gpu_seconds) == ("reached", pytest.approx(100 + 20 * 0.05 / 0.08))  # 112.5
    at_95 = matched(SWEEP, 0.95)
    assert (at_95.state, at_95.gpu_seconds) == ("reached", pytest.approx(150.0))
    # 0.96 at 200 is dominated by 0.97 at 180: between 0.97 and 0.98 the line goes from 180 to 260
    assert matched(SWEEP, 0.975).gpu_seconds == pytest.approx(220.0)
    assert matched(SWEEP, 0.93).gpu_seconds == pytest.approx(120.0)


def test_matched_attainment_is_never_extrapolated() -> None:
    above = matched(SWEEP, 0.99)
    assert (above.state, above.gpu_seconds) == ("never", None)
    below = matched(SWEEP, 0.80)
    assert (below.state, below.gpu_seconds) == ("always", 100.0)
    assert matched([Point(0.9, 7.0)], 0.9) == matched([Point(0.9, 7.0), Point(0.9, 9.0)], 0.9)
    assert matched([Point(0.9, 7.0)], 0.9).state == "reached"
    with pytest.raises(ValueError, match="at least one point"):
        matched([], 0.9)


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, 1e6)), min_size=1, max_size=8),
    st.floats(0, 1),
)
def test_a_match_lies_within_the_sweep(raw: list[tuple[float, float]], target: float) -> None:
    points = [Point(*pair) for pair in raw]
    answer = matched(points, target)
    if answer.state == "reached":
        assert answer.gpu_seconds is not None
        line = pareto(points)
        assert line[0].gpu_seconds - 1e-6 <= answer.gpu_seconds <= line[-1].gpu_seconds + 1e-6
        assert line[0].attainment <= target <= line[-1].attainment
    elif answer.state == "never":
        assert all(point.attainment < target for point in points)


def test_bootstrap_of_equal_values_has_no_width_and_of_two_values_is_exact() -> None:
    same = bootstrap([2.0] * 10)
    assert (same.mean, same.low, same.high, same.count) == (2.0, 2.0, 2.0, 10)
    assert same.excludes_zero
    # Resampling {0, 4}: the mean is 0, 2 or 4 with probability 1/4, 1/2, 1/4, so the 2.5 and 97.5 percentiles are the ends.
    pair = bootstrap([0.0, 4.0])
    assert (pair.mean, pair.low, pair.high) == (2.0, 0.0, 4.0)
    assert not pair.excludes_zero


def test_bootstrap_agrees_with_the_normal_interval() -> None:
    """Of 40 values with standard deviation s the interval is about mean +- 1.96 s/sqrt(40)."""
    values = [float(index % 8) for index in range(40)]  # mean 3.5, population s = sqrt(5.25)
    interval = bootstrap(values, seed=3)
    half = 1.96 * math.sqrt(5.25 / 40)
    assert interval.mean == 3.5
    assert interval.low == pytest.approx(3.5 - half, abs=0.12) and interval.high == pytest.approx(3.5 + half, abs=0.12)
    assert bootstrap(values, seed=3) == interval != bootstrap(values, seed=4)
    with pytest.raises(ValueError, match="at least one value"):
        bootstrap([])


def test_percentile_is_linear_between_ranks() -> None:
    assert percentile([10.0, 20.0, 30.0, 40.0], 50) == 25.0
    assert percentile([10.0, 20.0, 30.0, 40.0], 95) == pytest.approx(38.5)
    assert percentile([5.0], 95) == 5.0
    assert math.isnan(percentile([], 50))


def test_wins_counts_pairs() -> None:
    assert wins([1, 2, 3, 4], [2, 2, 2, 5]) == (2, 1, 1)
    with pytest.raises(ValueError, match="longer"):
        wins([1], [1, 2])


def test_kendall() -> None:
    assert kendall([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert kendall([1, 2, 3, 4], [4, 3, 2, 1]) == -1.0
    # one swapped neighbour: 5 concordant, 1 discordant of 6 pairs
    assert kendall([1, 2, 3, 4], [1, 3, 2, 4]) == pytest.approx(4 / 6)
    # a tie in the second: 5 concordant, none discordant; tau_b = 5 / sqrt(6 * 5)
    assert kendall([1, 2, 3, 4], [1, 2, 2, 3]) == pytest.approx(5 / math.sqrt(30))
    assert math.isnan(kendall([1, 1, 1], [1, 2, 3]))


def test_progress_says_how_long_the_rest_takes() -> None:
    now = [0.0]
    stream = io.StringIO()
    progress = Progress(200, "cells", stream=stream, clock=lambda: now[0])
    assert progress.line(0) == "cells   0%  0/200  0s gone, unknown left"
    now[0] = 90.0
    assert progress.line(50, "mooncake") == "cells  25%  50/200  1m30s gone, 4m30s left  mooncake"
    progress.show(50)
    now[0] = 100.0
    progress.show(60)  # within 30 s of the last line: silent where there is no terminal
    assert stream.getvalue().count("\n") == 1
    progress.end("done")
    assert stream.getvalue().endswith("done\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_renews_one_line_on_a_terminal() -> None:
    now = [0.0]
    stream = Terminal()
    progress = Progress(10, "run", stream=stream, clock=lambda: now[0])
    for done in range(5):
        progress.show(done)
        now[0] += 0.15
    progress.end()
    assert stream.getvalue().count("\r") == 3 + 2 and "\n" not in stream.getvalue()


def test_durations_are_short() -> None:
    assert [duration(value) for value in (0, 59.4, 60, 3599, 3600, 30_000)] == ["0s", "59s", "1m00s", "59m59s", "1h00m", "8h20m"]
