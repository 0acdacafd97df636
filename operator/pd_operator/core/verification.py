"""What is proven of each slice, and when its canary runs (invariant I5). Level-triggered: all of it stands in status and in Jobs.

A slice's canaries are numbered. The newest Job stays as the record of the last run; deleting it asks for another one. What a run
found is written into status once, so that neither a restart of the operator nor the end of the Job's pod loses it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from pd_operator.api.conditions import Reason, Type
from pd_operator.core import diagnosis, proof
from pd_operator.core.names import ABOUT, CANARY, COMPONENT, REVISION, SLICE
from pd_operator.core.observed import ChildFact, PodFact
from pd_operator.core.proof import Verdict
from pd_operator.core.revision import manifest_hash, pairing_hash, pods_hash
from pd_operator.core.snapshot import Snapshot

Mode = Literal["Required", "Advisory", "Disabled"]
TRIES: Final = 3  # runs, one soon after another, before it counts as failed: the first request of a new pair may take half a minute
SOON: Final = (5.0, 20.0)  # seconds after the first failure, after the second
LATER: Final = 600.0  # seconds between two runs after that
POD_WAIT: Final = 30.0  # seconds that a Job has no pod, or one that cannot start, before that is told
EVIDENCE_WAIT: Final = 15.0  # seconds that the pod's end may be seen after the Job's
WAYS_OUT: Final = "not to wait for it: spec.verification: Advisory or Disabled"
HALTED: Final = "does not start: "  # what stands in status between a Job's name and the cause


@dataclass(frozen=True, slots=True)
class Trial:
    """The newest canary that ended."""

    number: int
    at: datetime
    about: str  # subject() when it ran
    failures: int  # in a row, this one included; 0 after a success
    handoff: Verdict
    offload: Verdict | None  # None without LMCache


@dataclass(frozen=True, slots=True)
class Proven:
    """The newest success of a slice."""

    at: datetime
    number: int
    evidence: str  # hash of the termination message
    about: str
    handoff: str  # what was seen
    offload: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one slice."""

    slice: str
    trial: Trial | None = None
    proven: Proven | None = None
    running: str = ""  # name of the Job that has not ended
    blocked: Verdict | None = None  # why it does not start
    newest: int = 0  # number of the newest Job that exists

    @property
    def failed(self) -> bool:
        """Whether the last runs failed as often as is tried at once."""
        return self.trial is not None and self.trial.failures >= TRIES


@dataclass(frozen=True, slots=True)
class Gate:
    """What the rollout may let to the front door."""

    required: bool = False
    proven: frozenset[str] = frozenset()
    failed: Mapping[str, str] = field(default_factory=dict)  # slice -> why its last canary proved nothing

    def opens(self, slice_: str) -> bool:
        """Whether a slice may serve."""
        return not self.required or slice_ in self.proven

    def stands(self, dark: Sequence[str]) -> tuple[Reason, str]:
        """How a rollout stands that waits for nothing but the proof of these slices."""
        failed = [f"{name}: {self.failed[name]}" for name in dark if name in self.failed]
        if failed:
            return Reason.VERIFICATION_FAILED, f"{failed[0]}; it stays dark and is tried again"
        return Reason.ROLLING_OUT, f"{', '.join(dark)} is ready, and dark until its canary has proven a handoff"


OPEN: Final = Gate()


def mode_of(snapshot: Snapshot) -> Mode:
    """How this object is verified."""
    return snapshot.spec.verification


def subject(snapshot: Snapshot) -> str:
    """Hash of what a proof is about: engines and router as they are now. Replicas are not in it."""
    router = snapshot.spec.router.model_dump(mode="json", exclude={"replicas"})
    images = {part: snapshot.images.get(part, "") for part in ("engine", "router", "lmcache")}
    return manifest_hash(
        {"pairing": pairing_hash(snapshot.spec), "pods": pods_hash(snapshot.spec), "router": router, "images": images}
    )


def records(snapshot: Snapshot) -> dict[str, Record]:
    """Slice -> what is known of it, with what has ended since the last status."""
    before = {str(s.get("name")): s for s in snapshot.status.get("slices", ())}
    jobs = _jobs(snapshot)
    return {name: _record(snapshot, name, before.get(name, {}), jobs.get(name, [])) for name in sorted({*before, *jobs})}


def gate(snapshot: Snapshot, known: Mapping[str, Record]) -> Gate:
    """For the rollout."""
    failed = {r.slice: _sentence(r) for r in known.values() if r.failed or r.blocked}
    return Gate(mode_of(snapshot) == "Required", frozenset(r.slice for r in known.values() if r.proven), failed)


