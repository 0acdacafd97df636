"""ServeGen: arrivals of many clients, each with its rate and burstiness per 600 s and lengths per 6 h (arXiv:2505.09999)."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from pathlib import Path

import numpy as np

from pd_simulate.traces import TraceError
from pd_simulate.workload import Floats, Ints, Workload

RATE_WINDOW = 600.0
LENGTH_WINDOW = 21_600.0

# client -> rows of (window start s, requests/s, coefficient of variation of the gaps)
Rates = dict[str, list[tuple[float, float, float]]]
# client -> window start s -> ((input tokens, share), (output tokens, share))
Lengths = dict[str, dict[float, tuple[tuple[Ints, Floats], tuple[Ints, Floats]]]]


def generate(where: Path, model: str, rate: float, seed: int, start: float = 0.0, duration: float = 86_400.0) -> Workload:
    """Requests in [start, start + duration) seconds of the model's trace, with a mean of `rate` requests/s over that window.

    Gaps of a client are gamma with the window's coefficient of variation, as ServeGen fits them. Clients whose lengths are
    not in the archives are left out, and what remains is scaled to `rate`. Raises TraceError.
    """
    rates, lengths = _rates(where, model), _lengths(where, model)
    rates = {client: rows for client, rows in rates.items() if client in lengths}
    windows = [(client, row) for client, rows in rates.items() for row in rows if start <= row[0] < start + duration and row[1] > 0]
    asked = sum(row[1] for _, row in windows) * RATE_WINDOW / duration
    if asked <= 0:
        raise TraceError(f"servegen {model}: no arrivals in [{start:g}, {start + duration:g}) s; accepted: a window with load")
    rng = np.random.default_rng(seed)
    parts = [_client(rng, row, rate / asked, lengths[client]) for client, row in windows]
    arrival = np.concatenate([part[0] for part in parts]) - start
    order = np.argsort(arrival, kind="stable")
    columns = [np.concatenate([part[i] for part in parts])[order] for i in (1, 2)]
    return Workload(f"servegen_{model}", arrival[order], columns[0], columns[1], duration)


def _client(
    rng: np.random.Generator,
    row: tuple[float, float, float],
    factor: float,
    lengths: dict[float, tuple[tuple[Ints, Floats], tuple[Ints, Floats]]],
) -> tuple[Floats, Ints, Ints]:
    start, rate, spread = row
    rate *= factor
    shape = 1.0 / max(spread, 0.1) ** 2
    count = int(rate * RATE_WINDOW * 1.5) + 20
    # Begin before the window, so that its start is no fresh start of the gaps; keep what falls inside.
    times = np.cumsum(rng.gamma(shape, 1.0 / (shape * rate), 2 * count)) - rng.uniform(0.5, 1.0) * count / rate
    times = times[(times >= 0) & (times < RATE_WINDOW)]
    known = max((one for one in lengths if one <= start), default=min(lengths))
    drawn = [rng.choice(values, size=len(times), p=share) for values, share in lengths[known]]
    return start + times, drawn[0], drawn[1]


def _members(where: Path, pattern: str) -> dict[str, str]:
    """File name -> text, over all archives of the pattern."""
    found = {}
    for archive in sorted(where.glob(pattern)):
        with tarfile.open(archive) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None:
                    found[Path(member.name).name] = file.read().decode()
    if not found:
        raise TraceError(f"{pattern}: none in {where.name}; accepted: ServeGen's archives there")
    return found


def _rates(where: Path, model: str) -> Rates:
    rates: Rates = {}
    for name, text in _members(where, f"servegen_{model}_clients_rate.tar.gz").items():
        rows = []
        for line, row in enumerate(csv.reader(io.StringIO(text)), start=1):
            try:
                rows.append((float(row[0]), float(row[1]), float(row[2])))
            except (IndexError, ValueError) as exc:
                raise TraceError(f"{name}, line {line}: {row}; accepted: start s, requests/s, coefficient of variation") from exc
        rates[name.split("-trace")[0]] = rows
    return rates


def _lengths(where: Path, model: str) -> Lengths:
    lengths: Lengths = {}
    for name, text in _members(where, f"servegen_{model}_clients_lengths*.tar.gz").items():
        windows = {}
        for start, tables in json.loads(text).items():
            pair = tuple(_distribution(name, start, field, tables.get(field)) for field in ("input_tokens", "output_tokens"))
            if all(len(values) for values, _ in pair):
                windows[float(start)] = (pair[0], pair[1])
        if windows:
            lengths[name.split("-dataset")[0]] = windows
    return lengths


def _distribution(name: str, start: str, field: str, text: str | None) -> tuple[Ints, Floats]:
    try:
        # "{39: 0.0004, 40: 0.0002}": split by hand, ast.literal_eval takes half a minute for m-small
        pairs = [one.split(":") for one in (text or "{}").strip().strip("{}").split(",") if one.strip()]
        values = np.maximum(1, np.array([int(float(value)) for value, _ in pairs], dtype=np.int64))
        shares = np.array([float(share) for _, share in pairs], dtype=np.float64)
    except ValueError as exc:
        raise TraceError(f"{name}, window {start}, {field}: {str(text)[:40]!r}; accepted: {{tokens: share}}") from exc
    total = shares.sum()
    return (values, shares / total) if total > 0 else (np.zeros(0, dtype=np.int64), np.zeros(0))
