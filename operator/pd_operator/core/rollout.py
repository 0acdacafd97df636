"""From one set of slices to the next: which exist, which of them serve, which go (invariant I3: they never pair).

    new slices dark -> ready -> proven -> their routers take the front label -> all ready -> old routers go -> old engines go

A revision has one slice, or one per transfer domain. Where both revisions do not fit the old one goes first; with `Recreate`
always. A third revision waits until nothing is left of the second. A router only sees the engines of its own slice, so at no
step do a prefill and a decode of two revisions, or of two domains, serve one request.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pd_operator.api.conditions import Reason
from pd_operator.api.scalars import quantity
from pd_operator.core import diagnosis
from pd_operator.core.names import ROLES, SLICE, Role
from pd_operator.core.observed import ChildFact, PodFact
from pd_operator.core.sites import Site, SliceTarget
from pd_operator.core.slices import complete, has_front, usable
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.verification import OPEN, Gate
from pd_operator.core.weights import capacity, fitting

PATIENCE = 30.0  # seconds that a pod is unschedulable before a serving slice ends for it


class State(StrEnum):
    """State of a slice, as status shows it."""

    DARK = "Dark"
    SERVING = "Serving"
    REMOVING = "Removing"


@dataclass(frozen=True, slots=True)
class SlicePlan:
    """One slice and what becomes of it."""

    name: str
    revision: str
    state: State
    front: bool = False  # its router pods carry the front label
    keep_routers: bool = True
    keep_engines: bool = True
    replicas: Mapping[Role, int] | None = None  # None: its workloads stay as they are
    site: Site = field(default_factory=Site)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Slices, those of the current revision first, and how the rollout stands."""

    slices: tuple[SlicePlan, ...]
    reason: Reason
    message: str


def plan_rollout(
    snapshot: Snapshot, revision: str, targets: Sequence[SliceTarget], lacking: str = "", gate: Gate = OPEN
) -> RolloutPlan:
    """Decide over the slices of a snapshot whose spec asks for `targets`, all of `revision`.

    Args:
        lacking: what the transfer domains lack for a pair ("Insufficient nvidia.com/gpu"), for pods of which the scheduler
            says less because we keep them off nodes that would take only one role.
        gate: which slices may serve; one that serves already keeps serving.
    """
    workloads = snapshot.deployments()
    names = {t.name for t in targets}
    leaving = [s for s in workloads if s not in names and snapshot.revision_of(s) == revision]
    old = {s: d for s, d in workloads.items() if s not in names and s not in leaving}
    if not old:
        return _own(snapshot, revision, targets, leaving, lacking, gate)
    gone = tuple(_remove(snapshot, s) for s in old)
    if snapshot.spec.suspend:  # no slice can get ready now, so none waits for another
        own = _own(snapshot, revision, targets, leaving, lacking, gate)
        return RolloutPlan((*own.slices, *gone), own.reason, own.message)
    if snapshot.spec.rollout.type == "Recreate":
        begun = [t for t in targets if t.name in workloads]  # what was begun before is not thrown away
        kept = _all(begun, revision, State.DARK, _lit(snapshot, targets, gate))
        others = tuple(_remove(snapshot, s) for s in leaving)
        message = f"Recreate: {', '.join(old)} ends before {_names(targets)} starts"
        return RolloutPlan((*kept, *others, *gone), Reason.ROLLING_OUT, message)
    return _replace(snapshot, revision, targets, leaving, old, lacking, gate)


def hold(snapshot: Snapshot, reason: Reason) -> RolloutPlan:
    """The slices as they are, for a spec that is refused: nothing is made and nothing ends."""
    slices = []
    for name, parts in snapshot.deployments().items():
        front = has_front(parts.get(ROUTER))
        slices.append(SlicePlan(name, snapshot.revision_of(name), State.SERVING if front else State.DARK, front=front))
    return RolloutPlan(tuple(slices), reason, "nothing is changed until the spec is accepted")


def _own(
    snapshot: Snapshot, revision: str, targets: Sequence[SliceTarget], leaving: Sequence[str], lacking: str, gate: Gate
) -> RolloutPlan:
    """Only slices of the current revision exist: a further one joins the front door when it is complete and proven."""
    workloads = snapshot.deployments()
    stays, going = _leave(snapshot, targets, leaving)
    ends = {s.name for s in going}  # what goes now is nobody to wait for, or routers would start dark only to be rolled at once
    fronted = {s for s, parts in workloads.items() if s not in ends and has_front(parts.get(ROUTER))}
    lit = _lit(snapshot, targets, gate)
    slices = []
    for target in targets:
        alone = not fronted - {target.name}  # nobody else serves: do not wait in the dark for the last replica
        front = target.name in lit and (alone or target.name in fronted or complete(workloads.get(target.name, {}), target.placed))
        slices.append(_target(target, revision, State.SERVING if front else State.DARK, front=front))
    ending = [s.name for s in (*stays, *going)]
    return RolloutPlan((*slices, *stays, *going), *_own_progress(snapshot, targets, ending, lacking, gate))


