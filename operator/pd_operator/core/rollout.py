"""From one revision to the next: which slices exist, which of them serve, which go (invariant I3: they never pair).

    new slice dark -> ready -> its routers take the front label -> they are all ready -> old routers go -> old engines go

Where both do not fit the old slice goes first; with `Recreate` always. A third revision waits until nothing is left of the
second. A router only sees the engines of its own slice, so at no step do a prefill and a decode of two revisions serve one
request.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pd_operator.api.conditions import Reason
from pd_operator.api.scalars import quantity
from pd_operator.core import diagnosis
from pd_operator.core.names import FRONT, ROLES, SLICE, slice_name
from pd_operator.core.observed import ChildFact
from pd_operator.core.snapshot import ROUTER, Snapshot

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


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """Slices, the target first, and how the rollout stands."""

    slices: tuple[SlicePlan, ...]
    reason: Reason
    message: str


def plan_rollout(snapshot: Snapshot, revision: str) -> RolloutPlan:
    """Decide over the slices of a snapshot whose spec asks for `revision`."""
    name = slice_name(snapshot.name, revision)
    workloads = snapshot.deployments()
    target = workloads.get(name, {})
    old = {s: d for s, d in workloads.items() if s != name}
    if not old:
        front = SlicePlan(name, revision, State.SERVING, front=True)
        return RolloutPlan((front,), *_own_progress(snapshot, name, target))
    gone = tuple(_remove(snapshot, s) for s in old)
    if snapshot.spec.suspend:  # no slice can get ready now, so none waits for another
        return RolloutPlan((SlicePlan(name, revision, State.SERVING, front=True), *gone), *_own_progress(snapshot, name, target))
    if snapshot.spec.rollout.type == "Recreate":
        kept = (SlicePlan(name, revision, State.DARK, front=True),) if target else ()  # what was begun before is not thrown away
        return RolloutPlan((*kept, *gone), Reason.ROLLING_OUT, f"Recreate: {', '.join(old)} ends before {name} starts")
    return _replace(snapshot, name, revision, target, old)


def hold(snapshot: Snapshot, reason: Reason) -> RolloutPlan:
    """The slices as they are, for a spec that is refused: nothing is made and nothing ends."""
    slices = []
    for name, parts in snapshot.deployments().items():
        front = has_front(parts.get(ROUTER))
        slices.append(SlicePlan(name, snapshot.revision_of(name), State.SERVING if front else State.DARK, front=front))
    return RolloutPlan(tuple(slices), reason, "nothing is changed until the spec is accepted")


def _replace(
    snapshot: Snapshot, name: str, revision: str, target: Mapping[str, ChildFact], old: Mapping[str, Mapping[str, ChildFact]]
) -> RolloutPlan:
    serving = _stays({s: d for s, d in old.items() if has_front(d.get(ROUTER))})
    others = tuple(_remove(snapshot, s) for s in old if s not in serving)
    fronted = has_front(target.get(ROUTER))
    if fronted and complete(target):
        slices = (SlicePlan(name, revision, State.SERVING, front=True), *(_remove(snapshot, s) for s in serving), *others)
        return RolloutPlan(slices, Reason.ROLLING_OUT, f"{name} serves; ending {', '.join(old)}")
    keep = tuple(SlicePlan(s, snapshot.revision_of(s), State.SERVING, front=True) for s in serving)
    if complete(target) or fronted:
        slices = (SlicePlan(name, revision, State.DARK, front=True), *keep, *others)
        return RolloutPlan(slices, Reason.ROLLING_OUT, f"{name} is ready; its routers join the front door")
    ending = _ending(snapshot, {name, *serving})
    if ending and not target:
        message = f"{', '.join(ending)} ends before {name} starts; {', '.join(serving) or 'nothing'} serves"
        return RolloutPlan((*keep, *others), Reason.ROLLING_OUT, message)
    missing = _missing(snapshot, name)
    if missing and not ending and not _patience(snapshot, name) and _frees(snapshot, revision, missing, serving):
        slices = (SlicePlan(name, revision, State.DARK), *(_remove(snapshot, s) for s in serving), *others)
        message = f"{name} does not fit beside {', '.join(old)} ({missing}); the old slice ends first"
        return RolloutPlan(slices, Reason.NO_CAPACITY_FOR_PAIR, message)
    front = not serving  # nobody serves: do not wait in the dark
    slices = (SlicePlan(name, revision, State.DARK, front=front), *keep, *others)
    serves = f"{', '.join(serving) or 'nothing'} serves"
    if missing:
        ways = f"{', '.join(ending)} is still ending" if ending else "free or add them, or set rollout.type: Recreate"
        return RolloutPlan(slices, Reason.NO_CAPACITY_FOR_PAIR, f"{name} finds no room ({missing}): {ways}; {serves}")
    return RolloutPlan(slices, Reason.ROLLING_OUT, f"{name} is starting{_trouble(snapshot, name)}; {serves}")


def has_front(router: ChildFact | None) -> bool:
    """Whether a router Deployment's pod template carries the front label."""
    return bool(router and router.workload and FRONT in router.workload.template_labels)


