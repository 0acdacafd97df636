"""Snapshot -> Plan: what should exist. Pure; the same snapshot gives the same plan (invariant I2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pd_operator.api.conditions import Reason
from pd_operator.core.capabilities import Refusal, Unproven
from pd_operator.core.compatibility import review
from pd_operator.core.compatibility_verdict import judge
from pd_operator.core.front import Front, leave_first, plan_front, told
from pd_operator.core.kept import Scaling, follow, scalings
from pd_operator.core.names import Role, controller_revision
from pd_operator.core.placing import Placing, place_slices
from pd_operator.core.pools import PoolPlan, plan_pools
from pd_operator.core.revision import pairing_hash, pods_hash
from pd_operator.core.rollout import RolloutPlan, SlicePlan, State, hold, plan_rollout
from pd_operator.core.rollout_bounds import late, pause
from pd_operator.core.snapshot import Snapshot

HISTORY = 5  # ControllerRevisions kept beyond those in use, as spec.revisionHistoryLimit of other workloads has 10


@dataclass(frozen=True, slots=True)
class Plan:
    """What should exist. With a refusal nothing is made and nothing is touched: what serves keeps serving."""

    revision: str
    pods: str
    refusal: Refusal | None
    more_refusals: int
    rollout: RolloutPlan
    placing: Placing
    pools: Mapping[Role, PoolPlan]
    front: Front
    scalings: tuple[Scaling, ...]
    kept_revisions: frozenset[str]  # names of ControllerRevisions
    renderer_changed: bool = False  # filled in once the templates were rendered
    unproven: tuple[Unproven, ...] = ()  # accepted, and left to verification

    @property
    def targets(self) -> tuple[SlicePlan, ...]:
        """Slices of the current revision that should exist now, with the replicas that each should have."""
        return tuple(s for s in self.rollout.slices if s.revision == self.revision and s.replicas is not None)

    @property
    def current(self) -> tuple[SlicePlan, ...]:
        """Slices of the current revision that do not end, those of a refused spec too."""
        return tuple(s for s in self.rollout.slices if s.revision == self.revision and s.state is not State.REMOVING)

    @property
    def target(self) -> SlicePlan | None:
        """The first of them."""
        return next(iter(self.current), None)


def make_plan(snapshot: Snapshot) -> Plan:
    """Decide over one snapshot."""
    revision, pods = pairing_hash(snapshot.spec), pods_hash(snapshot.spec)
    refusals = review(
        snapshot.spec,
        snapshot.upstream,
        snapshot.images,
        snapshot.missing,
        snapshot.server_version,
        snapshot.model,
        snapshot.missing_kinds,
    )
    refusals += [
        Refusal(
            Reason.NAME_CONFLICT,
            "metadata.name",
            snapshot.name,
            f"{conflict} exists and is not ours; remove it, or use another name",
        )
        for conflict in snapshot.conflicts
    ]
    pools = plan_pools(snapshot)
    totals = {role: mine.desired for role, mine in pools.items()}
    if refusals:
        placing, rollout, front = Placing(()), hold(snapshot, refusals[0].reason), Front(told(snapshot))
    else:
        placing = place_slices(snapshot, revision, totals)
        rollout = plan_rollout(snapshot, revision, placing.targets, placing.lacking)
        rollout = late(snapshot, placing.targets, pause(snapshot, revision, placing.targets, rollout))
        rollout = leave_first(snapshot, follow(snapshot, revision, rollout, totals))
        front = plan_front(snapshot, rollout, totals)
    return Plan(
        revision=revision,
        pods=pods,
        refusal=refusals[0] if refusals else None,
        more_refusals=max(0, len(refusals) - 1),
        rollout=rollout,
        placing=placing,
        pools=pools,
        scalings=() if refusals else scalings(snapshot, revision, rollout),
        front=front,
        kept_revisions=_kept(snapshot, revision, pods, rollout),
        unproven=judge(snapshot.spec, snapshot.upstream, snapshot.images, snapshot.model).unproven,
    )


def _kept(snapshot: Snapshot, revision: str, pods: str, rollout: RolloutPlan) -> frozenset[str]:
    """The revision that the spec names, the newest of each slice, and the newest few of the others."""
    newest = sorted(snapshot.revisions, key=lambda r: (r.number, r.name), reverse=True)
    in_use = {controller_revision(snapshot.name, revision, pods)}
    for pairing in {revision, *(s.revision for s in rollout.slices)}:
        in_use |= {r.name for r in [r for r in newest if r.pairing == pairing][:1]}
    rest = [r.name for r in newest if r.name not in in_use]
    return frozenset({*in_use, *rest[:HISTORY]})
