"""Compare: runs the cells of a matrix over all cores, keeps what is finished, goes on where an earlier run stopped."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from pd_simulate import execute, peers, store
from pd_simulate.cell import Cell, Row, Sweep
from pd_simulate.matrix import Matrix, Tuning, cells, training, tunings
from pd_simulate.pool import Done, run
from pd_simulate.progress import Progress, duration
from pd_simulate.training import MEMORY

PLAN = "plan.json"
TRAINING = "training"
TIMELINES = "timelines"
Settings = tuple[tuple[str, float | str], ...]
Compute = Callable[[Cell], tuple[dict[str, Any], dict[str, Any] | None]]


@dataclass(frozen=True, slots=True)
class Options:
    """How to run: where results lie, processes, seconds that one cell and the whole may take."""

    folder: Path
    jobs: int
    cell_limit: float = 900.0
    limit: float = 8 * 3600.0
    retry_failed: bool = False
    refresh: bool = False  # also run again what other code than today's computed
    quiet: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """What a comparison came to, in cells."""

    wanted: int
    finished: int  # with a result, in this run or an earlier one
    failed: int
    left: int  # not run: the time was over
    other_code: int  # finished by other code than today's

    @property
    def complete(self) -> bool:
        """Whether every cell was run, failures included."""
        return self.left == 0


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def compare(matrix: Matrix, registry: Sequence[Sweep], options: Options, compute: Compute = execute.compute) -> Ended:
    """Tune, then run every cell that has no row yet. Rows are on disk the moment a cell ends, failures as well.

    Raises InputError (inputs), StoreError (the results folder).
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # a worker a core is enough
    os.environ[MEMORY] = str(options.folder / TRAINING)  # workers inherit it
    session = _Session(options, compute)
    chosen = session.tune(tunings(matrix, registry))
    sweeps = {sweep.name: sweep for sweep in registry}
    configurations = {tuning for block in matrix.blocks if (tuning := block.tuning)}

    def tuned(cell: Cell) -> Cell:
        for tuning in configurations:
            if (settings := chosen.get(training(cell, tuning, sweeps[cell.policy]).key())) is not None:
                return replace(cell, settings=settings)
        return cell

    wanted = cells(matrix, registry, tuned)
    session.plan(matrix, wanted)
    session.work(wanted, matrix.name)
    return session.ended(wanted)


class _Session:
    """One call of `compare`: the rows known so far, and the clock."""

    def __init__(self, options: Options, compute: Compute) -> None:
        self._options, self._compute = options, compute
        self._rows = store.load(options.folder)
        self._law, self._peers = store.fingerprint("ours"), store.fingerprint("any peer")
        self._deadline = time.monotonic() + options.limit

    def tune(self, bases: Sequence[tuple[Cell, Tuning]]) -> dict[str, Settings]:
        """The best settings by training cell: run each policy's configurations on the first half, and choose."""
        tried = {base.key(): candidates(base, tuning) for base, tuning in bases}
        self.work([cell for group in tried.values() for cell in group], "tuning")
        best = {}
        for base, tuning in bases:
            rows = [row for cell in tried[base.key()] if (row := self._rows.get(cell.key())) is not None and row.summary]
            if rows:
                best[base.key()] = choose(rows, tuning.attainment).cell.settings
        return best

    def plan(self, matrix: Matrix, wanted: Sequence[Cell]) -> None:
        """Write down what was asked for, so that a report can say what is missing."""
        codes = {"code": self._law, "peers": self._peers}
        values = {"matrix": matrix.model_dump(mode="json"), **codes, "cells": [cell.key() for cell in wanted]}
        self._options.folder.mkdir(parents=True, exist_ok=True)
        (self._options.folder / PLAN).write_text(json.dumps(values, indent=1) + "\n")

    def work(self, wanted: Sequence[Cell], what: str) -> None:
        """Run the cells that have no row yet (or failed, when failures are to be tried again)."""
        todo = [cell for cell in wanted if self._todo(cell)]
        if not todo:
            return
        progress = Progress(len(wanted), what, quiet=self._options.quiet)
        done = len(wanted) - len(todo)
        pace = _Pace(todo, min(self._options.jobs, len(todo)))
        with store.appending(self._options.folder) as file:
            limits = {"jobs": self._options.jobs, "limit": self._options.cell_limit, "deadline": self._deadline}
            for item in run(self._compute, todo, **limits):  # type: ignore[arg-type]
                row = self._keep(item)
                file.write(row.line())
                file.flush()
                done += 1
                pace.note(item.item, item.seconds)
                progress.show(done, row.cell.title + (f": {row.error}" if row.error else ""), left=pace.left())
        progress.end()

    def ended(self, wanted: Sequence[Cell]) -> Ended:
        """Counts over the cells that were asked for."""
        rows = [row for cell in wanted if (row := self._rows.get(cell.key())) is not None]
        failed = sum(row.error is not None for row in rows)
        other = sum(row.code != self._code(row.cell) for row in rows)
        return Ended(len(wanted), len(rows) - failed, failed, len(wanted) - len(rows), other)

    def _code(self, cell: Cell) -> str:
        return self._law if cell.policy.startswith("ours") else self._peers

    def _todo(self, cell: Cell) -> bool:
        row = self._rows.get(cell.key())
        if row is None:
            return True
        return (row.error is not None and self._options.retry_failed) or (self._options.refresh and row.code != self._code(cell))

    def _keep(self, item: Done[Cell, tuple[dict[str, Any], dict[str, Any] | None]]) -> Row:
        summary, timeline = item.answer if item.answer is not None else (None, None)
        row = Row(item.item, summary, item.error, round(item.seconds, 3), self._code(item.item))
        self._rows[item.item.key()] = row
        if timeline is not None:
            folder = self._options.folder / TIMELINES
            folder.mkdir(exist_ok=True)
            (folder / f"{item.item.key()}.json").write_text(json.dumps(timeline, separators=(",", ":")))
        return row


