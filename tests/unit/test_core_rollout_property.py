"""Whatever is edited, whatever breaks, in whatever order: every step keeps the rules of the world, and in the end one slice serves.

The rules are those of rollout_world: no engine Deployment goes while a router of its slice exists, no selector spans two
revisions, a serving slice ends only when another is complete or when there is no room for both, Ready and kstatus tell the truth.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rollout_world import World

from pd_operator.core.names import ROLES

ROLE = st.sampled_from(ROLES)
STEP = st.one_of(
    st.tuples(st.just("pairing"), st.integers(1, 3)),
    st.tuples(st.just("pods"), ROLE, st.integers(1, 2)),
    st.tuples(st.just("replicas"), ROLE, st.integers(1, 3)),
    st.tuples(st.just("routers"), st.integers(1, 2)),
    st.tuples(st.just("suspend"), st.booleans()),
    st.tuples(st.just("type"), st.sampled_from(["RollingUpdate", "Recreate"])),
    st.tuples(st.just("break"), st.integers(1, 3)),
    st.tuples(st.just("mend"), st.integers(1, 3)),
    st.tuples(st.just("gpus"), st.integers(1, 8)),
    st.tuples(st.just("lose"), st.integers(0, 5)),
    st.tuples(st.just("refuse"), st.booleans()),
    st.tuples(st.just("pause"), st.booleans()),
    st.tuples(st.just("gateway"), st.booleans()),
    st.tuples(st.just("crash"), st.integers(0, 12)),
    st.tuples(st.just("tick"), st.integers(1, 4)),
    st.tuples(st.just("tick"), st.integers(1, 4)),
)


def do(world: World, step: tuple[Any, ...]) -> None:
    """One thing that happens."""
    match step:
        case ("pairing", n):
            world.pairing_edit(n)
        case ("pods", role, n):
            world.edit({role: {"template": {"spec": {"priorityClassName": f"p{n}"}}}})
        case ("replicas", role, n):
            world.edit({role: {"replicas": n}})
        case ("routers", n):
            world.edit({"router": {"replicas": n, "args": [f"--request-timeout-secs={n}"]}})
        case ("suspend", value):
            world.edit({"suspend": value})
        case ("type", value):
            world.edit({"rollout": {"type": value}})
        case ("break", n):
            world.broken.add(f"--max-num-seqs={n}")
        case ("mend", n):
            world.broken.discard(f"--max-num-seqs={n}")
        case ("gpus", n):
            world.gpus = n
        case ("lose", n):
            world.lose(n)
        case ("refuse", value):
            world.edit({"rollout": {"maxSurge": 1 if value else "25%"}})
        case ("pause", value):
            world.edit({"rollout": {"paused": value}})
        case ("gateway", value):
            world.edit({"gateway": {"parentRefs": [{"name": "public"}]} if value else None})
        case ("crash", n):
            world.reconcile(crash_after=n)
        case ("tick", n):
            for _ in range(n):
                world.tick()
                world.reconcile()


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEP, max_size=14))
@example([("tick", 4), ("pairing", 2), ("tick", 2), ("pairing", 3), ("tick", 1), ("pairing", 1), ("tick", 4)])
@example([("gpus", 2), ("tick", 4), ("pairing", 2), ("tick", 4), ("pairing", 1), ("tick", 2), ("suspend", True), ("tick", 2)])
@example([("tick", 4), ("pairing", 2), ("tick", 4), ("type", "Recreate"), ("pairing", 3), ("crash", 3), ("tick", 1)])
@example([("pairing", 2), ("tick", 1), ("suspend", True), ("gateway", True), ("tick", 1)])
def test_every_history_ends_with_one_serving_slice(history: list[tuple[Any, ...]]) -> None:
    world = World()
    world.pairing_edit(1)
    world.reconcile()
    for step in history:
        do(world, step)
    world.broken.clear()
    world.gpus = 1000
    world.edit({"suspend": False, "rollout": {"paused": False, "maxSurge": "25%"}})
    world.settle()
    assert world.broken_rules == []
    assert [s.revision for s in world.plan.rollout.slices] == [world.plan.revision]
    assert world.backends() == ({world.plan.rollout.slices[0].name: 100} if world.changes.get("gateway") else {})
    assert len(world.endpoints()) == world.changes.get("router", {}).get("replicas", 2)
    for role in ROLES:
        alive = [p for p in world.pods if p.labels.get("pdserve.dev/role") == role]
        assert len(alive) == world.changes.get(role, {}).get("replicas", 1)
