"""The wedge rule: when a slice is given up, what is left alone for how long, and that it all stands in status."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import builders
import pytest
from builders import NOW
from placing_world import KEY, RACK, Racks, Slice, counts, node, pinned

from pd_operator.core.exclusions import record, recorded
from pd_operator.core.observed import LOST_AFTER, PodFact
from pd_operator.core.placement.demand import BACKOFF, BACKOFF_MAX, Exclusion
from pd_operator.core.plan import make_plan
from pd_operator.core.sites import Kind, Site
from pd_operator.core.status import build_status

TIMEOUT = 600.0  # placement.schedulingTimeout
LONG = TIMEOUT + 1
FLOATING = Site(Kind.FLOATING, KEY)
NODES = (node("a0", "a"), node("b0", "b", 2))
FULL = {"b0": 2}


def half(site: Site = FLOATING, waits_for: float = LONG, **fields: Any) -> Slice:
    """Decode has a node, prefill waits."""
    return Slice(site, [None], ["a0"], waits_for=waits_for, **fields)


def left(world: Racks) -> list[tuple[str, int]]:
    return [(e.domain, e.times) for e in world.place().excluded]


def test_half_a_slice_for_too_long_excludes_its_domain() -> None:
    world = Racks(NODES, [half()], foreign=FULL)
    placing = world.place()
    assert [(w.slice, w.places) for w in placing.wedged] == [(world.name(), ("a",))]
    (only,) = placing.excluded
    assert (only.domain, only.until, only.times) == ("a", NOW + BACKOFF, 1) and "prefill pod found no node for 10m" in only.reason


@pytest.mark.parametrize("foreign", [FULL, {}], ids=["nowhere else", "somewhere else"])
def test_the_slice_goes_only_when_status_says_why(foreign: dict[str, int]) -> None:
    """A crash between the two leaves a slice, never a forgotten exclusion (invariant I9)."""
    nodes = (node("a0", "a"), node("a1", "a"), NODES[1])  # the planner sees room on a1, and the scheduler does not
    world = Racks(nodes, [half()], foreign=foreign)
    assert list(counts(world.place())) == [world.name()]
    snapshot = world.snapshot()
    world.status = build_status(snapshot, make_plan(snapshot))
    placing = world.place()
    (only,) = placing.targets
    assert only.name == world.name(1) and only.site.domain == ("" if foreign else "b")
    assert only.site.avoid_domains == (("a",) if foreign else ())
    assert placing.excluded == tuple(recorded(world.status))


@pytest.mark.parametrize(
    "slice_",
    [
        half(waits_for=TIMEOUT - 1),
        half(waits_for=0),
        half(pod_fields={"scheduling_reason": "SchedulingGated"}),
        half(pod_fields={"nominated": "b0"}),
        Slice(FLOATING, [None], [None], waits_for=LONG),
        Slice(FLOATING, ["a0", None], ["b0"], waits_for=LONG),
    ],
    ids=["not yet", "not tried", "gated", "a node is being emptied for it", "nothing is bound", "a pair runs"],
)
def test_what_is_not_wedged(slice_: Slice) -> None:
    world = Racks(NODES, [slice_])
    assert world.place().wedged == () and left(world) == []


def test_a_pinned_slice_of_which_nothing_binds_is_given_up_too() -> None:
    """The planner saw room, and the scheduler refuses for a reason that the planner does not know."""
    world = Racks(NODES, [Slice(pinned("b"), [None], [None], waits_for=LONG)])
    assert left(world) == [("b", 1)]


def test_the_clock_stands_while_a_node_is_being_made() -> None:
    young = replace(NODES[0].capacity, name="c0", ready=False)
    fresh = replace(NODES[0], capacity=young, created=NOW - timedelta(minutes=14))
    assert left(Racks((*NODES, fresh), [half()], foreign=FULL)) == []
    broken = replace(fresh, created=NOW - timedelta(minutes=16))
    assert left(Racks((*NODES, broken), [half()], foreign=FULL)) == [("a", 1)]


def test_the_clock_starts_anew_with_a_new_node_in_the_domain() -> None:
    fresh = node("a9", "a", 0, created=NOW - timedelta(seconds=TIMEOUT - 1))
    assert left(Racks((*NODES, fresh), [half()], foreign=FULL)) == []
    elsewhere = node("b9", "b", 0, created=NOW)
    assert left(Racks((*NODES, elsewhere), [half()], foreign=FULL)) == [("a", 1)]


def test_where_no_node_can_be_read_the_nodes_are_left_alone() -> None:
    world = Racks(slices=[half()], observed=False)
    assert left(world) == [("node/a0", 1)]
    snapshot = world.snapshot()
    world.status = build_status(snapshot, make_plan(snapshot))
    (only,) = world.place().targets
    assert (only.name, only.site.avoid_nodes, only.site.avoid_domains) == (world.name(1), ("a0",), ())


@pytest.mark.parametrize(("times", "wait"), [(1, 2 * BACKOFF), (4, 16 * BACKOFF), (9, BACKOFF_MAX)])
def test_each_time_doubles_the_wait(times: int, wait: timedelta) -> None:
    before = Exclusion("a", "x", NOW - timedelta(minutes=1), times)
    world = Racks(NODES, [half()], foreign=FULL, status={"excludedDomains": record([before])})
    (only,) = world.place().excluded
    assert (only.until - NOW, only.times) == (wait, times + 1)


def test_an_exclusion_that_holds_is_not_prolonged() -> None:
    """Or an unchanged world would be written again and again (invariant I2)."""
    before = Exclusion("a", "x", NOW + timedelta(minutes=1), 1)
    world = Racks(NODES, [half()], foreign=FULL, status={"excludedDomains": record([before])})
    assert world.place().excluded == (before,)


def test_an_exclusion_is_forgotten_after_a_while_and_when_a_pair_runs_there() -> None:
    old = Exclusion("a", "x", NOW - BACKOFF_MAX - timedelta(seconds=1), 3)
    assert left(Racks(NODES, status={"excludedDomains": record([old])})) == []
    recent = Exclusion("a", "x", NOW - timedelta(seconds=1), 3)
    assert left(Racks(NODES, status={"excludedDomains": record([recent])})) == [("a", 3)]
    runs = Slice(pinned("b"), ["b0"], ["b0"])
    here = Exclusion("b", "x", NOW + timedelta(seconds=1), 3)
    assert left(Racks(NODES, [runs], status={"excludedDomains": record([here])})) == []


def test_an_excluded_domain_gets_no_slice() -> None:
    held = Exclusion("b", "x", NOW + timedelta(minutes=1))
    nodes = (*NODES, node("c0", "c", 2))
    assert list(counts(Racks(nodes, status={"excludedDomains": record([held])}).place()).values()) == [("c", 1, 1)]


def test_the_next_look_is_when_the_clock_runs_out() -> None:
    assert Racks(NODES, [half(waits_for=590.0)], foreign=FULL).place().due == 10.0
    assert Racks(NODES, [half(waits_for=LONG)], foreign=FULL).place().due == 1.0
    assert Racks(NODES).place().due is None


def test_what_is_recorded_is_what_is_read() -> None:
    excluded = [Exclusion("a", "why", NOW, 2), Exclusion("node/n", "", NOW + timedelta(hours=1), 1)]
    assert recorded({"excludedDomains": record(excluded)}) == excluded
    assert recorded({}) == []


# --- pods that nobody ends ----------------------------------------------------------------------------------------------------


def test_a_pod_that_never_ends_is_lost_some_time_after_its_grace_period() -> None:
    pod = PodFact("ns", "p", "u", deleting=True, grace_ends=NOW)
    assert not pod.lost(NOW + timedelta(seconds=LOST_AFTER))
    assert pod.lost(NOW + timedelta(seconds=LOST_AFTER + 1))
    assert not PodFact("ns", "p", "u").lost(NOW + timedelta(days=1))


def test_a_site_is_part_of_the_pairing_class() -> None:
    """An edit of the topology key makes a new revision: slices of both never share a name."""
    assert builders.revision_of(RACK) != builders.revision_of()