class _Pace:
    """How long the rest takes: the mean seconds of each trace's cells so far, of all cells for a trace not seen yet."""

    def __init__(self, todo: Sequence[Cell], jobs: int) -> None:
        self._jobs = jobs
        self._waiting: dict[str, int] = defaultdict(int)
        self._seen: dict[str, list[float]] = defaultdict(list)
        for cell in todo:
            self._waiting[cell.trace] += 1

    def note(self, cell: Cell, seconds: float) -> None:
        """One cell is done."""
        self._waiting[cell.trace] -= 1
        self._seen[cell.trace].append(seconds)

    def left(self) -> float:
        """Seconds until the rest is done."""
        every = [value for values in self._seen.values() for value in values]
        total = sum(count * fmean(self._seen[trace] or every) for trace, count in self._waiting.items() if count)
        return total / self._jobs


def candidates(base: Cell, tuning: Tuning) -> list[Cell]:
    """The configurations to try: the policy's defaults, then random ones, the same for everybody who asks again."""
    chance = Random(f"{base.policy} {base.trace} {base.budget}")
    found = {base.key(): base}
    for _ in range(10 * tuning.configurations):
        settings = peers.draw(base.policy, chance)
        if len(found) == tuning.configurations or not settings:
            break
        cell = replace(base, settings=settings)
        found.setdefault(cell.key(), cell)
    return list(found.values())


def choose(rows: Sequence[Row], attainment: float) -> Row:
    """The cheapest run that attains enough, else the one that attains most; the first of equals. Only runs with a summary."""

    def rank(row: Row) -> tuple[bool, float, float]:
        assert row.summary is not None
        attained, cost = float(row.summary["attainment"]), float(row.summary["gpu_seconds"])
        enough = attained >= attainment
        return (not enough, cost if enough else -attained, cost)

    return min(rows, key=rank)


def describe(ended: Ended, options: Options, seconds: float) -> str:
    """The last lines for a person."""
    counts = f"{ended.finished} of {ended.wanted} cells have a result, {ended.failed} failed, {ended.left} not run"
    lines = [f"{counts} ({duration(seconds)})"]
    if ended.failed:
        lines.append(f"failures are in {options.folder / store.CELLS} (field error); --retry-failed runs them again")
    if ended.left:
        lines.append("the time limit was reached; the same command goes on from here")
    if ended.other_code:
        lines.append(f"{ended.other_code} results are from other code than today's: --refresh runs them again")
    return "\n".join(lines)
