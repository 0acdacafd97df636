"""The ledger: what one PDDeployment may use after everything that is bound, reserved or just planned by others."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from builders import NAMESPACE, NOW
from placing_world import GPU, KEY, OWNER, SHAPE, node, pinned

from pd_operator.core.ledger import Held, Ledger, Need, Room, domain_of_slice
from pd_operator.core.names import ROLE, slice_labels
from pd_operator.core.observed import ChildFact, UsageFact, WorkloadFact
from pd_operator.core.sites import Kind, Site

OTHER = (NAMESPACE, "other")
NODES = (node("a0", "a", 2), node("a1", "a", 1), node("b0", "b", 4))


def ledger() -> Ledger:
    made = Ledger()
    for one in NODES:
        made.node(one.capacity.name, one)
    return made


def deployment(owner: str, role: str, replicas: int, site: Site, **fields: object) -> ChildFact:
    slice_ = f"{owner}-r-0"
    labels = slice_labels(owner, "engine", slice_, "r") | {ROLE: role}
    base = ChildFact("Deployment", NAMESPACE, f"{slice_}-{role}", f"uid-{role}", labels=labels, site=site.encode())
    return replace(base, workload=WorkloadFact(spec_replicas=replicas, shapes=(SHAPE,)), **fields)  # type: ignore[arg-type]


def engine(owner: str, role: str, number: int, at: str, deleting: bool = False) -> UsageFact:
    return UsageFact(NAMESPACE, f"{owner}-{role}-{number}", at, SHAPE.requests, owner, f"{owner}-r-0", role, deleting)


def free(room: Room, domain: str) -> int:
    return room.view.room(KEY, domain).get(GPU, 0)


def test_bound_pods_of_anybody_are_taken_off() -> None:
    book = ledger()
    guest = UsageFact("guests", "g", "a0", {GPU: 1})
    book.pod(None, guest)
    assert (free(book.room(OWNER, KEY), "a"), free(book.room(OWNER, KEY), "b")) == (2, 4)
    book.pod(guest, None)
    assert free(book.room(OWNER, KEY), "a") == 3


def test_a_pod_may_be_seen_before_its_node() -> None:
    book = Ledger()
    book.pod(None, UsageFact("guests", "g", "a0", {GPU: 1}))
    book.node("a0", NODES[0])
    assert free(book.room(OWNER, KEY), "a") == 1


def test_unbound_replicas_of_others_are_reserved_until_they_bind() -> None:
    book = ledger()
    book.child(OTHER, None, deployment("other", "decode", 2, pinned("a")))
    assert free(book.room(OWNER, KEY), "a") == 1 and book.waiting() == {OTHER}
    book.pod(None, engine("other", "decode", 0, "a0"))
    book.pod(None, engine("other", "decode", 1, "a1"))
    assert free(book.room(OWNER, KEY), "a") == 1 and book.waiting() == set()


def test_own_unbound_replicas_are_held_and_reserved() -> None:
    """The planner counts them as there, so what is free is without them."""
    book = ledger()
    book.child(OWNER, None, deployment("chat", "decode", 5, pinned("a")))
    book.pod(None, engine("chat", "decode", 0, "a0"))
    room = book.room(OWNER, KEY)
    assert room.held["chat-r-0", "decode"] == Held(("a0",), reserved=2)  # of four, two find room
    assert free(room, "a") == 0


def test_a_pod_that_ends_takes_room_and_is_not_held() -> None:
    book = ledger()
    book.child(OWNER, None, deployment("chat", "decode", 1, pinned("a")))
    book.pod(None, engine("chat", "decode", 0, "a0", deleting=True))
    room = book.room(OWNER, KEY)
    assert room.held["chat-r-0", "decode"] == Held((), reserved=1) and free(room, "a") == 1


def test_a_plan_counts_before_the_watch_shows_its_workloads() -> None:
    """Two PDDeployments planned in the same second: the second sees what the first was given."""
    book = ledger()
    need = Need(2, pinned("a"), (SHAPE,))
    book.assume(OTHER, {("other-r-0", "decode"): need})
    assert free(book.room(OWNER, KEY), "a") == 1
    book.child(OTHER, None, deployment("other", "decode", 2, pinned("a")))  # shown: counted once
    assert free(book.room(OWNER, KEY), "a") == 1
    book.child(OTHER, deployment("other", "decode", 2, pinned("a")), None)
    assert free(book.room(OWNER, KEY), "a") == 3


def test_the_next_plan_replaces_what_the_last_one_asked_for() -> None:
    book = ledger()
    book.assume(OTHER, {("other-r-0", "decode"): Need(2, pinned("a"), (SHAPE,))})
    book.assume(OTHER, {("other-r-1", "decode"): Need(1, pinned("b"), (SHAPE,))})
    room = book.room(OWNER, KEY)
    assert (free(room, "a"), free(room, "b")) == (3, 3)
    book.forget(OTHER)
    assert free(book.room(OWNER, KEY), "b") == 4 and book.waiting() == set()


def test_after_a_failover_the_reservations_are_the_same() -> None:
    """They follow from the workloads alone, in whatever order the watches show things."""
    events = [
        lambda b: b.child(OTHER, None, deployment("other", "decode", 2, pinned("a"))),
        lambda b: b.pod(None, engine("other", "decode", 0, "a0")),
        *(lambda b, n=n: b.node(n.capacity.name, n) for n in NODES),
    ]
    found = []
    for order in (events, events[::-1]):
        book = Ledger()
        for event in order:
            event(book)
        room = book.room(OWNER, KEY)
        found.append((free(room, "a"), free(room, "b"), book.waiting()))
    assert found[0] == found[1] == (1, 4, {OTHER})


def test_a_floating_slice_reserves_where_it_has_bound_and_nowhere_before() -> None:
    book = ledger()
    floating = Site(Kind.FLOATING, KEY)
    book.child(OTHER, None, deployment("other", "decode", 1, floating))
    book.child(OTHER, None, deployment("other", "prefill", 1, floating))
    assert free(book.room(OWNER, KEY), "a") == 3 and free(book.room(OWNER, KEY), "b") == 4
    book.pod(None, engine("other", "decode", 0, "b0"))
    assert free(book.room(OWNER, KEY), "b") == 2


def test_a_workload_that_ends_reserves_nothing() -> None:
    book = ledger()
    book.child(OTHER, None, deployment("other", "decode", 2, pinned("a"), deleting=True))
    assert free(book.room(OWNER, KEY), "a") == 3 and book.waiting() == set()


def test_room_is_taken_from_the_fullest_node_that_fits() -> None:
    """As little as possible is broken up: one GPU goes to the node that has one."""
    book = ledger()
    book.child(OTHER, None, deployment("other", "decode", 1, pinned("a")))
    left = {n.name: n.free[GPU] for n in book.room(OWNER, KEY).view.nodes(KEY, "a")}
    assert left == {"a0": 2, "a1": 0}


@pytest.mark.parametrize("field", ["unschedulable", "ready"])
def test_a_node_that_takes_no_pods_is_not_reserved_on(field: str) -> None:
    book = ledger()
    capacity = replace(NODES[0].capacity, **{field: field == "unschedulable"})
    book.node("a0", replace(NODES[0], capacity=capacity))
    book.child(OWNER, None, deployment("chat", "decode", 3, pinned("a")))
    room = book.room(OWNER, KEY)
    assert room.held["chat-r-0", "decode"].reserved == 1
    assert list(room.unready) == ([] if field == "unschedulable" else ["a0"])


def test_who_is_concerned_by_a_node() -> None:
    book = ledger()
    book.pod(None, engine("chat", "decode", 0, "a0"))
    book.pod(None, engine("other", "decode", 0, "b0"))
    assert (book.holders("a0"), book.holders("b0"), book.holders("a1")) == ({OWNER}, {OTHER}, set())


def test_the_newest_node_of_a_slices_domain() -> None:
    book = ledger()
    book.node("a9", node("a9", "a", created=NOW - timedelta(minutes=1)))
    book.child(OWNER, None, deployment("chat", "decode", 1, pinned("a")))
    assert book.room(OWNER, KEY).newest == {"a": NOW - timedelta(minutes=1)}


def test_the_domain_of_a_slice_is_where_most_of_its_pods_are() -> None:
    labels = {"1": {KEY: "x"}, "2": {KEY: "y"}, "3": {KEY: "y"}, "4": {}}
    assert domain_of_slice(["1", "2", "3", "4"], labels, KEY) == "y"
    assert domain_of_slice(["1", "2"], labels, KEY) == "x"
    assert domain_of_slice(["4", "gone"], labels, KEY) is None


def test_a_node_that_is_gone_is_no_room() -> None:
    book = ledger()
    book.pod(None, engine("chat", "decode", 0, "b0"))
    book.node("b0", None)
    room = book.room(OWNER, KEY)
    assert room.view.domains(KEY) == ("a",) and room.labels == {"b0": {}}
