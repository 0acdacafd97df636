"""Counters that a canary reads before and after its requests, by program and version.

`optional` series appear with their first event: absent is zero. The others must be there, or the version has renamed them and
nothing that was read proves anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from pd_operator.upstream.signals_table import Kind, Series, Table

# vllm/v1/metrics/loggers.py and distributed/kv_transfer/kv_connector/v1/nixl/stats.py at 0.32.0, the same names in every version
# that is accepted (0.22.1 and later).
# NIXL's series exist from the start where the NixlConnector is on; under MultiConnector too (measured with 0.32.0).
VLLM: Final[Mapping[str, Series]] = {
    "answered": Series(Kind.COUNTER, ("vllm:request_success_total",), optional=True),
    "computed": Series(Kind.COUNTER, ("vllm:prompt_tokens_by_source_total",), {"source": ("local_compute",)}),
    "transfers": Series(Kind.COUNTER, ("vllm:nixl_bytes_transferred_count",), optional=True),
    "transferred": Series(Kind.COUNTER, ("vllm:nixl_bytes_transferred_sum",), optional=True),
    "failed": Series(Kind.COUNTER, ("vllm:nixl_num_failed_transfers_total",), optional=True),
}
# The same family with another label: a reader takes a name once.
VLLM_RECEIVED: Final[Mapping[str, Series]] = {
    "received": Series(Kind.COUNTER, ("vllm:prompt_tokens_by_source_total",), {"source": ("external_kv_transfer",)}),
}
# Seen on LMCache 0.5.5 in MP mode. l1_write counts chunks; what P2P stores counts elsewhere (l2_store_...{l2_name="p2p"}).
LMCACHE: Final[Mapping[str, Series]] = {
    "lookups": Series(Kind.COUNTER, ("lmcache_mp_lookups_requests_total",), optional=True),
    "written": Series(Kind.COUNTER, ("lmcache_mp_l1_write_chunks_total",), optional=True),
    "hit": Series(Kind.COUNTER, ("lmcache_mp_lookup_hit_tokens_total",), optional=True),
    "borrowed": Series(Kind.COUNTER, ("lmcache_mp_lookup_hit_l2_tokens_total",), optional=True),
}
# smg's own decision for each request, measured with 1.13.0: `passthrough` hands nothing over. It says what was asked for, never
# what was done, so a `nixl` of it proves nothing.
SMG: Final[Mapping[str, Series]] = {
    "passed": Series(Kind.COUNTER, ("smg_pd_kv_connector_mode_total",), {"mode": ("passthrough",)}, optional=True),
}
SEEN: Final = "measured with vLLM 0.32.0, LMCache 0.5.5, smg 1.13.0"
PROGRAMS: Final[Mapping[str, tuple[Mapping[str, Series], ...]]] = {
    "vllm": (VLLM, VLLM_RECEIVED),
    "lmcache": (LMCACHE,),
    "smg": (SMG,),
}


@lru_cache(maxsize=16)
def tables(program: str, version: str) -> tuple[Table, ...]:
    """The counters of a program; none for one that has none. No accepted version is known to differ."""
    del version
    return tuple(Table(program, series, (), (), SEEN) for series in PROGRAMS.get(program, ()))
