"""What the churn test compares with: the most that fits from nothing, and beside what runs where it is."""

from __future__ import annotations

from churn.packing import Best, Wanted, most_beside, most_gpus

BIG = Wanted("big", (1, 1), (8, 8))
SMALL = Wanted("small", (2, 2), (1, 1))


def test_from_nothing_everything_is_packed_anew() -> None:
    assert most_gpus([BIG, SMALL], {"a": [8, 8], "b": [8]}) == Best(20, 20)


def test_what_runs_stays_on_its_node() -> None:
    """Two small replicas on either node of `a` leave no room for a big one there, and `b` holds no pair."""
    running = {"big": {}, "small": {"a": (2, 2)}}
    assert most_beside([BIG, SMALL], running, {"a": [6, 6], "b": [8]}) == Best(4, 4)


def test_all_together_may_have_what_is_free() -> None:
    """Each alone could have the last pair; together one of them can."""
    other = Wanted("other", (2, 2), (2, 2))
    running = {"small": {"a": (1, 1)}, "other": {"a": (1, 1)}}
    assert most_beside([SMALL, other], running, {"a": [4]}).found == 6 + 4
    assert most_beside([SMALL, other], running, {"a": [2]}).found == 6 + 2
