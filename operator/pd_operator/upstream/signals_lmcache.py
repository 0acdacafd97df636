"""LMCache server's series (0.5.5, MP mode; served on its HTTP port). No scaling signal: they tell whether the cache works.

A counter has no series before its first event, so absent is zero. `stored` counts chunks in every transfer mode; the counters of
submitted and finished stores are absent with engine_driven (measured).
"""

from __future__ import annotations

from typing import Final

from pd_operator.upstream.signals_table import How, Kind, Quantity, Series, Table

SERIES: Final = {
    "requested": Series(Kind.COUNTER, ("lmcache_mp_lookup_requested_tokens_total",), optional=True),
    "hit": Series(Kind.COUNTER, ("lmcache_mp_lookup_hit_tokens_total",), optional=True),
    "usage": Series(Kind.GAUGE, ("lmcache_mp_l1_usage_ratio",), optional=True),
    "lookups": Series(Kind.COUNTER, ("lmcache_mp_lookups_requests_total",), optional=True),
    "stored": Series(Kind.COUNTER, ("lmcache_mp_l1_write_chunks_total",), optional=True),
}
QUANTITIES: Final = (
    Quantity("cache_requested", How.RATE, "requested", "cache"),
    Quantity("cache_hit", How.RATE, "hit", "cache"),
    Quantity("cache_usage", How.SUM, "usage", "cache"),
)
EVIDENCE: Final = (
    Quantity("lookups", How.TOTAL, "lookups", "cache"),
    Quantity("requested", How.TOTAL, "requested", "cache"),
    Quantity("hit", How.TOTAL, "hit", "cache"),
    Quantity("stored", How.TOTAL, "stored", "cache"),
)


def table(version: str) -> Table:
    """The table; no version is known to differ."""
    del version
    return Table("lmcache", SERIES, QUANTITIES, (), "lmcache/v1/multiprocess at 0.5.5", EVIDENCE)
