"""Recommend: for a trace and an engine of one's own: how many GPUs, which split, what attainment, and what the inputs lacked."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pd_simulate import execute, scenario
from pd_simulate.cell import Cell, Sweep
from pd_simulate.fleet import Fleet
from pd_simulate.policies.static import Outcome, Static, best_split
from pd_simulate.result import TIMELINE
from pd_simulate.simulation import simulate
from pd_simulate.workload import Workload

SLACK = 1.5  # the budget to search in, as a multiple of what the busiest minute needs
SHORT = 900.0  # seconds: a trace that is shorter says little about scaling


@dataclass(frozen=True, slots=True)
class Fixed:
    """A split that never changes."""

    prefill: int
    decode: int
    gpus: int
    attainment: float


@dataclass(frozen=True, slots=True)
class Scaled:
    """The pool scaled by a policy at one knob value."""

    policy: str
    knob: float | None
    attainment: float
    mean_gpus: float
    most_gpus: int


@dataclass(frozen=True, slots=True)
class Advice:
    """The whole answer."""

    target: float
    budget: int
    busiest: scenario.Need
    fixed: Fixed
    scaled: tuple[Scaled, ...]  # one a knob value
    lacking: tuple[str, ...]

    @property
    def best(self) -> Scaled | None:
        """The cheapest knob value that attains the target."""
        reaching = [item for item in self.scaled if item.attainment >= self.target]
        return min(reaching, key=lambda item: item.mean_gpus) if reaching else None


def budget_for(load: Workload, cell: Cell) -> int:
    """GPUs to search in when the user names none: SLACK times the busiest minute's need, at least two of each role's replica."""
    engine = scenario.profile(cell.profile)
    peak = max(need.gpus for need in scenario.needs(load, engine, scenario.slo(cell.slo)))
    return max(math.ceil(SLACK * peak), 2 * (engine.gpus_prefill + engine.gpus_decode))


def recommend(cell: Cell, sweep: Sweep, target: float, tell: Callable[[str], None] = lambda _: None) -> Advice:
    """Search the fixed split that attains `target` (0..1) with the fewest GPUs, and sweep the policy's knob. Raises InputError."""
    load, times = scenario.workload(cell)
    fleet = scenario.fleet(cell, load, times)
    needs = scenario.needs(load, fleet.profile, fleet.slo)
    fixed = _fixed(cell, load, fleet, target, tell)
    scaled = []
    for knob in sweep.knobs or (None,):
        tell(f"{sweep.name} with knob {knob}")
        scaled.append(_scaled(replace(cell, policy=sweep.name, knob=knob)))
    return Advice(target, cell.budget, max(needs, key=lambda need: need.gpus), fixed, tuple(scaled), tuple(lacking(cell, load)))


def _fixed(cell: Cell, load: Workload, fleet: Fleet, target: float, tell: Callable[[str], None]) -> Fixed:
    def run(prefill: int, decode: int) -> Outcome:
        tell(f"fixed split {prefill}P {decode}D")
        result = simulate(load, replace(fleet, prefill=prefill, decode=decode), Static(prefill, decode), cell.seed)
        return Outcome(result.attainment, float(result.summary()["goodput"]), result.gpu_seconds_total)

    engine = fleet.profile
    prefill, decode, outcome = best_split(run, cell.budget, target, engine.gpus_prefill, engine.gpus_decode)
    return Fixed(prefill, decode, prefill * engine.gpus_prefill + decode * engine.gpus_decode, outcome.attainment)


def _scaled(cell: Cell) -> Scaled:
    result = execute.run(cell)
    engine = scenario.profile(cell.profile)
    samples = np.asarray(result.timeline)
    names = {name: index for index, name in enumerate(TIMELINE)}
    used = np.zeros(len(samples))
    for role, each in (("prefill", engine.gpus_prefill), ("decode", engine.gpus_decode)):
        for state in ("ready", "starting", "draining"):
            used += each * samples[:, names[f"{role}_{state}"]]
    mean = float(result.summary()["mean_gpus"])
    return Scaled(cell.policy, cell.knob, result.attainment, mean, int(used.max()) if len(used) else 0)


