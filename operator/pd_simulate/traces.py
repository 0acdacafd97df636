"""Loaders of public traces and of a user's own. The folder is an argument or the variable PDD_TRACES."""

from __future__ import annotations

import csv
import gzip
import json
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO, TypeVar

from pd_simulate.workload import Workload, from_rows

T = TypeVar("T")

# Names that a user's file may give to its columns, any letter case.
ARRIVAL = ("arrival", "arrival_time", "timestamp", "time")
PROMPT = ("prompt", "prompt_tokens", "input_length", "contexttokens", "num_prefill_tokens", "input_tokens", "request tokens")
OUTPUT = ("output", "output_tokens", "output_length", "generatedtokens", "num_decode_tokens", "response tokens")
CACHED = ("cached", "cached_tokens")
CANCEL = ("cancel_after",)
PREFIX = ("hash_ids",)
# Mooncake's own block size; ServeGen's mean rate by default.
MOONCAKE_BLOCK = 512
SERVEGEN_RATE = 10.0

_FILES = {
    "azure_code": "azure_llm_2023_code.csv",
    "azure_conv": "azure_llm_2023_conv.csv",
    "mooncake_conversation": "mooncake_fast25_conversation.jsonl",
    "mooncake_synthetic": "mooncake_fast25_synthetic.jsonl",
}
_SERVEGEN = {"servegen_m-small": "m-small", "servegen_deepseek-r1": "deepseek-r1"}
NAMES = (*_FILES, *_SERVEGEN)


class TraceError(ValueError):
    """A trace that cannot be read; says file, line, field, value and what would be accepted."""


def folder(given: str | Path | None = None) -> Path:
    """Where traces are: the argument, else PDD_TRACES. Raises TraceError."""
    where = given or os.environ.get("PDD_TRACES")
    if not where:
        raise TraceError("PDD_TRACES: not set; accepted: the folder of the traces, in this variable or as an argument")
    if not Path(where).is_dir():
        raise TraceError(f"PDD_TRACES: {str(where)!r} is no folder; accepted: the folder of the traces")
    return Path(where)


def load(name: str, where: str | Path | None = None) -> Workload:
    """A trace by its name in NAMES (ServeGen: one day, at 10 requests/s in the mean), or a path to a CSV or JSONL file."""
    if name in _FILES:
        return _named(read(_either(folder(where) / _FILES[name])), name)
    if name in _SERVEGEN:
        from pd_simulate import servegen  # noqa: PLC0415  (servegen raises this module's error)

        return servegen.generate(folder(where), _SERVEGEN[name], rate=SERVEGEN_RATE, seed=0)
    if not Path(name).is_file():
        raise TraceError(f"trace: {name!r} is no file; accepted: a path, or one of {', '.join(NAMES)}")
    return read(Path(name))


def _either(path: Path) -> Path:
    """The file, or the same name with .gz."""
    packed = path.with_name(path.name + ".gz")
    if not path.is_file() and not packed.is_file():
        raise TraceError(f"{path.name}: not in {path.parent.name}; accepted: that file, or the same with .gz")
    return path if path.is_file() else packed


def _named(workload: Workload, name: str) -> Workload:
    object.__setattr__(workload, "name", name)  # just made here, nobody else has it
    return workload


def read(path: Path) -> Workload:
    """A CSV or JSONL file, gzip too. Columns: see ARRIVAL, PROMPT, OUTPUT; CACHED, CANCEL and PREFIX may be there.

    Arrivals are seconds, an ISO 8601 time (Azure), or milliseconds in a JSONL with `timestamp` and `input_length` (Mooncake).
    They count from the first one. Raises TraceError.
    """
    kind = path.name.removesuffix(".gz").rsplit(".", 1)[-1].lower()
    if kind not in ("csv", "jsonl"):
        raise TraceError(f"{path.name}: unknown kind {kind!r}; accepted: .csv, .jsonl, and either with .gz")
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            rows = list(_csv(path, file) if kind == "csv" else _jsonl(path, file))
    except (OSError, UnicodeDecodeError) as exc:
        raise TraceError(f"{path.name}: {exc}; accepted: text in UTF-8, gzip only with .gz") from exc
    if not rows:
        raise TraceError(f"{path.name}: no requests; accepted: one or more")
    return from_rows(path.name.removesuffix(".gz").rsplit(".", 1)[0], rows, block=MOONCAKE_BLOCK)