def settled(child: ChildFact | None) -> bool:
    """Whether a Deployment's pods are all of its current template, ready and available."""
    if child is None or child.workload is None or child.deleting:
        return False
    w = child.workload
    wanted = w.spec_replicas if w.spec_replicas is not None else 1
    return w.observed_generation >= child.generation and wanted > 0 and w.updated == w.replicas == w.ready == w.available == wanted


def complete(slice_: Mapping[str, ChildFact]) -> bool:
    """Whether prefill, decode and router of a slice are all settled."""
    return all(settled(slice_.get(part)) for part in (*ROLES, ROUTER))


def _remove(snapshot: Snapshot, slice_: str) -> SlicePlan:
    """Routers first: they finish their streams against engines that still run; engines when no router pod is left."""
    routers_left = bool(snapshot.pods_of(slice_, ROUTER)) or ROUTER in snapshot.deployments().get(slice_, {})
    return SlicePlan(slice_, snapshot.revision_of(slice_), State.REMOVING, keep_routers=False, keep_engines=routers_left)


def _stays(serving: Mapping[str, Mapping[str, ChildFact]]) -> list[str]:
    """Old slices that go on serving: a whole one if there is one, since two serve only while the second was taking over."""
    whole = [s for s, parts in serving.items() if complete(parts)]
    return whole[:1] or list(serving)


def _ending(snapshot: Snapshot, staying: Set[str]) -> list[str]:
    """Slices of which something is left, pods without a Deployment included: they hold room until they are gone."""
    pods = (p for p in snapshot.pods if p.phase not in ("Succeeded", "Failed"))
    left = {*snapshot.deployments(), *(p.labels.get(SLICE, "") for p in pods)}
    return sorted(left - staying - {""})


def _own_progress(snapshot: Snapshot, name: str, target: Mapping[str, ChildFact]) -> tuple[Reason, str]:
    if snapshot.spec.suspend:
        return Reason.SUSPENDED, "spec.suspend is true"
    if complete(target):
        return Reason.UPDATED, f"{name} is up to date"
    rolling = [r for r in ROLES if (d := target.get(r)) and d.workload and d.workload.updated < d.workload.replicas]
    blocked = _missing(snapshot, name, rolling)
    if blocked:
        ways = "free or add them, or set rollout.type: Recreate"
        return Reason.NO_CAPACITY_FOR_PAIR, f"a replacement pod of {name} finds no node ({blocked}): {ways}"
    return Reason.ROLLING_OUT, f"{name} is starting{_trouble(snapshot, name)}"


def _missing(snapshot: Snapshot, name: str, roles: Sequence[str] = ROLES) -> str:
    """What the scheduler lacks for the engines of a slice ("Insufficient nvidia.com/gpu"); "" when nothing."""
    message = diagnosis.unschedulable([p for role in roles for p in snapshot.pods_of(name, role)])
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
        (d.workload.spec_replicas or 0, role, snapshot.revision_of(s))
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


def _patience(snapshot: Snapshot, name: str) -> bool:
    """Whether a pod of the slice has waited so briefly that other pods or a new node may still make room for it."""
    waiting = [
        p for role in ROLES for p in snapshot.pods_of(name, role) if p.scheduling_reason == "Unschedulable" and not p.deleting
    ]
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


def _trouble(snapshot: Snapshot, name: str) -> str:
    """What holds up a slice, for the message; "" when nothing is known."""
    for part in (*ROLES, ROUTER):
        cause = diagnosis.diagnose(snapshot.pods_of(name, part))
        if cause and cause[0] is not Reason.STARTING:
            return f" ({part}: {cause[1]})"
    return ""
