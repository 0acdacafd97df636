"""Scaled: what the scaling tick knows of one PDDeployment, and what it reads of its pods."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pd_operator.core import diagnosis
from pd_operator.core.names import ROLE, ROLES, SLICE, Role
from pd_operator.core.observed import PodFact
from pd_operator.core.scaling import codec
from pd_operator.core.scaling.decision import Decision
from pd_operator.core.scaling.learned import DecodeLearned, Learned, Memory, PrefillLearned
from pd_operator.core.scaling.readings import Replicas
from pd_operator.core.scaling.record import Record

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
    """What the last tick decided. A tick that could not decide leaves what the one before it said."""

    time: float  # seconds since 1970
    decision: Decision
    unknown: str = ""  # signals that are not known and why; "" when a decision rests on all of them
    lead: Mapping[Role, LeadTime] = field(default_factory=dict)
    uneven: str = ""  # which slice gets another share of the requests than it should; core/traffic.py
    since: Mapping[Role, float] = field(default_factory=dict)  # when the signals that a role needs ceased to be known
    over: str = ""  # the budget that it shares, where minimums and pools that nobody may limit exceed it
    record: Record | None = None  # the decision with all that it was made from; a line of it costs more than to decide


@dataclass(frozen=True, slots=True)
class Missing:
    """Replicas that cannot be, as the last reconcile saw it."""

    short: int = 0  # no transfer domain has room for them; their pods wait, or are still to be made
    refused: int = 0  # the API server takes no pod of them (a quota, an admission webhook)


def replicas_of(
    pods: Sequence[PodFact], serving: frozenset[str], desired: int, now: datetime, missing: Missing = Missing()
) -> Replicas:
    """Counts of one role from its pods. One that starts counts until a cause says that it never will be ready."""
    ready = starting = blocked = draining = 0
    oldest = 0.0
    for pod in pods:
        if pod.phase in ("Succeeded", "Failed"):  # evicted: it holds nothing, and another was made in its place
            continue
        if pod.deleting:
            draining += not pod.lost(now)
        elif pod.ready and pod.labels.get(SLICE) in serving:
            ready += 1
        elif not pod.ready and diagnosis.is_blocked(pod):
            blocked += 1
        else:
            starting += 1
            oldest = max(oldest, (now - pod.created).total_seconds() if pod.created else 0.0)
    silent = max(0, missing.short - blocked)  # the scheduler has not said so yet of those among the pods
    return Replicas(desired, ready, max(0, starting - silent), blocked + silent + missing.refused, draining, oldest)


def start_time(pod: PodFact) -> float | None:
    """Seconds from the creation of a pod to its being ready; None where that is not what its condition says.

    The condition tells the last time that it became ready, so the first answer for a pod is the one to keep.
    """
    if not (pod.ready and pod.created and pod.ready_since) or any(c.restarts for c in pod.containers):
        return None
    taken = (pod.ready_since - pod.created).total_seconds()
    return taken if 0 <= taken <= MAX_LEAD else None


def lead_time(seconds: Iterable[float]) -> LeadTime | None:
    """Of the start times of the pods that exist; None without any."""
    ordered = sorted(seconds)
    return LeadTime(_rank(ordered, 50), _rank(ordered, 90), len(ordered)) if ordered else None


@dataclass(slots=True)
class Starts:
    """How long the replicas of one PDDeployment took to be ready; a role without any keeps its last lead time."""

    lead: dict[Role, LeadTime] = field(default_factory=dict)
    taken: dict[str, float] = field(default_factory=dict)  # uid of a pod -> seconds, as first seen
    pods: Sequence[PodFact] = ()  # as they were seen last

    def see(self, pods: Sequence[PodFact]) -> None:
        """Measure those that became ready, and forget pods that are gone."""
        if pods is self.pods:
            return
        self.pods = pods
        self.taken = {p.uid: t for p in pods if (t := self.taken.get(p.uid, start_time(p))) is not None}
        for role in ROLES:
            mine = [self.taken[p.uid] for p in pods if p.labels.get(ROLE) == role and p.uid in self.taken]
            if (measured := lead_time(mine)) is not None:
                self.lead[role] = measured


def lead_text(lead: LeadTime) -> str:
    """For status, to two digits."""
    return f"p50 {two_digits(lead.p50)}s, p90 {two_digits(lead.p90)}s"


def read_lead(text: str) -> LeadTime | None:
    """A lead time from a status, counted as one replica's; None where it says nothing."""
    found = re.fullmatch(r"p50 (\d+(?:\.\d+)?)s, p90 (\d+(?:\.\d+)?)s", text)
    return LeadTime(float(found[1]), float(found[2]), 1) if found else None


def two_digits(value: float) -> str:
    """Two significant digits, without an exponent up to a million (118.3 -> 120)."""
    return f"{float(f'{value:.2g}'):.7g}"


def _rank(ordered: Sequence[float], percent: int) -> float:
    """Nearest rank."""
    return ordered[max(0, -(-len(ordered) * percent // 100) - 1)]


def restore(statuses: Mapping[Role, Mapping[str, Any]], now: float) -> Learned:
    """What was learned before a restart, from the status of both pools. What cannot be read is learned anew.

    Rates and recommendations of a past that is not the last minute are dropped: without them nothing steps down before a
    whole window was seen (invariant I4), and a load of long ago orders nothing.
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
    """Without what was true of one moment: rates, the queue, the counts' past. Whether decode was congested stays, since the
    state is written whenever that changes."""
    p, d = learned.prefill, learned.decode
    gates = tuple(replace(g, streak=0, starts=None) for g in d.gates)
    return Learned(
        None,
        replace(p, memory=Memory(), queue=None, prompt_rate=None, request_rate=None, ready=0, late=0),
        replace(d, memory=Memory(), starts=None, running=None, stuck_since=None, gates=gates),
    )
