"""Runs: the finished runs of a comparison as one small CSV, a line each, and back."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import fields
from itertools import pairwise
from pathlib import Path

from pd_simulate.cell import Cell, Row, from_json
from pd_simulate.scenario import window

OUTAGE, OUTAGE_SECONDS = "signals-lost", 300.0
SETTINGS = [field.name for field in fields(Cell) if field.name not in ("settings", "purpose", "digest")]
NUMBERS = (
    "attainment",
    "gpu_seconds",
    "mean_gpus",
    "offered",
    "timed_out",
    "recomputed",
    "ttft_p95",
    "itl_p95",
    "reversals_per_hour",
)
DOWN = "down_while_unknown"  # steps down of both roles while signals were lost, "" where no timeline was kept


def runs_csv(rows: Iterable[tuple[Row, Path]]) -> str:
    """One line for each finished run, given with its folder of timelines: its settings, and the numbers that the page needs."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*SETTINGS, *NUMBERS, DOWN, "code"])
    for row, timelines in sorted(rows, key=lambda item: order(item[0].cell)):
        if row.summary is None:
            continue
        settings = ["" if (value := getattr(row.cell, name)) is None else value for name in SETTINGS]
        numbers = ["" if (value := row.summary[name]) is None else f"{value:.6g}" for name in NUMBERS]
        writer.writerow([*settings, *numbers, steps_down(row.cell, timelines), row.code])
    return text.getvalue()


def order(cell: Cell) -> tuple[object, ...]:
    """The traces as they are first, then shocks; of each by budget, admission, policy, seed and knob."""
    knob = -1.0 if cell.knob is None else cell.knob
    return (cell.shock != "none", cell.trace, cell.shock, cell.budget, cell.admission, cell.policy, cell.seed, knob)


def steps_down(cell: Cell, timelines: Path) -> str:
    """Replicas that a policy took away while every signal was unknown, of both roles; "" without a timeline."""
    path = timelines / f"{cell.key()}.json"
    if cell.shock != OUTAGE or not path.is_file():
        return ""
    kept = json.loads(path.read_text())
    start = window(kept["duration"]).shock_start
    counts = [(at, prefill, decode) for at, prefill, decode, _ in kept["decisions"]]
    pairs = [(before, after) for before, after in pairwise(counts) if start < after[0] <= start + OUTAGE_SECONDS]
    return str(sum(max(0, before[role] - after[role]) for before, after in pairs for role in (1, 2)))


def read(text: str) -> list[tuple[Row, str]]:
    """The runs of a CSV, each with its steps down while signals were unknown."""
    kinds = {field.name: str(field.type) for field in fields(Cell)}
    found = []
    for line in csv.DictReader(io.StringIO(text)):
        values = {name: _value(line[name], kinds[name]) for name in SETTINGS}
        summary = {name: float(line[name]) if line[name] else None for name in NUMBERS}
        found.append((Row(from_json(values), summary, None, 0.0, line["code"]), line[DOWN]))
    return found


def _value(text: str, kind: str) -> object:
    if kind == "float | None":
        return float(text) if text else None
    return float(text) if kind == "float" else int(text) if kind == "int" else text
