"""Old slices that go on serving while a rollout is under way: what is live in the spec reaches them too.

Their pod templates are those of their revision and stay. Their numbers follow the pools, and their routers follow `spec.router` as
long as it is the program that their revision was made with: whether another one pairs with the old engines, nobody has looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from pydantic import ValidationError

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.names import ROLES, Role
from pd_operator.core.placing import split
from pd_operator.core.rollout import RolloutPlan, SlicePlan, State
from pd_operator.core.snapshot import ROUTER, Snapshot


@dataclass(frozen=True, slots=True)
class Scaling:
    """A workload that gets another number and nothing else; `uid` is the precondition."""

    kind: str
    name: str
    uid: str
    replicas: int


def follow(snapshot: Snapshot, revision: str, rollout: RolloutPlan, totals: Mapping[Role, int]) -> RolloutPlan:
    """The rollout, in which every old slice that serves has the replicas that it should have.

    Of each old revision its slices share the pools' totals as they do now, at least one replica each. A number that came with the
    new revision is made for it (larger replicas, fewer of them), so it never shrinks what still serves; a later one does.
    """
    kept = [s for s in rollout.slices if s.revision != revision and s.state is State.SERVING]
    counts: dict[str, dict[Role, int]] = {s.name: {} for s in kept}
    for old in dict.fromkeys(s.revision for s in kept):
        mine = [s.name for s in kept if s.revision == old]
        for role in ROLES:
            now = [_wanted(snapshot, name, role) for name in mine]
            total = totals[role] if _may_shrink(snapshot, revision, role, totals[role]) else max(totals[role], sum(now))
            shares = split(total, now)
            for name, share in zip(mine, shares, strict=True):
                counts[name][role] = max(1, share)
    slices = tuple(replace(s, replicas=counts[s.name]) if s.name in counts else s for s in rollout.slices)
    return replace(rollout, slices=slices)


def _may_shrink(snapshot: Snapshot, revision: str, role: Role, total: int) -> bool:
    """Whether a number is another one than that with which the new revision was made; a pool that scales has none in the spec."""
    made = [r for r in snapshot.revisions if r.pairing == revision]
    first = (max(made, key=lambda r: r.number).spec.get(role) or {}).get("replicas") if made else total
    return first is None or total < int(first)


def scalings(snapshot: Snapshot, revision: str, rollout: RolloutPlan) -> tuple[Scaling, ...]:
    """Workloads of old slices whose number is another one. Their manifests are not rendered, so it is written by itself."""
    found = []
    for slice_ in followers(revision, rollout):
        wanted: dict[str, int] = {str(role): n for role, n in (slice_.replicas or {}).items()}
        if spec_of(snapshot, slice_.revision) is None:
            wanted[ROUTER] = snapshot.spec.router.replicas
        for part, number in wanted.items():
            child = snapshot.deployments().get(slice_.name, {}).get(part)
            if child is not None and child.workload and not child.deleting and child.workload.spec_replicas != number:
                found.append(Scaling(child.kind, child.name, child.uid, number))
    return tuple(found)


def followers(revision: str, rollout: RolloutPlan) -> tuple[SlicePlan, ...]:
    """Old slices that follow."""
    return tuple(s for s in rollout.slices if s.revision != revision and s.replicas is not None)


def spec_of(snapshot: Snapshot, revision: str) -> PDDeploymentSpec | None:
    """The spec that the routers of an older revision are rendered from: what pairs is the revision's, what is live is today's.

    None where the revision's spec is not known any more, or where today's router is another program than the revision's.
    """
    stored = [r for r in snapshot.revisions if r.pairing == revision and r.spec]
    if not stored:
        return None
    try:
        old = PDDeploymentSpec.model_validate(max(stored, key=lambda r: r.number).spec)
    except ValidationError:  # of a version of the operator whose API was another one
        return None
    now = snapshot.spec
    programs = [(spec.router.type, spec.router.version, spec.router.image) for spec in (old, now)]
    return old.model_copy(update={"router": now.router, "rollout": now.rollout}) if programs[0] == programs[1] else None


def _wanted(snapshot: Snapshot, name: str, role: Role) -> int:
    child = snapshot.deployments().get(name, {}).get(role)
    return (child.workload.spec_replicas or 0) if child is not None and child.workload else 0
