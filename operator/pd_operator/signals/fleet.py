"""The pods whose signals are wanted. Who is in it decides what is counted: a series of any other pod never is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Key = tuple[str, str]  # namespace and name of a PDDeployment
Side = Literal["prefill", "decode", "router", "cache"]


@dataclass(frozen=True, slots=True)
class Target:
    """One page of /metrics of one pod. A pod with two (engine and LMCache server) is two targets.

    `uid` is the pod's: a pod made anew under the same name is another one. A pod that is not `ready` counts when it answers and
    is not missed when it does not (it starts, or drains).
    """

    namespace: str
    deployment: str
    slice: str
    side: Side
    pod: str
    uid: str
    url: str  # e.g. http://10.0.0.7:8000/metrics
    program: str  # vllm, smg, vllm-router, lmcache
    version: str
    ready: bool = True
    deleting: bool = False
    running: bool | None = None  # whether the kubelet says that its container is ready
    created: float = 0.0  # the pod, seconds since 1970
    every: int = 1  # it is scraped in each so many sweeps
    since: float = 0.0  # when it became ready, seconds since 1970; 0 where nobody knows

    @property
    def key(self) -> Key:
        """Its PDDeployment."""
        return self.namespace, self.deployment

    def young(self, now: float, seconds: float) -> bool:
        """Whether this engine became ready so short a time ago that nobody can have missed it yet.

        Clocks of nodes may differ, so a time that is to come counts as well, and no longer. A router is never young: it has its
        share of the requests at once, and without it what is offered would look smaller than it is.
        """
        return self.ready and self.side in ("prefill", "decode") and self.since > 0 and abs(now - self.since) < seconds


@dataclass(frozen=True, slots=True)
class Part:
    """The targets of one side of one slice, and the programs (with versions) that they run."""

    slice: str
    side: Side
    targets: tuple[Target, ...]
    programs: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Deployment:
    """One PDDeployment's targets: the pods of its serving slices, terminating ones included until they are gone."""

    namespace: str
    name: str
    targets: tuple[Target, ...]
    percentile: int = 95  # of slo.percentile, for `ttft`
    scales: bool = True  # whether its load is wanted; the counters of its pods always are

    @property
    def key(self) -> Key:
        """Namespace and name."""
        return self.namespace, self.name

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Its targets by slice and side, in that order. Kept, since most deployments are the same from tick to tick."""
        found: dict[tuple[str, Side], list[Target]] = {}
        for target in self.targets:
            found.setdefault((target.slice, target.side), []).append(target)
        return tuple(
            Part(slice_, side, tuple(mine), frozenset((t.program, t.version) for t in mine))
            for (slice_, side), mine in sorted(found.items())
        )

    @cached_property
    def sides(self) -> frozenset[Side]:
        """Sides that some slice of it has."""
        return frozenset(part.side for part in self.parts)


Fleet = Callable[[], tuple[Deployment, ...]]  # asked anew at each scrape and each read
