"""The chunks of one cache server (LMCache's L1), with its counters."""

from collections import OrderedDict

from standin.metrics import Counter, Gauge, Registry


class CacheMetrics:
    """LMCache's series. Most counters have no series before their first event, as OpenTelemetry's exporter does it."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.ticks = self._counter("l1_eviction_loop_ticks", "Iterations of the L1 eviction loop")
        self.l1_read = self._counter("l1_read_chunks", "Total chunks read from L1")
        self.l1_write = self._counter("l1_write_chunks", "Total chunks written to L1")
        self.l1_evicted = self._counter("l1_evicted_chunks", "Total chunks evicted from L1")
        self.lookups = self._counter("lookups_requests", "Completed lookups")
        self.requested = self._counter("lookup_requested_tokens", "Total tokens submitted for lookup")
        self.hit = self._counter("lookup_hit_tokens", "Total tokens found in L1+L2 during lookup")
        self.hit_l1 = self._counter("lookup_hit_l1_tokens", "Of lookup_hit: tokens L1 could serve")
        self.hit_l2 = self._counter("lookup_hit_l2_tokens", "Of lookup_hit: tokens L2 added")
        self.early_exit = self._counter("lookup_early_exit_requests", "Lookups without a cache probe")
        self.l2_loaded = self._counter("l2_load_completed_requests", "Per-adapter load tasks completed")
        self.l2_prefetched = self._counter("l2_prefetch_hit_chunks", "Prefix chunks found in L2")
        self._counter("event_bus_dropped_events", "Events that the bus dropped").inc(0)
        self.memory = self._gauge("l1_memory_usage_bytes", "Bytes of L1 in use")
        self.ratio = self._gauge("l1_usage_ratio", "Share of L1 in use")
        for name in ("active_prefetch_jobs", "active_p2p_lookup_jobs", "event_bus_queue_depth", "event_bus_drain_lag_seconds"):
            self._gauge(name, name.replace("_", " "))
        for name in ("l2_store_adapters", "l2_prefetch_adapters"):
            adapters = self.registry.add(Gauge(f"lmcache_mp_{name}", name.replace("_", " ")))
            for state in ("active", "draining"):
                adapters.set(0, state=state)

    def _counter(self, name: str, help_text: str) -> Counter:
        return self.registry.add(_OtelCounter(f"lmcache_mp_{name}", help_text))

    def _gauge(self, name: str, help_text: str) -> Gauge:
        gauge = self.registry.add(Gauge(f"lmcache_mp_{name}", help_text))
        gauge.set(0)
        return gauge


class _OtelCounter(Counter):
    """A counter that is not on the page before it has a series, and has no `_created`."""

    def render(self) -> list[str]:
        if not self.created:
            return []
        return [f"# HELP {self.name}_total {self.help_text}", f"# TYPE {self.name}_total counter", *self.samples()]


class ChunkStore:
    """Chunks by key, the least recently used ones are evicted in bulk when the store is nearly full."""

    def __init__(
        self, capacity: int, align: int, watermark: float, ratio: float, metrics: CacheMetrics, *, evicts: bool = True
    ) -> None:
        self._chunks: OrderedDict[str, bytes] = OrderedDict()
        self._capacity = capacity
        self._align = align
        self._watermark = watermark
        self._ratio = ratio
        self._metrics = metrics
        self._evicts = evicts
        self.used = 0

    def __len__(self) -> int:
        return len(self._chunks)

    def __contains__(self, key: str) -> bool:
        return key in self._chunks

    def _size(self, data: bytes) -> int:
        return -(-len(data) // self._align) * self._align

    def prefix(self, keys: list[str]) -> int:
        """How many of `keys`, from the first on, are stored."""
        for count, key in enumerate(keys):
            if key not in self._chunks:
                return count
        return len(keys)

    def get(self, key: str) -> bytes | None:
        """A chunk, which becomes the most recently used one."""
        data = self._chunks.get(key)
        if data is not None:
            self._chunks.move_to_end(key)
        return data

    def put(self, key: str, data: bytes) -> bool:
        """Stores a chunk; False if it was there, or if nothing may be evicted and there is no room."""
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return False
        if self.used + self._size(data) > self._capacity and not self._evicts:
            return False
        self._chunks[key] = data
        self.used += self._size(data)
        self._metrics.l1_write.inc()
        if self._evicts and self.used > self._capacity * self._watermark:
            self._evict()
        return True

    def _evict(self) -> None:
        target = self._capacity * (self._watermark - self._ratio)
        while self._chunks and self.used > target:
            _, data = self._chunks.popitem(last=False)
            self.used -= self._size(data)
            self._metrics.l1_evicted.inc()

    def clear(self) -> None:
        """Forgets everything."""
        self._chunks.clear()
        self.used = 0
