"""The condition Placed, and what stands beside it: where the engine pods are, or what keeps them from a place."""

from __future__ import annotations

from collections.abc import Sequence

from pd_operator.api.conditions import Condition, Reason, Type
from pd_operator.core import diagnosis
from pd_operator.core.exclusions import making
from pd_operator.core.names import ROLES
from pd_operator.core.observed import PodFact
from pd_operator.core.placement.demand import active
from pd_operator.core.placement.result import Explanation, Outcome, Placement
from pd_operator.core.plan import Plan
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.sites import Kind
from pd_operator.core.snapshot import Snapshot

SHOWN = 3  # domains whose explanation stands in the message


def placed(snapshot: Snapshot, plan: Plan, slices: Sequence[SlicePlan]) -> Condition:
    """The condition, over the slices that status is about."""
    pods = [p for s in slices for role in ROLES for p in snapshot.engines_of(s.name, role) if not p.deleting]
    blocked = _blocked(snapshot, plan, pods) or _without_node(plan, pods)
    if blocked is not None:
        return blocked
    nodes = sorted({p.node for p in pods})
    return Condition(Type.PLACED, "True", Reason.BOUND, f"{len(pods)} engine pods on {len(nodes)} nodes{_where(plan, slices)}")


def _blocked(snapshot: Snapshot, plan: Plan, pods: Sequence[PodFact]) -> Condition | None:
    """What keeps the slices from a place, whatever their pods say."""
    if snapshot.spec.suspend:
        return Condition(Type.PLACED, "False", Reason.SUSPENDED, "spec.suspend is true")
    placement = plan.placing.placement
    if plan.placing.wedged:
        return Condition(Type.PLACED, "False", Reason.WEDGED, _wedged(snapshot, plan))
    if placement is not None and (not placement.domains or any(placement.short)):
        return _lacking(snapshot, plan, placement, pods)
    return None


def _without_node(plan: Plan, pods: Sequence[PodFact]) -> Condition | None:
    """What pods without a node wait for."""
    unseen = f"; {plan.placing.unseen}, so the scheduler chooses the transfer domain" if plan.placing.unseen else ""
    message = diagnosis.unschedulable(pods)
    if message:
        return Condition(Type.PLACED, "False", Reason.NO_CAPACITY, message + unseen)
    if diagnosis.gated(pods):
        return Condition(Type.PLACED, "False", Reason.GATED, "a scheduling gate holds an engine pod")
    if pods and all(p.scheduled for p in pods):
        return None
    if plan.placing.unseen:
        return Condition(Type.PLACED, "Unknown", Reason.CAPACITY_UNOBSERVED, f"engine pods have no node yet{unseen}")
    text = "engine pods are being made" if plan.refusal is None else "nothing is made until the spec is accepted"
    return Condition(Type.PLACED, "Unknown", Reason.STARTING, text)


def _where(plan: Plan, slices: Sequence[SlicePlan]) -> str:
    if any(s.site.kind is Kind.CROSSING for s in slices):
        return "; they may be in different transfer domains (mode Preferred, and no domain holds all), where a handoff is slow"
    if all(s.site.kind is Kind.ANYWHERE for s in slices):
        return ""
    known = sorted({d for s in slices if (d := plan.placing.domains.get(s.name))})
    if known:
        return f" in transfer domain{'s' if len(known) > 1 else ''} {', '.join(known)}"
    return f" in one transfer domain a slice, not known which ({plan.placing.unseen})" if plan.placing.unseen else ""


def _wedged(snapshot: Snapshot, plan: Plan) -> str:
    first = plan.placing.wedged[0]
    places = ", ".join(first.places) or "its place"
    return (
        f"{first.slice} did not come together in {places}: {first.reason}; another place is looked for{_left_alone(snapshot, plan)}"
    )


def _lacking(snapshot: Snapshot, plan: Plan, placement: Placement, pods: Sequence[PodFact]) -> Condition:
    """No domain holds what is wanted: which case it is, and what is missing where."""
    left = _left_alone(snapshot, plan)
    text = _missing(snapshot, plan, placement) + left
    if placement.domains:
        return Condition(Type.PLACED, "False", Reason.NO_CAPACITY, text)
    if placement.reason is Outcome.NO_DOMAIN_LABEL:
        return Condition(Type.PLACED, "False", Reason.NO_DOMAIN_LABEL, text)
    if making(snapshot) or any(p.nominated and not p.node for p in pods):
        return Condition(Type.PLACED, "False", Reason.WAITING_FOR_NODES, f"a node is being made; {text}")
    return Condition(Type.PLACED, "False", Reason.WEDGED if left else Reason.NO_CAPACITY, text)


def _missing(snapshot: Snapshot, plan: Plan, placement: Placement) -> str:
    """The planner's sentence, and when nothing is placed what is missing in the domains that come closest to a pair."""
    if placement.domains or not placement.explanations:
        return placement.message

    def nearness(told: Explanation) -> tuple[int, bool, int, str]:
        fits = (told.fits_prefill, told.fits_decode)
        return -sum(map(bool, fits)), told.domain not in plan.placing.usable, -sum(fits), told.domain

    closest = sorted(placement.explanations, key=nearness)
    more = len(closest) + placement.unexplained - SHOWN
    key = snapshot.spec.placement.transfer_domain.topology_key
    told = "; ".join(e.text for e in closest[:SHOWN]) + (f"; and {more} more domains" if more > 0 else "")
    return f"no domain of {key} holds one prefill and one decode replica: {told}"


def _left_alone(snapshot: Snapshot, plan: Plan) -> str:
    now = active(plan.placing.excluded, snapshot.now)
    if not now:
        return ""
    until = {e.domain: e.until.strftime("%Y-%m-%dT%H:%M:%SZ") for e in plan.placing.excluded}
    return "; left alone: " + ", ".join(f"{name} until {until[name]}" for name in sorted(now)[:SHOWN])
