"""How far the Deployments of one slice are: role (or router) -> Deployment, as `Snapshot.deployments()` has them."""

from __future__ import annotations

from collections.abc import Mapping

from pd_operator.core.names import FRONT, ROLES, Role
from pd_operator.core.observed import ChildFact
from pd_operator.core.snapshot import ROUTER


def has_front(router: ChildFact | None) -> bool:
    """Whether a router Deployment's pod template carries the front label."""
    return bool(router and router.workload and FRONT in router.workload.template_labels)


def settled(child: ChildFact | None, least: int | None = None) -> bool:
    """Whether a Deployment's pods are all of its current template, ready and available; with `least`, at least so many of them."""
    if child is None or child.workload is None or child.deleting:
        return False
    w = child.workload
    wanted = w.spec_replicas if w.spec_replicas is not None else 1
    if w.observed_generation < child.generation or wanted <= 0 or w.updated != w.replicas:
        return False
    if least is not None and 0 < least < wanted:
        return w.ready >= least and w.available >= least
    return w.replicas == w.ready == w.available == wanted


def complete(slice_: Mapping[str, ChildFact], placed: Mapping[Role, int] | None = None) -> bool:
    """Whether prefill, decode and router of a slice are all settled; of engines, `placed` replicas are enough."""
    engines = all(settled(slice_.get(role), (placed or {}).get(role)) for role in ROLES)
    return engines and settled(slice_.get(ROUTER))


def usable(slice_: Mapping[str, ChildFact]) -> bool:
    """Whether a slice could serve: a router is ready, and of each role no more than a quarter is missing."""
    facts = {part: w for part in (*ROLES, ROUTER) if (child := slice_.get(part)) and not child.deleting and (w := child.workload)}
    if len(facts) < len(ROLES) + 1 or not facts[ROUTER].ready:
        return False
    wanted = {role: facts[role].spec_replicas or 0 for role in ROLES}
    return all(wanted[role] and facts[role].ready >= max(1, wanted[role] - wanted[role] // 4) for role in ROLES)
