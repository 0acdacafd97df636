"""Pools: whose number a pool has in each mode, what of it is used, and that no change of mode moves it (I6; DESIGN §3)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from builders import by_name, deep, deployment, make_snapshot, make_spec, rendered, revision_of, serving
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.core.names import ROLES, Role
from pd_operator.core.observed import ChildFact
from pd_operator.core.plan import make_plan
from pd_operator.core.pools import PoolPlan, gpus, gpus_of, mode_of, plan_pools
from pd_operator.core.snapshot import Snapshot

BOUNDS = {"prefill": {"minReplicas": 2, "maxReplicas": 8}, "decode": {"minReplicas": 2, "maxReplicas": 8}}


def scaling(mode: str, **more: Any) -> dict[str, Any]:
    """Changes that make an object scale."""
    return {"scaling": {"mode": mode, **deep(BOUNDS, more)}}


def pool_fact(role: str, replicas: int | None) -> ChildFact:
    """A PDPool that says so."""
    return ChildFact("PDPool", "demo", f"chat-{role}", f"uid-{role}", replicas=replicas)


def world(changes: dict[str, Any], prefill: int | None = None, decode: int | None = None, **fields: Any) -> Snapshot:
    """Both PDPools exist, with these numbers."""
    pools = (pool_fact("prefill", prefill), pool_fact("decode", decode))
    return make_snapshot(changes, children=(*fields.pop("children", ()), *pools), **fields)


def decode_of(snapshot: Snapshot) -> PoolPlan:
    return plan_pools(snapshot)["decode"]


REPLICAS = {"decode": {"replicas": 3}}
MODES: dict[str, tuple[dict[str, Any], int | None, tuple[int, int, bool]]] = {
    # changes, number in the PDPool -> (number, used, written through /scale)
    "static with a number": (REPLICAS, 5, (3, 3, True)),
    "static with its number": (REPLICAS, 3, (3, 3, False)),
    "static without one keeps": ({}, 5, (5, 5, False)),
    "auto": (scaling("Auto"), 5, (5, 5, False)),
    "external": (scaling("External"), 5, (5, 5, False)),
    "advisory": (scaling("Advisory"), 5, (5, 5, False)),
    "external above max": (scaling("External"), 50, (50, 8, False)),
    "external below min": (scaling("External"), 0, (0, 2, False)),
    "auto above max": (scaling("Auto"), 9, (9, 8, False)),
    "nobody's number, static": (REPLICAS, None, (3, 3, True)),
    "nobody's number, static without one": ({}, None, (1, 1, True)),
    "nobody's number, auto": (scaling("Auto"), None, (2, 2, True)),
    "nobody's number, external": (scaling("External"), None, (2, 2, True)),
    "nobody's number, advisory": (scaling("Advisory"), None, (2, 2, True)),
}


@pytest.mark.parametrize(("changes", "number", "expected"), MODES.values(), ids=MODES)
def test_modes(changes: dict[str, Any], number: int | None, expected: tuple[int, int, bool]) -> None:
    mine = decode_of(world(changes, 2, number))
    assert (mine.number, mine.desired, mine.scale) == expected and not mine.create


@pytest.mark.parametrize("changes", [{}, *(scaling(m) for m in ("Auto", "External", "Advisory"))])
def test_a_number_that_was_removed_comes_back_from_what_exists(changes: dict[str, Any]) -> None:
    workloads = (deployment(revision_of(changes), "decode", replicas=4),)
    mine = decode_of(world(changes, 2, None, children=workloads))
    assert (mine.number, mine.scale) == (4, True)


@pytest.mark.parametrize(
    ("changes", "there", "first"),
    [
        ({}, 0, 1),
        (REPLICAS, 0, 3),
        (REPLICAS, 7, 3),
        ({}, 7, 7),
        (scaling("Auto"), 0, 2),
        (scaling("Auto"), 7, 7),
        (scaling("External"), 7, 7),
        (scaling("Advisory"), 0, 2),
    ],
)
def test_the_first_number(changes: dict[str, Any], there: int, first: int) -> None:
    children = (deployment(revision_of(changes), "decode", replicas=there),) if there else ()
    mine = decode_of(make_snapshot(changes, children=children))
    assert (mine.number, mine.create, mine.scale) == (first, True, False)


def test_a_pool_that_is_made_again_in_a_rollout_counts_one_revision() -> None:
    """While one revision takes over from another, each has the whole number."""
    children = (deployment("aaaaaaaa", "decode", replicas=4), deployment("bbbbbbbb", "decode", replicas=4))
    assert decode_of(make_snapshot(scaling("Auto"), children=children)).number == 4


def test_every_change_of_mode_keeps_the_number() -> None:
    for changes in (scaling("Auto"), scaling("External"), scaling("Advisory"), {}, scaling("Auto")):
        plan = make_plan(world(changes, 5, 7))
        assert plan.refusal is None
        assert {r: (p.number, p.desired, p.scale, p.create) for r, p in plan.pools.items()} == {
            "prefill": (5, 5, False, False),
            "decode": (7, 7, False, False),
        }


def test_suspended_pools_keep_their_number() -> None:
    mine = decode_of(world({**scaling("Auto"), "suspend": True}, 5, 7))
    assert (mine.number, mine.desired, mine.scale) == (7, 0, False)


def test_limits_say_what_was_asked_and_which_field_says_otherwise() -> None:
    pools = plan_pools(world(scaling("External"), 1, 50))
    assert pools["decode"].limit == "MaxReplicas"
    assert pools["decode"].limit_message == "50 replicas are asked for: spec.scaling.decode.maxReplicas is 8"
    assert pools["prefill"].limit == "MinReplicas" and "spec.scaling.prefill.minReplicas is 2" in pools["prefill"].limit_message
    assert plan_pools(world(scaling("External"), 4, 4))["decode"].limit == ""
    shared = plan_pools(world(scaling("External", maxGPUs=6), 4, 8))
    assert {r: p.desired for r, p in shared.items()} == {"prefill": 2, "decode": 4}
    assert shared["decode"].limit == "MaxGPUs"
    assert shared["decode"].limit_message == "8 replicas are asked for, 4 are used: spec.scaling.maxGPUs is 6"


def test_gpus_of_a_replica() -> None:
    spec = make_spec({"prefill": {"resources": {"limits": {"nvidia.com/gpu": None, "amd.com/gpu": "2", "cpu": 4}}, "nodes": 3}})
    assert (gpus_of(spec, "prefill"), gpus_of(spec, "decode"), gpus(spec, {"prefill": 2, "decode": 5})) == (6, 1, 17)
    assert mode_of(spec) == "Static"


@given(
    numbers=st.tuples(*[st.integers(0, 40)] * 2),
    least=st.tuples(*[st.integers(1, 5)] * 2),
    room=st.tuples(*[st.integers(0, 30)] * 2),
    each=st.tuples(*[st.integers(0, 9)] * 2),
    cap=st.integers(2, 200),
)
def test_within_the_bounds_for_all_numbers(
    numbers: tuple[int, int], least: tuple[int, int], room: tuple[int, int], each: tuple[int, int], cap: int
) -> None:
    """Inside every bound; above maxGPUs only where the minimums need it; nobody is raised, and nothing that fits is withheld."""
    bounds = {r: {"minReplicas": least[i], "maxReplicas": least[i] + room[i]} for i, r in enumerate(ROLES)}
    limits = {r: {"resources": {"limits": {"nvidia.com/gpu": each[i]}}} for i, r in enumerate(ROLES)}
    free = plan_pools(world({**limits, "scaling": {"mode": "External", **bounds}}, *numbers))
    capped = plan_pools(world({**limits, "scaling": {"mode": "External", "maxGPUs": cap, **bounds}}, *numbers))
    counts: dict[Role, int] = {role: capped[role].desired for role in ROLES}
    for i, role in enumerate(ROLES):
        assert least[i] <= counts[role] <= least[i] + room[i]
        assert counts[role] <= free[role].desired
    used, minimum = (sum(n * each[i] for i, n in enumerate(c)) for c in (counts.values(), least))
    assert used <= max(cap, minimum)
    if used < cap:  # nothing that would still fit is withheld
        assert all(counts[r] == free[r].desired or used + each[i] > cap for i, r in enumerate(ROLES))


def test_bounds_stand_in_the_pool_and_go_with_scaling() -> None:
    _, _, bundle = rendered(scaling("External"))
    spec = by_name(bundle)["PDPool", "chat-decode"]["spec"]
    assert spec == {"deploymentName": "chat", "role": "decode", "minReplicas": 2, "maxReplicas": 8, "replicas": 2}
    there = serving(scaling("External"))
    there = replace(there, children=(*there.children, pool_fact("decode", 5), pool_fact("prefill", 5)))
    _, _, again = rendered(scaling("External"), children=there.children, pods=there.pods, revisions=there.revisions)
    assert "replicas" not in by_name(again)["PDPool", "chat-decode"]["spec"]
    _, _, static = rendered({}, children=there.children, pods=there.pods, revisions=there.revisions)
    assert by_name(static)["PDPool", "chat-decode"]["spec"] == {"deploymentName": "chat", "role": "decode"}