def due_in(record: Record, about: str, now: datetime) -> float | None:
    """Seconds until the slice's next canary, 0 for now; None: none is due."""
    trial = record.trial
    if record.running:
        return None
    if trial is None or trial.about != about or record.newest < trial.number:  # its Job was deleted: somebody asks again
        return 0.0
    if not trial.failures:
        return None
    wait = SOON[trial.failures - 1] if trial.failures <= len(SOON) else LATER
    return max(0.0, wait - (now - trial.at).total_seconds())


def next_number(record: Record) -> int:
    """Number of the next canary of a slice."""
    return 1 + max(record.newest, record.trial.number if record.trial else 0)


def to_status(record: Record) -> dict[str, Any]:
    """The part of status.slices[] that `records` reads back."""
    found: dict[str, Any] = {}
    if record.proven is not None:
        p = record.proven
        found["verified"] = {
            "at": _written(p.at),
            "canary": p.number,
            "evidence": p.evidence,
            "about": p.about,
            "handoff": p.handoff,
        } | ({"offload": p.offload} if p.offload else {})
    if record.trial is not None:
        t = record.trial
        found["canary"] = {
            "number": t.number,
            "at": _written(t.at),
            "about": t.about,
            "failures": t.failures,
            **_verdict("handoff", t.handoff),
            **(_verdict("offload", t.offload) if t.offload else {}),
        }
    return found


def _verdict(what: str, verdict: Verdict) -> dict[str, str]:
    return {f"{what}Reason": verdict.reason.value, f"{what}Message": verdict.sentence[:1000]}


def _read(found: Mapping[str, Any], what: str) -> Verdict | None:
    try:
        reason = Reason(found.get(f"{what}Reason", ""))
    except ValueError:
        return None
    proven = True if reason is Reason.VERIFIED else None if reason is Reason.NOT_YET_RUN else False
    return Verdict(proven, reason, str(found.get(f"{what}Message", "")))


def _record(snapshot: Snapshot, name: str, before: Mapping[str, Any], jobs: list[ChildFact]) -> Record:
    trial, proven = _trial(before.get("canary") or {}), _proven(before.get("verified") or {})
    newest = jobs[-1] if jobs else None
    if newest is None or (trial is not None and _number(newest) <= trial.number):
        return Record(name, trial, proven, newest=_number(newest) if newest else 0)
    ended = _ended(snapshot, newest)
    if ended is None:
        return Record(name, trial, proven, newest.name, _blocked(snapshot, newest), _number(newest))
    handoff, offload, digest = ended
    about = newest.labels.get(ABOUT, "")
    bad = handoff.proven is not True or (offload is not None and offload.proven is False)
    again = trial.failures if trial is not None and trial.about == about else 0
    trial = Trial(_number(newest), snapshot.now, about, again + 1 if bad else 0, handoff, offload)
    if not bad:
        proven = Proven(snapshot.now, trial.number, digest, about, handoff.sentence, offload.sentence if offload else "")
    return Record(name, trial, proven, newest=_number(newest))


def _ended(snapshot: Snapshot, job: ChildFact) -> tuple[Verdict, Verdict | None, str] | None:
    """What a canary found, and a hash of its evidence; None while it has not ended."""
    cached = snapshot.spec.lmcache is not None
    pods = _pods(snapshot, job)
    texts = [c.exit_message for p in pods for c in p.containers if c.exit_code is not None]
    if texts:
        seen = proof.read(texts[-1])
        if seen is not None:
            digest = hashlib.sha256(texts[-1].encode()).hexdigest()[:16]
            return proof.judge_handoff(seen), proof.judge_offload(seen) if cached else None, digest
        said = " ".join(texts[-1].split())[-300:]
        return _nothing(cached, f"Job {job.name} left no evidence: {said or 'its pod said nothing'}")
    fact = job.job
    if fact is None or not fact.ended or (fact.ended_at and (snapshot.now - fact.ended_at).total_seconds() < EVIDENCE_WAIT):
        return None
    stuck = _blocked(snapshot, job)
    if stuck:
        return _nothing(cached, stuck.sentence, stuck.reason)
    return _nothing(cached, f"Job {job.name} ended without evidence: {fact.message or fact.ended}")


