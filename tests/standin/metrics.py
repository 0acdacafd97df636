"""Counters, gauges, histograms and summaries in Prometheus' text format, as prometheus_client writes them.

prometheus_client appends `_total` to counters and adds a `_created` gauge to counters, histograms and summaries;
dashboards and scrapers meet these series, so they are here too.
"""

import gc
import os
import platform
import resource
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import TypeVar

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


def _text(value: float) -> str:
    if value == float("inf"):
        return "+Inf"
    return repr(float(value))


def _line(name: str, labels: Iterable[tuple[str, str]], value: float) -> str:
    pairs = sorted(labels)
    inner = ",".join('{}="{}"'.format(k, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for k, v in pairs)
    return f"{name}{{{inner}}} {_text(value)}" if inner else f"{name} {_text(value)}"


class Metric:
    """Base of the four kinds: a name, a help text, constant labels and one series per set of labels."""

    kind = "untyped"
    suffix = ""

    def __init__(self, name: str, help_text: str, constant: dict[str, str] | None = None) -> None:
        self.name = name
        self.help_text = help_text
        self.constant = dict(constant or {})
        self.created: dict[Labels, float] = {}

    def key(self, labels: dict[str, str]) -> Labels:
        """The series of `labels`; makes it if it is new."""
        key = tuple(sorted({**self.constant, **labels}.items()))
        if key not in self.created:
            self.created[key] = time.time()
            self._make(key)
        return key

    def _make(self, key: Labels) -> None:
        raise NotImplementedError

    def samples(self) -> list[str]:
        """The lines of all series."""
        raise NotImplementedError

    def render(self) -> list[str]:
        """HELP, TYPE and samples."""
        if not self.created:
            return [f"# HELP {self.name}{self.suffix} {self.help_text}", f"# TYPE {self.name}{self.suffix} {self.kind}"]
        lines = [
            f"# HELP {self.name}{self.suffix} {self.help_text}",
            f"# TYPE {self.name}{self.suffix} {self.kind}",
            *self.samples(),
        ]
        if self.kind != "gauge":
            lines += [f"# HELP {self.name}_created {self.help_text}", f"# TYPE {self.name}_created gauge"]
            lines += [_line(f"{self.name}_created", key, at) for key, at in self.created.items()]
        return lines


class Counter(Metric):
    """Only grows."""

    kind = "counter"
    suffix = "_total"

    def __init__(self, name: str, help_text: str, constant: dict[str, str] | None = None) -> None:
        super().__init__(name, help_text, constant)
        self.values: dict[Labels, float] = {}

    def _make(self, key: Labels) -> None:
        self.values[key] = 0.0

    def inc(self, amount: float = 1.0, /, **labels: str) -> None:
        """Adds `amount` to the series of `labels`."""
        self.values[self.key(labels)] += amount

    def value(self, **labels: str) -> float:
        """The present value of the series."""
        return self.values[self.key(labels)]

    def samples(self) -> list[str]:
        return [_line(self.name + self.suffix, key, value) for key, value in self.values.items()]


class Gauge(Counter):
    """Goes up and down."""

    kind = "gauge"
    suffix = ""

    def set(self, value: float, /, **labels: str) -> None:
        """Sets the series of `labels`."""
        self.values[self.key(labels)] = float(value)


class Histogram(Metric):
    """Counts observations in buckets."""

    kind = "histogram"

    def __init__(self, name: str, help_text: str, buckets: Iterable[float], constant: dict[str, str] | None = None) -> None:
        super().__init__(name, help_text, constant)
        self.bounds = [*[float(bound) for bound in buckets], float("inf")]
        self.counts: dict[Labels, list[int]] = {}
        self.sums: dict[Labels, float] = {}

    def _make(self, key: Labels) -> None:
        self.counts[key] = [0] * len(self.bounds)
        self.sums[key] = 0.0

    def observe(self, value: float, /, **labels: str) -> None:
        """Counts one observation."""
        key = self.key(labels)
        self.counts[key][bisect_left(self.bounds, value)] += 1
        self.sums[key] += value

    def samples(self) -> list[str]:
        lines = []
        for key, counts in self.counts.items():
            running = 0
            for bound, count in zip(self.bounds, counts, strict=True):
                running += count
                lines.append(_line(f"{self.name}_bucket", [*key, ("le", _text(bound))], running))
            lines.append(_line(f"{self.name}_count", key, running))
            lines.append(_line(f"{self.name}_sum", key, self.sums[key]))
        return lines


class Summary(Metric):
    """Count and sum only, as prometheus_client's Summary."""

    kind = "summary"

    def __init__(self, name: str, help_text: str, constant: dict[str, str] | None = None) -> None:
        super().__init__(name, help_text, constant)
        self.totals: dict[Labels, list[float]] = {}

    def _make(self, key: Labels) -> None:
        self.totals[key] = [0.0, 0.0]

    def observe(self, value: float, /, **labels: str) -> None:
        """Counts one observation."""
        totals = self.totals[self.key(labels)]
        totals[0] += 1
        totals[1] += value

    def samples(self) -> list[str]:
        lines = []
        for key, (count, total) in self.totals.items():
            lines += [_line(f"{self.name}_count", key, count), _line(f"{self.name}_sum", key, total)]
        return lines


MetricT = TypeVar("MetricT", bound=Metric)


class Registry:
    """All metrics of one process, and what must run before a scrape."""

    def __init__(self) -> None:
        self.metrics: list[Metric] = []
        self.before_scrape: list[Callable[[], None]] = []

    def add(self, metric: MetricT) -> MetricT:
        """Registers `metric` and returns it."""
        self.metrics.append(metric)
        return metric

    def render(self) -> bytes:
        """The whole page."""
        for hook in self.before_scrape:
            hook()
        lines = process_lines()
        for metric in self.metrics:
            lines += metric.render()
        return ("\n".join(lines) + "\n").encode()


_STARTED = time.time()


def process_lines() -> list[str]:
    """The python_* and process_* series that prometheus_client exports by itself on Linux."""
    lines: list[str] = []
    for name, help_text, field in (
        ("python_gc_objects_collected", "Objects collected during gc", "collected"),
        ("python_gc_objects_uncollectable", "Uncollectable objects found during GC", "uncollectable"),
        ("python_gc_collections", "Number of times this generation was collected", "collections"),
    ):
        lines += [f"# HELP {name}_total {help_text}", f"# TYPE {name}_total counter"]
        lines += [_line(f"{name}_total", [("generation", str(n))], float(stats[field])) for n, stats in enumerate(gc.get_stats())]
    major, minor, patch = platform.python_version_tuple()
    info = [
        ("implementation", "CPython"),
        ("major", major),
        ("minor", minor),
        ("patchlevel", patch),
        ("version", f"{major}.{minor}.{patch}"),
    ]
    lines += ["# HELP python_info Python platform information", "# TYPE python_info gauge", _line("python_info", info, 1.0)]
    with open("/proc/self/statm", encoding="ascii") as statm:
        pages = [int(word) for word in statm.read().split()[:2]]
    usage = resource.getrusage(resource.RUSAGE_SELF)
    page = resource.getpagesize()
    for name, kind, value in (
        ("process_virtual_memory_bytes", "gauge", pages[0] * page),
        ("process_resident_memory_bytes", "gauge", pages[1] * page),
        ("process_start_time_seconds", "gauge", _STARTED),
        ("process_cpu_seconds_total", "counter", usage.ru_utime + usage.ru_stime),
        ("process_open_fds", "gauge", len(os.listdir("/proc/self/fd"))),
        ("process_max_fds", "gauge", resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ):
        lines += [f"# HELP {name} {name.replace('_', ' ')}.", f"# TYPE {name} {kind}", _line(name, [], float(value))]
    return lines
