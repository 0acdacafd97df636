"""vLLM's series (vllm/v1/metrics/loggers.py at 0.32.0; what other versions lack is from facts checked on their wheels).

With data parallelism each rank has its own `engine` label; ranks add up. Names of counters end in `_total` in the page.
"""

from __future__ import annotations

from typing import Final

from packaging.version import InvalidVersion, Version

from pd_operator.upstream.signals_table import How, Kind, Quality, Quantity, Row, Series, Table

FETCH_STAGES: Final = Version("0.32.0")  # vllm:num_requests_kv_fetch_by_stage came with it; absent in 0.31.0
LATE_READS: Final = Version("0.32.0")  # vllm:nixl_num_notifications_after_expiry came with it

# Paths whose answers are generated.
PATHS: Final = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")

SERIES: Final = {
    "running": Series(Kind.GAUGE, ("vllm:num_requests_running",)),
    # Everything that does not run: for capacity, and deferred (KV load, LoRA).
    "waiting": Series(Kind.GAUGE, ("vllm:num_requests_waiting",)),
    # waiting_to_start (D has no room yet), in_progress, completed_waiting; only where kv_role is a consumer.
    "fetching": Series(Kind.GAUGE, ("vllm:num_requests_kv_fetch_by_stage",)),
    "kv_usage": Series(Kind.GAUGE, ("vllm:kv_cache_usage_perc",)),
    # kv_cache_size_tokens counts what hybrid models really hold; it reads "None" where the version does not know it.
    "kv_config": Series(
        Kind.INFO, ("vllm:cache_config_info",), numbers=(("kv_cache_size_tokens",), ("num_gpu_blocks", "block_size"))
    ),
    # Since February 2026 (vllm-project/vllm PR 33290), so every version that we accept has it.
    "computed": Series(Kind.COUNTER, ("vllm:prompt_tokens_by_source_total",), {"source": ("local_compute",)}),
    "prefills": Series(Kind.COUNTER, ("vllm:request_prefill_time_seconds_count",)),
    "prefill_seconds": Series(Kind.COUNTER, ("vllm:request_prefill_time_seconds_sum",)),
    "first_tokens": Series(Kind.COUNTER, ("vllm:time_to_first_token_seconds_count",)),
    "first_token_seconds": Series(Kind.COUNTER, ("vllm:time_to_first_token_seconds_sum",)),
    "first_token_buckets": Series(Kind.COUNTER, ("vllm:time_to_first_token_seconds_bucket",)),
    "gaps": Series(Kind.COUNTER, ("vllm:inter_token_latency_seconds_count",)),
    "gap_seconds": Series(Kind.COUNTER, ("vllm:inter_token_latency_seconds_sum",)),
    "gap_buckets": Series(Kind.COUNTER, ("vllm:inter_token_latency_seconds_bucket",)),
    "outputs": Series(Kind.COUNTER, ("vllm:request_generation_tokens_count",)),
    "output_tokens": Series(Kind.COUNTER, ("vllm:request_generation_tokens_sum",)),
    # Came with --max-num-queued-reqs; before it nothing is rejected by the engine.
    "rejected": Series(Kind.COUNTER, ("vllm:admission_rejections_total",), optional=True),
    # Evidence of a handoff (nixl/stats.py). Decode pulls, so transfers and their failures are counted there; expiry on prefill.
    "received": Series(Kind.COUNTER, ("vllm:prompt_tokens_by_source_total",), {"source": ("external_kv_transfer",)}),
    "transfers": Series(Kind.COUNTER, ("vllm:nixl_bytes_transferred_count",)),
    "transferred_bytes": Series(Kind.COUNTER, ("vllm:nixl_bytes_transferred_sum",)),
    "failed_transfers": Series(Kind.COUNTER, ("vllm:nixl_num_failed_transfers_total",)),
    "expired": Series(Kind.COUNTER, ("vllm:nixl_num_kv_expired_reqs_total",)),
    "read_late": Series(Kind.COUNTER, ("vllm:nixl_num_notifications_after_expiry_total",)),
    "ended": Series(
        Kind.COUNTER, ("vllm:request_success_total",), {"finished_reason": ("stop", "length", "repetition")}, optional=True
    ),
    "engine_errors": Series(Kind.COUNTER, ("vllm:request_success_total",), {"finished_reason": ("error",)}, optional=True),
    "aborted": Series(Kind.COUNTER, ("vllm:request_success_total",), {"finished_reason": ("abort",)}, optional=True),
    # prometheus-fastapi-instrumentator; a series appears with its first answer. Admission's 503 is among the 5xx.
    "good_answers": Series(Kind.COUNTER, ("http_requests_total",), {"status": ("2xx",), "handler": PATHS}, optional=True),
    "bad_answers": Series(Kind.COUNTER, ("http_requests_total",), {"status": ("5xx",), "handler": PATHS}, optional=True),
    # Of a request the mean gap between its tokens.
    "mean_gap_buckets": Series(Kind.COUNTER, ("vllm:request_time_per_output_token_seconds_bucket",)),
}

# For dashboards and runbooks only (vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py, seen on 0.32.0 with NIXL).
SHOWN: Final = ("vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_kv_expired_reqs_total")