def _leave(
    snapshot: Snapshot, targets: Sequence[SliceTarget], leaving: Sequence[str]
) -> tuple[tuple[SlicePlan, ...], tuple[SlicePlan, ...]]:
    """Slices of the current revision that are not wanted any more: those that serve go when all others are complete.

    Replicas for which there is no room are not waited for, or a move to where more of them fit would never end.
    """
    workloads, joins = snapshot.deployments(), _joins(snapshot, targets)
    done = all(
        complete(parts := workloads.get(t.name, {}), t.placed) and (has_front(parts.get(ROUTER)) or t.name not in joins)
        for t in targets
    )
    kept = [s for s in leaving if not done and not snapshot.spec.suspend and _serves(snapshot, s)]
    stays = tuple(SlicePlan(s, snapshot.revision_of(s), State.SERVING, front=True) for s in kept)
    return stays, tuple(_remove(snapshot, s) for s in leaving if s not in kept)


def _joins(snapshot: Snapshot, targets: Sequence[SliceTarget]) -> frozenset[str]:
    """Targets that may take traffic: all with a gateway, which weights them; else those that a plain Service does justice to."""
    names = [t.name for t in targets]
    if snapshot.spec.gateway is not None:
        return frozenset(names)
    pool = (sum(t.replicas["prefill"] for t in targets), sum(t.replicas["decode"] for t in targets))
    workloads = snapshot.deployments()
    able = {t.name: capacity(t.replicas["prefill"], t.replicas["decode"], pool) for t in targets}
    return frozenset(fitting(able, [n for n in names if has_front(workloads.get(n, {}).get(ROUTER))]))


def _lit(snapshot: Snapshot, targets: Sequence[SliceTarget], gate: Gate) -> frozenset[str]:
    """Those of them that may carry the front label now: proven, or at the front door already."""
    return _joins(snapshot, targets) - {*_dark(snapshot, targets, gate)}


def _dark(snapshot: Snapshot, targets: Sequence[SliceTarget], gate: Gate) -> list[str]:
    """Targets that wait for a proof."""
    workloads, joins = snapshot.deployments(), _joins(snapshot, targets)
    waiting = [t.name for t in targets if t.name in joins and not gate.opens(t.name)]
    return [name for name in waiting if not has_front(workloads.get(name, {}).get(ROUTER))]


def _serves(snapshot: Snapshot, name: str) -> bool:
    """Whether a slice answers requests: a router at the front door, a ready prefill and a ready decode."""
    parts = snapshot.deployments().get(name, {})
    ready = [bool((w := parts[role].workload) and w.ready) for role in ROLES if role in parts]
    return has_front(parts.get(ROUTER)) and len(ready) == len(ROLES) and all(ready)


def _replace(
    snapshot: Snapshot,
    revision: str,
    targets: Sequence[SliceTarget],
    leaving: Sequence[str],
    old: Mapping[str, Mapping[str, ChildFact]],
    lacking: str,
    gate: Gate,
) -> RolloutPlan:
    workloads, name = snapshot.deployments(), _names(targets)
    mine = [workloads.get(t.name, {}) for t in targets]
    serving = _stays(snapshot, {s: d for s, d in old.items() if has_front(d.get(ROUTER))})
    stays, going = _leave(snapshot, targets, leaving)
    others = (*stays, *going, *(_remove(snapshot, s) for s in old if s not in serving))
    joins, whole = _joins(snapshot, targets), all(map(_whole, mine, targets))
    fronted = all(has_front(workloads.get(n, {}).get(ROUTER)) for n in joins)
    if fronted and whole:
        slices = _all(targets, revision, State.SERVING, joins) + tuple(_remove(snapshot, s) for s in serving)
        return RolloutPlan((*slices, *others), Reason.ROLLING_OUT, f"{name} serves; ending {', '.join(old)}")
    keep = tuple(SlicePlan(s, snapshot.revision_of(s), State.SERVING, front=True) for s in serving)
    dark = _dark(snapshot, targets, gate)
    if fronted or (whole and not dark):
        slices = (*_all(targets, revision, State.DARK, joins), *keep, *others)
        return RolloutPlan(slices, Reason.ROLLING_OUT, f"{name} is ready; its routers join the front door")
    names = [t.name for t in targets]
    ending = _ending(snapshot, {*names, *serving, *(s.name for s in stays)})
    if ending and not any(mine):
        message = f"{', '.join(ending)} ends before {name} starts; {', '.join(serving) or 'nothing'} serves"
        return RolloutPlan((*keep, *others), Reason.ROLLING_OUT, message)
    missing = _missing(snapshot, names) or (lacking if _waiting(snapshot, names) else "")
    if missing and not ending and not _patience(snapshot, names) and _frees(snapshot, revision, missing, serving):
        slices = (*_all(targets, revision, State.DARK), *(_remove(snapshot, s) for s in serving), *others)
        message = f"{name} does not fit beside {', '.join(old)} ({missing}); the old slice ends first"
        return RolloutPlan(slices, Reason.NO_CAPACITY_FOR_PAIR, message)
    lit = frozenset() if serving else _lit(snapshot, targets, gate)  # nobody serves: do not wait for the last replica
    reason, message = Reason.ROLLING_OUT, f"{name} is starting{_trouble(snapshot, names)}"
    if whole:
        reason, message = gate.stands(dark)
    elif missing:
        ways = f"{', '.join(ending)} is still ending" if ending else "free or add them, or set rollout.type: Recreate"
        reason, message = Reason.NO_CAPACITY_FOR_PAIR, f"{name} finds no room ({missing}): {ways}"
    slices = (*_all(targets, revision, State.DARK, lit), *keep, *others)
    return RolloutPlan(slices, reason, f"{message}; {', '.join(serving) or 'nothing'} serves")


