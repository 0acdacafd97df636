"""Windows of one pod: rates through restarts, gaps and nonsense, and when nothing is known."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.signals.exposition import Reader
from pd_operator.signals.window import Columns, Window, quantile
from pd_operator.upstream.signals_table import How, Kind, Quantity, Series, Table

RATE = Quantity("r", How.RATE, "c")
NOW = Quantity("g", How.SUM, "g")
LEAST = Quantity("l", How.LEAST, "g")
TOTAL = Quantity("t", How.TOTAL, "c")
SHARE = Quantity("s", How.SHARE, "u", info="i")
SIZE = Quantity("z", How.SIZE, "i")
TAIL = Quantity("q", How.QUANTILE, "b")
MAYBE = Quantity("m", How.RATE, "o")
TABLE = Table(
    "test",
    {
        "c": Series(Kind.COUNTER, ("c_total",)),
        "g": Series(Kind.GAUGE, ("g",)),
        "u": Series(Kind.GAUGE, ("u",)),
        "i": Series(Kind.INFO, ("i",), numbers=(("n",),)),
        "b": Series(Kind.COUNTER, ("b_bucket",)),
        "o": Series(Kind.COUNTER, ("o_total",), optional=True),
    },
    (RATE, NOW, LEAST, TOTAL, SHARE, SIZE, TAIL, MAYBE),
    (),
    "",
)
READER = Reader(TABLE)


def window(*pages: tuple[float, str], seconds: float = 30.0) -> Window:
    """A window after these pages."""
    made = Window(TABLE, Columns(), seconds, period=5.0)
    for time, page in pages:
        made.add(time, READER.read(page.encode()))
    return made


def counter(*values: float | str, step: float = 5.0) -> Window:
    """One counter at each step."""
    return window(*((n * step, f'c_total{{engine="0"}} {v}\n') for n, v in enumerate(values)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 10, 20), 2.0),
        ((100, 110, 5, 15), 25 / 15),  # restarted between two scrapes: what it shows is growth
        ((100, 0, 0), 0.0),
        ((7,), "c_total has one sample only, a rate needs two"),
        ((7, 7), 0.0),
        ((1, "NaN", 11), "c_total is no number"),
        ((1, "+Inf", 11), "c_total is no number"),
        ((1, -5.0, 11), "c_total is no number"),  # a counter below zero: a sum that counted a negative time
    ],
)
def test_rates(values: Sequence[float | str], expected: float | str) -> None:
    found = counter(*values).value(RATE)
    assert found == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_nonsense_leaves_with_the_window() -> None:
    made = counter("NaN", *range(0, 100, 10))
    assert made.value(RATE) == pytest.approx(2.0)
    assert not any(p.bad for p in made.points)


def test_a_missed_sample_is_a_longer_step() -> None:
    assert window((0, "c_total 0\n"), (5, "c_total 10\n"), (15, "c_total 30\n")).value(RATE) == pytest.approx(2.0)


def test_a_series_that_appears_later_began_at_zero_and_one_of_the_first_sample_did_not() -> None:
    first, later = 'c_total{path="a"} 1000\n', 'c_total{path="a"} 1000\nc_total{path="b"} 30\n'
    assert window((0, first), (10, later)).value(RATE) == pytest.approx(3.0)
    assert window((0, later), (10, later)).value(RATE) == 0.0


def test_a_series_that_began_with_nonsense_has_no_known_beginning() -> None:
    made = window((0, "c_total 1\n"), (5, 'c_total 1\nc_total{p="b"} NaN\n'), (10, 'c_total 1\nc_total{p="b"} 999\n'))
    assert made.points[-1].grown == array("d", [0.0])


def test_ranks_that_restart_apart() -> None:
    pages = [(0, (100, 100)), (10, (120, 5)), (20, (140, 25))]
    made = window(*((t, "".join(f'c_total{{engine="{n}"}} {v}\n' for n, v in enumerate(both))) for t, both in pages))
    assert made.value(RATE) == pytest.approx((40 + 25) / 20)
    assert made.value(TOTAL) == 165.0


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=6), st.integers(0, 5))
def test_growth_is_what_was_added_whatever_restarts(steps: list[int], restart: int) -> None:
    shown, value = [], 0
    for n, step in enumerate(steps):
        value = step if n == restart + 1 and step else value + step
        shown.append(value)
    # A restart whose new value is not below the old one cannot be told from growth.
    true = sum(b - a if b >= a else b for a, b in itertools.pairwise(shown))
    assert counter(*shown).value(RATE) == pytest.approx(true / (5 * (len(steps) - 1)))


def test_the_window_is_covered_and_not_more() -> None:
    made = counter(*[0] * 4, *range(0, 200, 10))
    assert next(p.time for p in made.points) == made.points[-1].time - 30
    assert len(made.points) == 7
    assert made.value(RATE) == pytest.approx(2.0)


def test_counters_go_on_when_the_reader_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_operator.signals.exposition.REMEMBERED", 1)
    made, busy = Window(TABLE, Columns(), 30.0, 5.0), Reader(TABLE)
    for n in range(4):
        made.add(5.0 * n, busy.read(f'c_total{{p="a"}} {1000 + n}\nc_total{{p="b"}} {2000 + n}\ng{{p="{n}"}} 1\n'.encode()))
        for other in range(5):
            busy.read(f'c_total{{p="{n}-{other}"}} 1\n'.encode())
    assert made.value(RATE) == pytest.approx(6 / 15)
    assert len(busy._slots) <= 2 + 4 + 2  # those that a window holds, and the last heads


def test_samples_out_of_order_are_dropped() -> None:
    made = window((5, "c_total 5\n"), (5, "c_total 50\n"), (4, "c_total 60\n"), (10, "c_total 10\n"))
    assert made.value(RATE) == pytest.approx(1.0)


def test_gauges() -> None:
    made = window((0, "g 4\n"), (5, "g 2\n"), (10, "g 3\n"))
    assert (made.value(NOW), made.value(LEAST)) == (3.0, 2.0)
    assert window((0, "g NaN\n")).value(NOW) == window((0, "g +Inf\n")).value(NOW) == "g is no number"
    assert window((0, "c_total 1\n")).value(NOW) == "g is absent"
    assert window((0, "g 4\n"), (5, "c_total 1\n")).value(NOW) == "g is absent"


def test_absent_is_zero_only_where_the_table_says_so() -> None:
    made = window((0, "g 1\n"), (5, "g 1\n"))
    assert (made.value(MAYBE), made.value(RATE)) == (0.0, "c_total is absent")


def test_a_share_is_taken_rank_by_rank() -> None:
    page = 'u{engine="0"} 0.5\nu{engine="1"} 0.25\ni{engine="0",n="100"} 1\ni{engine="1",n="1000"} 1\n'
    assert window((0, page)).value(SHARE) == pytest.approx(300.0)
    assert window((0, page)).value(SIZE) == 1100.0
    assert window((0, page.replace('n="1000"', 'n="None"'))).value(SHARE) == "u is no number"
    assert window((0, 'u{engine="0"} 0.5\n')).value(SHARE) == "i is absent"


@pytest.mark.parametrize(("now", "stale"), [(10.0, False), (25.0, False), (27.4, False), (27.6, True), (9.0, False)])
def test_three_missed_samples_are_too_old(now: float, stale: bool) -> None:
    made = window((5, "g 1\n"), (10, "g 1\n"))
    assert made.stale(now) is stale
    assert made.age(now) == max(0.0, now - 10)


def test_an_empty_window_is_stale() -> None:
    assert window().stale(0.0)
    assert math.isinf(window().age(0.0))


@pytest.mark.parametrize(
    ("share", "buckets", "expected"),
    [
        (0.95, {1.0: 90.0, 2.0: 100.0, math.inf: 100.0}, 1.5),
        (0.5, {1.0: 90.0, 2.0: 100.0, math.inf: 100.0}, 50 / 90),
        (0.95, {1.0: 10.0, 2.0: 20.0, math.inf: 100.0}, 2.0),  # above the highest bound: at least that
        (0.95, {1.0: 0.0, 2.0: 0.0, math.inf: 0.0}, None),
        (0.95, {1.0: 5.0}, None),  # without +Inf it is no histogram
        (0.95, {}, None),
        (1.0, {1.0: 5.0, 2.0: 5.0, math.inf: 5.0}, 1.0),
    ],
)
def test_quantile(share: float, buckets: dict[float, float], expected: float | None) -> None:
    found = quantile(share, buckets)
    assert found == (None if expected is None else pytest.approx(expected))


def test_buckets_of_the_window() -> None:
    pages = [(0, (5, 10, 10)), (10, (6, 14, 15))]
    text = [
        (t, "".join(f'b_bucket{{le="{le}"}} {v}\n' for le, v in zip(("1.0", "2.0", "+Inf"), vs, strict=True))) for t, vs in pages
    ]
    assert window(*text).buckets(TAIL) == {1.0: 1.0, 2.0: 4.0, math.inf: 5.0}
