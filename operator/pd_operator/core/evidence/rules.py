"""Rules: when counters accuse, and when they take it back (docs/evidence.md has the table).

Every rule needs growth that goes on for `HOLD` seconds and counts of at least a handful, so that a restart, a deletion or a
scale-up, which cut or fail what is under way and then are over, accuse nobody. What is not known accuses nobody and clears
nobody. A finding about traffic is taken back by traffic that works, not by silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pd_operator.api.conditions import Reason
from pd_operator.core.evidence.counters import WINDOW, Grown, Track, fallbacks
from pd_operator.core.evidence.finding import OFFLOAD, Finding, clock
from pd_operator.core.names import ROLES, Role

HOLD: Final = 30.0  # seconds from the first to the last sign
RECENT: Final = 50.0  # seconds: three ticks and some; what ended earlier is over
CACHE_HOLD: Final = 60.0  # seconds; a server that was restarted is back after 6 to 25 (measured, vLLM and LMCache on CPU)
PAIR_HOLD: Final = 60.0  # seconds, and never less than one and a half lead times
FEW: Final = 3  # steps with a sign, one after the other; reads after a lease had ended
SOME: Final = 5  # requests
SHARE: Final = 0.3  # of the prompts computed on decode; requests for several answers at once (n > 1) are not handed over by smg
FAILED_SHARE: Final = 0.2  # of the transfers
EXPIRED_SHARE: Final = 0.05  # of prefill's requests: clients that leave between prefill and decode let leases expire too
MAX_WHY: Final = 100  # characters of somebody else's words: what to do next stands behind them
ALL: Final = 0.9  # of the requests that routers got in a while may count as all: some are still under way
HEALTHY: Final = 0.1  # of the requests may be fallbacks for a finding to be taken back


@dataclass(frozen=True, slots=True)
class SliceView:
    """One serving slice: its pages, its ready replicas by role, and since when a role has none or decode is stuck."""

    name: str
    tracks: tuple[Track, ...]
    ready: Mapping[Role, int] = field(default_factory=dict)
    paired: bool = False  # it had both roles ready while this process looked, or before
    lost_since: Mapping[Role, float] = field(default_factory=dict)
    stuck_since: float | None = None
    pair_hold: Mapping[Role, float] = field(default_factory=dict)
    lease: float = 30.0
    failed: float = 0.0  # transfers that failed in `WINDOW` and a lease before: theirs expire too, and decode answers for it
    coordinator: str = ""  # workload of the LMCache coordinator, with P2P
    coordinated: bool = False  # it has a ready pod
    alone_since: float | None = None  # since when it has no ready pod, though it had one

    def of(self, side: str) -> list[Track]:
        """Pages of one side."""
        return [t for t in self.tracks if t.last.side == side]


def judge(view: SliceView, standing: Sequence[Finding], now: float) -> Iterator[Finding]:
    """The findings of one slice: those that stood and are not taken back, and new ones."""
    fresh = {
        f.key: f
        for f in (*_decode(view, now), *_prefill(view), *_cache(view, now), *_stores(view), *_path(view, now), *_pair(view, now))
    }
    for old in standing:
        if old.slice == view.name and not _cleared(old, view, now):
            fresh[old.key] = old
    yield from fresh.values()


def _holds(signs: Sequence[float], track: Track) -> bool:
    """Whether signs of one thing go on: `FEW` of them over `HOLD` seconds, to the last step or the one before it."""
    last = track.steps[-2].time if len(track.steps) > 1 else 0.0
    return len(signs) >= FEW and signs[-1] - signs[0] >= HOLD and signs[-1] >= last


def _mended(grown: Grown) -> bool:
    """Whether a step shows nothing but handoffs that worked."""
    return grown.get("transfers", 0.0) > 0 and not grown.get("failed_transfers") and fallbacks(grown) == 0


def _decode(view: SliceView, now: float) -> Iterator[Finding]:
    silent: list[tuple[Track, float, float, float]] = []
    works = False
    for track in view.of("decode"):
        if track.last.deleting:
            continue
        failed, moved = track.total("failed_transfers"), track.total("transfers")
        if failed is None or moved is None:
            continue
        when = track.signs(lambda g: g.get("failed_transfers", 0.0) > 0)
        if failed >= FAILED_SHARE * (failed + moved) and _holds(when, track) and not _mended(track.steps[-1].grown):
            yield _failing(view, track, when[0])
            continue
        works = works or track.total("transfers", now - RECENT) not in (None, 0.0)
        when = track.signs(lambda g: (fallbacks(g) or 0.0) > 0)
        if not _holds(when, track) or _mended(track.steps[-1].grown):
            continue
        since = when[0] - 1.0
        prompts, alone = track.total("prompts", since), track.fallbacks(since)
        if prompts is None or alone is None:
            continue
        if alone >= SOME and alone >= SHARE * prompts and (track.total("failed_transfers", since) or 0.0) < alone / 2:
            silent.append((track, alone, prompts, when[0]))
    idle = len(silent) == 1 and silent[0][0].total("transfers", silent[0][3] - 1.0) == 0
    if idle and works and len(view.of("decode")) > 1:
        yield _idle(view, *silent[0])
    elif silent:
        yield _silent(view, silent)


def _failing(view: SliceView, track: Track, since: float) -> Finding:
    pod = track.last.pod
    failed, moved = (track.total(name, since - 1.0) or 0.0 for name in ("failed_transfers", "transfers"))
    text = (
        f"decode pod {pod}: {failed:.0f} transfers from prefill failed and {moved:.0f} ended since {clock(since)}; it computes "
        f"those prompts itself. Next: kubectl logs {pod} -c engine; check the way to prefill's side channel, and that both run one "
        "version; then delete the pod: it may hold on to a prefill that is gone"
    )
    return Finding(Reason.REPLICA_NOT_TRANSFERRING, pod, view.name, since, text)


def _idle(view: SliceView, track: Track, alone: float, prompts: float, since: float) -> Finding:
    pod = track.last.pod
    text = (
        f"decode pod {pod}: no transfer since {clock(since)}, and {alone:.0f} of {prompts:.0f} prompts computed there, while "
        f"others of its slice receive theirs. Next: kubectl logs {pod} -c engine; then delete the pod, another is made"
    )
    return Finding(Reason.REPLICA_NOT_TRANSFERRING, pod, view.name, since, text)


def _silent(view: SliceView, found: Sequence[tuple[Track, float, float, float]]) -> Finding:
    alone, prompts = sum(f[1] for f in found), sum(f[2] for f in found)
    since, pod = min(f[3] for f in found), max(found, key=lambda f: f[1])[0].last.pod
    more = f" and {len(found) - 1} more" if len(found) > 1 else ""
    text = (
        f"slice {view.name}: decode computed {alone:.0f} of {prompts:.0f} prompts itself since {clock(since)} (pod {pod}{more}) "
        "and answered as if nothing were wrong. Next: with router smg check that the prefill pods still carry the annotation "
        "smg.ai/kv-connector; with any, that requests ask for one answer each (n=1)"
    )
    return Finding(Reason.SILENT_FALLBACK, view.name, view.name, since, text)


def _prefill(view: SliceView) -> Iterator[Finding]:
    for track in view.of("prefill"):
        expired, ended, late = track.total("expired"), track.total("ended"), track.total("read_late")
        # Step by step: pods that are deleted one after the other let leases expire too, in bursts.
        when = track.signs(lambda g: g.get("expired", 0.0) > 0 or g.get("read_late", 0.0) > 0, unbroken=True)
        many = expired is not None and ended is not None and expired - view.failed >= max(FEW, EXPIRED_SHARE * ended)
        if (many and _holds(when, track)) or (late is not None and late >= FEW and when):
            pod = track.last.pod
            read = f", and {late:.0f} were read after that: their answers may be wrong" if late else ""
            text = (
                f"prefill pod {pod}: the lease of {expired or 0:.0f} prompts ended before decode took them, since "
                f"{clock(when[0])}{read}. Next: give decode more replicas, or handoff.leaseDuration more than {view.lease:.0f}s"
            )
            yield Finding(Reason.LEASE_EXPIRED, pod, view.name, when[0], text)


def _cache(view: SliceView, now: float) -> Iterator[Finding]:
    engines = {t.last.uid: t for t in view.tracks if t.last.side in ROLES}
    for track in view.of("cache"):
        engine = engines.get(track.last.uid)
        lives = engine is not None and engine.down_since is None and engine.seen and now - engine.last.time <= RECENT
        if not lives or track.last.deleting or track.down_since is None or now - track.down_since < CACHE_HOLD:
            continue
        pod = track.last.pod
        why = track.last.failure[:MAX_WHY] or "its container is not ready"
        text = (
            f"pod {pod}: its LMCache server does not answer since {clock(track.down_since)} ({why}); the engine serves without it. "
            f"Next: kubectl logs {pod} -c lmcache --previous"
        )
        yield Finding(Reason.CACHE_DOWN, pod, view.name, track.down_since, text)

    if view.alone_since is not None and now - view.alone_since >= CACHE_HOLD:
        text = (
            f"{view.coordinator}: the LMCache coordinator has no ready pod since {clock(view.alone_since)}; the servers of slice "
            f"{view.name} do not find each other, and each serves what it stored itself. Next: kubectl describe pods -l "
            f"pdserve.dev/slice={view.name},app.kubernetes.io/component=coordinator"
        )
        yield Finding(Reason.CACHE_DOWN, view.coordinator, view.name, view.alone_since, text)


def _stores(view: SliceView) -> Iterator[Finding]:
    prefill = {t.last.uid for t in view.of("prefill")}
    for track in view.of("cache"):
        if track.last.uid not in prefill or track.last.deleting:
            continue
        stored = max((s.time for s in track.steps if s.grown.get("stored") != 0), default=0.0)  # or nothing is known of it
        when = [t for t in track.signs(lambda g: g.get("requested", 0.0) > g.get("hit", 0.0)) if t > stored]
        if _holds(when, track):
            pod, asked = track.last.pod, track.total("lookups", when[0] - 1.0) or 0.0
            text = (
                f"prefill pod {pod}: LMCache was asked {asked:.0f} times since {clock(when[0])} for chunks that it lacks, and "
                f"nothing was stored. Next: kubectl logs {pod} -c engine, for LMCache's words; then delete the pod"
            )
            yield Finding(Reason.NOT_SUBMITTING, pod, view.name, when[0], text)


def _path(view: SliceView, now: float) -> Iterator[Finding]:
    if view.stuck_since is not None and now - view.stuck_since > view.lease + HOLD:
        text = (
            f"slice {view.name}: handoffs wait on decode and nothing runs there since {clock(view.stuck_since)}, longer than the "
            f"lease of {view.lease:.0f}s. Next: kubectl logs of the decode pods, for transfers that hang"
        )
        yield Finding(Reason.BROKEN_PATH, view.name, view.name, view.stuck_since, text)
    failed, offered = (sum(t.total(name, now - HOLD) or 0.0 for t in view.of("router")) for name in ("failed", "offered"))
    few = 1 if failed >= max(SOME, ALL * offered) else SOME
    for track in (*view.of("prefill"), *view.of("decode")):
        yield from _errors(view, track, failed > 0, few)


def _errors(view: SliceView, track: Track, routers_fail: bool, few: int) -> Iterator[Finding]:
    """An engine that answers every request with a server error, `few` at least. A router stops asking it then (smg after ten, for a
    minute, and then for a minute again after one more), so signs need not go on while the routers' own requests fail, and where all
    of those fail one answer is enough: the others may have come before this process looked."""
    if not track.last.ready or any(track.total(name) is None for name in ("bad_answers", "good_answers")):
        return
    well = max((s.time for s in track.steps if s.grown.get("good_answers", 0.0) > 0), default=0.0)
    # The last good answers may share their step with the first bad ones. What an engine answered while it died says nothing of the
    # one that came after it: the step of a restart counts the new one only.
    since = max(well, track.restarted)
    steps = [(s.time, s.grown.get("bad_answers", 0.0) - s.grown.get("rejected", 0.0)) for s in track.steps if s.time >= since]
    when = [time for time, bad in steps if bad > 0]
    bad = sum(max(0.0, bad) for _, bad in steps)
    if bad < few or track.steps[-1].time - when[0] < HOLD or not (routers_fail or _holds(when, track)):
        return
    pod = track.last.pod
    alone = "; the routers refuse what comes meanwhile" if routers_fail and not _holds(when, track) else ""
    text = (
        f"{track.last.side} pod {pod}: requests since {clock(when[0])}: {bad:.0f}, all answered with a server error{alone}. "
        f"Next: kubectl logs {pod} -c engine; a new pod in its place begins anew"
    )
    yield Finding(Reason.BROKEN_PATH, pod, view.name, when[0], text)


def _pair(view: SliceView, now: float) -> Iterator[Finding]:
    for role, since in view.lost_since.items():
        if view.paired and now - since >= view.pair_hold.get(role, PAIR_HOLD):
            kind = "PrefillReady" if role == "prefill" else "DecodeReady"
            text = (
                f"slice {view.name}: no ready {role} replica since {clock(since)}; its requests are refused. Next: the "
                f"condition {kind} says why"
            )
            yield Finding(Reason.PAIR_LOST, view.name, view.name, since, text)
            return


def _cleared(old: Finding, view: SliceView, now: float) -> bool:
    """Whether something shows that it is over. The subject that is gone shows it too."""
    if old.reason is Reason.PAIR_LOST:
        return bool(view.ready) and all(view.ready.get(role, 0) > 0 for role in ROLES)
    if old.reason in OFFLOAD:
        return _offloads(old, view, now)
    mine = [t for t in view.tracks if old.subject in (t.last.pod, view.name)]
    if not mine:
        return True
    if old.reason is Reason.LEASE_EXPIRED:
        return all(_calm(t, now) for t in mine if t.last.side == "prefill")
    decode = [t for t in mine if t.last.side == "decode"]
    if old.reason is Reason.BROKEN_PATH:
        return any((t.total("good_answers", now - HOLD) or 0.0) > 0 for t in (decode or mine)) and view.stuck_since is None
    return bool(decode) and _works(decode, now)


def _offloads(old: Finding, view: SliceView, now: float) -> bool:
    if old.subject == view.coordinator:
        return view.coordinated
    mine = [t for t in view.tracks if t.last.pod == old.subject]
    caches = [t for t in mine if t.last.side == "cache"]
    if old.reason is Reason.CACHE_DOWN or not mine:
        return all(t.down_since is None and t.seen for t in caches)
    return any((t.total("stored", now - HOLD) or 0.0) > 0 for t in caches)


def _calm(track: Track, now: float) -> bool:
    """Whether no lease ended early for as long as the rules look."""
    covered = bool(track.steps) and now - track.steps[0].time >= WINDOW - RECENT
    return covered and track.total("expired") == 0 and not track.total("read_late")


def _works(tracks: Sequence[Track], now: float) -> bool:
    """Whether transfers ended in the last `HOLD` seconds, none failed, and nearly no prompt was computed on decode."""
    since = now - HOLD
    sums = [[t.total(name, since) for t in tracks] for name in ("transfers", "failed_transfers", "prompts")]
    sums.append([t.fallbacks(since) for t in tracks])
    if any(value is None for values in sums for value in values):
        return False
    moved, failed, prompts, alone = (sum(v or 0.0 for v in values) for values in sums)
    return moved > 0 and failed == 0 and alone <= HEALTHY * prompts
