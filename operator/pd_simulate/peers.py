"""Peers: the registry's policies as a comparison needs them, and the fleet that does not split P and D at all.

Sweeps of knobs, random configurations, and one policy built for a cell.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from random import Random

from pd_simulate.cell import Cell, Sweep
from pd_simulate.fleet import Fleet
from pd_simulate.policies import registry
from pd_simulate.policies.static import Static
from pd_simulate.training import Training
from pd_simulate.units import InputError
from pd_simulate.view import Policy
from pd_simulate.workload import Workload

AGGREGATED = "aggregated-static"


def _aggregated(inputs: registry.Inputs, share: float) -> Policy:
    return Static(0, max(1, int(share * inputs.budget / inputs.profile.gpus_decode)), AGGREGATED)


ENTRIES = {
    **registry.ENTRIES,
    AGGREGATED: registry.Entry(AGGREGATED, _aggregated, "share", (0.3, 0.4, 0.55, 0.75, 1.0), 1.0, "own"),
}


def entry(name: str) -> registry.Entry:
    """A policy's entry. Raises InputError that names those that exist."""
    if name not in ENTRIES:
        raise InputError(f"policy {name!r}: accepted are {', '.join(ENTRIES)}")
    return ENTRIES[name]


def sweeps() -> list[Sweep]:
    """Every policy and its knob's values."""
    return [Sweep(one.name, one.knobs, one.lower) for one in ENTRIES.values()]


def draw(policy: str, random: Random) -> tuple[tuple[str, float | str], ...]:
    """One random configuration of a policy's tunables; () when it has none."""
    return tuple(sorted(entry(policy).draw(random).items()))


def fitted(policy: Policy, fleet: Fleet) -> Fleet:
    """The fleet that a policy runs: engines that prefill and decode in mixed steps for the aggregated one."""
    if not isinstance(policy, Static) or policy.name != AGGREGATED:
        return fleet
    return replace(fleet, mode="aggregated", prefill=0, decode=policy.decode, minimum={"prefill": 0, "decode": 1})


def build(cell: Cell, load: Workload, fleet: Fleet) -> Policy:
    """The cell's policy. Raises InputError that names the policy or the setting and what is accepted."""
    try:
        one = entry(cell.policy)
        training = _training(Training(cell).key)
        inputs = registry.Inputs(
            profile=fleet.profile,
            budget=fleet.budget,
            slo_itl=fleet.slo.itl,
            training=training.load if "training" in one.needs else None,
            future=load if "future" in one.needs else None,
            run=training.run,
            stress=training.stress,
        )
        return one.build(inputs, cell.knob, dict(cell.settings))
    except (ValueError, TypeError) as exc:
        raise InputError(str(exc)) from exc


@lru_cache(maxsize=4)
def _training(cell: Cell) -> Training:
    return Training(cell)
