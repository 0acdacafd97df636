"""Rollouts, played in a small world: which slices there are at each step, and what never happens."""

from __future__ import annotations

from typing import Any

import pytest
from builders import revision_of
from rollout_world import World

from pd_operator.api.conditions import Reason
from pd_operator.core.names import FRONT, ROLES
from pd_operator.core.rollout import State
from pd_operator.core.snapshot import ROUTER

OLD = {"engine": {"args": ["--old"]}}
NEW = {"engine": {"args": ["--new"]}}
A, B = revision_of(OLD), revision_of(NEW)
DARK, SERVING, REMOVING = (s.value for s in State)


def up(**fields: Any) -> World:
    """A world whose first slice serves."""
    world = World(**fields)
    world.pairing_edit(1)
    world.settle()
    return world


def states(world: World, seen: list[dict[str, str]]) -> list[dict[int, str]]:
    """The same with the number of the edit in place of the revision."""
    number = {world.revision(n): n for n in (1, 2, 3)}
    return [{number[r]: s for r, s in step.items()} for step in seen]


def play(world: World) -> list[dict[int, str]]:
    """Settle, and check that nothing that must hold was broken on the way."""
    seen = states(world, world.settle())
    assert world.broken_rules == []
    assert len(world.endpoints()) == 2
    return seen


def test_first_slice() -> None:
    world = World()
    world.pairing_edit(1)
    assert play(world) == [{1: SERVING}]
    assert world.plan.rollout.reason is Reason.UPDATED


def test_pairing_edit_with_room() -> None:
    world = up()
    world.pairing_edit(2)
    assert play(world) == [{2: DARK, 1: SERVING}, {2: SERVING, 1: REMOVING}, {2: SERVING}]


def test_the_front_door_never_closes_while_there_is_room() -> None:
    world = up()
    world.pairing_edit(2)
    open_all_the_time: list[int] = []

    def watch(w: World) -> bool:
        open_all_the_time.append(len(w.endpoints()))
        return w.settled()

    world.run(watch)
    assert min(open_all_the_time) >= 2


def test_pairing_edit_without_room() -> None:
    world = up(gpus=2)
    world.pairing_edit(2)
    assert play(world) == [{2: DARK, 1: SERVING}, {2: DARK, 1: REMOVING}, {2: SERVING}]


def test_without_room_the_old_routers_end_before_the_old_engines() -> None:
    world = up(gpus=2)
    world.pairing_edit(2)
    world.run(lambda w: w.plan.rollout.reason is Reason.NO_CAPACITY_FOR_PAIR)
    names = {d.part for d in world.deployments.values() if d.slice.endswith(f"{world.revision(1)}-0")}
    assert names == set(ROLES)  # its routers are gone, its engines wait for the routers' pods
    play(world)


def test_recreate() -> None:
    world = up()
    world.edit({"rollout": {"type": "Recreate"}})
    world.pairing_edit(2)
    assert play(world) == [{1: REMOVING}, {2: SERVING}]


def test_recreate_chosen_in_the_middle_does_not_throw_away_what_was_begun() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.tick()
    world.edit({"rollout": {"type": "Recreate"}})
    assert play(world) == [{2: DARK, 1: REMOVING}, {2: SERVING}]


def test_back_to_the_old_revision_while_the_new_one_starts() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    before = {p.name for p in world.pods if p.labels["pdserve.dev/revision"] == world.revision(1)}
    world.pairing_edit(1)
    assert play(world) == [{1: SERVING, 2: REMOVING}, {1: SERVING}]
    assert before <= {p.name for p in world.pods}  # what served was not touched


def test_back_to_the_old_revision_while_it_ends() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: REMOVING in w.slices().values())
    world.pairing_edit(1)
    seen = play(world)
    assert seen[0] == {1: DARK, 2: SERVING} and seen[-1] == {1: SERVING}


def test_third_revision_waits_for_the_end_of_the_second() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.tick(2)
    world.pairing_edit(3)
    assert play(world) == [
        {1: SERVING, 2: REMOVING},
        {1: SERVING},
        {3: DARK, 1: SERVING},
        {3: SERVING, 1: REMOVING},
        {3: SERVING},
    ]


