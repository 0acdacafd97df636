"""Pools: the number of a pool in each scaling mode, and what of it may be used (DESIGN §3, PDPool; invariant I6).

| mode | who writes spec.replicas of the PDPool | what it was made with |
|---|---|---|
| Static | the operator, through /scale, from the spec's `replicas` | `replicas`, else what exists, else 1 |
| Auto | the operator's scaling tick, through /scale | what exists, else minReplicas |
| External | an HPA, KEDA, a person | the same |
| Advisory | nobody; a person may | the same |

Where somebody removed it the operator writes it once more in every mode: an HPA never starts on a scale without a number.

A change of mode never moves the number: it stands in the PDPool, and the operator's apply of a PDPool never contains it again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pd_operator.api.scalars import quantity
from pd_operator.api.types import PDDeploymentSpec, ScalingBounds
from pd_operator.core.names import REVISION, ROLES, Role, pool
from pd_operator.core.snapshot import Snapshot

Mode = Literal["Static", "Auto", "External", "Advisory"]


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """One pool: the number that it should have, what is used of it, and how it gets there."""

    role: Role
    number: int  # spec.replicas of the PDPool
    desired: int  # replicas of the workloads: the number inside every bound, or 0 while suspended
    create: bool  # the PDPool does not exist: made with `number` in it
    scale: bool  # it exists with another number, or with none: written through /scale
    limit: str = ""  # MaxReplicas, MinReplicas or MaxGPUs: the bound that makes `desired` another number
    limit_message: str = ""


def mode_of(spec: PDDeploymentSpec) -> Mode:
    """The scaling mode; Static when the spec has no `scaling`."""
    return spec.scaling.mode if spec.scaling else "Static"


def gpus_of(spec: PDDeploymentSpec, role: Role) -> int:
    """Accelerators of one replica: every limit whose name says gpu, on each of its nodes."""
    mine = spec.roles[role]
    each = sum(int(quantity(value)) for name, value in (mine.resources.limits or {}).items() if "gpu" in name)
    return each * mine.nodes


def gpus(spec: PDDeploymentSpec, counts: Mapping[Role, int]) -> int:
    """Accelerators of so many replicas."""
    return sum(count * gpus_of(spec, role) for role, count in counts.items())


def bounds_of(spec: PDDeploymentSpec, role: Role) -> ScalingBounds | None:
    """The bounds of a role; None when the pool is Static."""
    if spec.scaling is None:
        return None
    return spec.scaling.prefill if role == "prefill" else spec.scaling.decode


def plan_pools(snapshot: Snapshot) -> dict[Role, PoolPlan]:
    """Both pools, with the bounds that they share applied."""
    numbers = {role: _number(snapshot, role) for role in ROLES}
    used = {role: _clamped(snapshot.spec, role, numbers[role]) for role in ROLES}
    shares = _within_budget(snapshot.spec, {role: count for role, (count, _, _) in used.items()})
    plans: dict[Role, PoolPlan] = {}
    for role in ROLES:
        existing = snapshot.child("PDPool", pool(snapshot.name, role))
        count, limit, message = used[role]
        if shares[role] < count:
            most = snapshot.spec.scaling.max_gpus if snapshot.spec.scaling else None
            count, limit = shares[role], "MaxGPUs"
            message = f"{numbers[role]} replicas are asked for, {count} are used: spec.scaling.maxGPUs is {most}"
        static = mode_of(snapshot.spec) == "Static"
        plans[role] = PoolPlan(
            role,
            numbers[role],
            0 if snapshot.spec.suspend else count,
            create=existing is None,
            scale=existing is not None and existing.replicas != numbers[role] and (static or existing.replicas is None),
            limit=limit,
            limit_message=message,
        )
    return plans


def _number(snapshot: Snapshot, role: Role) -> int:
    """What spec.replicas of the PDPool is, or should be.

    Static takes the spec's. Everything else keeps what the PDPool says, and where it does not say (made anew, or `replicas`
    was removed from it) what exists: a number is never lost with the object that held it.
    """
    wanted = snapshot.spec.roles[role].replicas
    if snapshot.spec.scaling is None and wanted is not None:
        return wanted
    existing = snapshot.child("PDPool", pool(snapshot.name, role))
    if existing is not None and existing.replicas is not None:
        return existing.replicas
    there: dict[str, int] = {}  # by revision: while one takes over, both have the whole number
    for child in (parts[role] for parts in snapshot.deployments().values() if role in parts):
        if child.workload:
            revision = child.labels.get(REVISION, "")
            there[revision] = there.get(revision, 0) + (child.workload.spec_replicas or 0)
    bounds = bounds_of(snapshot.spec, role)
    return max(there.values(), default=0) or (bounds.min_replicas if bounds else 1)


def _clamped(spec: PDDeploymentSpec, role: Role, number: int) -> tuple[int, str, str]:
    bounds = bounds_of(spec, role)
    if bounds is None:
        return number, "", ""
    if number > bounds.max_replicas:
        text = f"{number} replicas are asked for: spec.scaling.{role}.maxReplicas is {bounds.max_replicas}"
        return bounds.max_replicas, "MaxReplicas", text
    if number < bounds.min_replicas:
        text = f"{number} replicas are asked for: spec.scaling.{role}.minReplicas is {bounds.min_replicas}"
        return bounds.min_replicas, "MinReplicas", text
    return number, "", ""


def _within_budget(spec: PDDeploymentSpec, counts: dict[Role, int]) -> dict[Role, int]:
    """Counts within maxGPUs, in proportion to what was asked for; nothing is raised, and no role goes below its minimum."""
    cap = spec.scaling.max_gpus if spec.scaling else None
    total = gpus(spec, counts)
    if cap is None or total <= cap:
        return counts
    each = {role: gpus_of(spec, role) for role in ROLES}
    least = {role: min(counts[role], bounds.min_replicas if (bounds := bounds_of(spec, role)) else 1) for role in ROLES}
    shares = {role: max(least[role], counts[role] * cap // total) if each[role] else counts[role] for role in ROLES}
    for role in sorted(ROLES, key=lambda r: shares[r] - least[r], reverse=True):  # a minimum may have taken more than its part
        over = gpus(spec, shares) - cap
        if over > 0 and each[role]:
            shares[role] = max(least[role], shares[role] - -(-over // each[role]))
    for role in ROLES:  # what rounding left over
        free = cap - gpus(spec, shares)
        if free > 0 and each[role]:
            shares[role] = min(counts[role], shares[role] + free // each[role])
    return shares
