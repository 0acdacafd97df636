"""Caps over both roles: the split by flow, floors, and GPUs that are not free yet."""

from __future__ import annotations

from typing import Any

import pytest
from scaling_builders import replicas

from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.budget import Claim, apply, split
from pd_operator.core.scaling.decision import Reason
from pd_operator.core.scaling.law import Law
from pd_operator.core.scaling.readings import Replicas

CAP = 16


def limits_of(
    gpus: tuple[int, int] = (1, 1), least: tuple[int, int] = (1, 1), most: tuple[int, int] = (50, 50), cap: int | None = CAP
) -> Bounds:
    return Bounds(RoleBounds(least[0], most[0], gpus[0]), RoleBounds(least[1], most[1], gpus[1]), cap)


@pytest.mark.parametrize(
    ("counts", "flows", "bounds", "expected"),
    [
        ((4, 36), (4.0, 12.0), {}, (4, 12)),  # by flow, not by how much decode asks for
        ((8, 24), (8.0, 24.0), {}, (4, 12)),  # 16 x 8 / 32
        ((2, 30), (2.0, 60.0), {}, (1, 15)),  # 16 x 2 / 62 = 0.5
        ((9, 9), (9.0, 3.0), {}, (9, 7)),  # its share is 12, it asks for 9
        ((8, 8), (8.0, 8.0), {"gpus": (1, 3)}, (4, 4)),  # 16 x 8 / (8 + 24) = 4 of one GPU; 12 GPUs are left: 4 of three
        ((3, 3), (3.0, 3.0), {"gpus": (4, 2)}, (2, 3)),  # 2.7: 2 and 4, or 3 and 2, serve 2/3 of the flows alike
        ((9, 9), (17.0, 1.4), {}, (9, 7)),
        ((20, 9), (17.0, 1.4), {}, (14, 2)),  # 14.8: 15 and 1 would serve 0.88 and 0.71, 14 and 2 serve 0.82 and all
        ((9, 9), (None, 9.0), {}, (8, 8)),  # a flow is not known: the counts
        ((9, 9), (0.0, 0.0), {}, (8, 8)),
        ((9, 9), (1.0, 99.0), {"least": (5, 1)}, (7, 9)),  # what decode does not ask for is prefill's
        ((9, 15), (1.0, 99.0), {"least": (5, 1)}, (5, 11)),  # the minimum
        ((9, 40), (0.0, 99.0), {"gpus": (0, 1)}, (9, 16)),  # a role without GPUs takes none
        ((40, 9), (99.0, 0.0), {"gpus": (1, 0)}, (16, 9)),
    ],
)
def test_split(counts: tuple[int, int], flows: tuple[Any, Any], bounds: dict[str, Any], expected: tuple[int, int]) -> None:
    claims = (Claim(counts[0], counts[0], flows[0], keep=False), Claim(counts[1], counts[1], flows[1], keep=False))
    assert split(counts, claims, limits_of(**bounds), Law()) == expected


@pytest.mark.parametrize(
    ("counts", "current", "flows", "keep", "expected"),
    [
        ((4, 14), (4, 12), (1.0, 99.0), (True, False), (4, 12)),  # prefill must not shrink: decode's rise is cut
        ((8, 12), (4, 12), (99.0, 1.0), (False, True), (4, 12)),
        ((8, 12), (4, 12), (99.0, 1.0), (False, False), (8, 8)),
        ((10, 10), (10, 10), (None, None), (True, True), (8, 8)),  # the cap itself was lowered: both
    ],
)
def test_a_role_that_must_not_shrink_gives_nothing(
    counts: tuple[int, int], current: tuple[int, int], flows: tuple[Any, Any], keep: tuple[bool, bool], expected: tuple[int, int]
) -> None:
    claims = (Claim(counts[0], current[0], flows[0], keep[0]), Claim(counts[1], current[1], flows[1], keep[1]))
    assert split(counts, claims, limits_of(), Law()) == expected