def test_third_revision_does_not_end_the_serving_one_for_room_that_the_second_still_holds() -> None:
    world = up(gpus=4)
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.tick(2)
    world.pairing_edit(3)
    seen = play(world)
    assert {3: SERVING, 1: REMOVING} in seen and {1: REMOVING} not in seen


def test_third_revision_while_two_serve() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: sum(d.part == ROUTER and FRONT in _labels(d) for d in w.deployments.values()) == 2)
    world.pairing_edit(3)
    assert play(world)[0] == {1: SERVING, 2: REMOVING}


def _labels(d: Any) -> dict[str, str]:
    return dict(d.manifest["spec"]["template"]["metadata"]["labels"])


def test_a_broken_revision_never_ends_the_serving_one() -> None:
    world = up()
    world.broken.add("--max-num-seqs=2")
    world.pairing_edit(2)
    with pytest.raises(AssertionError, match="not reached"):
        world.run(lambda w: w.settled(), limit=40)
    assert states(world, [world.slices()]) == [{2: DARK, 1: SERVING}]
    assert world.broken_rules == [] and len(world.endpoints()) == 2
    assert world.plan.rollout.reason is Reason.ROLLING_OUT
    assert "CrashLoop" not in world.plan.rollout.message and "logs" in world.plan.rollout.message  # says what to do
    ready = next(c for c in world.status["conditions"] if c["type"] == "Ready")
    assert ready["status"] == "True"  # the old slice serves
    world.pairing_edit(3)  # the way out
    assert play(world)[-1] == {3: SERVING}


def test_a_role_rolls_inside_its_slice() -> None:
    world = up()
    before = {p.name for p in world.pods if p.labels.get("pdserve.dev/role") == "decode"}
    world.edit({"prefill": {"template": {"spec": {"priorityClassName": "high"}}}})
    assert play(world) == [{1: SERVING}]
    assert before == {p.name for p in world.pods if p.labels.get("pdserve.dev/role") == "decode"}


def test_a_role_that_cannot_roll_says_so() -> None:
    world = up(gpus=2)
    world.edit({"prefill": {"template": {"spec": {"priorityClassName": "high"}}}})
    world.run(lambda w: w.plan.rollout.reason is Reason.NO_CAPACITY_FOR_PAIR)
    assert "Insufficient nvidia.com/gpu" in world.plan.rollout.message and "Recreate" in world.plan.rollout.message
    assert len(world.endpoints()) == 2
    world.edit({"rollout": {"type": "Recreate"}})
    play(world)


def test_suspend_and_resume() -> None:
    world = up()
    world.edit({"suspend": True})
    world.run(lambda w: not any(p.gpus for p in w.pods))
    world.reconcile()
    assert world.plan.rollout.reason is Reason.SUSPENDED and world.reconcile() == 0
    world.edit({"suspend": None})
    assert play(world) == [{1: SERVING}]


def test_suspend_ends_the_engines_of_every_slice() -> None:
    world = up()
    world.pairing_edit(2)
    world.run(lambda w: len(w.slices()) == 2)
    world.edit({"suspend": True})
    world.run(lambda w: not any(p.gpus for p in w.pods), limit=30)
    assert world.broken_rules == []
    world.edit({"suspend": None})
    assert play(world)[-1] == {2: SERVING}


def test_pairing_edit_while_suspended() -> None:
    world = up()
    world.edit({"suspend": True})
    world.run(lambda w: not any(p.gpus for p in w.pods))
    world.pairing_edit(2)
    world.run(lambda w: list(w.slices()) == [w.revision(2)])
    world.edit({"suspend": None})
    assert play(world)[-1] == {2: SERVING}


def test_replicas_and_routers_change_without_touching_engines() -> None:
    world = up()
    before = {p.name for p in world.pods if p.gpus}
    world.edit({"decode": {"replicas": 3}, "router": {"replicas": 3, "args": ["--policy=random"]}})
    world.settle()
    assert before <= {p.name for p in world.pods}
    assert len([p for p in world.pods if p.gpus]) == 4 and len(world.endpoints()) == 3


def test_a_settled_world_is_not_written() -> None:
    world = up()
    assert [world.reconcile() for _ in range(3)] == [0, 0, 0]
