"""Scaled: what the scaling tick knows of one PDDeployment, and what it reads of its pods."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pd_operator.core import diagnosis
from pd_operator.core.names import Role
from pd_operator.core.observed import PodFact
from pd_operator.core.scaling import codec
from pd_operator.core.scaling.decision import Decision
from pd_operator.core.scaling.learned import DecodeLearned, Learned, Memory, PrefillLearned
from pd_operator.core.scaling.readings import Replicas

MAX_LEAD = 7200.0  # seconds; a pod that became ready later than this after its creation had another reason
DEFAULT_LEAD = 120.0  # seconds, before any start was seen (DESIGN §7: 300 s of down window is 1.5 of more than this)
STALE = 60.0  # seconds; a past that ends earlier than this says nothing about the down window


@dataclass(frozen=True, slots=True)
class LeadTime:
    """Seconds from creating a replica to its being ready, over the replicas that exist."""

    p50: float
    p90: float
    count: int


@dataclass(frozen=True, slots=True)
class Scaled:
    """What the last tick decided, or why it could not."""

    time: float  # seconds since 1970
    decision: Decision | None = None
    unknown: str = ""  # signals that are not known and why; "" when a decision rests on all of them
    why_not: str = ""  # why there is no decision: nothing was scraped yet
    lead: Mapping[Role, LeadTime] = field(default_factory=dict)


def replicas_of(pods: Sequence[PodFact], serving: frozenset[str], slice_label: str, desired: int, now: datetime) -> Replicas:
    """Counts of one role from its pods. One that starts counts until a cause says that it never will be ready."""
    ready = starting = blocked = draining = 0
    oldest = 0.0
    for pod in pods:
        if pod.deleting:
            draining += not pod.lost(now)
        elif pod.ready and pod.labels.get(slice_label) in serving:
            ready += 1
        elif not pod.ready and diagnosis.is_blocked(pod):
            blocked += 1
        else:
            starting += 1
            oldest = max(oldest, (now - pod.created).total_seconds() if pod.created else 0.0)
    return Replicas(desired, ready, starting, blocked, draining, oldest)


def lead_time(pods: Sequence[PodFact]) -> LeadTime | None:
    """Of the pods that are ready and never restarted a container; None without any."""
    seconds = sorted(
        taken
        for pod in pods
        if pod.ready and pod.created and pod.ready_since and not any(c.restarts for c in pod.containers)
        if 0 <= (taken := (pod.ready_since - pod.created).total_seconds()) <= MAX_LEAD
    )
    if not seconds:
        return None
    return LeadTime(_rank(seconds, 50), _rank(seconds, 90), len(seconds))


def _rank(ordered: Sequence[float], percent: int) -> float:
    """Nearest rank."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def restore(statuses: Mapping[Role, Mapping[str, Any]], now: float) -> Learned:
    """What was learned before a restart, from the status of both pools. What cannot be read is learned anew.

    The recommendations of a past that is not the last minute are dropped: without them nothing steps down before a whole
    window was seen (invariant I4).
    """
    found: dict[str, Any] = {}
    kinds: tuple[tuple[Role, Any], ...] = (("prefill", PrefillLearned), ("decode", DecodeLearned))
    for role, kind in kinds:
        text = (statuses.get(role, {}).get("learned") or {}).get("state", "")
        try:
            wrapped = json.loads(text) if text else {}
            found[role] = codec.decode(kind, wrapped.get("learned", {}))
            found["time"] = max(found.get("time", 0.0), float(wrapped.get("time", 0.0)))
        except (ValueError, AttributeError, TypeError):
            found[role] = kind()
    time = found.get("time") or None
    learned = Learned(time, found["prefill"], found["decode"])
    if time is not None and 0 <= now - time <= STALE:
        return learned
    return _without_past(learned)


def _without_past(learned: Learned) -> Learned:
    fresh = Memory()
    return replace(
        learned, time=None, prefill=replace(learned.prefill, memory=fresh, queue=None), decode=replace(learned.decode, memory=fresh)
    )
