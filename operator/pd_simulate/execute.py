"""Execute: one cell, from its settings to its numbers. Runs in any process; importable, so that spawned workers find it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pd_simulate import peers, scenario
from pd_simulate.cell import Cell
from pd_simulate.fleet import Fleet
from pd_simulate.result import TIMELINE, Result
from pd_simulate.simulation import simulate
from pd_simulate.units import InputError
from pd_simulate.view import Policy, Targets, View
from pd_simulate.workload import Workload

SAMPLES = 240  # points of a stored timeline: what a chart can show
TIMELINE_SEED = 0  # timelines are stored for this seed only


@dataclass(slots=True)
class Watched:
    """A policy that also tells how far simulated time has come."""

    policy: Policy
    tell: Callable[[float], None]
    name: str = ""
    tick: float = 15.0

    def __post_init__(self) -> None:
        self.name, self.tick = self.policy.name, self.policy.tick

    def decide(self, view: View) -> Targets:
        """The policy's answer."""
        self.tell(view.now)
        return self.policy.decide(view)


@dataclass(frozen=True, slots=True)
class Prepared:
    """All that a cell's run needs."""

    load: Workload
    fleet: Fleet
    policy: Policy
    times: scenario.Window


def prepare(cell: Cell) -> Prepared:
    """Workload, fleet and policy of a cell. Raises InputError for settings that do not fit."""
    load, times = scenario.workload(cell)
    fleet = scenario.fleet(cell, load, times)
    policy = peers.build(cell, load, fleet)
    return Prepared(load, peers.fitted(policy, fleet), policy, times)


def simulate_prepared(ready: Prepared, seed: int, tell: Callable[[float], None] | None = None) -> Result:
    """Simulate; `tell` hears the simulated time at every tick."""
    policy = Watched(ready.policy, tell) if tell else ready.policy
    return simulate(ready.load, ready.fleet, policy, seed)


def run(cell: Cell) -> Result:
    """Simulate a cell."""
    return simulate_prepared(prepare(cell), cell.seed)


def records(policy: Policy) -> list[str] | None:
    """Lines of the decisions that a policy recorded, None when it records none."""
    lines: list[str] | None = getattr(policy, "records", None)
    return lines


def compute(cell: Cell) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Summary of a cell's run, and its timeline where one is kept. What `pool.run` calls."""
    result = run(cell)
    kept = cell.seed == TIMELINE_SEED and cell.purpose == "compare"
    return summary(result), timeline(result) if kept else None


def summary(result: Result) -> dict[str, Any]:
    """Result.summary() with None for what is not a number, so that it is JSON."""
    return {key: _plain(value) for key, value in result.summary().items()}


def timeline(result: Result) -> dict[str, Any]:
    """At most SAMPLES samples of the run over time, and the decisions whose counts or reasons changed."""
    stride = max(1, math.ceil(len(result.timeline) / SAMPLES))
    rows = result.timeline[::stride]
    decisions = []
    last: tuple[object, ...] = ()
    for item in result.decisions:
        state = (item.applied["prefill"], item.applied["decode"], item.note)
        if state != last:
            decisions.append([item.time, *state])
            last = state
    return {
        "warmup": result.warmup,
        "duration": result.duration,
        "columns": {name: [round(float(value), 3) for value in rows[:, index]] for index, name in enumerate(TIMELINE)},
        "decisions": decisions,
    }


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def check(cells: list[Cell]) -> None:
    """Look at the inputs of one cell of each trace and profile before hours of work. Raises InputError."""
    for name in dict.fromkeys(cell.profile for cell in cells):
        scenario.profile(name or scenario.DEFAULT_PROFILE)
    for name in dict.fromkeys(cell.slo for cell in cells):
        scenario.slo(name)
    for name, digest in dict.fromkeys((cell.trace, cell.digest) for cell in cells):
        if len(scenario.trace(name, digest)) == 0:
            raise InputError(f"trace {name}: no requests in it")
