"""The chain of one PDDeployment: model -> placement -> prefill, decode, router -> handoff -> offload -> door.

A pure function from what was read to a document. Each link says what is known (ok, not, unknown), by what, since when, and what
to do next. The status is what the operator last wrote; pods are looked at too, since an operator that is down leaves a status
that was true once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from enum import StrEnum
from typing import Any

from pd_operator.api.conditions import Reason, Type
from pd_operator.core import diagnosis
from pd_operator.core.names import COMPONENT, FRONT, ROLE, ROLES, SLICE
from pd_operator.core.observed import PodFact
from pd_operator.core.verified import OFF
from pd_operator.kube.seen import Seen
from pd_operator.plugin.next_steps import NOT_SEEN, UNPROVEN, fill, next_steps
from pd_operator.plugin.terminal import age, instant

EVENTS = 5  # that are told
PODS = 12  # that are told a part; those that are not ready first
GOOD: Mapping[str, str] = {Type.DEGRADED: "False", Type.UPDATE_AVAILABLE: "False"}
PARTS = (*ROLES, "router")
LINKS = (
    ("model", Type.ACCEPTED),
    ("placement", Type.PLACED),
    ("prefill", Type.PREFILL_READY),
    ("decode", Type.DECODE_READY),
    ("router", Type.ROUTER_READY),
    ("handoff", Type.HANDOFF_VERIFIED),
    ("offload", Type.OFFLOAD_VERIFIED),
)
BLIND = ("NotScraped", "SignalsUnknown", "NoSeries")  # reasons of ScalingActive that somebody should look at


class Verdict(StrEnum):
    """What is known of a link."""

    OK = "ok"
    NOT = "not"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Link:
    """One link of the chain, or a note beside it. `age` is seconds since the verdict is this."""

    name: str
    verdict: Verdict
    reason: str
    evidence: str
    since: str = ""
    age: int | None = None
    next: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PodLine:
    """One pod; `why` is what keeps it from being ready. `age` in seconds."""

    part: str
    name: str
    ready: bool
    slice: str
    node: str
    restarts: int
    age: int | None
    why: str = ""


@dataclass(frozen=True, slots=True)
class EventLine:
    """One event; `age` in seconds since it was last seen."""

    age: int | None
    type: str
    reason: str
    object: str
    note: str
    count: int


@dataclass(frozen=True, slots=True)
class Chain:
    """Everything that `kubectl pdd status` says."""

    namespace: str
    name: str
    ready: bool
    headline: str
    first: str  # the step to take first; "" where there is none
    facts: Mapping[str, Any]
    links: tuple[Link, ...]
    notes: tuple[Link, ...] = ()
    pods: tuple[PodLine, ...] = ()
    pods_untold: int = 0
    events: tuple[EventLine, ...] = ()
    unread: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """The same as JSON values."""
        return asdict(self)


def chain(seen: Seen) -> Chain:
    """What is known of one PDDeployment."""
    conditions = {str(c.get("type")): c for c in seen.status.get("conditions") or ()}
    if not conditions:
        nobody = (Link("model", Verdict.UNKNOWN, "", "no operator has said anything about it yet", next=NOT_SEEN),)
        made = _since(seen, seen.deployment["metadata"].get("creationTimestamp"))
        text = f"no operator has looked at it, {age(made)} after it was made"
        return Chain(seen.namespace, seen.name, False, text, NOT_SEEN[0], _facts(seen), nobody, unread=seen.unread)
    links = (*(_link(seen, name, conditions[type_]) for name, type_ in LINKS if type_ in conditions), _door(seen, conditions))
    ready = conditions.get(Type.READY) or {}
    good = ready.get("status") == "True" and not _outdated(seen, ready) and all(x.verdict is not Verdict.NOT for x in links)
    pods = _pods(seen)
    return Chain(
        seen.namespace,
        seen.name,
        good,
        _headline(seen, ready, good, links),
        "" if good else _first(links),
        _facts(seen),
        links,
        (*_notes(seen, conditions), *_pool_notes(seen)),
        pods[0],
        pods[1],
        _events(seen),
        seen.unread,
    )


def _first(links: Sequence[Link]) -> str:
    """The first step of the first link that needs somebody, else of the first that needs time."""
    broken = [x for x in links if x.verdict is not Verdict.OK and x.next]
    patient = (Reason.STARTING, Reason.NOT_DISCOVERED)
    ordered = sorted(broken, key=lambda x: (x.verdict is Verdict.UNKNOWN, x.reason in patient))
    return ordered[0].next[0] if ordered else ""


def _headline(seen: Seen, ready: Mapping[str, Any], good: bool, links: Sequence[Link]) -> str:
    if good:
        return str(ready.get("message", ""))
    if ready.get("status") != "True":
        return f"{ready.get('reason', '')}: {ready.get('message', '')}"
    if _outdated(seen, ready):
        return f"generation {seen.deployment['metadata'].get('generation')} has not been looked at yet"
    first = next(x for x in links if x.verdict is Verdict.NOT)
    return f"the status says Ready, what is there says no: {first.name}: {first.evidence}"


def _facts(seen: Seen) -> dict[str, Any]:
    spec, status = seen.deployment.get("spec") or {}, seen.status
    scaling = spec.get("scaling")
    return {
        "model": (spec.get("model") or {}).get("uri", ""),
        "engine": " ".join(str((spec.get("engine") or {}).get(k, "")) for k in ("type", "version")),
        "router": (spec.get("router") or {}).get("type", "smg"),
        "scaling": scaling.get("mode", "Auto") if scaling else "Static",
        "generation": seen.deployment["metadata"].get("generation"),
        "observedGeneration": status.get("observedGeneration"),
        "revision": status.get("currentRevision", ""),
        "updatedRevision": status.get("updatedRevision", ""),
        "url": status.get("url", ""),
        "deleting": seen.deployment["metadata"].get("deletionTimestamp", ""),
        "roles": {str(r.get("name")): str(r.get("ready", "")) for r in status.get("roles") or ()},
    }


def _outdated(seen: Seen, condition: Mapping[str, Any]) -> bool:
    return (condition.get("observedGeneration") or 0) < (seen.deployment["metadata"].get("generation") or 0)


def _seconds(then: datetime, now: datetime) -> int:
    return max(0, int((now - then).total_seconds()))


def _since(seen: Seen, when: object) -> int | None:
    then = instant(when)
    return None if then is None else _seconds(then, seen.now)


def _link(seen: Seen, name: str, condition: Mapping[str, Any]) -> Link:
    """A link from its condition; what the pods show now goes before a status that says something else."""
    reason, since = str(condition.get("reason", "")), str(condition.get("lastTransitionTime", ""))
    status, evidence = condition.get("status"), str(condition.get("message", ""))
    verdict = (
        Verdict.UNKNOWN
        if status == "Unknown"
        else Verdict.OK
        if status == GOOD.get(str(condition.get("type")), "True")
        else Verdict.NOT
    )
    mine = _part(seen, name)
    suspended = seen.deployment.get("spec", {}).get("suspend") and reason == Reason.STARTING  # nothing starts, and nothing should
    steps = () if verdict is Verdict.OK or suspended else tuple(next_steps(reason, _known(seen, mine, evidence)))
    if reason == Reason.NOT_YET_RUN and evidence == OFF:
        steps = tuple(fill(UNPROVEN, _known(seen, ())))  # no canary comes by itself
    if _outdated(seen, condition):
        said = f"of generation {condition.get('observedGeneration')} it was said: {evidence}"
        return Link(name, Verdict.UNKNOWN, reason, said, since, _since(seen, since), (*steps, *fill(NOT_SEEN, _known(seen, mine))))
    if name in PARTS and "pods" not in seen.unread and verdict is Verdict.OK and not any(_serves(p) for p in mine):
        evidence = f"status says {evidence!r}, and of {len(mine)} pods none is ready now: does the operator run?"
        return Link(name, Verdict.NOT, reason, evidence, since, _since(seen, since), (*fill(NOT_SEEN, {}), *_pod_steps(seen, mine)))
    return Link(name, verdict, reason, evidence, since, _since(seen, since), steps)


def _serves(pod: PodFact) -> bool:
    return pod.ready and not pod.deleting


def _part(seen: Seen, name: str) -> list[PodFact]:
    """Pods of prefill, decode or router; for the other links those of both roles."""
    names = (name,) if name in PARTS else ROLES
    return [p for p in seen.pods if _part_of(p) in names]


def _part_of(pod: PodFact) -> str:
    return pod.labels.get(ROLE) or pod.labels.get(COMPONENT, "")


def _known(seen: Seen, pods: Sequence[PodFact], message: str = "") -> dict[str, str]:
    """What a next step can name: the pod that the message is about, else the first that is not ready, and its container."""
    waiting = [p for p in pods if not p.ready and not p.deleting]
    pod = next((p for p in waiting if p.name in message), waiting[0] if waiting else None)
    known = {"namespace": seen.namespace, "name": seen.name}
    if pod is None:
        return known
    known["pod"] = pod.name
    bad = next((c for c in pod.containers if not c.ready), None)
    return known | ({"container": bad.name} if bad else {})


def _pod_steps(seen: Seen, pods: Sequence[PodFact]) -> list[str]:
    cause = diagnosis.diagnose(pods)
    return next_steps(cause[0], _known(seen, pods, cause[1])) if cause else []


def _door(seen: Seen, conditions: Mapping[str, Mapping[str, Any]]) -> Link:
    """The front Service: whether it leads to a router that is ready."""
    ready = conditions.get(Type.READY) or {}
    serving = [s for s in seen.status.get("slices") or () if s.get("state") == "Serving"]
    fronts = [p for p in seen.pods if FRONT in p.labels and _serves(p)]
    told = ", ".join(_slice(s) for s in serving)
    since, router = str(ready.get("lastTransitionTime", "")), conditions.get(Type.ROUTER_READY) or {}
    lasts, url = _since(seen, since), str(seen.status.get("url", ""))
    if not serving or ("pods" not in seen.unread and not fronts):
        why = (
            "no slice takes traffic"
            if not serving
            else f"status says that {told} takes traffic, and no router pod that does is ready"
        )
        reason = str(ready.get("reason", "")) if ready.get("status") != "True" else str(router.get("reason", ""))
        see = () if not serving else tuple(fill(NOT_SEEN, {}))
        return Link("door", Verdict.NOT, reason, f"{url}: {why}; clients get a refused connection", since, lasts, see)
    pods = f"{len(fronts)} router pods ready" if "pods" not in seen.unread else "router pods not read"
    still = "" if ready.get("status") == "True" else "; not Ready all the same"
    return Link("door", Verdict.OK, Reason.READY, f"{url}: {pods}, {told}{still}", since, lasts)


def _slice(found: Mapping[str, Any]) -> str:
    domain = f" in {found['domain']}" if found.get("domain") else ""
    return f"slice {found.get('name')}{domain} ({found.get('prefill', 0)} prefill, {found.get('decode', 0)} decode ready)"


def _notes(seen: Seen, conditions: Mapping[str, Mapping[str, Any]]) -> list[Link]:
    """What is worth saying beside the chain: a rollout under way, what is degraded, an update."""
    shown = {Type.PROGRESSING: "rollout", Type.DEGRADED: "degraded", Type.UPDATE_AVAILABLE: "update"}
    notes = []
    for type_, name in shown.items():
        condition = conditions.get(type_) or {}
        quiet = condition.get("status") == GOOD.get(type_, "True") and condition.get("reason") != Reason.ROLLING_OUT
        repeats = type_ is Type.PROGRESSING and (conditions.get(Type.ACCEPTED) or {}).get("status") == "False"
        if condition and not quiet and not repeats and condition.get("reason") != Reason.SUSPENDED:
            note = _link(seen, name, condition)
            notes.append(replace(note, verdict=Verdict.OK) if type_ is Type.UPDATE_AVAILABLE else note)
    if when := seen.deployment["metadata"].get("deletionTimestamp"):
        notes.append(
            Link("deleting", Verdict.NOT, "", "the object is being deleted, and its pods with it", str(when), _since(seen, when))
        )
    return notes


def _pool_notes(seen: Seen) -> list[Link]:
    """What keeps a pool from its number, and a law that does not see."""
    notes = []
    more = (f"kubectl pdd explain {seen.name} -n {seen.namespace}",)
    for role, obj in seen.pools.items():
        for c in (obj.get("status") or {}).get("conditions") or ():
            limited = c.get("type") == "ScalingLimited" and c.get("status") == "True"
            blind = c.get("type") == "ScalingActive" and c.get("status") == "False" and c.get("reason") in BLIND
            if limited or blind:
                since = str(c.get("lastTransitionTime", ""))
                text = str(c.get("message", ""))
                notes.append(Link(f"scaling of {role}", Verdict.UNKNOWN, str(c["reason"]), text, since, _since(seen, since), more))
    return notes


def _pods(seen: Seen) -> tuple[tuple[PodLine, ...], int]:
    """Lines of each part, those that are not ready first, and how many are left out."""
    told: list[PodLine] = []
    for part in PARTS:
        mine = sorted((p for p in seen.pods if _part_of(p) == part), key=lambda p: (p.ready and not p.deleting, p.name))
        told += [_pod(seen, part, p) for p in mine[:PODS]]
    others = sum(1 for p in seen.pods if _part_of(p) not in PARTS)
    return tuple(told), len(seen.pods) - others - len(told)


def _pod(seen: Seen, part: str, pod: PodFact) -> PodLine:
    cause = diagnosis.diagnose([pod])
    why = "ends" if pod.deleting else f"{cause[0]}: {cause[1].removeprefix(f'pod {pod.name}').lstrip(': ')}" if cause else ""
    lives = None if pod.created is None else _seconds(pod.created, seen.now)
    restarts = sum(c.restarts for c in pod.containers)
    return PodLine(part, pod.name, _serves(pod), pod.labels.get(SLICE, ""), pod.node, restarts, lives, why)


def _events(seen: Seen) -> tuple[EventLine, ...]:
    """The newest warnings, then the newest others, the last one first; of two about the same only the newer."""
    told: dict[tuple[str, str, str], EventLine] = {}
    for when, event in sorted(((_seen_last(e), e) for e in seen.events), key=lambda x: str(x[0]), reverse=True):
        about = event.get("regarding") or {}
        key = (str(about.get("kind")), str(about.get("name")), str(event.get("reason")))
        count = int((event.get("series") or {}).get("count") or event.get("deprecatedCount") or 1)
        note = " ".join(str(event.get("note", "")).split())
        ago = None if when is None else _seconds(when, seen.now)
        told.setdefault(key, EventLine(ago, str(event.get("type", "")), key[2], f"{key[0]}/{key[1]}", note, count))
    kept = sorted(told, key=lambda key: told[key].type != "Warning")[
        :EVENTS
    ]  # that a pod was scheduled must not hide why one was not
    return tuple(line for key, line in told.items() if key in kept)


def _seen_last(event: Mapping[str, Any]) -> datetime | None:
    """When it was last seen: events of old recorders have other fields."""
    series = event.get("series") or {}
    for value in (series.get("lastObservedTime"), event.get("deprecatedLastTimestamp"), event.get("eventTime")):
        if value and (found := instant(value)):
            return found
    return instant((event.get("metadata") or {}).get("creationTimestamp"))
