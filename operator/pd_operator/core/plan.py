"""Snapshot -> Plan: what should exist. Pure; the same snapshot gives the same plan (invariant I2)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
from pd_operator.core.slices import complete, usable
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.verification import Record, due_in, gate, mode_of, next_number, records, subject

HISTORY = 5  # ControllerRevisions kept beyond those in use, as spec.revisionHistoryLimit of other workloads has 10


@dataclass(frozen=True, slots=True)
class Canary:
    """A canary to start: its Job does not exist yet."""

    slice: SlicePlan
    number: int
    about: str
    dark: bool  # the slice does not serve


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
    verification: Mapping[str, Record] = field(default_factory=dict)  # slice -> what is proven of it
    canaries: tuple[Canary, ...] = ()  # to start now
    canary_due: float | None = None  # seconds until another one is due
    canary_refused: str = ""  # why the API server takes no Job of ours; known once it was asked

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
    pools, known = plan_pools(snapshot), records(snapshot)
    totals = {role: mine.desired for role, mine in pools.items()}
    if refusals:
        placing, rollout, front = Placing(()), hold(snapshot, refusals[0].reason), Front(told(snapshot))
    else:
        placing = place_slices(snapshot, revision, totals)
        rollout = plan_rollout(snapshot, revision, placing.targets, placing.lacking, gate(snapshot, known))
        rollout = late(snapshot, placing.targets, pause(snapshot, revision, placing.targets, rollout))
        rollout = leave_first(snapshot, follow(snapshot, revision, rollout, totals))
        front = plan_front(snapshot, rollout, totals)
    canaries, due = ((), None) if refusals else _canaries(snapshot, revision, rollout, known)
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
        verification=known,
        canaries=canaries,
        canary_due=due,
    )


def _canaries(
    snapshot: Snapshot, revision: str, rollout: RolloutPlan, known: Mapping[str, Record]
) -> tuple[tuple[Canary, ...], float | None]:
    """Canaries of the slices of the current revision that are due now, and seconds until the next one is."""
    if mode_of(snapshot) == "Disabled" or snapshot.spec.suspend:
        return (), None
    about, workloads = subject(snapshot), snapshot.deployments()
    now: list[Canary] = []
    waits: list[float] = []
    for slice_ in rollout.slices:
        record, parts = known.get(slice_.name, Record(slice_.name)), workloads.get(slice_.name, {})
        # What was asked before is asked again when a change of it is through; what is new, as soon as it could serve.
        ready = complete(parts) if record.proven or (record.trial and record.trial.about != about) else usable(parts)
        due = due_in(record, about, snapshot.now) if slice_.revision == revision and slice_.replicas is not None and ready else None
        if due is not None and due > 0:
            waits.append(due)
        elif due is not None:
            now.append(Canary(slice_, next_number(record), about, dark=not slice_.front))
    return tuple(now), min(waits, default=None)


def _kept(snapshot: Snapshot, revision: str, pods: str, rollout: RolloutPlan) -> frozenset[str]:
    """The revision that the spec names, the newest of each slice, and the newest few of the others."""
    newest = sorted(snapshot.revisions, key=lambda r: (r.number, r.name), reverse=True)
    in_use = {controller_revision(snapshot.name, revision, pods)}
    for pairing in {revision, *(s.revision for s in rollout.slices)}:
        in_use |= {r.name for r in [r for r in newest if r.pairing == pairing][:1]}
    rest = [r.name for r in newest if r.name not in in_use]
    return frozenset({*in_use, *rest[:HISTORY]})