def _whole(parts: Mapping[str, ChildFact], target: SliceTarget) -> bool:
    """Whether a slice has all that it should have, what finds no room now included."""
    counts = {role: w.spec_replicas for role in ROLES if role in parts and (w := parts[role].workload)}
    return complete(parts) and counts == dict(target.replicas)


def _target(target: SliceTarget, revision: str, state: State, front: bool = False) -> SlicePlan:
    return SlicePlan(target.name, revision, state, front=front, replicas=target.replicas, site=target.site)


def _all(targets: Sequence[SliceTarget], revision: str, state: State, lit: Set[str] = frozenset()) -> tuple[SlicePlan, ...]:
    """Plans for all targets; those in `lit` carry the front label."""
    return tuple(_target(t, revision, state if t.name in lit else State.DARK, t.name in lit) for t in targets)


def _names(targets: Iterable[SliceTarget]) -> str:
    return ", ".join(t.name for t in targets)


def _remove(snapshot: Snapshot, slice_: str) -> SlicePlan:
    """Routers first: they finish their streams against engines that still run; engines when no router pod is left."""
    routers_left = bool(snapshot.pods_of(slice_, ROUTER)) or ROUTER in snapshot.deployments().get(slice_, {})
    return SlicePlan(slice_, snapshot.revision_of(slice_), State.REMOVING, keep_routers=False, keep_engines=routers_left)


def _stays(snapshot: Snapshot, serving: Mapping[str, Mapping[str, ChildFact]]) -> list[str]:
    """Old slices that go on serving: those of a whole revision if there is one, since two serve only while one takes over."""
    revisions = {snapshot.revision_of(s): None for s in serving}
    mine = {r: [s for s in serving if snapshot.revision_of(s) == r] for r in revisions}
    whole = [slices for slices in mine.values() if all(complete(serving[s]) for s in slices)]
    return whole[0] if whole else list(serving)


def _ending(snapshot: Snapshot, staying: Set[str]) -> list[str]:
    """Slices of which something is left, pods without a Deployment included: they hold room until they are gone."""
    pods = (p for p in snapshot.pods if p.phase not in ("Succeeded", "Failed"))
    left = {*snapshot.deployments(), *(p.labels.get(SLICE, "") for p in pods)}
    return sorted(left - staying - {""})


def _own_progress(
    snapshot: Snapshot, targets: Sequence[SliceTarget], leaving: Sequence[str], lacking: str, gate: Gate
) -> tuple[Reason, str]:
    if snapshot.spec.suspend:
        return Reason.SUSPENDED, "spec.suspend is true"
    workloads, names = snapshot.deployments(), [t.name for t in targets]
    dark = _dark(snapshot, targets, gate)
    if dark and all(usable(workloads.get(n, {})) for n in names):
        return gate.stands(dark)
    if all(complete(workloads.get(n, {})) for n in names):
        return _arrived(snapshot, targets, leaving)
    for name in names:
        parts = workloads.get(name, {})
        rolling = [r for r in ROLES if (d := parts.get(r)) and d.workload and d.workload.updated < d.workload.replicas]
        blocked = _missing(snapshot, [name], rolling)
        if blocked:
            ways = "free or add them, or set rollout.type: Recreate"
            return Reason.NO_CAPACITY_FOR_PAIR, f"a replacement pod of {name} finds no node ({blocked}): {ways}"
    trouble = f" (no room: {lacking})" if lacking else _trouble(snapshot, names)
    return Reason.ROLLING_OUT, f"{_names(targets)} is starting{trouble}"


