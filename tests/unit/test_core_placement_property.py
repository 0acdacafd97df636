"""What every plan keeps, on random worlds."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from placement_world import RACK, World, random_world

from pd_operator.core.placement.index import CapacityIndex
from pd_operator.core.placement.planner import CONSOLIDATION, place, reserve
from pd_operator.core.placement.result import Outcome, Placement

SEEDS = st.integers(0, 2**32)
CONFIG = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def small(seed: int) -> World:
    """A world of a few nodes."""
    return random_world(seed, most_nodes=16, most_domains=4, most=6)


def plan(world: World) -> Placement:
    """Its placement."""
    return place(world.demand, world.view)


@CONFIG
@given(SEEDS)
def test_never_over_capacity_and_one_node_for_each_pod_of_a_replica(seed: int) -> None:
    world = random_world(seed, most_nodes=24, most_domains=5, most=8)
    view, shapes = world.view, (world.demand.prefill_shape, world.demand.decode_shape)
    before = {n.name: n for n in view.nodes("", "")}
    found = place(world.demand, view)
    assert reserve(world.demand, view, found.domains)
    wanted: dict[str, int] = {}
    for share in found.domains:
        running = world.demand.running.get(share.domain, (0, 0))
        for shape, now, there in zip(shapes, share[1:3], running, strict=True):
            for pod in shape.pods:
                for name, amount in pod.needs().items():
                    wanted[name] = wanted.get(name, 0) + amount * max(0, now - there)
    taken: dict[str, int] = {}
    for node in view.nodes("", ""):
        for name in wanted:
            gone = before[node.name].free.get(name, 0) - node.free.get(name, 0)
            taken[name] = taken.get(name, 0) + gone
            assert not gone or node.free[name] >= 0, f"{node.name} has {node.free} after {found.domains}"
    assert {k: v for k, v in taken.items() if v} == {k: v for k, v in wanted.items() if v}


@CONFIG
@given(SEEDS)
def test_both_roles_or_none_and_never_more_than_wanted(seed: int) -> None:
    world = small(seed)
    found, demand = plan(world), world.demand
    assert all(share.prefill >= 1 and share.decode >= 1 for share in found.domains)
    assert len(found.domains) <= demand.max_domains
    assert found.short == (demand.prefill - found.total[0], demand.decode - found.total[1]) and min(found.short) >= 0
    assert not set(demand.excluded) & {share.domain for share in found.domains}
    assert found.floating is (not found.domains)
    assert (found.reason is Outcome.PLACED) is (found.short == (0, 0))


@CONFIG
@given(SEEDS)
def test_never_worse_than_keeping_what_runs(seed: int) -> None:
    """Whatever is kept of what runs, the plan has no less effective capacity, and at the same disrupts no more."""
    world = small(seed)
    demand = world.demand
    there = {d: r for d, r in demand.running.items() if d not in demand.excluded}
    kept = []
    for choice in product(*([(0, 0), *product(range(1, r[0] + 1), range(1, r[1] + 1))] for r in there.values())):
        used = [c for c in choice if any(c)]
        if (
            len(used) <= demand.max_domains
            and sum(c[0] for c in used) <= demand.prefill
            and sum(c[1] for c in used) <= demand.decode
        ):
            ended = sum(map(sum, demand.running.values())) - sum(map(sum, used))
            effective = sum(min(p * demand.decode, d * demand.prefill) for p, d in used)
            kept.append((demand.prefill * demand.decode - effective, ended + CONSOLIDATION * len(used)))
    assert plan(world).objective[:2] <= min(kept)


@CONFIG
@given(SEEDS, st.randoms(use_true_random=False))
def test_same_input_same_plan_whatever_the_order(seed: int, rng: random.Random) -> None:
    world = small(seed)
    nodes, running = list(world.nodes), list(world.demand.running.items())
    rng.shuffle(nodes)
    rng.shuffle(running)
    assert plan(world) == plan(World(tuple(nodes), replace(world.demand, running=dict(running)))) == plan(world)


@CONFIG
@given(SEEDS)
@example(8)
def test_one_replica_more_of_free_capacity_never_gives_a_worse_plan(seed: int) -> None:
    world = small(seed)
    rng = random.Random(seed)
    shape = rng.choice((world.demand.prefill_shape, world.demand.decode_shape))
    lucky = rng.sample(range(len(world.nodes)), k=min(len(world.nodes), len(shape.pods)))
    nodes = list(world.nodes)
    for at, pod in zip(lucky, shape.pods, strict=False):
        more = {name: nodes[at].free.get(name, 0) + pod.needs().get(name, 0) for name in {*nodes[at].free, *pod.needs()}}
        nodes[at] = replace(nodes[at], free=more)
    before, after = plan(world), plan(World(tuple(nodes), world.demand))
    assert before.exact and after.exact
    assert after.objective[:3] <= before.objective[:3]


@CONFIG
@given(SEEDS)
def test_a_plan_that_was_carried_out_is_kept(seed: int) -> None:
    """Planned again once its replicas run, nothing moves and nothing is lost."""
    world = random_world(seed, most_nodes=24, most_domains=5, most=8)
    view = world.view
    first = place(world.demand, view)
    assert reserve(world.demand, view, first.domains)
    running = {share.domain: (share.prefill, share.decode) for share in first.domains}
    again = place(replace(world.demand, running=running), view)
    assert again.moved == (0, 0)
    assert again.objective.lost == first.objective.lost and again.objective.unplaced <= first.objective.unplaced
    assert {d: (p, n) for d, p, n, _ in again.domains} == running or again.objective < first.objective


@CONFIG
@given(SEEDS)
def test_preferred_is_never_less_than_required(seed: int) -> None:
    world = small(seed)
    required = plan(world)
    view, demand = world.view, replace(world.demand, mode="Preferred")
    preferred = place(demand, view)
    assert reserve(demand, view, preferred.domains)
    assert preferred.objective.lost <= required.objective.lost
    assert not preferred.crossing or preferred.objective.lost < required.objective.lost
    assert sum(s.crossing for s in preferred.domains) <= 1 and len(preferred.domains) <= world.demand.max_domains
    assert preferred.crossing == (preferred.anchor != "")


@CONFIG
@given(SEEDS)
def test_two_deployments_planned_one_after_the_other_share(seed: int) -> None:
    world = small(seed)
    view = world.view
    first = place(world.demand, view)
    assert reserve(world.demand, view, first.domains)
    second_demand = replace(world.demand, key="default/other", running={})
    second = place(second_demand, view)
    assert reserve(second_demand, view, second.domains)
    index = CapacityIndex.of(world.nodes)
    for node in view.nodes("", ""):
        original = index.node(node.name)
        assert original is not None
        assert all(free >= min(0, original.free.get(name, 0)) for name, free in node.free.items())


@CONFIG
@given(SEEDS)
def test_every_domain_is_explained_in_a_sentence(seed: int) -> None:
    world = small(seed)
    found = place(world.demand, world.view, explained=100)
    assert found.unexplained == 0
    assert {e.domain for e in found.explanations} == {*world.index.domains(RACK), *world.demand.running}
    for e in found.explanations:
        assert e.text.startswith(f"{e.domain}: ") and len(e.text) > len(e.domain) + 10
        assert e.chosen == found.of(e.domain)
        assert e.chosen[0] <= e.fits_prefill <= world.demand.prefill and e.chosen[1] <= e.fits_decode <= world.demand.decode
