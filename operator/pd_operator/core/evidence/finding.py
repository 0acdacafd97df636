"""Findings: what the counters accuse, with the words that a person reads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pd_operator.api.conditions import Reason

# The gravest first: it gives the condition its reason.
ORDER: Final = (
    Reason.PAIR_LOST,
    Reason.BROKEN_PATH,
    Reason.LEASE_EXPIRED,
    Reason.SILENT_FALLBACK,
    Reason.REPLICA_NOT_TRANSFERRING,
    Reason.CACHE_DOWN,
    Reason.NOT_SUBMITTING,
)
HANDOFF: Final = frozenset({Reason.BROKEN_PATH, Reason.LEASE_EXPIRED, Reason.SILENT_FALLBACK, Reason.REPLICA_NOT_TRANSFERRING})
OFFLOAD: Final = frozenset({Reason.CACHE_DOWN, Reason.NOT_SUBMITTING})
MAX_FINDINGS: Final = 32
MAX_SENTENCE: Final = 400  # characters


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. `since` is when its first sign was seen, in seconds since 1970; the sentence stays as first told."""

    reason: Reason
    subject: str  # the pod, or the slice
    slice: str
    since: float
    sentence: str

    @property
    def key(self) -> tuple[Reason, str]:
        """What makes two findings the same."""
        return self.reason, self.subject


def ordered(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The gravest first, then by name; at most as many as status holds."""
    return tuple(sorted(findings, key=lambda f: (ORDER.index(f.reason), f.subject))[:MAX_FINDINGS])


def record(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    """For status."""
    return [
        {
            "reason": f.reason.value,
            "subject": f.subject,
            "slice": f.slice,
            "since": instant(f.since),
            "message": f.sentence[:MAX_SENTENCE],
        }
        for f in findings
    ]


def read(handoff: Mapping[str, Any]) -> tuple[Finding, ...]:
    """Findings out of a status; what is not one is left out."""
    found = []
    for one in handoff.get("findings") or ():
        reason = next((r for r in ORDER if r.value == one.get("reason")), None)
        since = seconds_of(str(one.get("since", "")))
        if reason is not None and since is not None and one.get("subject"):
            found.append(Finding(reason, str(one["subject"]), str(one.get("slice", "")), since, str(one.get("message", ""))))
    return ordered(found)


def instant(seconds: float) -> str:
    """Seconds since 1970 as status writes an instant."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def clock(seconds: float) -> str:
    """Seconds since 1970 for a sentence."""
    return datetime.fromtimestamp(int(seconds), UTC).strftime("%H:%M:%SZ")


def seconds_of(text: str) -> float | None:
    """The other way round; None for what is no instant."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None
