"""Which program has which table of signals, and the union of all for queries that span versions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Final

from pd_operator.upstream import signals_lmcache, signals_smg, signals_vllm, signals_vllm_router
from pd_operator.upstream.signals_table import Quantity, Series, Table

PROGRAMS: Final[Mapping[str, Callable[[str], Table]]] = {
    "vllm": signals_vllm.table,
    "smg": signals_smg.table,
    "vllm-router": signals_vllm_router.table,
    "lmcache": signals_lmcache.table,
}
# What a tick asks of Prometheus; the cache's series are for dashboards only.
TICK: Final = ("vllm", "smg", "vllm-router")


@lru_cache(maxsize=256)
def table(program: str, version: str) -> Table | None:
    """The table of a program at a version, None for a program that has none."""
    make = PROGRAMS.get(program)
    return make(version) if make else None


def union(programs: tuple[str, ...] = TICK, evidence: bool = False) -> list[tuple[Quantity, list[Table]]]:
    """Every quantity (or, with `evidence`, every number of a pod) once, with the newest table of each program that has it: a query
    spans programs and versions."""
    found: dict[str, tuple[Quantity, list[Table]]] = {}
    for program in programs:
        newest = PROGRAMS[program]("")
        for quantity in newest.evidence if evidence else newest.quantities:
            found.setdefault(quantity.name, (quantity, []))[1].append(newest)
    return list(found.values())


def series_of(quantity: Quantity, tables: list[Table]) -> list[Series]:
    """The series of a quantity in each program that has it."""
    return [t.series[q.series] for t in tables for q in t.quantities if q.name == quantity.name]
