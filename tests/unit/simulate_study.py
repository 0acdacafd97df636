"""A results folder with made-up rows whose truth is known: what `ours` needs, and each peer's excess over it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

from pd_simulate.cell import Cell, Row
from pd_simulate.compare import PLAN, TIMELINES
from pd_simulate.result import TIMELINE
from pd_simulate.store import CELLS

CODE = "made-up"
WINDOW = 3000.0  # measured seconds
# Policy -> GPUs on average at 95 %, as a multiple of what the load needs (10 GPUs).
COSTS = {"oracle": 0.9, "ours": 1.0, "hpa-utilization": 1.5, "dynamo-sla": 1.3, "llmd-slo": 1.4, "static-best": 1.6, "wva-v2": 1.7}
HEADROOM = (0.9, 0.95, 1.0, 1.1, 1.25)


def summary(attainment: float, gpus: float) -> dict[str, Any]:
    """A summary with all the numbers of Result.summary()."""
    offered = 20_000
    good = round(attainment * offered)
    numbers: dict[str, Any] = dict.fromkeys(
        ("rejected", "cancelled", "timed_out", "expired", "failed", "unfinished", "recomputed", "retried", "preemptions"), 0
    )
    numbers |= {"offered": offered, "good": good, "completed": offered, "attainment": attainment, "mean_gpus": gpus}
    numbers |= {"gpu_seconds": gpus * WINDOW, "goodput": good / WINDOW, "good_per_1000_gpu_seconds": good / gpus / WINDOW * 1000}
    for name, value in (("ttft", 0.4), ("itl", 0.03), ("handoff_wait", 0.1)):
        numbers |= {f"{name}_p{percent}": value * percent / 50 for percent in (50, 95, 99)}
    numbers |= {"reversals_per_hour": 4.0, "wasted_prefill_tokens": 1000, "held_token_seconds": 2.5e6, "clamps": 3}
    return numbers


def rows(
    trace: str, *, seeds: int = 4, costs: dict[str, float] | None = None, shock: str = "none", noise: float = 0.01
) -> list[Row]:
    """Sweeps of every policy; attainment = 1 - 0.05 exp(12 (1 - headroom)), common noise by seed."""
    found = []
    for policy, cost in (costs or COSTS).items():
        for seed in range(seeds):
            common = 1 + noise * Random(seed).uniform(-1, 1)
            for knob in HEADROOM:
                own = 1 + noise / 4 * Random(f"{policy} {seed}").uniform(-1, 1)
                attained = 1 - 0.05 * math.exp(12 * (1 - knob))
                cell = Cell(trace, policy, knob, seed, budget=32, half="second", shock=shock, requests=1000)
                found.append(Row(cell, summary(attained, 10 * cost * knob * common * own), None, 1.0, CODE))
    return found


def timeline(scale: float) -> dict[str, Any]:
    """Two hours with a hump in the middle, in which decode is the bottleneck."""
    times = [30.0 * index for index in range(120)]
    hump = [max(0.0, math.sin(math.pi * (time - 900) / 1800)) if 900 < time < 2700 else 0.0 for time in times]
    columns = {name: [0.0] * len(times) for name in TIMELINE}
    columns["time"] = times
    columns["prefill_ready"] = [float(round(scale * (4 + 2 * value))) for value in hump]
    columns["decode_ready"] = [float(round(scale * (5 + 8 * value))) for value in hump]
    columns["handoffs"] = [round(40 * value) + 0.0 for value in hump]
    columns["prefill_queue"] = [round(15 * value) + 0.0 for value in hump]
    columns["held_tokens"] = [300_000 * value for value in hump]
    decisions = []
    for time, value in zip(times, hump, strict=True):
        reason = "GatedByDecode" if value > 0.5 else "Demand"
        after = "Demand" if value > 0 else "Cooldown"
        decisions.append([time, round(scale * (4 + 2 * value)), round(scale * (5 + 8 * value)), f"P {reason}, D {after}"])
    return {"warmup": 600.0, "duration": 3600.0, "columns": columns, "decisions": decisions}


def write(folder: Path, found: list[Row], *, missing: int = 0, timelines: bool = True) -> Path:
    """The folder as `compare` leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CELLS).write_text("".join(row.line() for row in found))
    absent = [replace(found[0].cell, seed=1000 + index).key() for index in range(missing)]
    matrix = {"name": "made-up", "note": "", "left_out": ["Budgets 16 and 64."]}
    keys = [row.cell.key() for row in found if row.cell.purpose == "compare"]
    (folder / PLAN).write_text(json.dumps({"matrix": matrix, "code": CODE, "cells": keys + absent}))
    (folder / TIMELINES).mkdir(exist_ok=True)
    for row in found:
        if timelines and row.cell.seed == 0 and row.error is None:
            (folder / TIMELINES / f"{row.cell.key()}.json").write_text(json.dumps(timeline(COSTS.get(row.cell.policy, 1.0))))
    return folder