def lacking(cell: Cell, load: Workload) -> list[str]:
    """What the inputs did not say, and what was assumed instead."""
    found = []
    if load.prefix is None and not load.cached.any():
        found.append("prefix hits: the trace has none, so every prompt token is computed; real hits need fewer P")
    if not np.isfinite(load.cancel_after).any():
        found.append("cancellations: the trace has none")
    if load.duration < SHORT:
        found.append(f"length: {load.duration:.0f} s of trace; under {SHORT:.0f} s say little about scaling")
    if len(load) >= cell.requests:
        found.append(f"the trace was cut after {cell.requests:,} requests ({load.duration:.0f} s)")
    if load.duration < 86_400:
        found.append("a whole day: rates outside this window are not known")
    found.append(f"start-up: {cell.lead_time:g} s were assumed (--lead-time)")
    found.append("network: 25 GB/s for each P were assumed; failures: none")
    found.append("chance: one seed; another day differs")
    return found


def describe(advice: Advice) -> str:
    """The answer for a person."""
    target = f"{100 * advice.target:g} %"
    fixed, best = advice.fixed, advice.best
    reach = "" if fixed.attainment >= advice.target else f" (does not reach {target} with {advice.budget} GPUs)"
    lines = [
        f"busiest minute: needs {advice.busiest.prefill:.1f} GPUs of P and {advice.busiest.decode:.1f} of D by work alone",
        f"fixed split:    {fixed.prefill} P + {fixed.decode} D = {fixed.gpus} GPUs attain {100 * fixed.attainment:.2f} %{reach}",
    ]
    if best is None:
        most = max(advice.scaled, key=lambda item: item.attainment)
        lines.append(f"scaled:         no knob value reaches {target}, best {100 * most.attainment:.2f} % (give more GPUs: --gpus)")
    else:
        saved = 100 * (1 - best.mean_gpus / fixed.gpus)
        compared = f"{abs(saved):.0f} % {'fewer' if saved >= 0 else 'more'} than fixed" if fixed.attainment >= advice.target else ""
        lines.append(
            f"scaled:         {best.policy}{_knob(best)}: {best.mean_gpus:.1f} GPUs on average, {best.most_gpus} at most, "
            f"attain {100 * best.attainment:.2f} %{'; ' + compared if compared else ''}"
        )
    lines += ["", f"{'knob':>8} {'attained':>10} {'mean GPUs':>10} {'most':>6}"]
    for item in advice.scaled:
        knob = "default" if item.knob is None else f"{item.knob:g}"
        lines.append(f"{knob:>8} {100 * item.attainment:>8.2f} % {item.mean_gpus:>10.2f} {item.most_gpus:>6}")
    return "\n".join([*lines, "", "What the inputs lacked:", *(f"  {text}" for text in advice.lacking)])


def _knob(item: Scaled) -> str:
    return "" if item.knob is None else f" with knob {item.knob:g}"


def as_json(advice: Advice) -> dict[str, object]:
    """The answer for a program."""
    best = advice.best

    def scaled(item: Scaled) -> dict[str, object]:
        return {name: getattr(item, name) for name in Scaled.__slots__}

    return {
        "target": advice.target,
        "budget": advice.budget,
        "busiest": {"prefill": advice.busiest.prefill, "decode": advice.busiest.decode},
        "fixed": {name: getattr(advice.fixed, name) for name in Fixed.__slots__},
        "best": scaled(best) if best else None,
        "scaled": [scaled(item) for item in advice.scaled],
        "lacking": list(advice.lacking),
    }


def sweep_of(registry: Sequence[Sweep], name: str) -> Sweep:
    """The policy's sweep. Raises KeyError."""
    return {item.name: item for item in registry}[name]
