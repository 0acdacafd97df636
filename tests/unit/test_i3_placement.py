"""I3 with domains: whatever happens to nodes, pods, spec and operator, a slice's engines are in one domain; and it ends well."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from placed_world import PlacedWorld

from pd_operator.core.names import ROLES

RACKS = {f"{d}{n}": (d, 2) for d in "abc" for n in (0, 1)}
NODE = st.sampled_from(sorted(RACKS))
ROLE = st.sampled_from(ROLES)
STEP = st.one_of(
    st.tuples(st.just("replicas"), ROLE, st.integers(1, 4)),
    st.tuples(st.just("domains"), st.integers(1, 3)),
    st.tuples(st.just("pairing"), st.integers(1, 2)),
    st.tuples(st.just("guests"), NODE, st.integers(0, 2)),
    st.tuples(st.just("dies"), NODE),
    st.tuples(st.just("comes"), NODE, st.integers(1, 4)),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("crash"), st.integers(0, 12)),
    st.tuples(st.just("tick"), st.integers(1, 6)),
    st.tuples(st.just("tick"), st.integers(1, 6)),
)


def do(world: PlacedWorld, step: tuple[Any, ...]) -> None:
    """One thing that happens."""
    match step:
        case ("replicas", role, n):
            world.edit({role: {"replicas": n}})
        case ("domains", n):
            world.edit({"placement": {"maxDomains": n}})
        case ("pairing", n):
            world.pairing_edit(n)
        case ("guests", name, n):
            if name in world.racks:
                world.guests[name] = min(n, world.free(name) + world.guests.get(name, 0))
        case ("dies", name):
            world.racks.pop(name, None)
            world.guests.pop(name, None)
        case ("comes", name, n):
            world.racks.setdefault(name, (name[0], n))
        case ("lose", n):
            world.lose(n)
        case ("suspend", value):
            world.edit({"suspend": value})
        case ("crash", n):
            world.reconcile(crash_after=n)
        case ("tick", n):
            for _ in range(n):
                world.tick()
                world.reconcile()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=14), st.randoms(use_true_random=False))
def test_every_history_keeps_slices_whole_and_ends_with_everything_placed(history: list[tuple[Any, ...]], random: Any) -> None:
    world = PlacedWorld(racks=dict(RACKS), random=random)
    world.pairing_edit(1)
    world.reconcile()
    for step in history:
        do(world, step)
    world.guests.clear()
    for name in RACKS:
        world.racks.setdefault(name, (name[0], 2))
    world.racks |= {f"big{n}": ("big", 8) for n in range(3)}
    world.edit({"suspend": False})
    world.settle()
    assert world.broken_rules == []
    for role in ROLES:
        alive = [p for p in world.pods if p.labels.get("pdserve.dev/role") == role and p.ending is None]
        assert len(alive) == world.changes.get(role, {}).get("replicas", 1) and all(p.ready for p in alive)
    domains = world.domains()
    assert all(len(set(d)) == 1 and "-" not in d for d in domains.values())
    assert len(domains) <= max(1, world.changes["placement"].get("maxDomains", 1))
    for slice_ in domains:
        assert {p.labels["pdserve.dev/role"] for p in world.pods if p.gpus and p.labels["pdserve.dev/slice"] == slice_} == set(
            ROLES
        )


def test_a_settled_world_writes_nothing_whatever_happens_elsewhere() -> None:
    """Invariant I2: guests on other nodes, nodes that come and go, change nothing of what runs."""
    world = PlacedWorld(racks=dict(RACKS))
    world.settle()
    home = next(iter(world.domains().values()))[0]
    for name in sorted(RACKS):
        if name[0] != home:
            world.guests[name] = 1
            assert world.reconcile() == 0
            del world.racks[name]
            assert world.reconcile() == 0
    assert world.broken_rules == []


@pytest.mark.parametrize("after", range(14))
def test_a_crash_after_any_write_of_a_move_ends_the_same(after: int) -> None:
    """Invariant I9: the home of a slice loses a node; the operator dies in the middle of moving it."""
    world = PlacedWorld(racks={"a0": ("a", 1), "a1": ("a", 1), "b0": ("b", 1), "b1": ("b", 1)})
    world.settle()
    (slice_,) = world.domains()
    home = world.domains()[slice_][0]
    del world.racks[f"{home}0"]
    world.tick()
    world.reconcile(crash_after=after)
    world.settle()
    other = "b" if home == "a" else "a"
    assert list(world.domains().values()) == [[other, other]] and world.broken_rules == []


def test_an_autoscaler_brings_a_floating_slice_up_whole() -> None:
    """No domain has room; nodes come one by one, each large enough for one pod."""
    world = PlacedWorld(racks={"a0": ("a", 1), "b0": ("b", 1)})
    world.run(lambda w: w.clock >= 60)
    assert list(world.domains().values()) == [["-", "-"]]
    world.racks["b1"] = ("b", 1)  # a pair fits in b now: the operator pins it there
    world.settle()
    assert list(world.domains().values()) == [["b", "b"]] and world.broken_rules == []


def test_a_move_to_where_more_fits_ends_although_not_all_fits_there() -> None:
    """4 + 4 are wanted: 2 + 2 run in a, then b has room for 3 + 3. What waits for a node is not waited for."""
    world = PlacedWorld(racks={"a0": ("a", 2), "a1": ("a", 2), "b0": ("b", 3), "b1": ("b", 3)}, guests={"b0": 3, "b1": 3})
    world.edit({"prefill": {"replicas": 4}, "decode": {"replicas": 4}})
    world.run(lambda w: w.clock >= 200)
    assert [sorted(where) for where in world.domains().values()] == [["-"] * 4 + ["a"] * 4]
    roles = sorted(p.labels["pdserve.dev/role"] for p in world.pods if p.bound and p.gpus)
    assert roles == ["decode", "decode", "prefill", "prefill"]  # the room is for pairs, whoever asks first
    world.guests.clear()
    world.run(lambda w: list(world.domains().values()) == [["-", "-", *["b"] * 6]], limit=60)
    assert world.slices() == {world.plan.revision: "Serving"} and world.broken_rules == []


def test_names_of_slices_are_not_used_again() -> None:
    """A ReplicaSet of a former slice may still make pods for the domain that it had."""
    world = PlacedWorld(racks={"a0": ("a", 2), "b0": ("b", 2)})
    names = []
    for home in ("a", "b", "a", "b"):
        world.guests = {f"{name}0": 0 if name == home else 2 for name in "ab"}
        for p in [p for p in world.pods if p.gpus]:
            world._end(p)
        world.settle()
        (name,) = world.domains()
        assert world.domains()[name] == [home, home]
        names.append(name[-1])
    assert names == ["0", "1", "2", "3"] and world.broken_rules == []


def test_where_the_new_revision_does_not_fit_the_old_one_ends_first_and_the_room_is_used_again() -> None:
    world = PlacedWorld(racks={"a0": ("a", 1), "a1": ("a", 1)})
    world.pairing_edit(1)
    world.settle()
    world.pairing_edit(2)
    world.settle()
    assert list(world.domains().values()) == [["a", "a"]] and world.broken_rules == []


def test_a_wedged_slice_goes_elsewhere_after_its_timeout() -> None:
    """Prefill's pods may not be where decode's room is, which the planner cannot see: here, a node that lies about its room."""
    world = PlacedWorld(racks={"a0": ("a", 2), "b0": ("b", 2)})
    real = world.free

    def lying(name: str) -> int:  # the scheduler's view: something holds one GPU of a0 that no pod asks for
        return real(name) - (name == "a0")

    world.free = lying  # type: ignore[method-assign]
    world.run(lambda w: "b" in {d for where in w.domains().values() for d in where}, limit=80)
    assert 600 <= world.clock <= 760
    assert [e["name"] for e in world.status["excludedDomains"]] == ["a"]
    world.settle()
    assert list(world.domains().values()) == [["b", "b"]] and world.broken_rules == []
