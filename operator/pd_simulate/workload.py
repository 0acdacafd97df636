"""Workload: requests as arrays, and the changes made to it: scale, window, resample, shock. Loaders are in traces.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]
Prefix: TypeAlias = tuple[int, ...]

# Hash ids of a copy or of a repeated block are moved by multiples of this, so that a copy is not a hit of its original.
_COPY = 1 << 40


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival. All arrays have one entry per request.

    `arrival` seconds from the start of the window; `prompt` and `output` tokens, at least 1; `cached` prompt tokens that a
    prefix hit covers whatever the replica (used when `prefix` is None); `cancel_after` seconds from arrival to the client's
    cancellation, inf = never; `prefix` one tuple of block hash ids per request (`block` tokens each), for a simulated cache;
    `duration` seconds of the window that the requests were drawn from.
    """

    name: str
    arrival: Floats
    prompt: Ints
    output: Ints
    duration: float
    cached: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    cancel_after: Floats = field(default_factory=lambda: np.zeros(0))
    prefix: tuple[Prefix, ...] | None = None
    block: int = 512

    def __post_init__(self) -> None:
        count = len(self.arrival)
        if len(self.cached) == 0:
            object.__setattr__(self, "cached", np.zeros(count, dtype=np.int64))
        if len(self.cancel_after) == 0:
            object.__setattr__(self, "cancel_after", np.full(count, np.inf))
        self._check(count)

    def _check(self, count: int) -> None:
        for name in ("prompt", "output", "cached", "cancel_after"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"workload.{name}: {len(getattr(self, name))} entries; accepted: {count}, one per arrival")
        if self.prefix is not None and len(self.prefix) != count:
            raise ValueError(f"workload.prefix: {len(self.prefix)} entries; accepted: {count}, one per arrival")
        if count == 0:
            return
        if np.any(np.diff(self.arrival) < 0) or self.arrival[0] < 0:
            raise ValueError("workload.arrival: not sorted or negative; accepted: seconds from the start, in ascending order")
        for name in ("prompt", "output"):
            if getattr(self, name).min() < 1:
                raise ValueError(f"workload.{name}: {getattr(self, name).min()}; accepted: 1 or more tokens")
        if self.cached.min() < 0:
            raise ValueError(f"workload.cached: {self.cached.min()}; accepted: 0 or more tokens")

    def __len__(self) -> int:
        return len(self.arrival)

    def take(self, index: NDArray[np.intp] | NDArray[np.bool_], **changes: object) -> Workload:
        """The requests at `index` (mask or positions), fields in `changes` replaced."""
        rows = np.flatnonzero(index) if index.dtype == np.bool_ else index
        picked: dict[str, object] = {
            "arrival": self.arrival[rows],
            "prompt": self.prompt[rows],
            "output": self.output[rows],
            "cached": self.cached[rows],
            "cancel_after": self.cancel_after[rows],
            "prefix": None if self.prefix is None else tuple(self.prefix[i] for i in rows),
        }
        return replace(self, **{**picked, **changes})  # type: ignore[arg-type]

    def window(self, start: float, end: float) -> Workload:
        """Requests that arrive in [start, end) seconds; time 0 becomes `start`."""
        mask = (self.arrival >= start) & (self.arrival < end)
        name = f"{self.name}[{start:g}:{end:g}]"
        return self.take(mask, arrival=self.arrival[mask] - start, duration=min(end, self.duration) - start, name=name)

    def half(self, which: int) -> Workload:
        """First (1) or second (2) half of the window, by time."""
        if which not in (1, 2):
            raise ValueError(f"half: {which}; accepted: 1 or 2")
        middle = self.duration / 2
        return self.window(0.0, middle) if which == 1 else self.window(middle, self.duration)


def from_rows(name: str, rows: Sequence[tuple[float, int, int, int, float, Prefix | None]], block: int = 512) -> Workload:
    """A workload of (arrival s, prompt, output, cached, cancel after s, prefix) in any order; time 0 is the first arrival.

    Prefixes count only if all rows have them.
    """
    ordered = sorted(rows, key=lambda row: row[0])
    columns = list(zip(*ordered, strict=True)) or [()] * 6
    arrival = np.array(columns[0], dtype=np.float64)
    arrival -= arrival[0] if len(arrival) else 0.0
    prompt, output, cached = (np.array(column, dtype=np.int64) for column in columns[1:4])
    prefix = tuple(columns[5]) if ordered and all(one is not None for one in columns[5]) else None
    duration = float(arrival[-1]) if len(arrival) else 0.0
    return Workload(name, arrival, prompt, output, duration, cached, np.array(columns[4], dtype=np.float64), prefix, block)


