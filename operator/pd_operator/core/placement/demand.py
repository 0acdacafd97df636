"""What one PDDeployment wants placed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Final, Literal

from pd_operator.core.placement.capacity import ReplicaShape

Mode = Literal["Required", "Preferred"]
CROSSING: Final = ""  # stands for a domain where a slice has none: it crosses domains, or there is no topology key

BACKOFF: Final = timedelta(minutes=5)  # the first exclusion of a domain; doubled each time, as Kueue's requeuingStrategy does
BACKOFF_MAX: Final = timedelta(hours=2)


@dataclass(frozen=True, slots=True)
class Demand:
    """Replicas wanted, their shapes, and what is there already.

    `running` holds the replicas that exist and should stay: bound ones, and unbound ones whose room is reserved in the view
    (or which still have time to find some). The view's free capacity is without them.
    """

    key: str  # namespace/name
    prefill: int  # replicas wanted in all
    decode: int
    prefill_shape: ReplicaShape
    decode_shape: ReplicaShape
    topology_key: str = ""  # "": the whole cluster is one domain, called ""
    mode: Mode = "Required"
    max_domains: int = 1
    running: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # domain (CROSSING for a crossing slice) -> (p, d)
    pinned: frozenset[str] = frozenset()  # when not empty, only these domains
    excluded: Mapping[str, str] = field(default_factory=dict)  # domain -> why it is not used now

    def __post_init__(self) -> None:
        if min(self.prefill, self.decode) < 0 or (self.prefill == 0) != (self.decode == 0):
            raise ValueError(f"Demand {self.key}: prefill={self.prefill}, decode={self.decode}: both must be 0, or both at least 1")
        if self.max_domains < 1:
            raise ValueError(f"Demand {self.key}: max_domains={self.max_domains}: must be at least 1")
        for domain, (p, d) in self.running.items():
            if min(p, d) < 0:
                raise ValueError(f"Demand {self.key}: running[{domain!r}]=({p}, {d}): must not be negative")

    def allows(self, domain: str) -> bool:
        """Whether the domain may be used at all."""
        return domain not in self.excluded and (not self.pinned or domain in self.pinned)


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A domain in which a slice wedged, and until when it is left alone."""

    domain: str
    reason: str
    until: datetime
    times: int = 1  # in a row


def exclude(domain: str, reason: str, now: datetime, before: Exclusion | None = None) -> Exclusion:
    """Leave a domain alone from now on: BACKOFF, doubled for each time before, at most BACKOFF_MAX."""
    times = (before.times if before else 0) + 1
    return Exclusion(domain, reason, now + min(BACKOFF_MAX, BACKOFF * 2 ** min(times - 1, 10)), times)


def active(exclusions: Iterable[Exclusion], now: datetime) -> dict[str, str]:
    """Domain -> reason of the exclusions that hold now: `Demand.excluded`."""
    return {e.domain: e.reason for e in sorted(exclusions, key=lambda e: (e.domain, e.until)) if e.until > now}
