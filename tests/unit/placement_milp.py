"""The placement problem as a mixed-integer program, solved by HiGHS: the same rules as pd_operator.core.placement, written again.

Variables: per domain the replicas of each role, whether it is used, its effective capacity, the running replicas that end and
which side of the balance rule holds; per node and kind of pod the pods that are new there. One level is solved after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from placement_world import RACK, World
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from pd_operator.core.placement.capacity import NodeCapacity, PodShape, accelerators_of
from pd_operator.core.placement.result import Objective, Share

CONSOLIDATION = 2
TIME_LIMIT_S = 20.0  # of each HiGHS run


@dataclass(frozen=True)
class Answer:
    """What HiGHS found."""

    objective: Objective
    proven: bool  # False: the time limit came first


class Infeasible(Exception):
    """No values keep the rules."""


class _Program:
    def __init__(self, presolve: bool) -> None:
        self.presolve = presolve
        self.lower: list[float] = []
        self.upper: list[float] = []
        self.rows: list[tuple[dict[int, float], float, float]] = []

    def var(self, upper: float) -> int:
        self.lower.append(0)
        self.upper.append(max(0, upper))
        return len(self.upper) - 1

    def row(self, terms: dict[int, float], lower: float = -np.inf, upper: float = np.inf) -> None:
        self.rows.append((terms, lower, upper))

    def minimise(self, terms: dict[int, float]) -> tuple[int, bool]:
        size = len(self.upper)
        cost = np.zeros(size)
        for at, value in terms.items():
            cost[at] += value
        data = [(i, at, value) for i, (row, _, _) in enumerate(self.rows) for at, value in row.items()]
        i, j, values = zip(*data, strict=True)
        matrix = csr_matrix((values, (i, j)), shape=(len(self.rows), size))
        constraint = LinearConstraint(matrix, [r[1] for r in self.rows], [r[2] for r in self.rows])
        answer = milp(
            cost,
            constraints=constraint,
            bounds=Bounds(np.array(self.lower), np.array(self.upper)),
            integrality=np.ones(size),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": 0.0, "presolve": self.presolve},
        )
        if answer.x is None:
            raise Infeasible(answer.message)
        return round(float(cost @ np.round(answer.x))), bool(answer.status == 0)


def solve(world: World, shares: Sequence[Share] | None = None, presolve: bool = True) -> Answer | None:
    """The best objective, or that of given shares; None where they break a rule. Proven unless HiGHS ran out of time.

    HiGHS' presolve is faster and, in scipy 1.17.1, sometimes wrong: it calls random_world(1072) infeasible, which the empty plan
    satisfies, and loses the best answer of random_world(87). Without it both are right.
    """
    demand = world.demand
    whole = demand.prefill * demand.decode
    wanted = demand.prefill, demand.decode
    names = sorted({n.labels[RACK] for n in world.nodes if n.labels.get(RACK)} | set(demand.running))
    names = [name for name in names if name not in demand.excluded]
    program = _Program(presolve)
    used, effective, ended, placed, room = [], [], [], [], {}
    counts: tuple[list[int], list[int]] = ([], [])
    for name in names:
        nodes = [n for n in world.nodes if n.labels.get(RACK) == name]
        running = demand.running.get(name, (0, 0))
        u, e = program.var(1), program.var(whole)
        x = [program.var(wanted[r]) for r in (0, 1)]
        new = [program.var(max(0, wanted[r] - running[r])) for r in (0, 1)]
        for r in (0, 1):
            other = 1 - r
            program.row({x[r]: 1, u: -wanted[r]}, upper=0)
            program.row({x[r]: 1, u: -1}, lower=0)
            program.row({e: 1, x[r]: -wanted[other]}, upper=0)
            program.row({new[r]: 1, x[r]: -1}, lower=-running[r])
            b = program.var(1)
            program.row({x[r]: 1, b: -wanted[r]}, upper=max(1, running[r]))
            slack = max(wanted[other] - 1, max(wanted) / 2)
            program.row({x[r]: wanted[other], x[other]: -wanted[r], b: 2 * whole}, upper=slack + 2 * whole)
            out = program.var(running[r])
            program.row({out: 1, x[r]: 1}, lower=running[r])
            ended.append(out)
            counts[r].append(x[r])
            placed.append(x[r])
        _pods(program, world, nodes, new)
        used.append(u)
        effective.append(e)
        room[u] = sum(max(0, n.free.get(a, 0)) for n in nodes for a in accelerators_of(demand.prefill_shape, demand.decode_shape))
    for r in (0, 1):
        program.row(dict.fromkeys(counts[r], 1), upper=wanted[r])
    program.row(dict.fromkeys(used, 1), upper=demand.max_domains)
    if shares is not None:
        given = {share.domain: share for share in shares}
        if not set(given) <= set(names):
            return None
        for at, name in enumerate(names):
            share = given.get(name, Share(name, 0, 0))
            for r in (0, 1):
                program.row({counts[r][at]: 1}, share[1 + r], share[1 + r])
    try:
        return _levels(program, world, used, effective, ended, placed, room)
    except Infeasible:
        return None


def _levels(
    program: _Program,
    world: World,
    used: list[int],
    effective: list[int],
    ended: list[int],
    placed: list[int],
    room: dict[int, int],
) -> Answer:
    """Lost, then the other three as one number: few enough digits for HiGHS' tolerances."""
    demand = world.demand
    whole, wanted = demand.prefill * demand.decode, demand.prefill + demand.decode
    outside = sum(sum(demand.running[d]) for d in demand.excluded if d in demand.running)
    lost, proven = program.minimise(dict.fromkeys(effective, -1.0)) if effective else (0, True)
    program.row(dict.fromkeys(effective, -1.0), upper=lost + 0.01)
    tall = sum(room.values()) + 1
    wide = tall * (wanted + 1)
    rest = dict.fromkeys(ended, float(wide)) | {u: CONSOLIDATION * wide + float(room[u]) for u in used}
    value, done = program.minimise(rest | dict.fromkeys(placed, float(-tall))) if used else (0, True)
    disruption = -(-(value - tall + 1) // wide)
    unplaced = -((value - disruption * wide) // tall)
    rooms = value - disruption * wide + unplaced * tall
    return Answer(Objective(whole + lost, disruption + outside, wanted - unplaced, rooms), proven and done)


def _pods(program: _Program, world: World, nodes: list[NodeCapacity], new: list[int]) -> None:
    """New pods per node; a node never gets more pods of a role than there are new replicas of it."""
    shapes = (world.demand.prefill_shape, world.demand.decode_shape)
    kinds = [(r, shape, shape.needs(), each) for r in (0, 1) for shape, each in _distinct(shapes[r].pods)]
    variables: list[dict[int, float]] = [{} for _ in kinds]
    for n in nodes:
        here: dict[int, int] = {}
        for at, (_, shape, needs, _) in enumerate(kinds):
            top = min(n.free.get(k, 0) // v for k, v in needs.items()) if shape.admits(n) else 0
            if top > 0:
                here[at] = program.var(top)
                variables[at][here[at]] = 1.0
        for name in sorted({k for at in here for k in kinds[at][2]}):
            scale = 2.0**30 if name == "memory" else 1.0
            terms = {var: kinds[at][2].get(name, 0) / scale for at, var in here.items()}
            program.row(terms, upper=max(0, n.free.get(name, 0)) / scale)
        for r in (0, 1):
            mine = {var: 1.0 for at, var in here.items() if kinds[at][0] == r}
            if mine:
                program.row(mine | {new[r]: -1.0}, upper=0)
    for at, (r, _, _, each) in enumerate(kinds):
        program.row(variables[at] | {new[r]: -float(each)}, lower=0)


def _distinct(pods: tuple[PodShape, ...]) -> list[tuple[PodShape, int]]:
    found: list[tuple[PodShape, int]] = []
    for shape in pods:
        if shape not in [known for known, _ in found]:
            found.append((shape, pods.count(shape)))
    return found
