"""Who stands in the HTTPRoute, with which weight, and what status says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import builders
import pytest
from builders import NAME, NAMESPACE, by_name, conditions, make_snapshot, make_spec, pod, serving, whole_slice
from placing_world import Racks, Slice, node, pinned
from rollout_world import World

from pd_operator.api.conditions import Reason
from pd_operator.core.front import answers, plan_front, url
from pd_operator.core.names import FRONT
from pd_operator.core.observed import ChildFact, ParentFact, PodFact, RouteFact
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.prune import prune
from pd_operator.core.rollout import RolloutPlan, SlicePlan, State
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.status import build_status
from pd_operator.render.bundle import render

GATEWAY: dict[str, Any] = {"gateway": {"parentRefs": [{"name": "public"}], "hostnames": ["chat.example.org"]}}
MISSING = {"HTTPRoute": "the API server does not know HTTPRoute of gateway.networking.k8s.io/v1"}


def two(first: tuple[int, int], second: tuple[int, int], *, lit: tuple[bool, bool] = (True, True), **changes: Any) -> Racks:
    """Two slices in two domains with (prefill, decode) ready replicas; `lit` have a ready router with the front label."""
    sizes = {role: {"replicas": first[i] + second[i]} for i, role in enumerate(("prefill", "decode"))}
    slices = [
        Slice(pinned(domain), [f"{domain}0"] * p, [f"{domain}0"] * d, index=index, front=lit[index])
        for index, (domain, (p, d)) in enumerate((("a", first), ("b", second)))
    ]
    nodes = [node(f"{domain}0", domain, sum(size)) for domain, size in zip("ab", (first, second), strict=True)]  # no room to move
    world = Racks(nodes, slices, {**sizes, "placement": {"maxDomains": 2}, **changes})
    for index, on in enumerate(lit):
        name = world.name(index)
        base = pod(world.revision, ROUTER, index, front=on)
        world.pods.append(replace(base, labels={**base.labels, "pdserve.dev/slice": name}))
    return world


def backends(snapshot: Snapshot, plan: Plan | None = None) -> dict[str, int]:
    """What the rendered route leads to."""
    bundle = render(snapshot, plan or make_plan(snapshot))
    (rule,) = by_name(bundle)["HTTPRoute", NAME]["spec"]["rules"]
    assert all((b["group"], b["kind"], b["port"]) == ("", "Service", 80) for b in rule["backendRefs"])
    return {b["name"]: b["weight"] for b in rule["backendRefs"]}


def routed(snapshot: Snapshot, names: dict[str, int], *parents: ParentFact) -> Snapshot:
    """The snapshot with an observed HTTPRoute."""
    fact = RouteFact(tuple(sorted(names.items())), parents)
    child = ChildFact("HTTPRoute", NAMESPACE, NAME, "uid-route", owner_uid=builders.UID, route=fact)
    return replace(snapshot, children=(*snapshot.children, child))


def degraded(snapshot: Snapshot) -> dict[str, Any]:
    return conditions(build_status(snapshot, make_plan(snapshot)))["Degraded"]


def test_two_slices_are_weighted_by_what_each_can_serve() -> None:
    world = two((1, 3), (1, 1), **GATEWAY)
    snapshot = world.snapshot()
    # Of 2:4, one prefill feeds two decodes: min(1 * 4, 3 * 2) against min(1 * 4, 1 * 2).
    assert backends(snapshot) == {world.name(0): 67, world.name(1): 33}
    status = build_status(snapshot, make_plan(snapshot))
    assert [(s["name"], s["weight"], s["state"]) for s in status["slices"]] == [
        (world.name(0), 67, "Serving"),
        (world.name(1), 33, "Serving"),
    ]


def test_without_a_gateway_there_is_no_route_and_no_weight() -> None:
    world = two((2, 2), (2, 2))
    snapshot = world.snapshot()
    plan = make_plan(snapshot)
    assert not [kind for kind, _ in by_name(render(snapshot, plan)) if kind == "HTTPRoute"]
    assert all("weight" not in s for s in build_status(snapshot, plan)["slices"])


def test_what_each_slice_should_get_is_its_weight_or_behind_a_service_its_capacity() -> None:
    expected = {two((1, 3), (1, 1)).name(0): 67, two((1, 3), (1, 1)).name(1): 33}
    world = two((1, 3), (1, 1), **GATEWAY)
    world.status = {"slices": [{"name": name, "weight": w} for name, w in zip(expected, (63, 37), strict=True)]}
    assert list(make_plan(world.snapshot()).front.should.values()) == [63, 37]
    assert dict(make_plan(two((1, 3), (1, 1)).snapshot()).front.should) == expected


def test_the_service_stays_with_a_gateway() -> None:
    made = by_name(render(s := two((1, 1), (1, 1), **GATEWAY).snapshot(), make_plan(s)))
    assert made["Service", NAME]["spec"]["selector"] == {FRONT: NAME}


@pytest.mark.parametrize("why", ["no label", "not ready", "deleting"])
def test_a_dark_slice_has_no_weight(why: str) -> None:
    world = two((2, 2), (2, 2), lit=(True, why != "no label"), **GATEWAY)
    change: dict[str, Any] = {"not ready": {"ready": False}, "deleting": {"deleting": True}}.get(why, {})
    last = world.pods.pop()
    world.pods.append(replace(last, **change))
    assert backends(world.snapshot()) == {world.name(0): 100}


def test_before_any_slice_serves_the_route_leads_to_the_service() -> None:
    assert backends(make_snapshot(GATEWAY)) == {NAME: 100}
    assert backends(replace(serving(GATEWAY), spec=make_spec({**GATEWAY, "suspend": True}), pods=())) == {NAME: 100}


def test_the_weights_that_status_tells_stay_within_the_band() -> None:
    world = two((1, 3), (1, 1), **GATEWAY)
    world.status = {"slices": [{"name": world.name(0), "weight": 63}, {"name": world.name(1), "weight": 37}]}
    assert backends(world.snapshot()) == {world.name(0): 63, world.name(1): 37}
    world.status = {"slices": [{"name": world.name(0), "weight": 61}, {"name": world.name(1), "weight": 39}]}
    assert backends(world.snapshot()) == {world.name(0): 67, world.name(1): 33}


def test_an_edited_route_is_no_base() -> None:
    """Whatever somebody wrote into the route, the plan is the same: so the edit is undone."""
    world = two((1, 3), (1, 1), **GATEWAY)
    plain = world.snapshot()
    edited = routed(plain, {world.name(0): 66, world.name(1): 34})
    assert backends(edited) == backends(plain)


def test_a_slice_leaves_the_route_before_its_routers_go() -> None:
    world = two((2, 2), (2, 2), **GATEWAY)
    smaller = replace(world.snapshot(), spec=builders.make_spec(builders.deep(world.changes, PLACED_ONE)))
    names = {world.name(0): 50, world.name(1): 50}
    before = routed(smaller, names)
    plan = make_plan(before)
    leaving = next(s for s in plan.rollout.slices if s.state.value == "Removing")
    bundle = render(before, plan)
    assert leaving.name not in backends(before, plan)  # this pass writes the route without it
    assert [d.name for d in prune(before, plan, bundle.keys)] == []  # and ends nothing
    after = routed(smaller, {n: 100 for n in names if n != leaving.name})
    plan = make_plan(after)
    gone = [d.name for d in prune(after, plan, render(after, plan).keys)]
    assert gone == [f"{leaving.name}-router"]
    assert leaving.name not in {s.name for s in plan.current}


PLACED_ONE: dict[str, Any] = {
    "prefill": {"replicas": 2},
    "decode": {"replicas": 2},
    "placement": {"transferDomain": {"topologyKey": "example.org/rack"}, "maxDomains": 1},
}


def test_a_route_that_is_no_longer_asked_for_goes_first() -> None:
    snapshot = routed(serving(), {NAME: 100})
    plan = make_plan(snapshot)
    deletions = prune(snapshot, plan, render(snapshot, plan).keys)
    assert [(d.kind, d.reason) for d in deletions] == [("HTTPRoute", "no longer planned")]


def test_a_missing_kind_is_a_refusal_that_is_looked_at_again() -> None:
    snapshot = replace(serving(GATEWAY), missing_kinds=MISSING)
    plan = make_plan(snapshot)
    assert plan.refusal is not None and plan.refusal.reason is Reason.MISSING_KIND and plan.refusal.outside
    assert plan.refusal.message.startswith("spec.gateway: the API server does not know HTTPRoute")
    found = conditions(build_status(snapshot, plan))
    assert found["Accepted"]["status"] == "False" and "keeps serving" in found["Ready"]["message"]
    assert make_plan(replace(serving(), missing_kinds=MISSING)).refusal is None  # others do not care


def test_while_a_spec_is_refused_status_keeps_the_weights() -> None:
    base = serving(GATEWAY)
    (name,) = (s.name for s in make_plan(base).rollout.slices)
    refused = replace(base, missing_kinds=MISSING, status={"slices": [{"name": name, "weight": 100}]})
    assert build_status(refused, make_plan(refused))["slices"][0]["weight"] == 100


@pytest.mark.parametrize(
    ("gateway", "expected"),
    [
        (None, "http://chat.demo.svc"),
        ({"parentRefs": [{"name": "x"}]}, "http://chat.demo.svc"),
        ({"parentRefs": [{"name": "x"}], "hostnames": ["*.example.org"]}, "http://chat.demo.svc"),
        ({"parentRefs": [{"name": "x"}], "hostnames": ["*.example.org", "a.example.org"]}, "http://a.example.org"),
        ({"parentRefs": [{"name": "x"}, {"name": "y", "port": 443}], "hostnames": ["a.example.org"]}, "https://a.example.org"),
    ],
)
def test_url(gateway: dict[str, Any] | None, expected: str) -> None:
    snapshot = make_snapshot({"gateway": gateway} if gateway else {})
    assert url(snapshot) == expected == build_status(snapshot, make_plan(snapshot))["url"]


def test_a_parent_that_refuses_the_route_is_named_and_ready_stays() -> None:
    base = serving(GATEWAY)
    (name,) = (s.name for s in make_plan(base).rollout.slices)
    no = ParentFact("Gateway infra/public", "example.org/gw", "Accepted is False, NotAllowedByListeners: no listener allows it")
    snapshot = routed(base, {name: 100}, ParentFact("Gateway other", "example.org/gw"), no)
    found = conditions(build_status(snapshot, make_plan(snapshot)))
    assert (found["Degraded"]["status"], found["Degraded"]["reason"]) == ("True", "RouteRefused")
    assert found["Degraded"]["message"].startswith(
        "Gateway infra/public (example.org/gw): Accepted is False, NotAllowedByListeners"
    )
    assert found["Ready"]["status"] == "True"
    assert degraded(routed(serving(), {name: 100}, no))["status"] == "False"  # no gateway in the spec: not our route


def test_a_route_that_nobody_took_yet_is_said_in_ready() -> None:
    base = serving(GATEWAY)
    message = "serving at http://chat.example.org"
    waiting = conditions(build_status(routed(base, {}), make_plan(base)))["Ready"]
    assert waiting["message"] == f"{message}; no gateway has accepted HTTPRoute chat yet"
    taken = routed(base, {}, ParentFact("Gateway public", "example.org/gw"))
    assert conditions(build_status(taken, make_plan(taken)))["Ready"]["message"] == message


def test_more_slices_than_a_rule_holds_leave_the_smallest_out() -> None:
    spec = make_spec(GATEWAY)
    children: list[ChildFact] = []
    pods: list[PodFact] = []
    for n in range(20):
        mine, theirs = whole_slice(f"{n:08x}", front=True, replicas=1 + n)
        children += mine
        pods += theirs
    slices = tuple(SlicePlan(f"chat-{n:08x}-0", f"{n:08x}", State.SERVING, front=True) for n in range(20))
    snapshot = make_snapshot(spec, children=tuple(children), pods=tuple(pods))
    found = plan_front(snapshot, RolloutPlan(slices, Reason.ROLLING_OUT, ""), {"prefill": 1, "decode": 1}).weights
    assert sorted(found) == [f"chat-{n:08x}-0" for n in range(4, 20)] and sum(found.values()) == 100


def test_unequal_slices_behind_a_plain_service_stay_dark_and_say_why() -> None:
    world = two((3, 3), (1, 1), lit=(True, False))
    plan = make_plan(world.snapshot())
    assert {s.name: s.front for s in plan.rollout.slices} == {world.name(0): True, world.name(1): False}
    found = conditions(build_status(world.snapshot(), plan))
    assert (found["Progressing"]["status"], found["Progressing"]["reason"]) == ("False", "WeightsNotEnforceable")
    assert world.name(1) in found["Progressing"]["message"] and "spec.gateway" in found["Progressing"]["message"]
    assert found["Reconciling"]["status"] == "False"


@pytest.mark.parametrize(("second", "changes"), [((2, 2), {}), ((3, 3), {}), ((1, 1), GATEWAY)])
def test_slices_that_can_share_join(second: tuple[int, int], changes: dict[str, Any]) -> None:
    world = two((3, 3), second, lit=(True, False), **changes)
    assert all(s.front for s in make_plan(world.snapshot()).rollout.slices)


def test_a_rollout_moves_the_route_slice_by_slice_and_drops_nothing() -> None:
    """new dark -> both in the route -> only the new one -> the old one ends."""
    world = World(changes=dict(GATEWAY))
    world.pairing_edit(1)
    world.settle()
    seen: list[tuple[int, ...]] = []
    world.pairing_edit(2)

    def done(w: World) -> bool:
        weights = tuple(sorted(w.backends().values()))
        if not seen or seen[-1] != weights:
            seen.append(weights)
        return w.settled()

    world.run(done)
    assert seen == [(100,), (50, 50), (100,)]
    assert world.broken_rules == []
    assert answers(world.snapshot(), world.plan.rollout.slices[0])
