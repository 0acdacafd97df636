"""The scaling tick with one budget for several PDDeployments: the real law, stores and roster (test_scaling_loop.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from builders import deep, pod, serving
from test_scaling_loop import BUSY, SCALING, World, load, show, snapshot_of

from pd_operator.core.names import ROLES
from pd_operator.core.plan import make_plan
from pd_operator.core.scaling.record import parse, replay
from pd_operator.core.scaling.shared import Budget
from pd_operator.core.status import build_pool_status
from pd_operator.signals.load import nothing

UNKNOWN = nothing("pod x does not answer")


def at(name: str, priority: int, **changes: Any) -> Any:
    return snapshot_of(name, **deep({"scaling": {"priority": priority}}, changes))


def condition(world: World, name: str, type_: str, role: str = "decode", priority: int = 0) -> tuple[str, str, str]:
    """A condition of a pool as the reconcile after the tick writes it."""
    there = replace(at(name, priority), scaled=world.roster.scaled(("demo", name), f"uid-{name}"))
    status = build_pool_status(there, make_plan(there), role, {}, 1)  # type: ignore[arg-type]
    found = next(c for c in status["conditions"] if c["type"] == type_)
    return found["status"], found["reason"], found["message"]


def test_the_higher_priority_gets_what_there_is_and_the_other_is_told_who_holds_it() -> None:
    """Each of both needs 1 + 3; the budget has 6."""
    world = World(at("high", 5), at("low", 0), budgets=[Budget("prod", 6)])
    world.tick(3, BUSY)
    assert world.server.scaled == [("demo", "high-decode", 3)] and world.number("decode", "low") == 1
    status, reason, message = condition(world, "low", "ScalingLimited")
    assert (status, reason) == ("True", "MaxGPUs")
    assert message == "budget prod has 6 GPUs; demo/high (priority 5) holds 4; 2 are for this one"
    assert condition(world, "high", "ScalingLimited", priority=5)[0] == "False"
    assert world.roster.budgets == {"prod": (6, 6)}
    assert [d for line in world.lines for d in replay(line)] == []


def test_a_share_of_a_budget_keeps_the_head_room_that_was_asked_for() -> None:
    world = World(at("high", 5), at("low", 0, scaling={"headroomPercent": 150}), budgets=[Budget("prod", 6)])
    world.tick(3, BUSY)
    last = next(made for made in map(parse, reversed(world.lines)) if made.name == "demo/low")
    assert "demo/high (priority 5) holds 4" in last.bounds.shared and last.law.decode_load == 0.85 / 1.5
    assert last.decision.decode.wanted == 4, "400 / (0.567 x 200) = 3.5: wanted, and not got"


def test_a_lower_priority_gives_back_one_a_minute_and_only_what_is_known() -> None:
    world = World(at("high", 5), at("low", 0), budgets=[Budget("prod", 8)])
    show(world.stores, "demo", "low-decode", 5)  # 1 + 5, and high has 1 + 1: all 8
    plenty = load(running=800.0, kv_tokens=800_000.0)
    world.pages.of = {("demo", "low"): plenty, ("demo", "high"): load()}
    world.tick(8)
    assert world.server.scaled == []
    world.pages.of = {("demo", "low"): UNKNOWN, ("demo", "high"): BUSY}
    world.tick(20)
    assert world.server.scaled == [] and condition(world, "low", "ScalingActive")[1] == "NoSeries"
    assert "demo/low (priority 0) holds 6" in condition(world, "high", "ScalingLimited", priority=5)[2]
    world.pages.of[("demo", "low")] = replace(plenty, unread={"decode": 1})
    world.tick(8)
    assert world.server.scaled == []  # one of its replicas has not been read yet
    world.pages.of[("demo", "low")] = plenty
    world.tick(1)
    assert world.server.scaled == [("demo", "low-decode", 4)]
    world.tick(3)  # within the minute low gives no more; high takes what is free
    assert world.server.scaled == [("demo", "low-decode", 4), ("demo", "high-decode", 2)]
    world.tick(6)
    assert [n for n in world.server.scaled if "low" in n[1]] == [("demo", "low-decode", 4), ("demo", "low-decode", 3)]
    assert world.number("decode", "high") == 3
    before = list(world.server.scaled)
    world.tick(40)  # ten minutes of the same load: nobody moves
    assert world.server.scaled == before


def test_static_suspended_and_other_namespaces() -> None:
    """A Static object of 2 + 3 is counted; one of another namespace is not, and is not limited either."""
    world = World(at("auto", 0), budgets=[Budget("team", 8, frozenset({"demo"}))])
    fixed = {"scaling": None, "prefill": {"replicas": 2}, "decode": {"replicas": 3}}
    world.put(replace(serving(deep(SCALING, fixed)), name="fixed", uid="uid-fixed"))
    world.put(replace(serving(deep(SCALING, fixed)), namespace="elsewhere", name="far", uid="uid-far"))
    world.tick(2, BUSY)
    assert world.server.scaled == [("demo", "auto-decode", 2)]
    assert "demo/fixed (Static) holds 5" in condition(world, "auto", "ScalingLimited")[2]
    world.put(replace(serving(deep(SCALING, {**fixed, "suspend": True})), name="fixed", uid="uid-fixed"))
    world.tick(1)
    assert world.server.scaled[-1] == ("demo", "auto-decode", 3)


def test_pods_of_an_object_that_was_not_read_yet_stop_every_rise() -> None:
    world = World(at("auto", 0), budgets=[Budget("prod", 100)])
    stranger = pod("feedbeef", "decode", 7)
    stranger = replace(stranger, labels={**stranger.labels, "pdserve.dev/deployment": "new"}, name="new-0")
    world.stores.pods.put("pods", ("demo", "new-0"), stranger)
    world.tick(2, BUSY)
    assert world.server.scaled == []
    assert "demo/new holds some, and nobody has read yet how many" in condition(world, "auto", "ScalingLimited")[2]
    world.put(replace(serving(deep(SCALING, {"scaling": None})), name="new", uid="uid-new"))
    world.tick(1)
    assert world.server.scaled == [("demo", "auto-decode", 3)]


def test_a_deleted_object_holds_its_gpus_until_its_pods_are_gone() -> None:
    world = World(at("auto", 0), at("old", 0), budgets=[Budget("prod", 5)])
    world.tick(1)
    world.roster.forget(("demo", "old"))
    for role in ROLES:
        world.stores.children.remove("pools", ("PDPool", "demo", f"old-{role}"))
    world.tick(1, BUSY)
    assert world.server.scaled == [("demo", "auto-decode", 2)]  # 1 + 1 of old, and 1 + 2
    assert "demo/old (deleted) holds 2" in condition(world, "auto", "ScalingLimited")[2]
    for one in world.stores.pods.by_owner("demo", "old"):
        world.stores.pods.remove("pods", (one.namespace, one.name))
    world.tick(1)
    assert world.server.scaled[-1] == ("demo", "auto-decode", 3)
    world.roster.forget(("demo", "another"))
    assert [h.key for h in world.roster.holders()] == [("demo", "auto")]


def test_a_replica_that_spans_nodes_holds_the_gpus_of_all_of_them() -> None:
    """Suspended: its two leaders still end, and each stands for two nodes of one GPU."""
    world = World(at("auto", 0), budgets=[Budget("prod", 6)])
    for n in range(2):
        leader = pod("feedbeef", "decode", n)
        leader = replace(leader, name=f"wide-{n}", labels={**leader.labels, "pdserve.dev/deployment": "wide"}, deleting=True)
        world.stores.pods.put("pods", ("demo", leader.name), leader)
    wide = deep(SCALING, {"scaling": None, "suspend": True, "decode": {"nodes": 2, "parallelism": {"tensor": 2}}})
    world.put(replace(serving(wide), name="wide", uid="uid-wide"))
    world.tick(2, BUSY)
    assert world.server.scaled == []
    assert "demo/wide (suspended) holds 4" in condition(world, "auto", "ScalingLimited")[2]


def test_a_refused_spec_is_counted_with_what_it_ran_before() -> None:
    world = World(at("auto", 0), budgets=[Budget("prod", 7)])
    fixed = deep(SCALING, {"scaling": None, "prefill": {"replicas": 2}, "decode": {"replicas": 2}})
    good = replace(serving(fixed), name="fixed", uid="uid-fixed")
    world.put(good)
    bad = replace(good, conflicts=("Service fixed",))
    assert make_plan(bad).refusal is not None
    world.roster.put(bad, make_plan(bad))
    world.tick(2, BUSY)
    assert world.server.scaled == [("demo", "auto-decode", 2)]


def test_minimums_above_the_budget_are_told() -> None:
    world = World(at("a", 0), at("b", 0), budgets=[Budget("prod", 3)])
    world.tick(2)
    status, reason, message = condition(world, "a", "ScalingLimited")
    assert (status, reason) == ("True", "MaxGPUs")
    assert message == "budget prod has 3 GPUs: the minReplicas of 2 PDDeployments need 4, and pools that are not Auto hold 0"
    assert world.server.scaled == []


def test_external_and_advisory_are_counted_and_not_limited() -> None:
    world = World(at("auto", 9), at("other", 0, scaling={"mode": "Advisory"}), budgets=[Budget("prod", 6)])
    show(world.stores, "demo", "other-decode", 3)
    world.tick(2, BUSY)
    assert world.server.scaled == []  # 1 + 1 and 1 + 3: nothing is left
    assert "demo/other (Advisory) holds 4" in condition(world, "auto", "ScalingLimited", priority=9)[2]
    advice = [parse(line).decision.decode.desired for line in world.lines if parse(line).name == "demo/other"]
    assert advice == [3, 3]
