"""The front door: which slices take traffic, with which weight, and what a gateway says of it.

Without `spec.gateway` it is the Service `<pdd>`, which leads to the routers that carry the front label: every one gets the same.
With it, an HTTPRoute `<pdd>` holds one backend a serving slice, weighted by what the slice can serve. The Service stays: it is the
route's only backend while no slice serves (clients get the gateway's 503), and an address inside the cluster.

    dark -> front label -> a ready router with it -> in the route
    out of the route -> routers end -> engines end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from pd_operator.core.compatibility import MAX_BACKENDS
from pd_operator.core.names import FRONT, ROLES, Role
from pd_operator.core.observed import ParentFact, RouteFact
from pd_operator.core.rollout import RolloutPlan, SlicePlan, State
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.weights import TOTAL, capacity, shares, weights

ROUTE: Final = "HTTPRoute"
HTTPS: Final = 443


@dataclass(frozen=True, slots=True)
class Front:
    """How requests are shared out. Without a gateway there are no weights."""

    weights: Mapping[str, int]  # serving slice -> points of TOTAL in the route
    should: Mapping[str, int] = field(default_factory=dict)  # serving slice -> points that it should get: its weight or its share

    def backends(self, service: str) -> tuple[tuple[str, int], ...]:
        """(Service, weight) in the order in which the route names them; `service` is the one of the front door."""
        return tuple(sorted(self.weights.items())) or ((service, TOTAL),)


def plan_front(snapshot: Snapshot, rollout: RolloutPlan, totals: Mapping[Role, int]) -> Front:
    """Weights of the slices that answer now. The base is what status told before: the route may have been edited by others."""
    serving = [s for s in rollout.slices if answers(snapshot, s)]
    able = {s.name: _capacity(snapshot, s, totals) for s in serving}
    if snapshot.spec.gateway is None:
        return Front({}, shares(able))
    if len(able) > MAX_BACKENDS:  # both revisions of a rollout: the rest waits until the old one is gone
        order = [s.name for s in sorted(serving, key=lambda s: -able[s.name])]
        able = {name: able[name] for name in order[:MAX_BACKENDS]}
    found = weights(able, told(snapshot))
    return Front(found, found)


def told(snapshot: Snapshot) -> dict[str, int]:
    """Weights as status has them."""
    before = snapshot.status.get("slices", ())
    return {str(s["name"]): int(s["weight"]) for s in before if s.get("weight") is not None}


def answers(snapshot: Snapshot, slice_: SlicePlan) -> bool:
    """Whether the front door leads to a slice: a ready router pod with the front label. A count of the Deployment would include
    pods from before the flip, which the front Service does not select."""
    routers = snapshot.pods_of(slice_.name, ROUTER)
    return slice_.state is not State.REMOVING and any(p.ready and not p.deleting and FRONT in p.labels for p in routers)


def leave_first(snapshot: Snapshot, rollout: RolloutPlan) -> RolloutPlan:
    """The rollout, but a slice that ends keeps its pods while the observed route still leads to it."""
    route = route_of(snapshot)
    if snapshot.spec.gateway is None or route is None:
        return rollout
    named = {service for service, _ in route.backends}
    slices = tuple(
        replace(s, keep_routers=True, keep_engines=True) if s.state is State.REMOVING and s.name in named else s
        for s in rollout.slices
    )
    return replace(rollout, slices=slices)


def route_of(snapshot: Snapshot) -> RouteFact | None:
    """The observed HTTPRoute of this object."""
    found = snapshot.child(ROUTE, snapshot.name)
    return found.route if found is not None and not found.deleting else None


def url(snapshot: Snapshot) -> str:
    """Where clients go: the gateway's first host name that is one, else the Service.

    The listener is somebody else's object, so its scheme is not known: https where a parentRef names port 443, else http.
    """
    gateway = snapshot.spec.gateway
    host = next((h for h in gateway.hostnames if "*" not in h), "") if gateway else ""
    if gateway is None or not host:
        return f"http://{snapshot.name}.{snapshot.namespace}.svc"
    secure = any(parent.get("port") == HTTPS for parent in gateway.parent_refs)
    return f"{'https' if secure else 'http'}://{host}"


def refused(snapshot: Snapshot) -> str:
    """What gateway controllers have against the route, each parent named; "" when nothing."""
    return "; ".join(f"{p.name} ({p.controller}): {p.refusal}" for p in _parents(snapshot) if p.refusal)


def unanswered(snapshot: Snapshot) -> str:
    """That no gateway controller took the route yet, for the message of Ready; "" without a gateway, or when one did."""
    if snapshot.spec.gateway is None or any(not p.refusal for p in _parents(snapshot)):
        return ""
    return f"; no gateway has accepted {ROUTE} {snapshot.name} yet"


def _parents(snapshot: Snapshot) -> Sequence[ParentFact]:
    route = route_of(snapshot)
    return route.parents if snapshot.spec.gateway is not None and route is not None else ()


def _capacity(snapshot: Snapshot, slice_: SlicePlan, totals: Mapping[Role, int]) -> int:
    parts = snapshot.deployments().get(slice_.name, {})
    prefill, decode = (w.ready if role in parts and (w := parts[role].workload) else 0 for role in ROLES)
    return capacity(prefill, decode, (totals["prefill"], totals["decode"]))