def _ordered(workload: Workload, arrival: Floats, **changes: object) -> Workload:
    """The same requests at other times (kept inside the window), sorted again."""
    times = np.clip(arrival, 0.0, max(workload.duration, 0.0))
    order = np.argsort(times, kind="stable")
    return workload.take(order, arrival=times[order], **changes)


def _moved(prefix: Prefix, copy: int) -> Prefix:
    return tuple(block + copy * _COPY for block in prefix) if copy else prefix


def scaled(workload: Workload, factor: float, seed: int, jitter: float = 5.0) -> Workload:
    """The rate times `factor` by thinning (< 1) or superposition of copies whose arrivals are jittered by +- `jitter` seconds.

    Not by compressing time, which would change what a lead time means (facts/autoscaling.md section 8).
    """
    if factor <= 0:
        raise ValueError(f"factor: {factor}; accepted: a number above 0")
    rng = np.random.default_rng(seed)
    whole, rest = int(factor), factor - int(factor)
    rows, times = [], []
    prefixes: list[Prefix] = []
    for copy in range(whole + (rest > 1e-12)):
        keep = np.arange(len(workload)) if copy < whole else np.flatnonzero(rng.random(len(workload)) < rest)
        shift = rng.uniform(-jitter, jitter, len(keep)) if copy else 0.0
        rows.append(keep)
        times.append(workload.arrival[keep] + shift)
        if workload.prefix is not None:
            prefixes.extend(_moved(workload.prefix[i], copy) for i in keep)
    index = np.concatenate(rows)
    arrival = np.clip(np.concatenate(times), 0.0, workload.duration)
    order = np.argsort(arrival, kind="stable")
    prefix = None if workload.prefix is None else tuple(prefixes[i] for i in order)
    return workload.take(index[order], arrival=arrival[order], prefix=prefix, name=f"{workload.name} x{factor:g}")


def resampled(workload: Workload, seed: int, block: float = 60.0, reach: int = 5, jitter: float = 5.0) -> Workload:
    """One bootstrap draw: arrivals jittered by +- `jitter` seconds; lengths of each block of `block` seconds drawn from a block
    at most `reach` blocks away (a local block bootstrap, so that slow changes of the mix stay where they are).

    Lengths, cached tokens, cancellations and prefixes move together. A block drawn again gets new hash ids.
    """
    rng = np.random.default_rng(seed)
    if len(workload) == 0:
        return workload
    blocks = max(1, int(np.ceil(workload.duration / block)))
    edges = np.searchsorted(workload.arrival, np.arange(blocks + 1) * block)
    edges[-1] = len(workload)
    source = np.zeros(len(workload), dtype=np.intp)
    copies: list[int] = []
    drawn: dict[int, int] = {}
    for number in range(blocks):
        size = int(edges[number + 1] - edges[number])
        low, high = max(0, number - reach), min(blocks - 1, number + reach)
        pick = int(rng.integers(low, high + 1))
        first, last = int(edges[pick]), int(edges[pick + 1])
        if last == first:
            pick, first, last = number, int(edges[number]), int(edges[number + 1])
        source[edges[number] : edges[number + 1]] = first + np.arange(size) % max(1, last - first)
        copies.extend([drawn.get(pick, 0)] * size)
        drawn[pick] = drawn.get(pick, 0) + 1
    times = workload.arrival + rng.uniform(-jitter, jitter, len(workload))
    prefix = None if workload.prefix is None else tuple(_moved(workload.prefix[s], c) for s, c in zip(source, copies, strict=True))
    drawn_lengths = workload.take(source, arrival=workload.arrival, prefix=prefix, name=f"{workload.name} #{seed}")
    return _ordered(drawn_lengths, times)


