"""I9: a crash after any write leaves a state from which the next reconcile reaches the same end."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from rollout_world import World


def end(world: World) -> dict[str, Any]:
    """All objects as they are in the end, without what a first number of a PDPool leaves in its hash."""
    world.settle()
    assert world.broken_rules == []
    found: dict[str, Any] = {name: d.manifest for name, d in world.deployments.items()}
    found |= {f"{kind} {name}": obj["spec"] if kind == "PDPool" else obj for (kind, name), obj in world.objects.items()}
    return found


def first(world: World) -> None:
    world.pairing_edit(1)


def second(world: World) -> None:
    world.pairing_edit(1)
    world.settle()
    world.pairing_edit(2)


def without_room(world: World) -> None:
    world.gpus = 2
    second(world)


def pods(world: World) -> None:
    world.pairing_edit(1)
    world.settle()
    world.edit({"prefill": {"template": {"spec": {"priorityClassName": "high"}}, "replicas": 2}})


STARTS: dict[str, Callable[[World], None]] = {f.__name__: f for f in (first, second, without_room, pods)}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_crash_after_each_write_of_each_pass(start: Callable[[World], None]) -> None:
    world = World()
    start(world)
    expected = end(copy.deepcopy(world))
    for _ in range(40):
        before = copy.deepcopy(world)
        writes = world.reconcile()
        for crash_after in range(writes):
            crashed = copy.deepcopy(before)
            crashed.reconcile(crash_after=crash_after)
            assert end(crashed) == expected, f"crash after {crash_after} of {writes} writes"
        if writes == 0 and world.settled():
            return
        world.tick()
    raise AssertionError("the world did not settle within 40 passes")


def test_the_order_of_writes() -> None:
    """What a later object needs is there before it: stored templates and accounts, then what refers to them, then workloads."""
    from builders import rendered

    _, _, bundle = rendered({"lmcache": {"p2p": {"enabled": True}}})
    kinds = [{m["kind"] for m in stage} for stage in bundle.stages]
    assert kinds[0] == {"ControllerRevision", "ServiceAccount", "Role"} and kinds[-1] == {"Deployment"}
    # The RoleBinding after its Role: the server answers 404 to a binding whose Role it cannot compare with our rights.
    assert {"RoleBinding", "Service", "NetworkPolicy", "PDPool", "PodDisruptionBudget"} == kinds[1]
