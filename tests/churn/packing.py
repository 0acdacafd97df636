"""What fits, exactly: pods of 1, 2, 4 or 8 accelerators on the nodes of transfer domains, as a mixed-integer program (HiGHS).

Each size divides the next one, so a set of pods fits on nodes with free_n accelerators if and only if for each size s

    sum over the pods of at least s of (size / s)  <=  sum over nodes of floor(free_n / s)

(place the largest first: whatever node they take, they take the same number of smaller places). No variable per node is needed,
and the answer is exact. It shares no code with the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

SIZES = (1, 2, 4, 8)
TIME_LIMIT_S = 40.0
GAP = 0.001  # relative; what is left of it counts against us, see `Best.bound`
Rooms = Mapping[str, Sequence[int]]  # domain -> free accelerators of each of its nodes
Counts = tuple[int, int]  # prefill, decode


@dataclass(frozen=True)
class Wanted:
    """One PDDeployment."""

    name: str
    replicas: Counts
    gpus: Counts  # of one replica
    max_domains: int = 1

    @property
    def total(self) -> int:
        """Accelerators that it wants in all."""
        return sum(n * g for n, g in zip(self.replicas, self.gpus, strict=True))


@dataclass(frozen=True)
class Best:
    """The most that fits: what HiGHS found, and what it proved that nobody can exceed."""

    found: int
    bound: int


def places(free: Sequence[int], size: int) -> int:
    """Pods of a size that nodes take when nothing else comes."""
    return sum(max(0, f) // size for f in free)


def most_gpus(fleet: Sequence[Wanted], rooms: Rooms) -> Best:
    """Accelerators of the best placement of all PDDeployments together, from nothing: at least one pair in each used domain."""
    program = _Program()
    value: dict[int, float] = {}
    taken: dict[str, list[tuple[int, int]]] = {domain: [] for domain in rooms}
    for wanted in fleet:
        counts, used = _slices(program, wanted, rooms)
        for domain, pair in counts.items():
            for variable, size in zip(pair, wanted.gpus, strict=True):
                value[variable] = -float(size)
                taken[domain].append((variable, size))
        program.row(dict.fromkeys(used, 1.0), wanted.max_domains)
    return _best(program, value, taken, rooms)


def most_beside(fleet: Sequence[Wanted], running: Mapping[str, Mapping[str, Counts]], rooms: Rooms) -> Best:
    """Accelerators of the best that all PDDeployments together can have when each replica stays on its node.

    This is what an operator can reach that moves nothing that runs and starts no replica that the other role leaves idle
    (docs/placement.md: every domain keeps the ratio of the pools). `rooms` are free beside everything that runs.
    """
    program = _Program()
    value: dict[int, float] = {}
    taken: dict[str, list[tuple[int, int]]] = {domain: [] for domain in rooms}
    for wanted in fleet:
        counts, used = _slices(program, wanted, rooms)
        for domain, pair in counts.items():
            there = running[wanted.name].get(domain, (0, 0))
            _balance(program, wanted, pair, there)
            for variable, size, now in zip(pair, wanted.gpus, there, strict=True):
                program.row({variable: -1.0}, -now)
                new = program.variable(max(wanted.replicas))
                program.row({variable: 1.0, new: -1.0}, now)
                value[variable] = -float(size)
                taken[domain].append((new, size))
        program.row(dict.fromkeys(used, 1.0), wanted.max_domains)
    return _best(program, value, taken, rooms)


def most_effective(wanted: Wanted, running: Mapping[str, Counts], rooms: Rooms) -> int:
    """The most effective capacity, sum of min(p D, d P), that one PDDeployment can have beside everything that runs.

    Replicas that run need no room where they are; all others must fit into `rooms`, also where the plan ends some elsewhere.
    """
    program = _Program()
    p, d = wanted.replicas
    effective = []
    there = {domain: rooms.get(domain, ()) for domain in {*rooms, *running}}
    counts, used = _slices(program, wanted, there)
    for domain, pair in counts.items():
        value = program.variable(p * d)
        effective.append(value)
        program.row({value: 1.0, pair[0]: -float(d)}, 0)
        program.row({value: 1.0, pair[1]: -float(p)}, 0)
        fresh = []
        for variable, size, now in zip(pair, wanted.gpus, running.get(domain, (0, 0)), strict=True):
            new = program.variable(max(wanted.replicas))
            program.row({variable: 1.0, new: -1.0}, now)
            fresh.append((new, size))
        _fits(program, fresh, there[domain])
    program.row(dict.fromkeys(used, 1.0), wanted.max_domains)
    return round(-program.minimise(dict.fromkeys(effective, -1.0))[0])


def _best(program: _Program, value: Mapping[int, float], taken: Mapping[str, Sequence[tuple[int, int]]], rooms: Rooms) -> Best:
    """The least of `value`, when what each domain takes fits into its rooms."""
    for domain, pods in taken.items():
        _fits(program, pods, rooms[domain])
    found, bound = program.minimise(value)
    return Best(round(-found), int(-bound + 1e-6))


def _slices(program: _Program, wanted: Wanted, rooms: Rooms) -> tuple[dict[str, Counts], list[int]]:
    """Variables: replicas of each role by domain, and which domains are used."""
    counts, used = {}, []
    for domain in sorted(rooms):
        pair = program.variable(wanted.replicas[0]), program.variable(wanted.replicas[1])
        use = program.variable(1)
        for variable, most in zip(pair, wanted.replicas, strict=True):
            program.row({variable: 1.0, use: -float(most)}, 0)
            program.row({use: 1.0, variable: -1.0}, 0)
        counts[domain] = pair
        used.append(use)
    for role in (0, 1):
        program.row({pair[role]: 1.0 for pair in counts.values()}, wanted.replicas[role])
    return counts, used


def _balance(program: _Program, wanted: Wanted, pair: Counts, now: Counts) -> None:
    """A role grows beyond one replica only as far as the domain stays near the ratio P:D.

    p <= max(1, now)  or  p D - d P <= max(D - 1, max(P, D) / 2)          and the same with the roles exchanged
    """
    for mine, other in ((0, 1), (1, 0)):
        many, few = wanted.replicas[mine], wanted.replicas[other]
        slack = max(few - 1, max(many, few) / 2)
        grows = program.variable(1)
        program.row({pair[mine]: 1.0, grows: -float(many)}, max(1, now[mine]))
        program.row({pair[mine]: float(few), pair[other]: -float(many), grows: float(many * few)}, slack + many * few)


def _fits(program: _Program, pods: Sequence[tuple[int, int]], free: Sequence[int]) -> None:
    for size in SIZES:
        terms = {variable: each / size for variable, each in pods if each >= size}
        if terms:
            program.row(terms, places(free, size))


class _Program:
    def __init__(self) -> None:
        self._upper: list[float] = []
        self._rows: list[tuple[Mapping[int, float], float]] = []

    def variable(self, upper: float) -> int:
        self._upper.append(upper)
        return len(self._upper) - 1

    def row(self, terms: Mapping[int, float], upper: float) -> None:
        """sum of terms <= upper"""
        self._rows.append((terms, upper))

    def minimise(self, terms: Mapping[int, float]) -> tuple[float, float]:
        """(value found, bound proven). Raises ArithmeticError when HiGHS finds nothing in time."""
        size = len(self._upper)
        cost = np.zeros(size)
        for at, value in terms.items():
            cost[at] = value
        data = [(i, at, value) for i, (row, _) in enumerate(self._rows) for at, value in row.items()]
        i, j, values = zip(*data, strict=True)
        matrix = csr_matrix((values, (i, j)), shape=(len(self._rows), size))
        answer = milp(
            cost,
            constraints=LinearConstraint(matrix, -np.inf, [upper for _, upper in self._rows]),
            bounds=Bounds(np.zeros(size), np.array(self._upper)),
            integrality=np.ones(size),
            options={"time_limit": TIME_LIMIT_S, "mip_rel_gap": GAP},
        )
        if answer.x is None:
            raise ArithmeticError(f"HiGHS: {answer.message}")
        return float(answer.fun), float(answer.mip_dual_bound)
