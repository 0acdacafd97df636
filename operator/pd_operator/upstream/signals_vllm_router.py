"""vllm-router's series, seen on 0.1.17 with P/D traffic. It has no metric for its queue and none for 408 and 429."""

from __future__ import annotations

from typing import Final

from pd_operator.upstream.signals_table import How, Kind, Quality, Quantity, Row, Series, Table

SERIES: Final = {
    "offered": Series(Kind.COUNTER, ("vllm_router_pd_requests_total",), optional=True),
    # By worker, at the first error. The answer's status is in no series.
    "failed": Series(
        Kind.COUNTER,
        ("vllm_router_pd_prefill_errors_total", "vllm_router_pd_decode_errors_total"),
        added=True,
        optional=True,
    ),
}
EVIDENCE: Final = (Quantity("offered", How.TOTAL, "offered", "router"), Quantity("failed", How.TOTAL, "failed", "router"))
QUANTITIES: Final = (Quantity("offered", How.RATE, "offered", "router"),)
ROWS: Final = (
    Row("request_rate", "router", Quality.DERIVED, "rate of vllm_router_pd_requests_total; requests it rejects are in no series"),
    Row("queued_requests", "router", Quality.MISSING, "no series for the router's own queue"),
)


def table(version: str) -> Table:
    """The table; no version is known to differ."""
    del version
    return Table("vllm-router", SERIES, QUANTITIES, ROWS, "measured with vllm-router 0.1.17", EVIDENCE)