def _arrived(snapshot: Snapshot, targets: Sequence[SliceTarget], leaving: Sequence[str]) -> tuple[Reason, str]:
    if leaving:
        return Reason.ROLLING_OUT, f"{_names(targets)} serves; ending {', '.join(leaving)}"
    if small := sorted({t.name for t in targets} - _joins(snapshot, targets)):
        return Reason.WEIGHTS_NOT_ENFORCEABLE, _unweighted(targets, small)
    return Reason.UPDATED, f"{_names(targets)} is up to date"


def _unweighted(targets: Sequence[SliceTarget], dark: Sequence[str]) -> str:
    counts = ", ".join(f"{t.name} has {t.replicas['prefill']} + {t.replicas['decode']}" for t in targets)
    return (
        f"{', '.join(dark)} is ready and stays dark: behind the Service every slice gets the same share of the requests, which "
        f"the smallest could not serve ({counts} replicas); spec.gateway weights slices, or let the pools divide evenly"
    )


def _missing(snapshot: Snapshot, names: Sequence[str], roles: Sequence[str] = ROLES) -> str:
    """What the scheduler lacks for the engines of slices ("Insufficient nvidia.com/gpu"); "" when nothing."""
    message = diagnosis.unschedulable([p for name in names for role in roles for p in snapshot.engines_of(name, role)])
    found = sorted(set(re.findall(r"Insufficient ([A-Za-z0-9][A-Za-z0-9./_-]*[A-Za-z0-9])", message)))
    return ", ".join(f"Insufficient {resource}" for resource in found)


def _frees(snapshot: Snapshot, revision: str, missing: str, slices: Sequence[str]) -> bool:
    """Whether ending the slices frees enough of every missing resource for a pod of the new revision.

    Not a promise that the pod then fits (resources are counted over all nodes), but a pod that asks for more than the
    old slice holds can never be helped that way, so what serves is not ended for it.
    """
    resources = [part.removeprefix("Insufficient ") for part in missing.split(", ")]
    wanted = _templates(snapshot, revision)
    held = [
        ((d.workload.spec_replicas or 0) * d.workload.size, role, snapshot.revision_of(s))
        for s in slices
        for role, d in _engines(snapshot, s)
        if d.workload
    ]
    for resource in resources:
        needed = max((requested(t, resource) for t in wanted.values()), default=0.0)
        freed = sum(n * requested(_templates(snapshot, r).get(role, {}), resource) for n, role, r in held)
        if freed <= 0 or freed < needed:
            return False
    return bool(slices)


def _engines(snapshot: Snapshot, slice_: str) -> list[tuple[str, ChildFact]]:
    return [(role, d) for role, d in snapshot.deployments().get(slice_, {}).items() if role in ROLES]


def _templates(snapshot: Snapshot, revision: str) -> Mapping[str, Mapping[str, Any]]:
    """Newest stored pod templates of a revision, by role."""
    found = [r for r in snapshot.revisions if r.pairing == revision]
    return max(found, key=lambda r: r.number).templates if found else {}


def _waiting(snapshot: Snapshot, names: Sequence[str]) -> list[PodFact]:
    """Engine pods of slices that the scheduler finds no node for."""
    pods = (p for name in names for role in ROLES for p in snapshot.engines_of(name, role))
    return [p for p in pods if p.scheduling_reason == "Unschedulable" and not p.deleting]


def _patience(snapshot: Snapshot, names: Sequence[str]) -> bool:
    """Whether a pod has waited so briefly that other pods or a new node may still make room for it."""
    waiting = _waiting(snapshot, names)
    return any(p.scheduling_since and (snapshot.now - p.scheduling_since).total_seconds() < PATIENCE for p in waiting)


def requested(template: Mapping[str, Any], resource: str) -> float:
    """What one pod of a template requests of a resource, native sidecars included."""
    spec = template.get("spec") or {}
    total = 0.0
    for container in [*(spec.get("containers") or []), *(spec.get("initContainers") or [])]:
        resources = container.get("resources") or {}
        requests, limits = resources.get("requests") or {}, resources.get("limits") or {}
        total += float(quantity(requests.get(resource, limits.get(resource)) or 0))
    return total


def _trouble(snapshot: Snapshot, names: Sequence[str]) -> str:
    """What holds up slices, for the message; "" when nothing is known."""
    for name in names:
        for part in (*ROLES, ROUTER):
            cause = diagnosis.diagnose(snapshot.engines_of(name, part) if part in ROLES else snapshot.pods_of(name, part))
            if cause and cause[0] is not Reason.STARTING:
                return f" ({part}: {cause[1]})"
    return ""
