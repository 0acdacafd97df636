"""Step times: read a table of measured or computed latencies, fit the profile's laws to it, say the error on points held out."""

from __future__ import annotations

import csv
import gzip
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

from pd_simulate.workload import Floats

COLUMNS = ("phase", "context_tokens", "batch_size", "latency_ms")
KNOTS = 4
# Points needed: three coefficients and one to spare for prefill; d, e, f and one for decode.
LEAST = 4


class ProfileError(ValueError):
    """A table that cannot be read or fitted; says file, line, field, value and what would be accepted."""


@dataclass(frozen=True)
class Points:
    """Of one configuration and phase: context tokens of one request, batch size, seconds of one step."""

    context: Floats
    batch: Floats
    seconds: Floats

    def without(self, index: int) -> Points:
        """All but one."""
        keep = np.arange(len(self.seconds)) != index
        return Points(self.context[keep], self.batch[keep], self.seconds[keep])


@dataclass(frozen=True)
class Table:
    """A file's points by configuration and phase, and the further columns of each configuration's first row."""

    points: dict[tuple[str, str], Points]
    facts: dict[str, dict[str, str]]


@dataclass(frozen=True)
class Prefill:
    """max(floor, a + b n + c n^2) seconds."""

    floor: float
    a: float
    b: float
    c: float

    def seconds(self, tokens: Floats) -> Floats:
        """Of prompts of so many tokens."""
        return np.maximum(self.floor, self.a + self.b * tokens + self.c * tokens * tokens)


def read(path: Path) -> Table:
    """A CSV (gzip too) with the columns COLUMNS and, if it has several configurations, `config`. Raises ProfileError."""
    rows: dict[tuple[str, str], list[tuple[float, float, float]]] = defaultdict(list)
    facts: dict[str, dict[str, str]] = {}
    with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ProfileError(f"{path.name}, line 1: no column {', '.join(missing)}; accepted: {', '.join(COLUMNS)}, config")
        for line, row in enumerate(reader, start=2):
            phase, config = row["phase"], row.get("config") or path.name.split(".")[0]
            if phase not in ("prefill", "decode"):
                raise ProfileError(f"{path.name}, line {line}, phase: {phase!r}; accepted: prefill, decode")
            numbers = [_number(path, line, name, row[name]) for name in COLUMNS[1:]]
            rows[config, phase].append((numbers[0], numbers[1], numbers[2] / 1000))
            facts.setdefault(config, {key: value for key, value in row.items() if key not in COLUMNS and value})
    points = {key: Points(*np.array(sorted(value)).T) for key, value in rows.items()}
    return Table(points, facts)


def _number(path: Path, line: int, field: str, value: str | None) -> float:
    try:
        number = float(value or "")
    except ValueError:
        number = -1.0
    if not 0 < number < float("inf"):
        raise ProfileError(f"{path.name}, line {line}, {field}: {value!r}; accepted: a number above 0")
    return number


def _relative(design: Floats, seconds: Floats) -> Floats:
    """Non-negative least squares of the relative error."""
    solution, _ = nnls(design / seconds[:, None], np.ones(len(seconds)))
    return np.asarray(solution)


def fit_prefill(points: Points) -> Prefill:
    """Least squares of the relative error; the floor covers as many of the shortest prompts (0, 1 or 2) as fits best."""
    tokens, seconds = points.context, points.seconds
    best: tuple[float, Prefill] | None = None
    for covered in (0, 1, 2):
        if len(tokens) - covered < LEAST:
            continue
        above = tokens[covered:]
        a, b, c = _relative(np.column_stack((np.ones_like(above), above, above * above)), seconds[covered:])
        floor = float(np.exp(np.log(seconds[:covered]).mean())) if covered else 0.0
        law = Prefill(floor, float(a), float(b), float(c))
        error = float(((law.seconds(tokens) / seconds - 1) ** 2).sum())
        if best is None or error < best[0] - 1e-4:
            best = (error, law)
    if best is None:
        raise ProfileError(f"prefill: {len(tokens)} points; accepted: {LEAST} or more prompt lengths at batch size 1")
    return best[1]


def fit_straight(points: Points) -> Floats:
    """d, e, f of d + e B + f S."""
    if len(points.seconds) < LEAST:
        raise ProfileError(f"decode: {len(points.seconds)} points; accepted: {LEAST} or more of batch size and context")
    return _relative(np.column_stack((np.ones_like(points.batch), points.batch, points.batch * points.context)), points.seconds)


def knots_of(points: Points) -> Floats:
    """Batch sizes where the laws may bend: up to KNOTS of the table's, evenly spread; none if it has too few points."""
    sizes = np.unique(points.batch)
    if len(sizes) <= KNOTS or len(points.seconds) < 4 * KNOTS:
        return np.zeros(0)
    return np.asarray(sizes[np.rint(np.linspace(0, len(sizes) - 1, KNOTS)).astype(int)])


def fit_knots(points: Points, knots: Floats) -> tuple[tuple[float, float, float], ...]:
    """(B, alpha, beta) at each knot, by least squares of the relative error; linear in between."""
    hats = np.column_stack([np.interp(points.batch, knots, unit) for unit in np.eye(len(knots))])
    solution = _relative(np.hstack((hats, hats * (points.batch * points.context)[:, None])), points.seconds)
    alpha, beta = solution[: len(knots)], solution[len(knots) :]
    return tuple((float(k), float(a), float(b)) for k, a, b in zip(knots, alpha, beta, strict=True))


def _step(points: Points, train: Points, knots: Floats) -> Floats:
    """What a fit to `train` says about `points`."""
    total = points.batch * points.context
    if len(knots) == 0:
        d, e, f = fit_straight(train)
        return np.asarray(d + e * points.batch + f * total)
    bends = np.array(fit_knots(train, knots))
    alpha, beta = np.interp(points.batch, knots, bends[:, 1]), np.interp(points.batch, knots, bends[:, 2])
    return np.asarray(alpha + beta * total)


def held_out(phase: str, points: Points) -> Floats:
    """Absolute relative error of every inner point, each predicted by a fit to all the others.

    Inner: neither the smallest nor the largest context (and, for decode, batch): the table's edge is not extrapolated.
    """
    inner = (points.context > points.context.min()) & (points.context < points.context.max())
    if phase == "decode":
        inner &= (points.batch > points.batch.min()) & (points.batch < points.batch.max())
    knots = knots_of(points) if phase == "decode" else np.zeros(0)
    errors = []
    for index in np.flatnonzero(inner):
        train = points.without(int(index))
        said = fit_prefill(train).seconds(points.context) if phase == "prefill" else _step(points, train, knots)
        errors.append(abs(said[index] / points.seconds[index] - 1))
    return np.array(errors)
