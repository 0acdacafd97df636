"""Watch: one look at the pages of a PDDeployment -> what its counters prove and what they accuse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from pd_operator.core.evidence import attainment
from pd_operator.core.evidence.attainment import Attained, Objectives, Point
from pd_operator.core.evidence.counters import WINDOW, Counters, Track, fallbacks, follow
from pd_operator.core.evidence.finding import HANDOFF, OFFLOAD, Finding, ordered, read, seconds_of
from pd_operator.core.evidence.rules import PAIR_HOLD, SliceView, judge
from pd_operator.core.names import COORDINATOR, ROLES, Role, workload
from pd_operator.core.scaled import DEFAULT_LEAD, LeadTime

MAX_UNVERIFIED: Final = 64  # names in a status
SLACK: Final = 5.0  # requests that may be on their way from prefill to decode at a look
TOTALS: Final = ("transfers", "transferred_bytes", "failed_transfers", "expired", "read_late", "fallbacks")


@dataclass(frozen=True, slots=True)
class Site:
    """What the look knows beside the pages."""

    ready: Mapping[str, Mapping[Role, int]]  # serving slice -> role -> ready replicas
    lease: float = 30.0
    lead: Mapping[Role, LeadTime] = field(default_factory=dict)  # to a new ready replica, measured
    slo: Objectives = field(default_factory=Objectives)
    coordinators: Mapping[str, bool] = field(default_factory=dict)  # serving slice with P2P -> its coordinator has a ready pod


@dataclass(frozen=True, slots=True)
class SliceRecord:
    """What is known of a slice from look to look."""

    paired: bool = False
    lost_since: Mapping[Role, float] = field(default_factory=dict)
    stuck_since: float | None = None
    coordinated: bool = False  # its coordinator was ready once
    alone_since: float | None = None  # since when it is not any more
    moved: float = 0.0  # transfers that ended on decode
    fed: Mapping[str, float] = field(default_factory=dict)  # uid of a prefill pod -> requests that it ended
    failures: tuple[tuple[float, float], ...] = ()  # time and number of transfers that failed, of pods that are gone too


@dataclass(frozen=True, slots=True)
class Record:
    """All that is known of one PDDeployment from look to look."""

    tracks: Mapping[tuple[str, str], Track] = field(default_factory=dict)  # (uid, side)
    slices: Mapping[str, SliceRecord] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    proven: frozenset[str] = frozenset()  # uids of prefill pods
    totals: Mapping[str, float] = field(default_factory=dict)
    last_verified: float | None = None
    points: tuple[Point, ...] = ()
    outcomes: Mapping[tuple[str, str], float] = field(default_factory=dict)
    looked: bool = False  # whether a look was made since the start of this process
    unverified: frozenset[str] | None = None  # names, from the status; None: all of them
    verified_before: float = 0.0  # a pod made later is in no list of that status


@dataclass(frozen=True, slots=True)
class Evidence:
    """What one look found."""

    time: float
    findings: tuple[Finding, ...] = ()
    verified: Mapping[Role, int] = field(default_factory=dict)  # ready replicas that evidence proved
    unverified: tuple[str, ...] = ()  # names of ready replicas that none proved
    totals: Mapping[str, float] = field(default_factory=dict)
    last_verified: float | None = None
    disproved: frozenset[str] = frozenset()  # slices whose ready decode replicas are all accused
    unstored: frozenset[str] = frozenset()  # prefill pods that store nothing, of slices where none stores
    unread: tuple[str, ...] = ()  # names of ready pods whose engine's page was never read
    lead: Mapping[Role, LeadTime] = field(default_factory=dict)  # to a new ready replica, measured
    attained: Attained = field(default_factory=Attained)
    outcomes: Mapping[tuple[str, str], float] = field(default_factory=dict)  # (counted by, outcome) -> requests


def restore(status: Mapping[str, Any]) -> Record:
    """What a status told before a restart. What grew while nobody looked is not in its counts."""
    handoff = status.get("handoff") or {}
    names = handoff.get("unverified") or ()
    told = any((r.get("verifiedReplicas") or 0) > 0 for r in status.get("roles") or ())
    when = seconds_of(str(handoff.get("lastVerified", "")))
    totals = {"fallbacks": float(handoff.get("fallbackRequests") or 0), "expired": float(handoff.get("expired") or 0)}
    return Record(
        findings=read(handoff),
        totals=totals,
        last_verified=when,
        unverified=frozenset(map(str, names)) if told and len(names) < MAX_UNVERIFIED else None,
        verified_before=when or 0.0,
    )


def look(record: Record, pages: Sequence[Counters], site: Site, now: float) -> tuple[Record, Evidence]:
    """One look at the pages of the serving slices; `now` in seconds since 1970."""
    tracks: dict[tuple[str, str], Track] = {(p.uid, p.side): follow(record.tracks.get((p.uid, p.side)), p, now) for p in pages}
    slices: dict[str, SliceRecord] = {}
    findings: list[Finding] = []
    for name, ready in site.ready.items():
        mine = tuple(t for t in tracks.values() if t.last.slice == name)
        known = record.slices.get(name, SliceRecord(paired=not record.looked and record.last_verified is not None))
        slices[name] = _slice(name, known, mine, record, site, now)
        findings += judge(_view(name, mine, ready, slices[name], site), record.findings, now)
    proven = _proven(record, tracks, slices)
    moved = any((_newest(t, record) or {}).get("transfers", 0.0) > 0 for t in tracks.values())
    verified_at = now if moved else record.last_verified
    told = ordered(findings)
    last = record.points[-1].time if record.points else None
    came = attainment.point(record.tracks, tracks.values(), now, last)
    after = replace(
        record,
        tracks=tracks,
        slices=slices,
        findings=told,
        proven=proven,
        totals=_totals(record, tracks),
        last_verified=verified_at,
        points=(*(p for p in record.points if p.time > now - attainment.WINDOW), came),
        outcomes=attainment.outcomes(record.outcomes, came),
        looked=True,
    )
    return after, _evidence(after, told, site, now)


def _view(name: str, mine: tuple[Track, ...], ready: Mapping[Role, int], known: SliceRecord, site: Site) -> SliceView:
    lead = {role: site.lead[role].p90 if role in site.lead else DEFAULT_LEAD for role in ROLES}
    hold = {role: max(PAIR_HOLD, 1.5 * lead[role]) for role in ROLES}
    failed = sum(count for _, count in known.failures)
    return SliceView(name, mine, ready, known.paired, known.lost_since, known.stuck_since, hold, site.lease, failed,
                     workload(name, COORDINATOR), site.coordinators.get(name, True), known.alone_since)  # fmt: skip


def _newest(track: Track, record: Record) -> Mapping[str, float] | None:
    """The growth that this look found; None when there is no new page."""
    old = record.tracks.get((track.last.uid, track.last.side))
    fresh = track.steps and (old is None or track.last.time > old.last.time)
    return track.steps[-1].grown if fresh else None


def _slice(name: str, known: SliceRecord, mine: Sequence[Track], record: Record, site: Site, now: float) -> SliceRecord:
    ready, coordinated = site.ready[name], site.coordinators.get(name)
    fed = dict(known.fed)
    moved, failed = known.moved, 0.0
    for track in mine:
        grown = _newest(track, record) or {}
        if track.last.side == "prefill":
            fed[track.last.uid] = fed.get(track.last.uid, 0.0) + grown.get("ended", 0.0)
        elif track.last.side == "decode":
            moved += grown.get("transfers", 0.0)
            failed += grown.get("failed_transfers", 0.0)
    # Of a pod that is gone the last page was not seen: as many failures again as between the two before it.
    here = {(track.last.uid, track.last.side) for track in mine}
    gone = [t for key, t in record.tracks.items() if key not in here and t.last.slice == name and t.last.side == "decode"]
    failed += sum(track.steps[-1].grown.get("failed_transfers", 0.0) for track in gone if track.steps)
    lost = {role: known.lost_since.get(role, now) for role in ROLES if ready.get(role, 0) == 0}
    alone = None
    if coordinated is False and known.coordinated:
        alone = known.alone_since if known.alone_since is not None else now
    return SliceRecord(
        known.paired or not lost,
        lost,
        _stuck(known, mine, record, now),
        known.coordinated or coordinated is True,
        alone,
        moved,
        fed,
        (*(f for f in known.failures if f[0] > now - WINDOW - site.lease), *([(now, failed)] if failed else ())),
    )


def _stuck(known: SliceRecord, mine: Sequence[Track], record: Record, now: float) -> float | None:
    """Since when handoffs wait on decode while nothing runs or moves there. What is not known leaves it as it is."""
    steps = [_newest(t, record) for t in mine if t.last.side == "decode"]
    if not steps or any(s is None or s.get("running") is None or s.get("fetching") is None for s in steps):
        return known.stuck_since
    seen = [s for s in steps if s is not None]
    waits = sum(s["fetching"] for s in seen) > 0
    moves = any(s["running"] > 0 or s.get("transfers", 1.0) > 0 or s.get("first_tokens", 1.0) > 0 for s in seen)
    return (known.stuck_since if known.stuck_since is not None else now) if waits and not moves else None


def _proven(record: Record, tracks: Mapping[tuple[str, str], Track], slices: Mapping[str, SliceRecord]) -> frozenset[str]:
    """Prefill pods of which a handoff was certainly taken: more transfers ended on decode than all others could have fed.

    Prefill counts no reads, so nothing simpler proves one. Requests under way at the first look are allowed for.
    """
    found = set()
    for (uid, side), track in tracks.items():
        if side != "prefill":
            continue
        known = slices.get(track.last.slice)
        others = sum(n for other, n in known.fed.items() if other != uid) if known else 0.0
        sure = known is not None and known.fed.get(uid, 0.0) > 0 and known.moved > others + SLACK
        before = (
            record.unverified is not None
            and track.last.pod not in record.unverified
            and 0 < track.last.created < record.verified_before
        )
        if sure or before or uid in record.proven:
            found.add(uid)
    return frozenset(found)


def _totals(record: Record, tracks: Mapping[tuple[str, str], Track]) -> dict[str, float]:
    """Counts that never fall: what status told, and what grew since. What a pod shows at its first page came before it served
    (its canary's requests, some of which decode computes on purpose), so it is not counted."""
    found = {name: record.totals.get(name, 0.0) for name in TOTALS}
    for track in tracks.values():
        grown = _newest(track, record) or {}
        if track.last.side in ROLES:
            for name in TOTALS:
                found[name] += grown.get(name, 0.0)
        if track.last.side == "decode":  # prefill computes prompts for a living
            found["fallbacks"] += fallbacks(grown) or 0.0
    return found


def _evidence(record: Record, findings: tuple[Finding, ...], site: Site, now: float) -> Evidence:
    accused = {f.subject for f in findings if f.reason in HANDOFF}
    verified: dict[Role, int] = dict.fromkeys(ROLES, 0)
    unverified, unread = [], []
    accepted: dict[str, bool] = {}  # slice -> whether a ready decode replica is not accused
    for track in record.tracks.values():
        page = track.last
        if page.side not in ("prefill", "decode") or not page.ready:
            continue
        if not track.seen:
            unread.append(page.pod)
        if page.side == "decode":
            accepted[page.slice] = accepted.get(page.slice, False) or not accused & {page.pod, page.slice}
        proven = page.uid in record.proven if page.side == "prefill" else page.values.get("transfers", 0.0) > 0
        if proven and not accused & {page.pod, page.slice}:
            verified[page.side] += 1
        else:
            unverified.append(page.pod)
    return Evidence(
        now,
        findings,
        verified,
        tuple(sorted(unverified)[:MAX_UNVERIFIED]),
        record.totals,
        record.last_verified,
        disproved=frozenset(name for name, well in accepted.items() if not well),
        unstored=_unstored(record, findings),
        unread=tuple(sorted(unread)),
        lead=site.lead,
        attained=attainment.attained(record.points, site.slo, now),
        outcomes=record.outcomes,
    )


def _unstored(record: Record, findings: Sequence[Finding]) -> frozenset[str]:
    """Prefill pods that are accused of storing nothing, of the slices of which each prefill pod with an LMCache server is."""
    accused = {f.subject for f in findings if f.reason in OFFLOAD}
    slices: dict[str, set[str]] = {}
    for uid, side in record.tracks:
        page = record.tracks[uid, side].last
        if side == "prefill" and (uid, "cache") in record.tracks and not page.deleting:
            slices.setdefault(page.slice, set()).add(page.pod)
    return frozenset(pod for pods in slices.values() if pods <= accused for pod in pods)


def contradiction(evidence: Evidence | None, slice_: str, since: float) -> Finding | None:
    """What speaks against a proof of handoff of a slice made at `since` (seconds since 1970); None: nothing that is known does.

    One replica of several that fails does not: the slice hands over, and Degraded names the replica. PairLost and CacheDown say
    nothing about handoffs.
    """
    if evidence is None or slice_ not in evidence.disproved:
        return None
    return next((f for f in evidence.findings if f.reason in HANDOFF and f.slice == slice_ and f.since >= since), None)


def offload_contradiction(evidence: Evidence | None, slice_: str, since: float) -> Finding | None:
    """What speaks against a proof of offload of a slice made at `since`; None: a prefill replica stores, for all that is known."""
    if evidence is None:
        return None
    against = (f for f in evidence.findings if f.reason in OFFLOAD and f.slice == slice_ and f.subject in evidence.unstored)
    return next((f for f in against if f.since >= since), None)
