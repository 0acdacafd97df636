"""One budget of several PDDeployments: order, minimums, equal parts, what is held, and that nobody moves without a reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_operator.core.scaling import budget as caps
from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.scaling.budget import Claim
from pd_operator.core.scaling.law import DEFAULT
from pd_operator.core.scaling.readings import Replicas
from pd_operator.core.scaling.shared import Budget, Member, Pair, Share, allocate

SIXTEEN = Budget("prod", 16)


def auto(name: str, wanted: Pair, there: Pair = (1, 1), **changes: object) -> Member:
    """A member under Auto whose number is what is there."""
    found = Member(name, (1, 1), there, current=there, wanted=wanted, least=(1, 1), give=(1, 1))
    return replace(found, **changes)  # type: ignore[arg-type]


def gpus(shares: dict[str, Share]) -> dict[str, int | None]:
    return {name: share.gpus for name, share in shares.items()}


def test_a_budget_that_is_large_enough_limits_nobody() -> None:
    shares = allocate(SIXTEEN, [auto("a", (4, 4)), auto("b", (2, 6))])
    assert gpus(shares) == {"a": None, "b": None} and not shares["a"].detail


def test_the_higher_priority_is_served_first_and_nobody_is_below_its_minimum() -> None:
    shares = allocate(SIXTEEN, [auto("low", (8, 8)), auto("high", (8, 8), priority=5), auto("third", (1, 1))])
    assert gpus(shares) == {"high": 12, "low": 2, "third": None}
    assert shares["low"].detail == "budget prod has 16 GPUs; high (priority 5) holds 2, third (priority 0) holds 2"


def test_equals_share_in_equal_parts_and_leave_what_they_do_not_ask_for() -> None:
    assert gpus(allocate(SIXTEEN, [auto("a", (8, 8)), auto("b", (8, 8))])) == {"a": 8, "b": 8}
    assert gpus(allocate(SIXTEEN, [auto("a", (8, 8)), auto("b", (2, 2))])) == {"a": 12, "b": None}


def test_what_cannot_be_chosen_is_counted() -> None:
    fixed = Member("static", (2, 2), (2, 3), given="Static")
    shares = allocate(SIXTEEN, [auto("a", (8, 8)), fixed])
    assert gpus(shares) == {"a": 6} and "static (Static) holds 10" in shares["a"].detail


def test_a_lower_priority_gives_one_replica_at_a_time_and_the_higher_waits_for_it() -> None:
    low, high = auto("low", (7, 7), (7, 7)), auto("high", (4, 4), priority=1)
    shares = allocate(SIXTEEN, [low, high])
    assert gpus(shares) == {"low": 12, "high": 2}  # 14 less one of each role; nothing is free yet
    draining = replace(low, there=(6, 6), current=(6, 6), draining=(1, 1), give=(0, 0))
    assert gpus(allocate(SIXTEEN, [draining, high])) == {"low": 12, "high": 2}  # they still hold their GPUs
    gone = replace(draining, draining=(0, 0))
    assert gpus(allocate(SIXTEEN, [gone, high])) == {"low": 12, "high": 4}


def test_a_role_that_rises_while_the_other_falls_waits_for_what_drains() -> None:
    """Decode of 3 GPUs goes, prefill of 1 comes: 8 are held, and for as long as decode drains prefill has none."""
    swap = auto("a", (2, 1), (1, 2), gpus=(1, 3))
    fixed = Member("static", (0, 1), (1, 1), given="Static")
    assert gpus(allocate(Budget("b", 8), [swap, fixed])) == {"a": 7}
    after = replace(swap, there=(1, 1), current=(1, 1), draining=(0, 1))
    assert gpus(allocate(Budget("b", 8), [after, fixed])) == {"a": 7}
    assert gpus(allocate(Budget("b", 8), [replace(after, draining=(0, 0)), fixed])) == {"a": None}


def test_unknown_signals_hold_a_pool_whoever_asks() -> None:
    dark = auto("dark", (7, 7), (7, 7), give=(0, 0))
    assert gpus(allocate(SIXTEEN, [dark, auto("high", (8, 8), priority=9)])) == {"dark": 14, "high": 2}
    half = replace(dark, give=(0, 1))
    assert gpus(allocate(SIXTEEN, [half, auto("high", (8, 8), priority=9)])) == {"dark": 13, "high": 2}


def test_what_is_free_waits_for_the_higher_priority() -> None:
    """high needs 4 at once and 3 are free until low gave some back: mid does not take them, or high would wait for ever."""
    high = auto("high", (1, 2), gpus=(1, 4), priority=2)
    mid, low = auto("mid", (2, 2), priority=1), auto("low", (3, 3), (3, 3))
    assert gpus(allocate(SIXTEEN, [high, mid, low])) == {"high": 8, "mid": 2, "low": 4}


def test_who_gives_more_than_it_takes_waits_for_what_it_takes() -> None:
    """A decode replica that goes holds its 4 GPUs while it drains: the prefill replica beside it has to find one that is free."""
    swaps = auto("swaps", (2, 1), (1, 2), gpus=(1, 4))
    full = Member("t/full", (0, 7), (1, 1), given="Static")
    assert gpus(allocate(SIXTEEN, [swaps, full])) == {"swaps": 9}
    assert gpus(allocate(Budget("prod", 17), [swaps, full])) == {"swaps": 9}  # not due: two less are wanted than held
    drained = auto("swaps", (2, 1), (1, 1), gpus=(1, 4))
    assert gpus(allocate(SIXTEEN, [drained, full])) == {"swaps": None}


def test_minimums_above_the_budget_are_named_and_everybody_has_its_minimum() -> None:
    members = [auto(name, (4, 4), (3, 3), least=(3, 3)) for name in ("a", "b", "c")]
    shares = allocate(SIXTEEN, members)
    assert gpus(shares) == {"a": 6, "b": 6, "c": 6}
    assert (
        shares["a"].over
        == "budget prod has 16 GPUs: the minReplicas of 3 PDDeployments need 18, and pools that are not Auto hold 0"
    )


def test_nobody_rises_while_somebody_is_not_read_yet() -> None:
    shares = allocate(SIXTEEN, [auto("a", (3, 3)), auto("b", (1, 1))], unseen=["team/x"])
    assert gpus(shares) == {"a": 2, "b": None}
    assert shares["a"].detail == "budget prod has 16 GPUs; team/x holds some, and nobody has read yet how many"


def test_within_one_replica_of_equal_parts_nobody_moves() -> None:
    assert gpus(allocate(SIXTEEN, [auto("a", (9, 9), (5, 4)), auto("b", (9, 9), (3, 4))])) == {"a": 9, "b": 7}
    assert gpus(allocate(SIXTEEN, [auto("a", (9, 9), (5, 5)), auto("b", (9, 9), (3, 3))])) == {"a": 8, "b": 6}


def test_a_message_names_four_holders() -> None:
    others = [Member(f"t/{n}", (1, 1), (1, 1), given="External") for n in range(7)]
    (share,) = allocate(SIXTEEN, [auto("a", (9, 9)), *others]).values()
    assert share.detail.endswith("t/3 (External) holds 2, 3 more hold 6")


# --- random histories ---------------------------------------------------------------------------------------------------------

PAIRS = st.tuples(st.integers(1, 6), st.integers(1, 6))


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Budget, list[Member]]:
    members = []
    for n in range(draw(st.integers(1, 5))):
        least = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
        each = draw(st.tuples(st.integers(0, 2), st.integers(1, 4)))
        if draw(st.integers(0, 4)) == 0:
            members.append(Member(f"ns/{n}", each, draw(PAIRS), given="Static"))
        else:
            members.append(Member(f"ns/{n}", each, least, priority=draw(st.integers(0, 2)), current=least, least=least))
    return Budget("b", draw(st.integers(4, 60))), members


class World:
    """What decide and the cluster do with shares: counts by GPUs, one replica a minute down, drains that take some ticks."""

    def __init__(self, budget: Budget, members: Sequence[Member], drain: int) -> None:
        self.budget, self.members, self.drain = budget, {m.name: m for m in members}, drain
        self.ends: list[tuple[int, str, int]] = []  # (tick, name, role) of drains
        self.stepped: dict[str, int] = {}
        self.now = 0

    def used(self) -> int:
        return sum(m.held for m in self.members.values())

    def tick(self, wanted: dict[str, Pair], dark: set[str]) -> None:
        """One tick of 15 s in which each asks for so much."""
        self.now += 1
        for _, name, role in [e for e in self.ends if e[0] <= self.now]:
            m = self.members[name]
            self.members[name] = replace(m, draining=(m.draining[0] - (role == 0), m.draining[1] - (role == 1)))
        self.ends = [e for e in self.ends if e[0] > self.now]
        asking = []
        for m in self.members.values():
            rested = self.now - self.stepped.get(m.name, -10) >= 4
            ask = m.current if m.name in dark else wanted.get(m.name, m.current)
            ask = (max(ask[0], m.least[0]), max(ask[1], m.least[1]))
            ask = (max(ask[0], m.current[0] - rested), max(ask[1], m.current[1] - rested))
            asking.append(m if m.given else replace(m, wanted=ask, give=(0, 0) if m.name in dark or not rested else (1, 1)))
        for name, share in allocate(self.budget, asking).items():
            self._apply(next(m for m in asking if m.name == name), share, name in dark)

    def _apply(self, m: Member, share: Share, dark: bool) -> None:
        """What `decide` makes of a share: the caps of the law."""
        after = m.wanted
        if share.gpus is not None:
            roles = [RoleBounds(m.least[i], 100, m.gpus[i]) for i in (0, 1)]
            bounds = Bounds(roles[0], roles[1], max_gpus=share.gpus)
            claims = [Claim(m.wanted[i], m.current[i], None, dark, m.give[i]) for i in (0, 1)]
            there = [Replicas(m.current[i], m.current[i], draining=m.draining[i]) for i in (0, 1)]
            after, _ = caps.apply((claims[0], claims[1]), (there[0], there[1]), 1, bounds, DEFAULT)
        gone = [max(0, m.current[i] - after[i]) for i in (0, 1)]
        assert gone[0] <= m.give[0] and gone[1] <= m.give[1], (m, share, after)
        if any(gone):
            self.stepped[m.name] = self.now
            self.ends += [(self.now + self.drain, m.name, i) for i in (0, 1) for _ in range(gone[i])]
        drains = (m.draining[0] + gone[0], m.draining[1] + gone[1])
        self.members[m.name] = replace(m, current=after, there=after, draining=drains)


@given(worlds(), st.integers(1, 6), st.data())
@settings(max_examples=60, deadline=None)
def test_random_histories_keep_to_the_budget_and_to_the_minimums(
    made: tuple[Budget, list[Member]], drain: int, data: st.DataObject
) -> None:
    budget, members = made
    world = World(budget, members, drain)
    least = world.used()  # what is given, and every minimum
    names = [m.name for m in members if not m.given]
    for _ in range(data.draw(st.integers(1, 8))):
        wanted = {name: data.draw(PAIRS) for name in names}
        dark = {name for name in names if data.draw(st.integers(0, 5)) == 0}
        for _ in range(data.draw(st.integers(1, 6))):
            world.tick(wanted, dark)
            assert world.used() <= max(budget.max_gpus, least)
            assert all(m.current[i] >= m.least[i] for m in world.members.values() if not m.given for i in (0, 1))


@given(worlds(), st.data())
@settings(max_examples=30, deadline=None)
def test_an_unchanged_demand_comes_to_rest_in_the_order_of_priorities(
    made: tuple[Budget, list[Member]], data: st.DataObject
) -> None:
    budget, members = made
    world = World(budget, members, 1)
    wanted = {m.name: data.draw(PAIRS) for m in members}
    for _ in range(100):
        world.tick(wanted, set())
    settled = dict(world.members)
    for _ in range(20):
        world.tick(wanted, set())
        assert dict(world.members) == settled  # nobody moves any more
    mine = [m for m in settled.values() if not m.given]
    short = [m for m in mine if any(m.current[i] < wanted[m.name][i] for i in (0, 1))]
    # A share is whole GPUs, and its split into whole replicas may leave less than a replica of it.
    assert budget.max_gpus - world.used() < sum(max(m.gpus) for m in short) or not short
    for m in short:
        above = [o.size(o.current) - o.size(o.least) for o in mine if o.priority < m.priority]
        assert sum(above) < max(m.gpus), (m, above)  # what is too small for a replica of the higher one


@given(worlds(), st.data())
@settings(max_examples=50, deadline=None)
def test_the_same_members_in_any_order_get_the_same(made: tuple[Budget, list[Member]], data: st.DataObject) -> None:
    budget, members = made
    asking = [m if m.given else replace(m, wanted=data.draw(PAIRS), give=(1, 1)) for m in members]
    asking = [replace(m, wanted=(max(m.wanted[0], m.least[0]), max(m.wanted[1], m.least[1]))) if not m.given else m for m in asking]
    shuffled = data.draw(st.permutations(asking))
    assert allocate(budget, asking) == allocate(budget, shuffled)


@pytest.mark.parametrize(("namespace", "covered"), [("a", True), ("c", False)])
def test_a_budget_covers_its_namespaces(namespace: str, covered: bool) -> None:
    assert Budget("x", 4, frozenset({"a", "b"})).covers(namespace) is covered and SIXTEEN.covers(namespace)
