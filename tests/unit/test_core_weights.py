"""Weights by capacity: sums, bounds, and no rewrite without a reason."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.weights import BAND, TOTAL, capacity, fitting, shares, weights

NAMES = st.sampled_from([f"s{n}" for n in range(6)])
CAPACITIES = st.dictionaries(NAMES, st.integers(0, 40), min_size=1)
HISTORY = st.lists(CAPACITIES, min_size=1, max_size=30)


@pytest.mark.parametrize(
    ("prefill", "decode", "pool", "expected"),
    [(1, 1, (1, 1), 1), (1, 2, (2, 4), 4), (2, 1, (2, 4), 2), (0, 4, (2, 4), 0), (3, 0, (2, 4), 0), (1, 1, (0, 0), 0)],
)
def test_capacity_is_what_the_scarcer_role_allows(prefill: int, decode: int, pool: tuple[int, int], expected: int) -> None:
    assert capacity(prefill, decode, pool) == expected


@pytest.mark.parametrize(
    ("capacities", "expected"),
    [
        ({}, {}),
        ({"a": 7}, {"a": 100}),
        ({"a": 2, "b": 2}, {"a": 50, "b": 50}),
        ({"a": 4, "b": 2}, {"a": 67, "b": 33}),
        ({"a": 1, "b": 1, "c": 1}, {"a": 34, "b": 33, "c": 33}),
        ({"a": 5, "b": 0}, {"a": 100, "b": 0}),
        ({"a": 0, "b": 0}, {"a": 50, "b": 50}),
        ({"a": 999, "b": 1, "c": 1}, {"a": 98, "b": 1, "c": 1}),
    ],
)
def test_shares(capacities: dict[str, int], expected: dict[str, int]) -> None:
    assert shares(capacities) == expected


@given(CAPACITIES)
def test_shares_add_up_and_are_within_a_point_of_the_truth(capacities: dict[str, int]) -> None:
    found, total = shares(capacities), sum(capacities.values())
    assert sum(found.values()) == TOTAL and set(found) == set(capacities)
    for name, able in capacities.items():
        if total:
            assert bool(found[name]) == bool(able)
            assert abs(found[name] - TOTAL * able / total) < 1 + len(capacities)  # what is raised to one point is taken elsewhere
            assert found[name] <= TOTAL * able / total + 1


def test_a_move_within_the_band_is_no_rewrite_and_one_beyond_it_is() -> None:
    before = {"a": 50, "b": 50}
    assert weights({"a": 55, "b": 45}, before) == before
    assert weights({"a": 56, "b": 44}, before) == {"a": 56, "b": 44}
    assert weights({"a": 55, "b": 45}, {"a": 61, "b": 39}) == {"a": 55, "b": 45}


def test_a_slice_that_comes_goes_or_loses_everything_is_always_a_rewrite() -> None:
    before = {"a": 97, "b": 3}
    assert weights({"a": 100, "b": 0}, before) == {"a": 100, "b": 0}
    assert weights({"a": 97, "b": 3}, {"a": 100, "b": 0}) == {"a": 97, "b": 3}
    assert weights({"a": 97}, before) == {"a": 100}
    assert weights({"a": 97, "b": 2, "c": 1}, before) == {"a": 97, "b": 2, "c": 1}


def test_while_nothing_is_ready_the_weights_stay() -> None:
    assert weights({"a": 0, "b": 0}, {"a": 80, "b": 20}) == {"a": 80, "b": 20}
    assert weights({"a": 0, "b": 0}, {"a": 80, "c": 20}) == {"a": 50, "b": 50}


def test_what_somebody_wrote_into_status_is_no_base() -> None:
    assert weights({"a": 1, "b": 1}, {"a": 52, "b": 52}) == {"a": 50, "b": 50}


@given(HISTORY)
def test_every_history_keeps_the_band_and_rewrites_only_for_a_reason(history: list[dict[str, int]]) -> None:
    now: dict[str, int] = {}
    for able in history:
        before, now = now, weights(able, now)
        wanted = shares(able)
        assert sum(now.values()) == TOTAL and weights(able, now) == now  # a second look changes nothing
        if not any(able.values()):
            continue
        assert all(abs(now[n] - wanted[n]) <= BAND for n in wanted)
        if before and now != before and set(before) == set(now):
            moved = any(abs(before[n] - wanted[n]) > BAND for n in wanted)
            assert moved or any(bool(before[n]) != bool(wanted[n]) for n in wanted)


@given(st.dictionaries(NAMES, st.integers(40, 60), min_size=2, max_size=2), st.lists(st.integers(-1, 1), max_size=60))
def test_noise_never_flaps(base: dict[str, int], noise: list[int]) -> None:
    """A replica more or less of fifty, for ever: at most one rewrite after the first."""
    first, seen = min(base), []
    now: dict[str, int] = {}
    for step in noise:
        now = weights({**base, first: base[first] + step}, now)
        if not seen or seen[-1] != now:
            seen.append(now)
    assert len(seen) <= 1


@pytest.mark.parametrize(
    ("capacities", "serving", "expected"),
    [
        ({"a": 4, "b": 4}, [], ["a", "b"]),
        ({"a": 4, "b": 1}, [], ["a"]),
        ({"a": 4, "b": 2}, [], ["a", "b"]),
        ({"a": 4, "b": 3, "c": 2}, [], ["a", "b", "c"]),
        ({"a": 4, "b": 3, "c": 1}, [], ["a", "b"]),
        ({"a": 1, "b": 4}, ["a"], ["a", "b"]),
        ({"a": 4, "b": 1}, ["a", "b"], ["a", "b"]),
        ({"a": 0, "b": 0}, [], ["a", "b"]),
        ({"b": 3}, ["a"], ["b"]),
        ({}, ["a"], []),
    ],
)
def test_who_may_serve_behind_a_plain_service(capacities: dict[str, int], serving: list[str], expected: list[str]) -> None:
    assert sorted(fitting(capacities, serving)) == expected


@given(CAPACITIES, st.sets(NAMES))
def test_joining_never_lowers_what_all_serve_and_never_ends_a_slice(capacities: dict[str, int], serving: set[str]) -> None:
    chosen = fitting(capacities, sorted(serving))
    assert chosen and serving & set(capacities) <= set(chosen)
    begun = [capacities[n] for n in sorted(serving) if n in capacities]
    served = [capacities[n] for n in chosen]
    assert len(served) * min(served) >= len(begun) * min(begun, default=0)
    assert fitting(capacities, chosen) == chosen  # once they serve, nothing changes
