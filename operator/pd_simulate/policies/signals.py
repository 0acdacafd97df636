"""Signals: what policies read from a View: counts by state, rates from counters, gauges, and what a lost scrape does."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from pd_simulate.view import Counters, ReplicaView, Role, View


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one role by state."""

    role: Role
    ready: tuple[ReplicaView, ...]
    starting: tuple[ReplicaView, ...]  # blocked ones too: to every peer a pod that is not ready is just not ready
    draining: tuple[ReplicaView, ...]

    @property
    def provisioned(self) -> int:
        """Replicas that run or are meant to run soon."""
        return len(self.ready) + len(self.starting)

    @property
    def known(self) -> tuple[ReplicaView, ...]:
        """Ready replicas whose last scrape came."""
        return tuple(r for r in self.ready if r.known)


def pool(view: View, role: Role) -> Pool:
    """Replicas of `role`."""
    mine = [r for r in view.replicas if r.role == role]
    return Pool(
        role,
        tuple(r for r in mine if r.state == "ready"),
        tuple(r for r in mine if r.state in ("starting", "blocked")),
        tuple(r for r in mine if r.state == "draining"),
    )


def desired(view: View, role: Role) -> int:
    """What was asked for last: the `spec.replicas` that an autoscaler reads and writes."""
    return view.desired[role]


def bounded(view: View, role: Role, count: int) -> int:
    """`count` inside the role's minimum and maximum."""
    return max(view.minimum[role], min(view.maximum[role], count))


def ceil(value: float) -> int:
    """Ceiling with a tolerance of 1e-9, so that 3.0000000001 made by division stays 3."""
    return math.ceil(value - 1e-9)


@dataclass(frozen=True, slots=True)
class Rates:
    """Differences of counters over one window. Rates per second; means are None when nothing of the kind happened in it."""

    seconds: float
    requests: float  # offered requests/s
    prompt: float  # offered prompt tokens/s
    uncached: float  # of them without a prefix hit
    output: float  # output tokens/s generated
    decode_starts: float
    finished: float
    rejected: float
    isl: float | None  # prompt tokens of an offered request
    uncached_isl: float | None
    osl: float | None  # output tokens of a finished request

    @property
    def hit_rate(self) -> float:
        """Share of offered prompt tokens that a prefix hit covers, 0..1."""
        return 1 - self.uncached / self.prompt if self.prompt else 0.0


def _rates(older: Counters, newer: Counters, seconds: float) -> Rates:
    offered = newer.offered - older.offered
    finished = newer.finished - older.finished
    return Rates(
        seconds=seconds,
        requests=offered / seconds,
        prompt=(newer.offered_tokens - older.offered_tokens) / seconds,
        uncached=(newer.offered_uncached - older.offered_uncached) / seconds,
        output=(newer.output_tokens - older.output_tokens) / seconds,
        decode_starts=(newer.decode_starts - older.decode_starts) / seconds,
        finished=finished / seconds,
        rejected=(newer.rejected - older.rejected) / seconds,
        isl=(newer.offered_tokens - older.offered_tokens) / offered if offered else None,
        uncached_isl=(newer.offered_uncached - older.offered_uncached) / offered if offered else None,
        osl=(newer.finished_output - older.finished_output) / finished if finished else None,
    )


@dataclass(slots=True)
class RateWindow:
    """Keeps scraped counters and gives their rate over the last `keep` seconds, as PromQL `rate()` does (lost scrapes are gaps)."""

    keep: float
    samples: deque[tuple[float, Counters]] = field(default_factory=deque)

    def update(self, view: View) -> None:
        """Adds the view's counters when they are known and new."""
        if not view.counters_known:
            return
        at = view.now - view.counters_age
        if self.samples and at <= self.samples[-1][0]:
            return
        self.samples.append((at, view.counters))
        # One sample older than the window stays, so that the window is covered in full.
        while len(self.samples) > 2 and self.samples[1][0] <= at - self.keep:
            self.samples.popleft()

    def rates(self, now: float, seconds: float | None = None, stale: float = 300.0) -> Rates | None:
        """Rates over the last `seconds` (the whole window by default); None with fewer than two samples or none in `stale` s."""
        if len(self.samples) < 2 or now - self.samples[-1][0] > stale:
            return None
        newest_at, newest = self.samples[-1]
        start = newest_at - (self.keep if seconds is None else seconds)
        older_at, older = self.samples[0]
        for at, counters in self.samples:
            if at > start and at > self.samples[0][0]:
                break
            older_at, older = at, counters
        return _rates(older, newest, newest_at - older_at) if newest_at > older_at else None


@dataclass(slots=True)
class MeanWindow:
    """Mean and maximum of a gauge over a time window, seconds."""

    keep: float
    samples: deque[tuple[float, float]] = field(default_factory=deque)

    def add(self, now: float, value: float) -> None:
        """Adds a sample and drops those older than the window."""
        self.samples.append((now, value))
        while self.samples and self.samples[0][0] < now - self.keep:
            self.samples.popleft()

    def mean(self, now: float, seconds: float | None = None) -> float | None:
        """Mean of the samples of the last `seconds`, None without any."""
        start = now - (self.keep if seconds is None else seconds)
        values = [v for t, v in self.samples if t >= start]
        return sum(values) / len(values) if values else None

    def maximum(self, now: float, seconds: float | None = None) -> float | None:
        """Greatest sample of the last `seconds`, None without any."""
        start = now - (self.keep if seconds is None else seconds)
        return max((v for t, v in self.samples if t >= start), default=None)


def kv_usage(replica: ReplicaView) -> float:
    """Share of KV in use, 0..1: what `vllm:kv_cache_usage_perc` shows (requests that wait hold none)."""
    return replica.kv_used / replica.kv_capacity if replica.kv_capacity else 0.0
