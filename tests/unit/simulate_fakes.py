"""Functions that spawned workers run in tests; imports nothing slow."""

from __future__ import annotations

import os
import time
from typing import Any

from pd_simulate.cell import Cell


def square(value: int) -> int:
    """Answers, fails, dies or hangs, depending on the value."""
    if value == 13:
        raise ValueError("unlucky")
    if value == 99:
        os._exit(7)
    if value == 77:
        time.sleep(60)
    return value * value


def compute(cell: Cell) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Numbers that follow from the cell; `broken` fails."""
    if cell.policy == "broken":
        raise RuntimeError("no such engine")
    gpus = 10.0 * (cell.knob or 1.0) * (2.0 if cell.policy == "hpa-utilization" else 1.0)
    tuned = dict(cell.settings).get("decode_kv")
    attained = 0.9 + (0.05 if tuned is not None and float(tuned) > 0.6 else 0.0) + cell.seed / 100_000
    numbers = {"attainment": attained, "gpu_seconds": gpus * 100, "mean_gpus": gpus, "pid": os.getpid()}
    return numbers, {"kept": cell.policy} if cell.seed == 0 and cell.purpose == "compare" else None
