"""What the user lets a rollout do: `rollout.paused` holds it where it is, `rollout.progressDeadlineSeconds` says when it is stuck.

Both look at a rollout that is decided already, so no step of it depends on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pd_operator.api.conditions import Reason
from pd_operator.core.names import ROLES, workload
from pd_operator.core.rollout import RolloutPlan, SlicePlan, State
from pd_operator.core.sites import SliceTarget
from pd_operator.core.slices import has_front, settled
from pd_operator.core.snapshot import ROUTER, Snapshot

MOVING = (Reason.ROLLING_OUT, Reason.NO_CAPACITY_FOR_PAIR)


def pause(snapshot: Snapshot, revision: str, targets: Sequence[SliceTarget], rollout: RolloutPlan) -> RolloutPlan:
    """The rollout, held while `rollout.paused` is set: nothing new is begun, nothing joins, nothing that serves ends.

    Only while an old slice serves: there is nothing to hold in a first start, and an outage is not prolonged.
    """
    if not snapshot.spec.rollout.paused or snapshot.spec.suspend:
        return rollout
    workloads = snapshot.deployments()
    fronted = {s for s, parts in workloads.items() if has_front(parts.get(ROUTER))}
    old = [s for s in workloads if s in fronted and snapshot.revision_of(s) != revision]
    if not old:
        return _inside(snapshot, targets, rollout)
    wanted = {t.name: t for t in targets}
    slices = []
    for slice_ in rollout.slices:
        target = wanted.get(slice_.name)
        if slice_.name in old:
            slices.append(SlicePlan(slice_.name, slice_.revision, State.SERVING, front=True))
        elif target is None:
            slices.append(slice_)
        elif slice_.name in workloads:
            lit = slice_.name in fronted
            state = State.SERVING if lit else State.DARK
            slices.append(SlicePlan(target.name, revision, state, front=lit, replicas=target.replicas, site=target.site))
    begun = [t.name for t in targets if t.name in workloads]
    waits = f"{', '.join(begun)} stays as it is" if begun else f"{', '.join(wanted)} is not begun"
    return RolloutPlan(tuple(slices), Reason.PAUSED, f"spec.rollout.paused is true: {', '.join(old)} serves, {waits}")


def _inside(snapshot: Snapshot, targets: Sequence[SliceTarget], rollout: RolloutPlan) -> RolloutPlan:
    """A change of one role's pods waits inside its slice: its workload is paused, or is not yet replaced (render/engine.py)."""
    waits, turning = [], False
    for target in targets:
        for role in ROLES:
            child = snapshot.deployments().get(target.name, {}).get(role)
            if child is not None and child.workload and child.workload.paused and child.workload.updated < child.workload.replicas:
                waits.append(workload(target.name, role))
            elif snapshot.turning(target.name, role):
                waits.append(workload(target.name, role))
                turning = True
    if not waits or not (turning or rollout.reason in MOVING):
        return rollout
    return replace(rollout, reason=Reason.PAUSED, message=f"spec.rollout.paused is true: a change of {', '.join(waits)} waits")


def late(snapshot: Snapshot, targets: Sequence[SliceTarget], rollout: RolloutPlan) -> RolloutPlan:
    """The rollout, said to be stuck when a Deployment of the new slices says so. Its controller has the clock: each pod that
    becomes available starts it anew. Nothing is undone, and whatever comes up later goes on."""
    if rollout.reason not in MOVING:
        return rollout
    workloads = snapshot.deployments()
    parts = [workloads.get(t.name, {}).get(part) for t in targets for part in (*ROLES, ROUTER)]
    stuck = [d.name for d in parts if d is not None and d.workload and d.workload.late and not settled(d)]
    if not stuck:
        return rollout
    limit = snapshot.spec.rollout.progress_deadline_seconds
    message = f"{', '.join(stuck)} made no progress for {limit} s (spec.rollout.progressDeadlineSeconds); {rollout.message}"
    return replace(rollout, reason=Reason.DEADLINE_EXCEEDED, message=message)
