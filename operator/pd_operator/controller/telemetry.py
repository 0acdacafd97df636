"""The operator's own metrics, in a registry of their own."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Mapping, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pd_operator import __version__

PREFIX = "pd_operator"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)


class _StreamAges(Collector):
    """Ages are computed when they are scraped."""

    def __init__(self, ages: Callable[[], Mapping[str, float]]) -> None:
        self._ages = ages

    def collect(self) -> Iterable[Metric]:
        """See Collector."""
        family = GaugeMetricFamily(f"{PREFIX}_stream_age_seconds", "Seconds since a watch last received a byte.", labels=["kind"])
        for kind, age in sorted(self._ages().items()):
            family.add_metric([kind], age)
        yield family


class Telemetry:
    """All metrics; one instance per process. Also the hooks of the workqueue and the client."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        new = self.registry
        self._reconciles = Counter(f"{PREFIX}_reconcile_total", "Reconciles by result.", ["result"], registry=new)
        self._seconds = Histogram(f"{PREFIX}_reconcile_seconds", "Duration of a reconcile.", buckets=SECONDS, registry=new)
        self._depth = Gauge(f"{PREFIX}_workqueue_depth", "Keys that wait for a worker.", registry=new)
        self._delayed = Gauge(f"{PREFIX}_workqueue_delayed", "Keys that wait for their time.", registry=new)
        self._oldest = Gauge(f"{PREFIX}_workqueue_oldest_seconds", "Age of the key that waits longest for a worker.", registry=new)
        self._adds = Counter(f"{PREFIX}_workqueue_adds_total", "Keys that became ready.", registry=new)
        self._retries = Counter(f"{PREFIX}_workqueue_retries_total", "Reconciles that failed and are retried.", registry=new)
        self._waits = Histogram(f"{PREFIX}_workqueue_wait_seconds", "Time from ready to a worker.", buckets=SECONDS, registry=new)
        self._calls = Counter(f"{PREFIX}_api_requests_total", "Requests to the API server.", ["verb", "kind", "code"], registry=new)
        self._call_seconds = Histogram(
            f"{PREFIX}_api_request_seconds",
            "Duration of a request to the API server; watches: until the headers.",
            ["verb"],
            registry=new,
        )
        self._leader = Gauge(f"{PREFIX}_leader", "1 while this replica leads.", registry=new)
        self._lag = Gauge(f"{PREFIX}_loop_lag_seconds", "How late the event loop runs its timers.", registry=new)
        build = Gauge(f"{PREFIX}_build_info", "Version of the operator and of Python.", ["version", "python"], registry=new)
        build.labels(__version__, platform.python_version()).set(1)
        for result in ("done", "waiting", "terminal", "error"):
            self._reconciles.labels(result)
        ProcessCollector(registry=self.registry)

    def observe(
        self,
        *,
        depth: Callable[[], float],
        delayed: Callable[[], float],
        oldest: Callable[[], float],
        leader: Callable[[], bool],
        lag: Callable[[], float],
        stream_ages: Callable[[], Mapping[str, float]],
    ) -> None:
        """Where to read the gauges from, at each scrape."""
        self._depth.set_function(depth)
        self._delayed.set_function(delayed)
        self._oldest.set_function(oldest)
        self._leader.set_function(lambda: float(leader()))
        self._lag.set_function(lag)
        self.registry.register(_StreamAges(stream_ages))

    def reconciled(self, result: str, seconds: float) -> None:
        """Count one reconcile; `result` is done, waiting, terminal or error."""
        self._reconciles.labels(result).inc()
        self._seconds.observe(seconds)

    def api_call(self, verb: str, kind: str, code: str, seconds: float) -> None:
        """Count one request; the hook of KubeClient."""
        self._calls.labels(verb, kind, code).inc()
        self._call_seconds.labels(verb).observe(seconds)

    def added(self) -> None:
        """See QueueHooks."""
        self._adds.inc()

    def retried(self) -> None:
        """See QueueHooks."""
        self._retries.inc()

    def waited(self, seconds: float) -> None:
        """See QueueHooks."""
        self._waits.observe(seconds)

    def expose(self, names: Sequence[str] = ()) -> bytes:
        """The text format of Prometheus, of all metrics or of those that hold these names; the series of objects are thousands."""
        return generate_latest(self.registry.restricted_registry(names) if names else self.registry)