QUANTITIES: Final[tuple[Quantity, ...]] = (
    Quantity("running", How.SUM, "running"),
    Quantity("waiting", How.SUM, "waiting"),
    Quantity("fetching", How.SUM, "fetching", "decode"),
    Quantity("least_waiting", How.LEAST, "waiting", "prefill"),
    Quantity("kv_size", How.SIZE, "kv_config", "decode"),
    Quantity("kv_used", How.SHARE, "kv_usage", "decode", info="kv_config"),
    Quantity("computed", How.RATE, "computed", "prefill"),
    Quantity("computed_total", How.TOTAL, "computed", "prefill"),
    Quantity("prefills", How.RATE, "prefills", "prefill"),
    Quantity("prefills_total", How.TOTAL, "prefills", "prefill"),
    Quantity("prefill_seconds", How.RATE, "prefill_seconds", "prefill"),
    Quantity("rejected", How.RATE, "rejected", "prefill"),
    Quantity("first_tokens", How.RATE, "first_tokens"),
    Quantity("first_token_seconds", How.RATE, "first_token_seconds"),
    Quantity("first_token_quantile", How.QUANTILE, "first_token_buckets"),
    Quantity("gaps", How.RATE, "gaps", "decode"),
    Quantity("gap_seconds", How.RATE, "gap_seconds", "decode"),
    Quantity("gap_median", How.QUANTILE, "gap_buckets", "decode", percentile=50),
    Quantity("outputs", How.RATE, "outputs", "decode"),
    Quantity("output_tokens", How.RATE, "output_tokens", "decode"),
)

EVIDENCE: Final[tuple[Quantity, ...]] = (
    Quantity("computed", How.TOTAL, "computed"),
    Quantity("received", How.TOTAL, "received", "decode"),
    Quantity("transfers", How.TOTAL, "transfers", "decode"),
    Quantity("transferred_bytes", How.TOTAL, "transferred_bytes", "decode"),
    Quantity("failed_transfers", How.TOTAL, "failed_transfers", "decode"),
    Quantity("expired", How.TOTAL, "expired", "prefill"),
    Quantity("read_late", How.TOTAL, "read_late", "prefill"),
    Quantity("prompts", How.TOTAL, "first_tokens"),
    Quantity("ended", How.TOTAL, "ended"),
    Quantity("errors", How.TOTAL, "engine_errors"),
    Quantity("cancelled", How.TOTAL, "aborted", "decode"),
    Quantity("rejected", How.TOTAL, "rejected"),
    Quantity("good_answers", How.TOTAL, "good_answers"),
    Quantity("bad_answers", How.TOTAL, "bad_answers"),
    Quantity("running", How.SUM, "running", "decode"),
    Quantity("fetching", How.SUM, "fetching", "decode"),
    Quantity("first_tokens", How.TOTAL, "first_tokens"),
    Quantity("first_token_seconds", How.TOTAL, "first_token_seconds"),
    Quantity("first_token", How.QUANTILE, "first_token_buckets"),
    Quantity("mean_gap", How.QUANTILE, "mean_gap_buckets", "decode"),
)

ROWS: Final[tuple[Row, ...]] = (
    Row("prompt_rate", "router, prefill", Quality.DERIVED, "request_rate x computed / prefills"),
    Row("queued_tokens", "router, prefill", Quality.DERIVED, "(router's queue + waiting) x computed / prefills"),
    Row("prefill_rate", "prefill", Quality.EXACT, "rate of prompt tokens by source local_compute"),
    # Summed over requests that run at once, so it may exceed the seconds that went by; the law caps it.
    Row("prefill_seconds", "prefill", Quality.DERIVED, "rate of the sum of request_prefill_time_seconds"),
    Row("every_prefill_waiting", "prefill", Quality.EXACT, "least_waiting > 0"),
    Row("running", "decode", Quality.EXACT, "running"),
    Row("handoff_waiting", "decode", Quality.EXACT, "fetching, all stages"),
    Row("decode_starts", "decode", Quality.EXACT, "rate of first tokens on decode"),
    Row("kv_tokens", "decode", Quality.DERIVED, "kv_cache_usage_perc x tokens of cache_config_info, rank by rank"),
    Row("kv_capacity", "decode", Quality.EXACT, "tokens of cache_config_info per replica"),
    Row("output_tokens", "decode", Quality.EXACT, "output_tokens / outputs"),
    # Buckets are wide (25 to 50 ms), and linear inside one; stalls only lengthen gaps, so the median is below the mean.
    Row("itl", "decode", Quality.DERIVED, "min(median of the buckets of inter_token_latency_seconds, gap_seconds / gaps)"),
    Row("prefill_latency", "prefill", Quality.EXACT, "prefill_seconds / prefills"),
    # Streams get their response head before the first token, so no router's histogram holds the wait on decode.
    Row("ttft", "prefill, decode", Quality.DERIVED, "max(quantile of P + mean of D, mean of P + quantile of D)"),
)

OLD_HANDOFF: Final = Row(
    "handoff_waiting", "decode", Quality.DERIVED, "waiting on decode: this version does not tell fetches apart"
)


def table(version: str) -> Table:
    """The table of a version. One that cannot be read as a version is taken for the newest."""
    series, quantities, rows = dict(SERIES), QUANTITIES, ROWS
    if _before(version, LATE_READS):
        del series["read_late"]
    if _before(version, FETCH_STAGES):
        del series["fetching"]
        quantities = tuple(q for q in quantities if q.series in series)
        rows = tuple(OLD_HANDOFF if row.signal == OLD_HANDOFF.signal else row for row in rows)
    evidence = tuple(q for q in EVIDENCE if q.series in series)
    return Table("vllm", series, quantities, rows, "vllm/v1/metrics/loggers.py at 0.32.0", evidence)


def _before(version: str, limit: Version) -> bool:
    try:
        return Version(version) < limit
    except InvalidVersion:
        return False
