"""smg's series, seen on smg 1.13.0 with P/D traffic: what reached the door, and what waits in it.

smg_pd_ttft_seconds ends at the response head of decode, which vLLM sends before the first token of a stream: it is not TTFT.
"""

from __future__ import annotations

from typing import Final

from pd_operator.upstream.signals_table import How, Kind, Quality, Quantity, Row, Series, Table

# Requests that become prompts; /health, /v1/models and the like are counted under other paths.
PATHS: Final = ("/generate", "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")

SERIES: Final = {
    # Counted when the request comes: 7 with 2 running, 2 queued and 2 rejected (measured). Absent before the first request.
    "offered": Series(Kind.COUNTER, ("smg_http_requests_total",), {"path": PATHS}, optional=True),
    # Two places where a request waits, one after the other: at the door, and for a prefill worker. Both appear at first use.
    "queue": Series(Kind.GAUGE, ("smg_admission_queue_depth", "smg_pd_prefill_admission_queued"), added=True, optional=True),
    # Both places refuse in two ways: no room, and a wait that was too long. Each appears with its first event.
    "refused": Series(
        *(Kind.COUNTER, ("smg_admission_queue_rejected_total", "smg_pd_prefill_admission_rejections_total")),
        {"reason": ("full", "queue_full")},
        added=True,
        optional=True,
    ),
    "timed_out": Series(
        *(Kind.COUNTER, ("smg_admission_queue_rejected_total", "smg_pd_prefill_admission_rejections_total")),
        {"reason": ("timeout", "queue_timeout")},
        added=True,
        optional=True,
    ),
    # A role without a healthy engine: 503 with Retry-After 1 (measured).
    "unavailable": Series(
        Kind.COUNTER, ("smg_http_responses_total",), {"error_code": ("no_available_workers",), "path": PATHS}, optional=True
    ),
    # All of its 5xx, those above among them: a prefill queue's refusal is a 429, the door's time-out a 503 (measured).
    "failed": Series(
        Kind.COUNTER, ("smg_http_responses_total",), {"status_code": ("500", "502", "503", "504"), "path": PATHS}, optional=True
    ),
    # Its decision, no proof: `nixl` is counted for requests of which nothing is handed over (n > 1; measured).
    "not_handed": Series(Kind.COUNTER, ("smg_pd_kv_connector_mode_total",), {"mode": ("passthrough",)}, optional=True),
}

QUANTITIES: Final = (
    Quantity("offered", How.RATE, "offered", "router"),
    Quantity("queue", How.SUM, "queue", "router"),
)

EVIDENCE: Final = (
    Quantity("offered", How.TOTAL, "offered", "router"),
    Quantity("rejected", How.TOTAL, "refused", "router"),
    Quantity("timed_out", How.TOTAL, "timed_out", "router"),
    Quantity("unavailable", How.TOTAL, "unavailable", "router"),
    Quantity("failed", How.TOTAL, "failed", "router"),
    Quantity("not_handed", How.TOTAL, "not_handed", "router"),
)

ROWS: Final = (
    Row("request_rate", "router", Quality.EXACT, "rate of smg_http_requests_total on the paths of prompts"),
    Row("queued_requests", "router", Quality.EXACT, "smg_admission_queue_depth + smg_pd_prefill_admission_queued"),
)


def table(version: str) -> Table:
    """The table; no version is known to differ."""
    del version
    return Table("smg", SERIES, QUANTITIES, ROWS, "measured with smg 1.13.0", EVIDENCE)
