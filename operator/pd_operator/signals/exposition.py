"""Reading a page in Prometheus' text format: only the lines that a table asks for.

A page of an engine has some 700 lines, of which a tick needs about 50. So lines are found by a regular expression over the
bytes, and what stands before the value (name and labels, the same at each scrape) is parsed once and remembered.
Format: prometheus.io/docs/instrumenting/exposition_formats, version 0.0.4.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final
from weakref import WeakValueDictionary

from pd_operator.upstream import signals_catalog as catalog
from pd_operator.upstream import signals_labels as labels
from pd_operator.upstream.signals_table import Kind, Series, Table

CONTENT: Final = "text/plain;version=0.0.4;q=1,*/*;q=0.1"  # what to ask for; OpenMetrics would bring exemplars
REMEMBERED: Final = 50_000  # heads of lines; with more, label values change at each scrape and remembering is no use
_PAIR = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)', re.DOTALL)
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPED = {"n": "\n", "\\": "\\", '"': '"'}


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Slot:
    """One series of one pod, the same object at each scrape. Series that differ in `labels.COPIES` only share one slot.

    It stays the same as long as anybody holds it: a window would take a new one for a counter that has just begun.
    """

    series: str  # key of Table.series
    kind: Kind
    rank: str = ""  # of a data parallel engine
    bound: float | None = None  # `le`
    number: float | None = None  # of an info's labels


class Reader:
    """Reads pages of one program at one version. Remembers heads, so keep it; `reader()` does."""

    def __init__(self, table: Table) -> None:
        self.table = table
        # One family may be of several series, each with labels of its own.
        self._by_name: dict[str, list[tuple[str, Series, int]]] = {}
        for key, series in table.series.items():
            for part, name in enumerate(series.names):
                self._by_name.setdefault(name, []).append((key, series, part if series.added else 0))
        # Longest first: a name may begin with another one.
        names = sorted(self._by_name, key=len, reverse=True)
        alternatives = b"|".join(re.escape(name.encode()) for name in names)
        self._lines = re.compile(rb"\n((?:" + alternatives + rb")[{ \t][^\n]*)")
        self._heads: dict[bytes, tuple[tuple[Slot, int], ...]] = {}
        self._slots: WeakValueDictionary[tuple[str, int, tuple[tuple[str, str], ...]], Slot] = WeakValueDictionary()

    def read(self, page: bytes) -> dict[Slot, float]:
        """The values of the series of the table in a page. Lines that are none are skipped; NaN and infinities are kept."""
        found: dict[Slot, float] = {}
        chosen: dict[Slot, int] = {}
        heads = self._heads
        for line in self._lines.findall(b"\n" + page):
            head, text = _cut(line)
            try:
                known = heads[head]
            except KeyError:
                known = self._remember(head)
            if not known:
                continue
            try:
                value = float(text)
            except ValueError:
                value = math.nan
            for slot, order in known:
                old = chosen.get(slot)
                # The newest spelling of a name counts; of copies the greatest, NaN above all, so that none hides it.
                if old is None or order < old:
                    found[slot], chosen[slot] = value, order
                elif order == old and not math.isnan(found[slot]) and not value <= found[slot]:
                    found[slot] = value
        return found

    def _remember(self, head: bytes) -> tuple[tuple[Slot, int], ...]:
        if len(self._heads) >= REMEMBERED:
            self._heads.clear()
        found = self._heads[head] = self._parse(head)
        return found

    def _parse(self, head: bytes) -> tuple[tuple[Slot, int], ...]:
        """The slots of a line, each with the place of its name among the spellings; none when the table does not want it."""
        name, _, rest = head.decode("utf-8", "replace").partition("{")
        pairs = parse_labels(rest[:-1] if rest else "")
        if pairs is None:
            return ()
        wanted = [
            (key, series, part)
            for key, series, part in self._by_name.get(name.strip(), ())
            if all(pairs.get(label) in values for label, values in series.match.items())
        ]
        identity = tuple(sorted((k, v) for k, v in pairs.items() if k not in labels.COPIES))
        return tuple(
            (self._slot(key, series, part, identity, pairs), 0 if series.added else series.names.index(name.strip()))
            for key, series, part in wanted
        )

    def _slot(self, key: str, series: Series, part: int, identity: tuple[tuple[str, str], ...], pairs: Mapping[str, str]) -> Slot:
        slot = self._slots.get((key, part, identity))
        if slot is None:
            rank = next((pairs[label] for label in labels.RANKS if label in pairs), "")
            slot = Slot(key, series.kind, rank, _number(pairs.get("le")), info_number(series, pairs))
            self._slots[key, part, identity] = slot
        return slot


def _cut(line: bytes) -> tuple[bytes, bytes]:
    """What stands before the value, and the value; a time stamp after it is left out."""
    end = line.rfind(b"}") + 1
    if not end:
        head, _, rest = line.replace(b"\t", b" ").partition(b" ")
        return head, rest.split(None, 1)[0] if rest.strip() else b""
    words = line[end:].split(None, 1)
    return line[:end], words[0] if words else b""


def parse_labels(text: str) -> dict[str, str] | None:
    """The labels between the braces, unescaped; None when it is not a list of labels."""
    found: dict[str, str] = {}
    at = 0
    while at < len(text):
        match = _PAIR.match(text, at)
        if match is None:
            return None if text[at:].strip(" ,") else found
        value = match.group(2)
        found[match.group(1)] = _ESCAPE.sub(lambda m: _ESCAPED.get(m.group(1), m.group(0)), value) if "\\" in value else value
        at = match.end()
    return found


def info_number(series: Series, pairs: Mapping[str, str]) -> float | None:
    """The number in an info's labels: the product of the first set of labels that are all numbers."""
    for wanted in series.numbers:
        numbers = [_number(pairs.get(label)) for label in wanted]
        if all(n is not None and math.isfinite(n) and n > 0 for n in numbers):
            return math.prod(n for n in numbers if n is not None)
    return None


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


@lru_cache(maxsize=256)
def reader(program: str, version: str) -> Reader | None:
    """The one reader of a program at a version, so that all its pods share what is remembered; None without a table."""
    table = catalog.table(program, version)
    return Reader(table) if table else None
