"""Text: one run for a person at a terminal: what was attained, what it cost, what became of requests, replicas over time."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pd_simulate.fleet import Slo
from pd_simulate.progress import duration
from pd_simulate.result import OUTCOMES, TIMELINE, Result
from pd_simulate.workload import Floats

COLUMNS = 64  # of the plot
ROWS = 8  # of the plot of one role
LEVELS = " ▁▂▃▄▅▆▇█"


def column(result: Result, name: str) -> Floats:
    """One column of the timeline."""
    values: Floats = result.timeline[:, TIMELINE.index(name)]
    return values


def bottleneck(result: Result, limit: Slo) -> dict[str, float]:
    """Share of measured time in which a role held requests up for over half of the TTFT limit (Little: waiting / rate).

    Decode comes first: while it is full, prefill's queue grows because of it.
    """
    time = column(result, "time")
    measured = time >= result.warmup
    if measured.sum() < 2:
        return {"prefill": 0.0, "decode": 0.0, "none": 1.0}
    rate = np.maximum(np.gradient(column(result, "completed"), time), 1e-9)
    bound = max(0.5, limit.ttft) / 2
    handoffs, queue = column(result, "handoffs"), column(result, "prefill_queue") + column(result, "router_queue")
    decode = (handoffs > 1) & (handoffs / rate > bound)
    prefill = ~decode & (queue > 1) & (queue / rate > bound)
    share = {"prefill": float(prefill[measured].mean()), "decode": float(decode[measured].mean())}
    return {**share, "none": 1 - sum(share.values())}


def describe(result: Result, limit: Slo) -> str:
    """The whole summary, several lines."""
    numbers = result.summary()
    parts = [
        f"{result.workload}, policy {result.policy}, seed {result.seed}: "
        f"{duration(result.duration - result.warmup)} measured after {duration(result.warmup)} of warm-up",
        "",
        f"attainment  {100 * result.attainment:.2f} % ({numbers['good']} good of {numbers['offered']} offered)",
        f"goodput     {numbers['goodput']:.3g} good requests/s, {numbers['good_per_1000_gpu_seconds']:.4g} per 1,000 GPU-seconds",
        f"cost        {numbers['gpu_seconds']:,.0f} GPU-seconds, {numbers['mean_gpus']:.2f} GPUs on average",
        f"outcomes    {_outcomes(result)}",
        "",
        *_latencies(numbers),
        "",
        _bottleneck(result, limit),
        f"changes     {numbers['reversals_per_hour']:.1f} reversals/h, {numbers['clamps']} answers clamped to the bounds",
        "",
        *plot(result),
    ]
    return "\n".join(parts)


def _outcomes(result: Result) -> str:
    counts = result.counts()
    shown = [f"{name.replace('_', ' ')} {counts[name]}" for name in OUTCOMES if counts[name] or name == "completed"]
    repeated = int(result.recomputed.sum())
    return ", ".join(shown) + (f"; recomputed on decode {repeated}" if repeated else "")


def _latencies(numbers: dict[str, float | int | str]) -> list[str]:
    lines = ["seconds of completed requests        p50       p95       p99"]
    for name, title in (("ttft", "time to first token"), ("itl", "p95 of a request's gaps"), ("handoff_wait", "wait for decode")):
        values = [float(numbers[f"{name}_p{percent}"]) for percent in (50, 95, 99)]
        lines.append(f"  {title:<26}" + "".join(f"{_seconds(value):>10}" for value in values))
    return lines


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{1000 * value:.1f}ms" if value < 1 else f"{value:.2f}s"


def _bottleneck(result: Result, limit: Slo) -> str:
    share = bottleneck(result, limit)
    worst = max(("prefill", "decode"), key=lambda role: share[role])
    if share[worst] < 0.01:
        return "bottleneck  none: neither role held requests up for half of the TTFT limit in over 1 % of the time"
    return f"bottleneck  {worst}: decode in {100 * share['decode']:.0f} % of the time, prefill in {100 * share['prefill']:.0f} %"


def plot(result: Result) -> list[str]:
    """Ready replicas of both roles over time, one character a stretch (the mean of it), with the least and the most."""
    time = column(result, "time")
    if len(time) < 2:
        return []
    lines = []
    for role in ("prefill", "decode"):
        ready = column(result, f"{role}_ready")
        lines += [f"{role} ready, {ready.min():.0f} to {ready.max():.0f}", *_bars(_stretches(ready))]
    held = column(result, "held_tokens")
    lines.append(f"KV held on prefill, up to {held.max():,.0f} tokens")
    lines.append(f"     |{_sparkline(_stretches(held))}|")
    lines.append(f"     0{duration(float(time[-1])):>{COLUMNS + 1}}")
    return lines


def _stretches(values: Floats) -> list[float]:
    pieces = np.array_split(values, min(COLUMNS, len(values)))
    means = [float(piece.mean()) for piece in pieces]
    return [means[index * len(means) // COLUMNS] for index in range(COLUMNS)]


def _bars(values: Sequence[float]) -> list[str]:
    top = max(1, math.ceil(max(values)))
    rows = min(ROWS, top)
    lines = []
    for row in range(rows, 0, -1):
        floor = (row - 1) * top / rows
        cells = "".join(_block((value - floor) * rows / top) for value in values)
        label = f"{top * row / rows:4.0f}" if row in (rows, 1) or rows <= 4 else "    "
        lines.append(f"{label} |{cells}|")
    return lines


def _sparkline(values: Sequence[float]) -> str:
    top = max(values)
    return "".join(_block(value / top) if top else " " for value in values)


def _block(share: float) -> str:
    return LEVELS[min(8, max(0, round(share * 8)))]
