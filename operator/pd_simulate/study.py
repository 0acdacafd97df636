"""Study: a results folder read back: the rows, what had been asked for, what is missing, the timelines that were kept."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from pd_simulate import store
from pd_simulate.analysis import TARGETS, Scenario, Verdicts, judge, scenarios
from pd_simulate.cell import Row
from pd_simulate.compare import PLAN, TIMELINES
from pd_simulate.units import InputError


@dataclass
class Study:
    """All that a report needs."""

    name: str
    note: str
    left_out: Sequence[str]
    rows: Sequence[Row]  # of cells that were asked for, failures included; tuning runs apart
    tuning: Sequence[Row]
    wanted: int
    missing: int  # cells without a row
    code: str  # of ours, the law included
    code_peers: str
    timelines: Path

    @cached_property
    def scenarios(self) -> list[Scenario]:
        """Finished rows by scenario."""
        return scenarios(self.rows)

    @cached_property
    def verdicts(self) -> list[Verdicts]:
        """Every scenario at every target."""
        return [judge(scenario, target) for scenario in self.scenarios for target in TARGETS]

    @property
    def failures(self) -> list[tuple[str, int]]:
        """Errors of failed cells and how often each came, most frequent first."""
        return Counter(f"{row.cell.policy}: {row.error}" for row in self.rows if row.error is not None).most_common()

    @property
    def codes(self) -> list[str]:
        """Fingerprints of the code that made the results."""
        return sorted({row.code for row in self.rows})

    def timeline(self, row: Row) -> Mapping[str, Any] | None:
        """The timeline of a run, None when none was kept."""
        path = self.timelines / f"{row.cell.key()}.json"
        if not path.is_file():
            return None
        values: Mapping[str, Any] = json.loads(path.read_text())
        return values


def load(folder: Path) -> Study:
    """Read a folder that `compare` wrote. Raises InputError when it is not one, StoreError when it is damaged."""
    try:
        plan = json.loads((folder / PLAN).read_text())
        matrix, keys = plan["matrix"], plan["cells"]
    except (OSError, ValueError, KeyError) as exc:
        raise InputError(f"{folder}: no readable {PLAN} ({exc}); accepted is a folder that `compare -o` wrote") from exc
    found = store.load(folder)
    rows = [found[key] for key in keys if key in found]
    tuning = [row for row in found.values() if row.cell.purpose == "tune"]
    return Study(
        name=matrix["name"],
        note=matrix["note"],
        left_out=matrix["left_out"],
        rows=rows,
        tuning=tuning,
        wanted=len(keys),
        missing=len(keys) - len(rows),
        code=plan["code"],
        code_peers=plan.get("peers", plan["code"]),
        timelines=folder / TIMELINES,
    )
