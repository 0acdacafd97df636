"""Which children go: each for a reason that the plan confirms, and only ours (invariant I7)."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from pd_operator.core.names import COMPONENT, ROLE, SLICE, WORKLOADS
from pd_operator.core.observed import ChildFact
from pd_operator.core.plan import Plan
from pd_operator.core.slices import settled
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.verification import mode_of, newest_jobs

ORDER = (
    "HTTPRoute",
    "Job",
    *WORKLOADS,
    "Service",
    "RoleBinding",
    "Role",
    "ServiceAccount",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "ControllerRevision",
)


@dataclass(frozen=True, slots=True)
class Deletion:
    """A child to delete; `uid` is the precondition."""

    kind: str
    name: str
    uid: str
    reason: str


def prune(snapshot: Snapshot, plan: Plan, desired: Set[tuple[str, str]]) -> list[Deletion]:
    """Children that are neither desired nor of a slice that the plan keeps. A PDPool never goes: it holds learned numbers."""
    slices = {s.name: s for s in plan.rollout.slices}
    found = []
    last_canaries = newest_jobs(snapshot.children) if mode_of(snapshot) != "Disabled" else frozenset()
    for child in snapshot.children:
        if child.deleting or child.owner_uid != snapshot.uid or child.kind not in ORDER or (child.kind, child.name) in desired:
            continue
        if child.kind == "ControllerRevision":
            if child.name not in plan.kept_revisions:
                found.append(Deletion(child.kind, child.name, child.uid, "older than the kept revisions"))
            continue
        if child.kind == "Job" and child.name not in last_canaries:
            found.append(Deletion(child.kind, child.name, child.uid, "not the last canary of its slice"))
            continue
        owner = slices.get(child.labels.get(SLICE, ""))
        if owner is None:
            found.append(Deletion(child.kind, child.name, child.uid, "no longer planned"))
        elif _replaced(snapshot, child, desired):
            found.append(Deletion(child.kind, child.name, child.uid, "a workload of another kind has taken over"))
        elif not (owner.keep_routers if _is_router(child) else owner.keep_engines):
            found.append(Deletion(child.kind, child.name, child.uid, f"slice {owner.name} ends"))
    return sorted(found, key=lambda d: (ORDER.index(d.kind), d.name))


def _replaced(snapshot: Snapshot, child: ChildFact, desired: Set[tuple[str, str]]) -> bool:
    """A role's former workload, once the one of the other kind (`nodes` went to 1 or from it) is ready; with Recreate at once."""
    if child.kind not in WORKLOADS or ROLE not in child.labels or not any((kind, child.name) in desired for kind in WORKLOADS):
        return False
    heir = next((c for c in snapshot.children if c.kind in WORKLOADS and c.name == child.name and c.kind != child.kind), None)
    return snapshot.spec.rollout.type == "Recreate" or settled(heir)


def _is_router(child: ChildFact) -> bool:
    return child.kind == "Deployment" and child.labels.get(COMPONENT) == ROUTER
