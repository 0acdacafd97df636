"""Store: results of a comparison, an append-only file of JSON lines, one a finished cell. Half a last line is dropped."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from pd_simulate.cell import Row, row

CELLS = "cells.jsonl"
SHOWN_BY = (
    "analysis",
    "chapter",
    "charts",
    "export",
    "markup",
    "progress",
    "published",
    "report",
    "second",
    "statistics",
    "study",
    "text",
    "units",
)
STARTED_BY = ("cli", "commands", "compare", "matrix", "pool", "recommend", "replay", "store")


class StoreError(Exception):
    """A results file cannot be used; the message names the file, the line and what would be accepted."""


def load(folder: Path) -> dict[str, Row]:
    """Rows by cell key; the last one counts. Raises StoreError when a line other than the last is damaged."""
    path = folder / CELLS
    if not path.exists():
        return {}
    rows: dict[str, Row] = {}
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines, start=1):
        if number == len(lines):
            break  # what follows the last newline: nothing, or half a row
        try:
            item = row(json.loads(line))
        except (ValueError, KeyError, TypeError) as exc:
            raise StoreError(f"{path} line {number}: {exc}; expected a JSON row as `compare` writes it") from exc
        rows[item.cell.key()] = item
    return rows


@contextmanager
def appending(folder: Path) -> Iterator[TextIO]:
    """The results file, open to append, for this process alone. Cuts off a half-written last line.

    Raises StoreError when another process appends to it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / CELLS
    with path.open("a+b") as raw:
        try:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            raise StoreError(f"{path}: another comparison writes here; wait for it or use another folder (-o)") from exc
        raw.seek(0)
        content = raw.read()
        if content and not content.endswith(b"\n"):
            os.truncate(path, content.rfind(b"\n") + 1)
        with path.open("a", encoding="utf-8") as file:
            yield file


def fingerprint(policy: str = "ours") -> str:
    """A hash of the source that results of a policy depend on: the scaling law is part of it for ours (and its variants) alone."""
    state = hashlib.sha256()
    for path in sources(law=policy.startswith("ours")):
        state.update(path.name.encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:12]


def sources(law: bool = True) -> list[Path]:
    """The files that results depend on: the simulator, the policies, the scaling law; not what only starts runs or shows them."""
    here = Path(__file__).resolve().parent
    folders = (here, here.parent / "pd_operator" / "core" / "scaling") if law else (here,)
    return sorted(path for folder in folders for path in folder.rglob("*.py") if path.stem not in (*SHOWN_BY, *STARTED_BY))
