"""Training: what a policy may learn before it is compared: fixed splits on the first half of the trace, remembered on disk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

from pd_simulate import scenario, synthetic
from pd_simulate.cell import Cell
from pd_simulate.policies.static import Outcome, Static
from pd_simulate.simulation import simulate
from pd_simulate.store import fingerprint
from pd_simulate.workload import Workload, scaled

MEMORY = "PDD_SIMULATE_TRAINING"  # folder of remembered runs; unset: only this process remembers
REQUESTS = 10_000  # of one training run
SEED = 1000  # no seed of the comparison
STRESS = 3.0  # the stress test's rate, as a multiple of the training half's: above what its 8 replicas can do
STRESS_REQUESTS = 4_000


class Training:
    """The training half of a cell, equal for all its policies and seeds."""

    def __init__(self, cell: Cell) -> None:
        self._cell = replace(
            cell,
            policy="static",
            knob=None,
            settings=(),
            seed=SEED,
            admission="none",
            shock="none",
            half="first",
            requests=min(cell.requests, REQUESTS),
            purpose="tune",
        )
        self._known: dict[tuple[int, int, bool], Outcome] = {}
        self._code = fingerprint("static")

    @property
    def key(self) -> Cell:
        """The cell of the training runs: equal for all that share them."""
        return self._cell

    @property
    def load(self) -> Workload:
        """Requests of the training half."""
        return scenario.workload(self._cell)[0]

    def run(self, prefill: int, decode: int) -> Outcome:
        """A fixed split on the training half."""
        return self._outcome(prefill, decode, stress=False)

    def stress(self, prefill: int, decode: int) -> Outcome:
        """A fixed split far above its capacity."""
        return self._outcome(prefill, decode, stress=True)

    def _outcome(self, prefill: int, decode: int, *, stress: bool) -> Outcome:
        key = (prefill, decode, stress)
        if key not in self._known:
            path = self._path(key)
            if path is not None and path.is_file():
                self._known[key] = Outcome(**json.loads(path.read_text()))
            else:
                self._known[key] = self._simulate(prefill, decode, stress=stress)
                if path is not None:
                    _write(path, self._known[key])
        return self._known[key]

    def _simulate(self, prefill: int, decode: int, *, stress: bool) -> Outcome:
        load, times = scenario.workload(self._cell)
        fleet = replace(scenario.fleet(self._cell, load, times), prefill=prefill, decode=decode)
        if stress:
            load = scaled(load, STRESS, synthetic.SEED)
            if len(load) > STRESS_REQUESTS:
                load = load.window(0.0, float(load.arrival[STRESS_REQUESTS]))
            fleet = replace(fleet, warmup=load.duration / 4)
        result = simulate(load, fleet, Static(prefill, decode), SEED)
        numbers = result.summary()
        return Outcome(result.attainment, float(numbers["goodput"]), result.gpu_seconds_total)

    def _path(self, key: tuple[int, int, bool]) -> Path | None:
        if not os.environ.get(MEMORY):
            return None
        prefill, decode, stress = key
        kind = "stress" if stress else "run"
        return Path(os.environ[MEMORY]) / f"{self._code}-{self._cell.key()}-{kind}-{prefill}-{decode}.json"


def _write(path: Path, outcome: Outcome) -> None:
    """Whole or not at all: two processes may write the same answer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps(asdict(outcome)))
    part.replace(path)