def _nothing(cached: bool, sentence: str, reason: Reason = Reason.CANARY_FAILED) -> tuple[Verdict, Verdict | None, str]:
    offload = Verdict(None, Reason.NOT_YET_RUN, f"not judged: {sentence}") if cached else None
    return Verdict(False, reason, sentence), offload, ""


def _blocked(snapshot: Snapshot, job: ChildFact) -> Verdict | None:
    """Why a Job that is old enough has not started: it has no pod, or one that finds no node or no image."""
    if job.created is None or (snapshot.now - job.created).total_seconds() < POD_WAIT:
        return None
    pods = _pods(snapshot, job)
    if not pods and (told := _halted(snapshot, job)):  # its pod went, at the Job's deadline, and the Job is about to say so
        return Verdict(False, Reason.CANARY_FAILED, told)
    if not pods and not (job.job and job.job.pods):
        sentence = (
            f"Job {job.name} got no pod in {POD_WAIT:.0f} s: a quota, Pod Security or a webhook refuses it; "
            f"see: kubectl -n {job.namespace} describe job {job.name}; {WAYS_OUT}"
        )
        return Verdict(False, Reason.CANARY_FORBIDDEN, sentence)
    cause = diagnosis.diagnose([p for p in pods if diagnosis.is_blocked(p) or diagnosis.gated([p])])
    if cause is None:
        return None
    where = "the canary takes imagePullSecrets, nodeSelector and tolerations from spec.router.template.spec"
    return Verdict(False, Reason.CANARY_FAILED, f"Job {job.name} {HALTED}{cause[1]}; {where}; {WAYS_OUT}")


def _halted(snapshot: Snapshot, job: ChildFact) -> str:
    """Why a Job never started, as status told it: with its pod goes what said so."""
    for condition in snapshot.status.get("conditions", ()):
        if condition["type"] == Type.HANDOFF_VERIFIED:
            _, found, why = str(condition.get("message", "")).partition(f"Job {job.name} {HALTED}")
            return f"{found}{why}"
    return ""


def _sentence(record: Record) -> str:
    """What stands in the way of a slice's proof."""
    if record.blocked is not None:
        return f"{record.blocked.reason}: {record.blocked.sentence}"
    if record.trial is None:
        return ""
    verdicts = [v for v in (record.trial.handoff, record.trial.offload) if v is not None and v.proven is False]
    return "; ".join(f"{v.reason}: {v.sentence}" for v in verdicts)


def _jobs(snapshot: Snapshot) -> dict[str, list[ChildFact]]:
    """Slice -> its canary Jobs, the newest last."""
    found: dict[str, list[ChildFact]] = {}
    for child in sorted((c for c in snapshot.children if c.kind == "Job" and not c.deleting), key=_number):
        found.setdefault(child.labels.get(SLICE, ""), []).append(child)
    return found


def _pods(snapshot: Snapshot, job: ChildFact) -> list[PodFact]:
    wanted = {SLICE: job.labels.get(SLICE), CANARY: job.labels.get(CANARY), REVISION: job.labels.get(REVISION), COMPONENT: "canary"}
    mine = [p for p in snapshot.pods if p.owner_uid == job.uid and all(p.labels.get(k) == v for k, v in wanted.items())]
    return sorted(mine, key=lambda p: p.name)


def _number(job: ChildFact) -> int:
    text = job.labels.get(CANARY, "")
    return int(text) if text.isdigit() else 0


def _trial(found: Mapping[str, Any]) -> Trial | None:
    handoff, at = _read(found, "handoff"), _time(found.get("at"))
    if handoff is None or at is None:
        return None
    failures, number = int(found.get("failures", 0)), int(found.get("number", 0))
    return Trial(number, at, str(found.get("about", "")), failures, handoff, _read(found, "offload"))


def _proven(found: Mapping[str, Any]) -> Proven | None:
    at = _time(found.get("at"))
    if at is None:
        return None
    texts = [str(found.get(key, "")) for key in ("evidence", "about", "handoff", "offload")]
    return Proven(at, int(found.get("canary", 0)), *texts)


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None


def _written(at: datetime) -> str:
    return at.strftime("%Y-%m-%dT%H:%M:%SZ")


def newest_jobs(children: Iterable[ChildFact]) -> frozenset[str]:
    """Names of the Jobs that stay: the newest of each slice."""
    newest: dict[str, ChildFact] = {}
    for child in children:
        slice_ = child.labels.get(SLICE, "")
        if child.kind == "Job" and (slice_ not in newest or _number(child) > _number(newest[slice_])):
            newest[slice_] = child
    return frozenset(c.name for c in newest.values())