def lengthened(workload: Workload, start: float, end: float, prompt: float = 1.0, output: float = 1.0) -> Workload:
    """A shock: prompts and outputs of requests that arrive in [start, end) seconds multiplied. Prefix blocks stay the same."""
    inside = (workload.arrival >= start) & (workload.arrival < end)
    prompts = np.where(inside, np.maximum(1, np.rint(workload.prompt * prompt)), workload.prompt).astype(np.int64)
    outputs = np.where(inside, np.maximum(1, np.rint(workload.output * output)), workload.output).astype(np.int64)
    return replace(workload, prompt=prompts, output=outputs, name=f"{workload.name} isl x{prompt:g} osl x{output:g}")


def surged(workload: Workload, start: float, end: float, factor: float, seed: int) -> Workload:
    """A shock: the rate in [start, end) seconds times `factor` (> 1), by copies spread inside the shock."""
    if factor < 1:
        raise ValueError(f"factor: {factor}; accepted: 1 or more")
    inside = (workload.arrival >= start) & (workload.arrival < end)
    part = replace(workload.take(inside), arrival=workload.arrival[inside] - start, duration=max(end - start, 1e-9))
    more = scaled(part, factor, seed)
    return merged(f"{workload.name} rate x{factor:g}", [workload.take(~inside), replace(more, arrival=more.arrival + start)])


def cancelling(workload: Workload, share: float, seed: int, longest: float = 10.0) -> Workload:
    """A shock: `share` of the requests are cancelled by their client, uniformly within `longest` seconds of arrival."""
    rng = np.random.default_rng(seed)
    chosen = rng.random(len(workload)) < share
    after = np.where(chosen, rng.uniform(0.0, longest, len(workload)), workload.cancel_after)
    return replace(workload, cancel_after=after, name=f"{workload.name} {share:.0%} cancelled")


def merged(name: str, parts: Sequence[Workload]) -> Workload:
    """Several workloads at the same time. Prefixes survive only if all have them, with the same block size."""
    arrival = np.concatenate([part.arrival for part in parts])
    order = np.argsort(arrival, kind="stable")
    prefix: tuple[Prefix, ...] | None = None
    if all(part.prefix is not None for part in parts) and len({part.block for part in parts}) == 1:
        joined = [blocks for part in parts for blocks in (part.prefix or ())]
        prefix = tuple(joined[i] for i in order)
    columns = {
        key: np.concatenate([getattr(part, key) for part in parts])[order] for key in ("prompt", "output", "cached", "cancel_after")
    }
    duration = max(part.duration for part in parts)
    return Workload(name, arrival[order], duration=duration, prefix=prefix, block=parts[0].block, **columns)


def poisson(
    rate: float, duration: float, seed: int, prompt: tuple[float, float] = (1000.0, 0.5), output: tuple[float, float] = (200.0, 0.5)
) -> Workload:
    """Synthetic: Poisson arrivals at `rate` requests/s; lengths lognormal, given as (mean tokens, coefficient of variation)."""
    return on_off(rate, rate, duration, duration, seed, prompt, output)


def on_off(
    high: float,
    low: float,
    period: float,
    duration: float,
    seed: int,
    prompt: tuple[float, float] = (1000.0, 0.5),
    output: tuple[float, float] = (200.0, 0.5),
) -> Workload:
    """Synthetic: Poisson at `low` requests/s for half a `period` (seconds), then at `high`, and so on."""
    rng = np.random.default_rng(seed)
    peak = max(high, low)
    count = rng.poisson(peak * duration)
    times = np.sort(rng.uniform(0.0, duration, count))
    rate = np.where((times % period) < period / 2, low, high)
    times = times[rng.random(count) < rate / peak]
    name = f"poisson {high:g}/s" if high == low else f"on-off {low:g}-{high:g}/s"
    return Workload(name, times, _lengths(rng, len(times), prompt), _lengths(rng, len(times), output), duration)


def _lengths(rng: np.random.Generator, count: int, shape: tuple[float, float]) -> Ints:
    mean, spread = shape
    sigma = float(np.sqrt(np.log1p(spread * spread)))
    values = mean * np.exp(sigma * rng.standard_normal(count) - sigma * sigma / 2)
    return np.maximum(1, np.rint(values)).astype(np.int64)
