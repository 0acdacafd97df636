"""Pods for tests of signals: their pages, their labels in Prometheus, and the targets they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pd_operator.signals.fleet import Deployment, Side, Target
from pd_operator.upstream import signals_labels as labels

GAPS = (0.025, 0.05, 0.1, 1.0, math.inf)  # upper bounds of inter_token_latency_seconds
BUCKETS = (0.1, 0.5, 1.0, 5.0, math.inf)
CONTAINERS = {"prefill": "engine", "decode": "engine", "router": "router", "cache": "lmcache"}
PROGRAMS = {"prefill": ("vllm", "0.32.0"), "decode": ("vllm", "0.32.0"), "router": ("smg", "1.13.0"), "cache": ("lmcache", "0.5.5")}


@dataclass(frozen=True)
class Pod:
    """One pod and what it has done so far. Counters are what they are at this instant."""

    side: Side
    name: str = ""
    namespace: str = "team"
    deployment: str = "chat"
    slice: str = "chat-1a2b3c4d-0"
    version: str = ""
    ready: bool = True
    since: float = 0.0  # when it became ready
    model: str = "chat-8b"
    ranks: int = 1  # series of each family, by label engine; numbers are each rank's
    running: float = 0
    waiting: float = 0
    fetching: Mapping[str, float] = field(default_factory=dict)
    usage: float = 0.0
    blocks: int = 1000
    computed: float = 0  # prompt tokens
    prefills: float = 0
    prefill_seconds: float = 0.0
    first_tokens: Mapping[float, float] = field(default_factory=dict)  # upper bound -> cumulative count
    first_token_seconds: float = 0.0
    gaps: float = 0
    gap_seconds: float = 0.0
    stalls: float = 0  # of the gaps, those of 0.1 to 1 s; the others are of 25 to 50 ms
    outputs: float = 0
    output_tokens: float = 0
    offered: float = 0
    queued: float | None = None

    def but(self, **changes: Any) -> Pod:
        """The same pod later."""
        return replace(self, **changes)

    @property
    def pod(self) -> str:
        """Its name."""
        return self.name or f"{self.slice}-{self.side}-0"

    def target(self, url: str = "") -> Target:
        """As the operator knows it."""
        program, version = PROGRAMS[self.side]
        uid = f"uid-{self.namespace}-{self.pod}"
        where = (self.namespace, self.deployment, self.slice, self.side, self.pod, uid)
        return Target(*where, url or f"http://{uid}/metrics", program, self.version or version, self.ready, since=self.since)

    def labels(self) -> dict[str, str]:
        """Target labels, as a PodMonitor writes them (signals_labels)."""
        role = {} if self.side == "router" else {labels.ROLE: self.side}
        own = {labels.NAMESPACE: self.namespace, labels.POD: self.pod, labels.CONTAINER: CONTAINERS[self.side]}
        return {**own, labels.DEPLOYMENT: self.deployment, labels.SLICE: self.slice, **role}

    def samples(self) -> list[tuple[str, dict[str, str], float]]:
        """Name, labels and value of everything in its page."""
        if self.side == "router":
            found = [("smg_http_requests_total", {"method": "POST", "path": "/v1/completions"}, self.offered)]
            found.append(("smg_http_requests_total", {"method": "GET", "path": "/v1/models"}, 7 * self.offered))
            if self.queued is not None:
                found.append(("smg_admission_queue_depth", {}, self.queued))
                found.append(("smg_pd_prefill_admission_queued", {}, 1.0))
            return found
        return [sample for rank in range(self.ranks) for sample in self._rank(str(rank))]

    def _rank(self, rank: str) -> list[tuple[str, dict[str, str], float]]:
        mine = {"model_name": self.model, "engine": rank}
        values: list[tuple[str, dict[str, str], float]] = [
            ("num_requests_running", {}, self.running),
            ("num_requests_waiting", {}, self.waiting),
            ("kv_cache_usage_perc", {}, self.usage),
            ("prompt_tokens_by_source_total", {"source": "local_compute"}, self.computed),
            ("prompt_tokens_by_source_total", {"source": "local_cache_hit"}, 13 * self.computed),
            ("request_prefill_time_seconds_count", {}, self.prefills),
            ("request_prefill_time_seconds_sum", {}, self.prefill_seconds),
            ("time_to_first_token_seconds_count", {}, max(self.first_tokens.values(), default=0)),
            ("time_to_first_token_seconds_sum", {}, self.first_token_seconds),
            ("inter_token_latency_seconds_count", {}, self.gaps),
            ("inter_token_latency_seconds_sum", {}, self.gap_seconds),
            ("request_generation_tokens_count", {}, self.outputs),
            ("request_generation_tokens_sum", {}, self.output_tokens),
        ]
        values += [("num_requests_kv_fetch_by_stage", {"stage": s}, n) for s, n in self.fetching.items()]
        for bound in BUCKETS:
            count = max((n for b, n in self.first_tokens.items() if b <= bound), default=0)
            values.append(("time_to_first_token_seconds_bucket", {"le": number(bound)}, count))
        for bound in GAPS:
            count = self.gaps if bound >= 1.0 else self.gaps - self.stalls if bound >= 0.05 else 0.0
            values.append(("inter_token_latency_seconds_bucket", {"le": number(bound)}, count))
        info = {"engine": rank, "num_gpu_blocks": str(self.blocks), "block_size": "16", "kv_cache_size_tokens": "None"}
        return [*((f"vllm:{n}", {**mine, **own}, v) for n, own, v in values), ("vllm:cache_config_info", info, 1.0)]

    def page(self) -> bytes:
        """Its /metrics."""
        return "".join(f"{line(name, own, value)}\n" for name, own, value in self.samples()).encode()


def deployment(*pods: Pod, percentile: int = 95) -> Deployment:
    """The PDDeployment of these pods."""
    first = pods[0]
    return Deployment(first.namespace, first.deployment, tuple(p.target() for p in pods), percentile)


def number(value: float) -> str:
    """As prometheus_client writes it."""
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN" if math.isnan(value) else repr(float(value)))


def line(name: str, own: Mapping[str, str], value: float) -> str:
    """One line of the text format."""
    inner = ",".join(f"{k}={labels.quoted(v)}" for k, v in sorted(own.items()))
    return f"{name}{{{inner}}} {number(value)}" if inner else f"{name} {number(value)}"


def past(history: Iterable[tuple[float, Iterable[Pod]]], more: Iterable[tuple[str, Mapping[str, str], float, float]] = ()) -> str:
    """OpenMetrics text of scrapes at given times, with `up` as Prometheus writes it; `more` is name, labels, value, time."""
    families: dict[str, list[str]] = {}
    for time, pods in history:
        for pod in pods:
            for name, own, value in [*pod.samples(), ("up", {}, 1.0)]:
                text = line(name, {**own, **pod.labels(), "job": "pods"}, value)
                families.setdefault(name, []).append(f"{text} {time:.3f}\n")
    for name, own, value, time in more:
        families.setdefault(name, []).append(f"{line(name, own, value)} {time:.3f}\n")
    return "".join(f"# TYPE {name} unknown\n" + "".join(lines) for name, lines in families.items())
