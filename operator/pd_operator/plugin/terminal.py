"""Text for a terminal: ages, tables, and colour where a person looks on."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TextIO

COLOURS: Mapping[str, str] = {"good": "32", "bad": "31;1", "doubt": "33", "strong": "1", "faint": "2"}
UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))


class Paint:
    """Colours words by meaning, or leaves them as they are."""

    def __init__(self, on: bool) -> None:
        self.on = on

    def __call__(self, meaning: str, text: str) -> str:
        """`text` in the colour of a meaning of COLOURS."""
        return f"\x1b[{COLOURS[meaning]}m{text}\x1b[0m" if self.on and text else text


def paint(stream: TextIO | None = None) -> Paint:
    """Colour on a terminal that can, unless NO_COLOR (any text) is in the environment: https://no-color.org."""
    out = stream or sys.stdout
    return Paint(out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb")


def instant(text: object) -> datetime | None:
    """A time of the API; None where there is none, or it is none."""
    try:
        found = datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def age(seconds: float | None) -> str:
    """`7s`, `12m`, `3h20m`, `5d4h`: two units at most, and none that says nothing."""
    if seconds is None:
        return "?"
    rest = max(0, int(seconds))
    told: list[str] = []
    for size, unit in UNITS:
        count, rest = divmod(rest, size)
        if count or (unit == "s" and not told):
            told.append(f"{count}{unit}")
        if len(told) == 2 or (told and size <= 60 and unit == "m" and count >= 10):
            break
    return "".join(told)


def number(value: float) -> str:
    """Five digits, with commas and without an exponent for large ones: 20,000 or 0.03."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:,.5g}"


def columns(rows: Sequence[Sequence[str]], indent: str = "") -> list[str]:
    """Rows with their cells under each other; the last one is not filled up."""
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]) - 1)] if rows else []
    return [indent + "  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[-1]]).rstrip() for row in rows]