class _Columns:
    """Which of a file's fields is which."""

    def __init__(self, path: Path, line: int, fields: list[str]) -> None:
        self.path = path
        self.names = {field.strip().lower(): field for field in fields}
        self.arrival = self._need(line, ARRIVAL)
        self.prompt = self._need(line, PROMPT)
        self.output = self._need(line, OUTPUT)
        self.cached, self.cancel, self.prefix = self._find(CACHED), self._find(CANCEL), self._find(PREFIX)
        self.milliseconds = path.name.removesuffix(".gz").endswith(".jsonl") and {"timestamp", "input_length"} <= set(self.names)

    def _find(self, accepted: tuple[str, ...]) -> str | None:
        return next((self.names[name] for name in accepted if name in self.names), None)

    def _need(self, line: int, accepted: tuple[str, ...]) -> str:
        found = self._find(accepted)
        if found is None:
            raise TraceError(f"{self.path.name}, line {line}: no field {accepted[0]!r}; accepted: {', '.join(accepted)}")
        return found

    def row(self, line: int, row: dict[str, Any]) -> tuple[float, int, int, int, float, tuple[int, ...] | None]:
        """(arrival s, prompt, output, cached, cancel after s, prefix) of one line."""
        arrival = self._value(line, self.arrival, row, _time, "seconds from 0 on, or an ISO 8601 time")
        if self.milliseconds:
            arrival /= 1000
        count = "a whole number of tokens, 1 or more"
        prompt = self._value(line, self.prompt, row, _whole, count)
        # Azure has a few requests that generated nothing; a request streams one token at least.
        output = self._value(line, self.output, row, lambda text: max(1, _whole(text, 0)), "a whole number of tokens, 0 or more")
        cached = self._value(line, self.cached, row, lambda text: _whole(text, 0), "0 or more tokens") if self.cached else 0
        cancel = float("inf")
        if self.cancel and row.get(self.cancel) not in (None, ""):
            cancel = self._value(line, self.cancel, row, _time, "seconds from arrival, or nothing")
        prefix = None
        if self.prefix:
            prefix = self._value(line, self.prefix, row, lambda ids: tuple(int(one) for one in ids), "a list of whole numbers")
        return arrival, prompt, output, cached, cancel, prefix

    def _value(self, line: int, field: str, row: dict[str, Any], convert: Callable[[Any], T], accepted: str) -> T:
        value = row.get(field)
        try:
            return convert(value)
        except (TypeError, ValueError) as exc:
            raise TraceError(f"{self.path.name}, line {line}, {field}: {value!r}; accepted: {accepted}") from exc


def _csv(path: Path, file: TextIO) -> Iterator[tuple[float, int, int, int, float, tuple[int, ...] | None]]:
    reader = csv.DictReader(file)
    columns = _Columns(path, 1, list(reader.fieldnames or ()))
    for row in reader:
        yield columns.row(reader.line_num, row)


def _jsonl(path: Path, file: TextIO) -> Iterator[tuple[float, int, int, int, float, tuple[int, ...] | None]]:
    columns: _Columns | None = None
    for line, text in enumerate(file, start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as exc:
            raise TraceError(
                f"{path.name}, line {line}: {text.strip()[:40]!r} is not JSON; accepted: one JSON object a line"
            ) from exc
        if not isinstance(row, dict):
            raise TraceError(f"{path.name}, line {line}: {text.strip()[:40]!r}; accepted: one JSON object a line")
        columns = columns or _Columns(path, line, list(row))
        yield columns.row(line, row)


def _whole(value: Any, least: int = 1) -> int:
    number = float(value)
    if number != int(number) or number < least or isinstance(value, bool):
        raise ValueError(value)
    return int(number)


def _time(value: Any) -> float:
    """Seconds: a number, or an ISO 8601 time, of which Python reads six digits of a second."""
    try:
        seconds = float(value)
    except (TypeError, ValueError):
        text = str(value).strip()
        whole, _, part = text.partition(".")
        digits = len(part) - len(part.lstrip("0123456789"))
        text = f"{whole}.{part[: min(6, digits)].ljust(6, '0')}{part[digits:]}" if digits else text
        moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    if not 0 <= seconds < float("inf"):
        raise ValueError(value)
    return seconds
