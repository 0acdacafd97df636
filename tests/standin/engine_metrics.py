"""vLLM's metrics: names, types, labels and buckets of vllm/v1/metrics/loggers.py, buckets.py and nixl/stats.py of 0.32."""

from collections.abc import Iterable, Sequence

from standin.metrics import Counter, Gauge, Histogram, MetricT, Registry, Summary

LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560),
)
INTER_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
ITERATION = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
TRANSFER_TIME = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 5)
TRANSFER_BYTES = tuple(2 ** (10 + i) for i in range(1, 25, 2))
DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)
HTTP_SECONDS = (0.1, 0.5, 1)
HTTP_FINE = (0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 7.5, 10, 30, 60)

FETCH_STAGES = ("waiting_to_start", "in_progress", "completed_waiting")

# name, help, label of its own, values of that label
GAUGES: Sequence[tuple[str, str, str, tuple[str, ...]]] = (
    ("num_requests_running", "Number of requests in model execution batches.", "", ()),
    ("num_requests_waiting", "Number of requests waiting to be processed.", "", ()),
    ("num_requests_waiting_by_reason", "Number of waiting requests by reason.", "reason", ("capacity", "deferred")),
    ("num_requests_kv_fetch_by_stage", "Number of waiting requests by async KV load stage.", "stage", FETCH_STAGES),
    ("engine_sleep_state", "Engine sleep state.", "sleep_state", ("awake", "weights_offloaded", "discard_all")),
    ("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", "", ()),
)
COUNTERS: Sequence[tuple[str, str, str, tuple[str, ...]]] = (
    ("prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens.", "", ()),
    ("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "", ()),
    ("external_prefix_cache_queries", "External prefix cache queries, in terms of number of queried tokens.", "", ()),
    ("external_prefix_cache_hits", "External prefix cache hits, in terms of number of cached tokens.", "", ()),
    ("mm_cache_queries", "Multi-modal cache queries, in terms of number of queried items.", "", ()),
    ("mm_cache_hits", "Multi-modal cache hits, in terms of number of cached items.", "", ()),
    ("num_preemptions", "Cumulative number of preemption from the engine.", "", ()),
    ("prompt_tokens", "Number of prefill tokens processed.", "", ()),
    (
        *("prompt_tokens_by_source", "Number of prompt tokens by source.", "source"),
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
    ),
    ("prompt_tokens_cached", "Number of cached prompt tokens (local + external).", "", ()),
    (
        *("prompt_tokens_cached_by_source", "Prefix-cache hit tokens by the cache tier that supplied them.", "source"),
        ("device", "host", "p2p", "disk", "external_unspecified"),
    ),
    ("generation_tokens", "Number of generation tokens processed.", "", ()),
    (
        *("request_success", "Count of successfully processed requests.", "finished_reason"),
        ("stop", "length", "abort", "error", "repetition"),
    ),
)
# name, help, buckets; None stands for powers of ten times 1, 2, 5 up to the model's length in tokens
HISTOGRAMS: Sequence[tuple[str, str, tuple[float, ...] | None]] = (
    ("request_prompt_tokens", "Number of prefill tokens processed.", None),
    ("request_generation_tokens", "Number of generation tokens processed.", None),
    ("iteration_tokens_total", "Histogram of number of tokens per engine_step.", ITERATION),
    ("request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", None),
    ("request_params_n", "Histogram of the n request parameter.", (1, 2, 5, 10, 20)),
    ("request_params_max_tokens", "Histogram of the max_tokens request parameter.", None),
    ("time_to_first_token_seconds", "Histogram of time to first token in seconds.", FIRST_TOKEN),
    ("inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", INTER_TOKEN),
    ("request_time_per_output_token_seconds", "Histogram of time_per_output_token_seconds per request.", INTER_TOKEN),
    ("e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", LATENCY),
    ("request_queue_time_seconds", "Histogram of time spent in WAITING phase for request.", LATENCY),
    ("request_inference_time_seconds", "Histogram of time spent in RUNNING phase for request.", LATENCY),
    ("request_prefill_time_seconds", "Histogram of time spent in PREFILL phase for request.", LATENCY),
    ("request_decode_time_seconds", "Histogram of time spent in DECODE phase for request.", LATENCY),
    ("request_num_preemptions", "Histogram of the number of times a request was preempted.", (1, 2, 3, 4, 5, 10, 20)),
    ("request_prefill_kv_computed_tokens", "Histogram of new KV tokens computed during prefill.", None),
)
NIXL_HISTOGRAMS: Sequence[tuple[str, str, tuple[float, ...] | None]] = (
    ("nixl_xfer_time_seconds", "Histogram of transfer duration for NIXL KV Cache transfers.", TRANSFER_TIME),
    ("nixl_post_time_seconds", "Histogram of transfer post time for NIXL KV Cache transfers.", (0.001, *TRANSFER_TIME)),
    ("nixl_bytes_transferred", "Histogram of bytes transferred per NIXL KV Cache transfers.", TRANSFER_BYTES),
    ("nixl_num_descriptors", "Histogram of number of descriptors per NIXL KV Cache transfers.", DESCRIPTORS),
)
NIXL_COUNTERS: Sequence[tuple[str, str, str, tuple[str, ...]]] = (
    ("nixl_num_failed_transfers", "Number of failed NIXL KV Cache transfers, including handshakes.", "", ()),
    ("nixl_num_failed_notifications", "Number of failed NIXL KV Cache notifications.", "", ()),
    ("nixl_num_kv_expired_reqs", "Number of requests that had their KV expire. Tracked on the P instance.", "", ()),
    ("nixl_num_notifications_after_expiry", "Number of completion notifications for untracked requests.", "", ()),
)
SINCE_0_32 = {"num_requests_kv_fetch_by_stage", "nixl_num_notifications_after_expiry"}


def token_buckets(largest: int) -> list[float]:
    """1, 2, 5, 10, 20, 50 ... up to `largest` tokens."""
    bounds: list[float] = []
    scale = 1
    while True:
        for mantissa in (1, 2, 5):
            if mantissa * scale > largest:
                return bounds
            bounds.append(mantissa * scale)
        scale *= 10


class EngineMetrics:
    """All series of one engine by their name without `vllm:`; `registry.render()` is the page of /metrics."""

    def __init__(self, model_name: str, max_model_len: int, *, consumer: bool, nixl: bool, version: tuple[int, int]) -> None:
        self.registry = Registry()
        self.gauge: dict[str, Gauge] = {}
        self.counter: dict[str, Counter] = {}
        self.histogram: dict[str, Histogram] = {}
        self._labels = {"model_name": model_name, "engine": "0"}
        absent = set() if version >= (0, 32) else set(SINCE_0_32)
        if not consumer:
            absent.add("num_requests_kv_fetch_by_stage")
        for name, help_text, label, values in GAUGES:
            if name not in absent:
                self.gauge[name] = self._add(Gauge(f"vllm:{name}", help_text, self._labels), label, values)
        for name, help_text, label, values in (*COUNTERS, *(NIXL_COUNTERS if nixl else ())):
            if name not in absent:
                self.counter[name] = self._add(Counter(f"vllm:{name}", help_text, self._labels), label, values)
        for name, help_text, buckets in (*HISTOGRAMS, *(NIXL_HISTOGRAMS if nixl else ())):
            bounds: Iterable[float] = buckets if buckets is not None else token_buckets(max_model_len)
            self.histogram[name] = self._add(Histogram(f"vllm:{name}", help_text, bounds, self._labels), "", ())
        rejections = Counter(
            "vllm:admission_rejections", "Number of admission attempts rejected by a queue limit.", {"model_name": model_name}
        )
        self.counter["admission_rejections"] = self._add(rejections, "reason", ("max_num_queued_reqs", "max_num_queued_tokens"))
        self.gauge["engine_sleep_state"].set(1, sleep_state="awake")
        self.http = HttpMetrics(self.registry)

    def _add(self, metric: MetricT, label: str, values: Sequence[str]) -> MetricT:
        for value in values:
            metric.key({label: value})
        if not label:
            metric.key({})
        return self.registry.add(metric)

    def cache_config(self, values: dict[str, str]) -> None:
        """The info gauge of the cache configuration; every value is a label."""
        gauge = self.registry.add(Gauge("vllm:cache_config_info", "Information of the LLMEngine CacheConfig"))
        gauge.set(1, engine="0", **values)

    def count_prompt(self, total: int, local: int, external: int, said: int | None = None) -> None:
        """A prompt of `total` tokens is in the cache: `local` of them were there, `external` came from elsewhere. `said`: how many
        prefill had in its cache, which vLLM 0.32 counts in place of its own in one histogram."""
        self.counter["prompt_tokens"].inc(total)
        self.counter["prompt_tokens_cached"].inc(local + external)
        by_source = self.counter["prompt_tokens_by_source"]
        by_source.inc(total - local - external, source="local_compute")
        by_source.inc(local, source="local_cache_hit")
        by_source.inc(external, source="external_kv_transfer")
        self.histogram["request_prefill_kv_computed_tokens"].observe(total - (local + external if said is None else said))

    def count_lookup(self, queried: int, local: int, external: int, *, connected: bool) -> None:
        """A request was admitted: of `queried` tokens the prefix cache had `local` and the connectors `external` more."""
        self.counter["prefix_cache_queries"].inc(queried)
        self.counter["prefix_cache_hits"].inc(local)
        self.counter["prompt_tokens_cached_by_source"].inc(local, source="device")
        if connected:
            self.counter["external_prefix_cache_queries"].inc(queried - local)
            self.counter["external_prefix_cache_hits"].inc(external)
            self.counter["prompt_tokens_cached_by_source"].inc(external, source="external_unspecified")

    def count_transfer(self, seconds: float, size: int, descriptors: int) -> None:
        """D has read `size` bytes of KV in `seconds`."""
        self.histogram["nixl_xfer_time_seconds"].observe(seconds)
        self.histogram["nixl_post_time_seconds"].observe(0.0)
        self.histogram["nixl_bytes_transferred"].observe(size)
        self.histogram["nixl_num_descriptors"].observe(descriptors)


class HttpMetrics:
    """The series of prometheus-fastapi-instrumentator, which vLLM mounts."""

    def __init__(self, registry: Registry) -> None:
        self.requests = registry.add(Counter("http_requests", "Total number of requests by method, status and handler."))
        self.request_size = registry.add(Summary("http_request_size_bytes", "Content length of incoming requests by handler."))
        self.response_size = registry.add(Summary("http_response_size_bytes", "Content length of outgoing responses by handler."))
        self.fine = registry.add(Histogram("http_request_duration_highr_seconds", "Latency with many buckets.", HTTP_FINE))
        self.duration = registry.add(Histogram("http_request_duration_seconds", "Latency by handler.", HTTP_SECONDS))
        self.fine.key({})

    def observe(self, handler: str, method: str, status: int, seconds: float, request_bytes: int, response_bytes: int) -> None:
        """Counts one finished HTTP request."""
        self.requests.inc(handler=handler, method=method, status=f"{status // 100}xx")
        self.request_size.observe(request_bytes, handler=handler)
        self.response_size.observe(response_bytes, handler=handler)
        self.fine.observe(seconds)
        self.duration.observe(seconds, handler=handler, method=method)
