"""Peers: the registry's policies as a comparison needs them: sweeps of knobs, random configurations, and one built for a cell."""

from __future__ import annotations

from functools import lru_cache
from random import Random

from pd_simulate.cell import Cell, Sweep
from pd_simulate.fleet import Fleet
from pd_simulate.policies import registry
from pd_simulate.training import Training
from pd_simulate.units import InputError
from pd_simulate.view import Policy
from pd_simulate.workload import Workload


def sweeps() -> list[Sweep]:
    """Every policy and its knob's values."""
    return [Sweep(entry.name, entry.knobs) for entry in registry.ENTRIES.values()]


def draw(policy: str, random: Random) -> tuple[tuple[str, float | str], ...]:
    """One random configuration of a policy's tunables; () when it has none."""
    return tuple(sorted(registry.entry(policy).draw(random).items()))


def build(cell: Cell, load: Workload, fleet: Fleet) -> Policy:
    """The cell's policy. Raises InputError that names the policy or the setting and what is accepted."""
    try:
        entry = registry.entry(cell.policy)
        training = _training(Training(cell).key)
        inputs = registry.Inputs(
            profile=fleet.profile,
            budget=fleet.budget,
            slo_itl=fleet.slo.itl,
            training=training.load if "training" in entry.needs else None,
            future=load if "future" in entry.needs else None,
            run=training.run,
            stress=training.stress,
        )
        return entry.build(inputs, cell.knob, dict(cell.settings))
    except (ValueError, TypeError) as exc:
        raise InputError(str(exc)) from exc


@lru_cache(maxsize=4)
def _training(cell: Cell) -> Training:
    return Training(cell)