def test_a_split_within_one_of_the_present_one_is_kept_when_switched_on() -> None:
    claims = (Claim(9, 5, 4.0, keep=False), Claim(20, 11, 12.0, keep=False))
    assert split((9, 20), claims, limits_of(), Law(split_hysteresis=False)) == (4, 12)
    assert split((9, 20), claims, limits_of(), Law(split_hysteresis=True)) == (5, 11)
    far = (Claim(9, 6, 4.0, keep=False), claims[1])
    assert split((9, 20), far, limits_of(), Law(split_hysteresis=True)) == (4, 12)


@pytest.mark.parametrize(("give", "expected"), [((0, 0), (4, 12)), ((1, 1), (5, 11)), ((9, 9), (8, 8))])
def test_a_split_takes_no_more_than_a_role_may_give(give: tuple[int, int], expected: tuple[int, int]) -> None:
    claims = (Claim(9, 4, 9.0, keep=False, give=give[0]), Claim(12, 12, 9.0, keep=False, give=give[1]))
    assert split((9, 12), claims, limits_of(), Law()) == expected


def applied(
    counts: tuple[int, int], there: tuple[Replicas, Replicas], bounds: Bounds, first: int = 0
) -> tuple[tuple[int, int], list[list[Reason]]]:
    claims = (
        Claim(counts[0], there[0].desired, float(counts[0]), keep=False),
        Claim(counts[1], there[1].desired, float(counts[1]), keep=False),
    )
    pair, limits = apply(claims, there, first, bounds, Law())
    return pair, [[limit.reason for limit in part] for part in limits]


def test_maximum_and_minimum() -> None:
    bounds = limits_of(least=(2, 2), most=(5, 50), cap=None)
    assert applied((9, 1), (replicas(4), replicas(3)), bounds) == ((5, 2), [[Reason.MAX_REPLICAS], []])


@pytest.mark.parametrize(
    ("counts", "there", "first", "expected", "reasons"),
    [
        ((4, 12), (replicas(4), replicas(12)), 0, (4, 12), [[], []]),
        ((4, 13), (replicas(4), replicas(12)), 0, (4, 12), [[], [Reason.MAX_GPUS]]),
        # decode goes from 12 to 8, and its replicas drain first: prefill waits for their GPUs
        ((8, 8), (replicas(4), replicas(12)), 0, (4, 8), [[Reason.MAX_GPUS], []]),
        ((8, 8), (replicas(4), replicas(8, draining=4)), 0, (4, 8), [[Reason.MAX_GPUS], []]),
        ((8, 8), (replicas(4), replicas(8, draining=1)), 0, (7, 8), [[Reason.MAX_GPUS], []]),
        ((8, 8), (replicas(4), replicas(8)), 0, (8, 8), [[], []]),
        # both rise and three GPUs are free: the first takes what it needs
        ((5, 7), (replicas(3), replicas(5, draining=5)), 0, (5, 6), [[], [Reason.MAX_GPUS]]),
        ((5, 7), (replicas(3), replicas(5, draining=5)), 1, (4, 7), [[Reason.MAX_GPUS], []]),
        # a surge: 7 pods exist where 5 are asked for
        ((5, 5), (replicas(3), replicas(5, ready=13)), 0, (3, 5), [[Reason.MAX_GPUS], []]),
    ],
)
def test_a_rise_takes_only_gpus_that_are_free(
    counts: tuple[int, int], there: tuple[Replicas, Replicas], first: int, expected: tuple[int, int], reasons: list[list[Reason]]
) -> None:
    assert applied(counts, there, limits_of(), first) == (expected, reasons)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"least": (5, 1), "most": (4, 9)}, "scaling.prefill.minReplicas is 5: accepted is 0 to maxReplicas, 4"),
        ({"least": (9, 9)}, "scaling.maxGPUs is 16: accepted is 18 and above"),
        ({"gpus": (1, -1)}, "decode: gpus is -1"),
    ],
)
def test_bounds_that_nothing_satisfies_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        limits_of(**changes)
