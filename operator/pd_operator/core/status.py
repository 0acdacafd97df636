"""Snapshot + Plan -> status of the PDDeployment and of its pools. What a user reads is worded here and in `diagnosis`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from pd_operator.api.conditions import Condition, Reason, Type, merge
from pd_operator.core import backpressure, diagnosis
from pd_operator.core.autoscalers import conflict_of
from pd_operator.core.capabilities import Refusal
from pd_operator.core.evidence import told
from pd_operator.core.exclusions import record
from pd_operator.core.front import answers, refused, unanswered, url
from pd_operator.core.names import DEPLOYMENT, ROLE, ROLES, Role
from pd_operator.core.observed import PodFact, WorkloadFact
from pd_operator.core.placed import placed
from pd_operator.core.placing import next_slice
from pd_operator.core.plan import Plan
from pd_operator.core.pool_record import pool_record
from pd_operator.core.pool_status import pool_scaling
from pd_operator.core.pools import gpus_of, mode_of
from pd_operator.core.rollout import SlicePlan, State
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.traffic import uneven
from pd_operator.core.verification import Record, to_status
from pd_operator.core.verified import stands_in_the_way, verified

NO_WORKLOAD = WorkloadFact()
ONLY_TIME = frozenset({Reason.STARTING, Reason.NOT_DISCOVERED, Reason.NOT_YET_RUN})


def build_status(snapshot: Snapshot, plan: Plan) -> dict[str, Any]:
    """Status of the PDDeployment, complete: it is applied whole."""
    conditions = _conditions(snapshot, plan)
    serving = _serving(snapshot, plan)
    status = {
        "observedGeneration": snapshot.generation,
        "controller": snapshot.install.name,
        "currentRevision": serving.revision if serving else "",
        "updatedRevision": plan.revision,
        "url": url(snapshot),
        "servingSlices": sum(1 for s in plan.rollout.slices if answers(snapshot, s)),
        "bottleneck": _bottleneck(snapshot),
        "roles": [_role_status(snapshot, plan, role) for role in ROLES],
        "slices": [_slice_status(snapshot, plan, s) for s in plan.rollout.slices],
        "conditions": merge(snapshot.status.get("conditions", []), conditions, snapshot.generation, snapshot.now),
    }
    if snapshot.upstream.backpressure is not None:
        lead = snapshot.scaled.lead if snapshot.scaled else snapshot.evidence.lead if snapshot.evidence else {}
        status["backpressure"] = backpressure.status(snapshot.upstream.backpressure, lead, snapshot.status)
    if attained := told.attainment(snapshot.evidence, snapshot.status):
        status["attainment"] = attained
    if handoff := told.handoff(snapshot.evidence, snapshot.status):
        status["handoff"] = handoff
    if snapshot.spec.placement.transfer_domain.topology_key or "nextSlice" in snapshot.status:
        status["nextSlice"] = next_slice(snapshot)
    if plan.placing.excluded:  # absent and not empty without placement: what is not asked for is not shown
        status["excludedDomains"] = record(plan.placing.excluded)
    elif plan.refusal is not None and snapshot.status.get("excludedDomains"):
        status["excludedDomains"] = snapshot.status["excludedDomains"]
    return status


def _bottleneck(snapshot: Snapshot) -> str:
    scaled = snapshot.scaled
    if snapshot.spec.scaling is None:
        return "Unknown"
    if scaled is None:  # this process has not looked yet: what was told before stands
        return str(snapshot.status.get("bottleneck", "Unknown"))
    return scaled.decision.bottleneck.value


def build_pool_status(snapshot: Snapshot, plan: Plan, role: Role, previous: Mapping[str, Any], generation: int) -> dict[str, Any]:
    """Status of one PDPool; the selector matches one pod per replica, of all revisions."""
    workloads = _workloads(snapshot, role)
    ready, replicas = sum(w.ready for w in workloads), sum(w.replicas for w in workloads)
    mode, short = mode_of(snapshot.spec), plan.placing.short[ROLES.index(role)]
    conflict = conflict_of(snapshot, role)
    clash = conflict.message if conflict else ""
    scaling = pool_scaling(mode, plan.pools[role], snapshot.scaled, previous, role, short, clash)
    conditions = scaling.pop("conditions")
    status = {
        "observedGeneration": generation,
        "replicas": replicas,
        "readyReplicas": ready,
        "startingReplicas": max(0, replicas - ready),
        "selector": f"{DEPLOYMENT}={snapshot.name},{ROLE}={role}",
        **scaling,
        "conditions": merge(previous.get("conditions", []), conditions, generation, snapshot.now),
    }
    record = pool_record(status, previous, None if mode == "Static" else snapshot.scaled)
    return status | ({"record": record} if record else {})


def _conditions(snapshot: Snapshot, plan: Plan) -> list[Condition]:
    focus = _focus(snapshot, plan)
    found = [_accepted(plan), placed(snapshot, plan, plan.current or focus)]
    found += [_role_ready(snapshot, plan, focus, role) for role in ROLES]
    found.append(_router_ready(snapshot, plan, focus))
    found += verified(snapshot, plan, focus)
    found.append(_progressing(plan))
    found.append(_degraded(snapshot, plan))
    found.append(_update_available(plan))
    ready = _ready(snapshot, plan, focus, found)
    return [*found, ready, *_kstatus(plan, ready)]


def _degraded(snapshot: Snapshot, plan: Plan) -> Condition:
    others: list[tuple[Reason, str]] = []
    if plan.placing.strays:
        remedy = "restore the label of the nodes, or set a new rollout.restartID to place everything anew"
        others.append((Reason.PAIRING_NOT_ENFORCED, f"{'; '.join(plan.placing.strays)}: {remedy}"))
    if why := refused(snapshot):
        others.append((Reason.ROUTE_REFUSED, why))
    if why := uneven(snapshot):
        others.append((Reason.UNEVEN_TRAFFIC, why))
    return told.degraded(snapshot.evidence, snapshot.status, others)


def _accepted(plan: Plan) -> Condition:
    if plan.refusal is None:
        unproven = "; unproven: " + " | ".join(u.message for u in plan.unproven) if plan.unproven else ""
        return Condition(Type.ACCEPTED, "True", Reason.ACCEPTED, f"the spec was accepted{unproven}")
    more = f" (and {plan.more_refusals} more)" if plan.more_refusals else ""
    return Condition(Type.ACCEPTED, "False", plan.refusal.reason, plan.refusal.message + more)


def _making(plan: Plan, what: str) -> str:
    """What happens where no pod is seen yet."""
    return f"{what} are being made" if plan.refusal is None else "nothing is made until the spec is accepted"


def _role_ready(snapshot: Snapshot, plan: Plan, focus: Sequence[SlicePlan], role: Role) -> Condition:
    type_ = Type.PREFILL_READY if role == "prefill" else Type.DECODE_READY
    desired = plan.pools[role].desired
    if desired == 0:
        return Condition(type_, "False", Reason.SUSPENDED, "spec.suspend is true")
    pods = [p for s in focus for p in snapshot.engines_of(s.name, role)]
    workload = _sum(snapshot, focus, role)
    ready = workload.ready
    needed = max(1, desired - desired // 4)  # rollout.maxUnavailable of 25 % may be missing at any time
    if ready >= needed:
        return Condition(type_, "True", Reason.READY, f"{ready} of {desired} ready")
    if plan.placing.lacking and diagnosis.unschedulable(pods):  # kept off the nodes of today: the scheduler's message is about that
        return Condition(type_, "False", Reason.UNSCHEDULABLE, f"{ready} of {desired} ready; no room: see the condition Placed")
    return _not_ready(plan, type_, pods, workload, f"{ready} of {desired} ready")


def _router_ready(snapshot: Snapshot, plan: Plan, focus: Sequence[SlicePlan]) -> Condition:
    """True when a router is ready, and its own readiness asks for a healthy prefill and a healthy decode."""
    wanted = snapshot.spec.router.replicas * max(1, len(focus))
    workload = _sum(snapshot, focus, ROUTER)
    ready = workload.ready
    if ready >= 1:
        return Condition(Type.ROUTER_READY, "True", Reason.READY, f"{ready} of {wanted} ready; they see prefill and decode")
    pods = [p for s in focus for p in snapshot.pods_of(s.name, ROUTER)]
    cause = diagnosis.diagnose(pods)
    running = any(c.started for p in pods if not p.deleting for c in p.containers)
    if running and (cause is None or cause[0] is Reason.STARTING):
        return Condition(
            Type.ROUTER_READY,
            "False",
            Reason.NOT_DISCOVERED,
            "the router runs and sees no healthy prefill or no healthy decode yet",
        )
    return _not_ready(plan, Type.ROUTER_READY, pods, workload, f"{ready} of {wanted} ready")


def _not_ready(plan: Plan, type_: Type, pods: Sequence[PodFact], workload: WorkloadFact, count: str) -> Condition:
    cause = diagnosis.diagnose(pods)
    if workload.failure and (cause is None or cause[0] is Reason.STARTING):
        return Condition(type_, "False", Reason.PODS_REFUSED, f"{count}; {workload.failure}")
    if cause is None:
        return Condition(type_, "False", Reason.STARTING, f"{count}; {_making(plan, 'pods')}")
    return Condition(type_, "False", cause[0], f"{count}; {cause[1]}")


def _progressing(plan: Plan) -> Condition:
    rollout = plan.rollout
    if plan.refusal is not None:
        return Condition(Type.PROGRESSING, "False", plan.refusal.reason, "nothing is changed until the spec is accepted")
    moving = rollout.reason in (Reason.ROLLING_OUT, Reason.UPDATED, Reason.SUSPENDED)  # as a Deployment's: True when it is done too
    return Condition(Type.PROGRESSING, "True" if moving else "False", rollout.reason, rollout.message)


def _update_available(plan: Plan) -> Condition:
    if plan.renderer_changed:
        message = "this version of the operator renders the engine pods differently; set a new rollout.restartID to adopt it"
        return Condition(Type.UPDATE_AVAILABLE, "True", Reason.RENDERER_CHANGED, message)
    return Condition(Type.UPDATE_AVAILABLE, "False", Reason.AS_EXPECTED)


def _ready(snapshot: Snapshot, plan: Plan, focus: Sequence[SlicePlan], found: Sequence[Condition]) -> Condition:
    """Ready takes over the reason and message of what stands in the way."""
    if plan.refusal is None and snapshot.spec.suspend:
        return Condition(Type.READY, "False", Reason.SUSPENDED, "spec.suspend is true")
    by_type = {c.type: c for c in found}
    order = (Type.ACCEPTED, Type.PREFILL_READY, Type.DECODE_READY, Type.ROUTER_READY)
    blocking = [by_type[t] for t in order if by_type[t].status != "True"]
    proofs = [by_type[t] for t in (Type.HANDOFF_VERIFIED, Type.OFFLOAD_VERIFIED) if t in by_type]
    blocking += [c for c in proofs if stands_in_the_way(snapshot, plan, focus, c)]  # invariant I5
    if blocking and plan.placing.placement is not None and by_type[Type.PLACED].status == "False":
        blocking.insert(0, by_type[Type.PLACED])  # it knows more than the scheduler's message about a pod
    if blocking:
        # What only needs time stands behind what needs somebody.
        first = next((c for c in blocking if c.reason not in ONLY_TIME), blocking[0])
        still = " (what served before keeps serving)" if first.type is Type.ACCEPTED and snapshot.deployments() else ""
        return Condition(Type.READY, "False", first.reason, f"{first.type.value}: {first.message}{still}")
    if _serving(snapshot, plan) is None:
        return Condition(Type.READY, "False", Reason.ROLLING_OUT, plan.rollout.message)
    return Condition(Type.READY, "True", Reason.READY, f"serving at {url(snapshot)}{unanswered(snapshot)}")


def _kstatus(plan: Plan, ready: Condition) -> list[Condition]:
    """Reconciling and Stalled, so that kstatus (Flux, Argo CD, kubectl wait) reads progress and failure correctly."""
    if plan.refusal is not None:
        stalled = Condition(Type.STALLED, "True", plan.refusal.reason, plan.refusal.message)
        return [Condition(Type.RECONCILING, "False", Reason.AS_EXPECTED), stalled]
    if plan.rollout.reason is Reason.DEADLINE_EXCEEDED:
        stalled = Condition(Type.STALLED, "True", plan.rollout.reason, plan.rollout.message)
        return [Condition(Type.RECONCILING, "False", Reason.AS_EXPECTED), stalled]
    suspended = ready.reason == Reason.SUSPENDED
    waits = (Reason.ROLLING_OUT, Reason.NO_CAPACITY_FOR_PAIR, Reason.PAUSED, Reason.VERIFICATION_FAILED)
    moving = plan.rollout.reason in waits or (ready.status != "True" and not suspended)
    message = plan.rollout.message if plan.rollout.reason is not Reason.UPDATED else ready.message
    reconciling = Condition(Type.RECONCILING, "True", ready.reason if ready.status != "True" else plan.rollout.reason, message)
    return [
        reconciling if moving else Condition(Type.RECONCILING, "False", Reason.AS_EXPECTED),
        Condition(Type.STALLED, "False", Reason.AS_EXPECTED),
    ]


def _role_status(snapshot: Snapshot, plan: Plan, role: Role) -> dict[str, Any]:
    workloads = _workloads(snapshot, role)
    current = _sum(snapshot, plan.current, role)
    replicas, ready = sum(w.replicas for w in workloads), sum(w.ready for w in workloads)
    return {
        "name": role,
        "ready": f"{ready}/{plan.pools[role].desired}",
        "desiredReplicas": plan.pools[role].desired,
        "replicas": replicas,
        "readyReplicas": ready,
        "updatedReplicas": current.updated,
        "verifiedReplicas": min(told.verified(snapshot.evidence, snapshot.status, role), ready),
        "gpus": replicas * gpus_of(snapshot.spec, role),
    }


def _slice_status(snapshot: Snapshot, plan: Plan, slice_: SlicePlan) -> dict[str, Any]:
    lit = State.SERVING if answers(snapshot, slice_) else State.DARK
    shown = State.REMOVING if slice_.state is State.REMOVING else lit
    counts: dict[str, int] = {role: _sum(snapshot, [slice_], role).ready for role in ROLES}
    domain = plan.placing.domains.get(slice_.name, "")
    if plan.refusal is not None:  # nothing was looked at
        before = (s for s in snapshot.status.get("slices", ()) if s.get("name") == slice_.name)
        domain = next((str(s.get("domain", "")) for s in before), "")
    told: dict[str, Any] = {"name": slice_.name, "revision": slice_.revision, "domain": domain, **counts, "state": shown.value}
    if slice_.name in plan.front.weights:  # absent and not 0 without a gateway: nothing weights it
        told["weight"] = plan.front.weights[slice_.name]
    return told | to_status(plan.verification.get(slice_.name, Record(slice_.name)))


def _serving(snapshot: Snapshot, plan: Plan) -> SlicePlan | None:
    """A slice that answers now: one of the current revision as soon as it does."""
    answering = [s for s in plan.rollout.slices if answers(snapshot, s)]
    return next((s for s in answering if s.revision == plan.revision), answering[0] if answering else None)


def _focus(snapshot: Snapshot, plan: Plan) -> list[SlicePlan]:
    """What status is about: the slices of the revision that answers, else those of the current one."""
    serving = _serving(snapshot, plan)
    if serving is None:
        return list(plan.current)
    return [s for s in plan.rollout.slices if s.revision == serving.revision and s.state is not State.REMOVING]


def _sum(snapshot: Snapshot, slices: Sequence[SlicePlan], role: str) -> WorkloadFact:
    """Counts over the Deployments of a role of slices, and the first failure to create pods."""
    parts = snapshot.deployments()
    facts = [w for s in slices if (d := parts.get(s.name, {}).get(role)) and (w := d.workload)]
    return WorkloadFact(
        replicas=sum(w.replicas for w in facts),
        ready=sum(w.ready for w in facts),
        updated=sum(w.updated for w in facts),
        failure=next((w.failure for w in facts if w.failure), ""),
    )


def _workloads(snapshot: Snapshot, role: Role) -> list[WorkloadFact]:
    return [d[role].workload or NO_WORKLOAD for d in snapshot.deployments().values() if role in d]


def refused_status(previous: Mapping[str, Any], refusal: Refusal, generation: int, install: str, now: datetime) -> dict[str, Any]:
    """Status of an object whose spec cannot be read: everything else stays as it was."""
    accepted = Condition(Type.ACCEPTED, "False", refusal.reason, refusal.message)
    ready = Condition(Type.READY, "False", refusal.reason, f"Accepted: {refusal.message}")
    reconciling = Condition(Type.RECONCILING, "False", Reason.AS_EXPECTED)
    stalled = Condition(Type.STALLED, "True", refusal.reason, refusal.message)
    turned = merge(previous.get("conditions", []), [accepted, ready, reconciling, stalled], generation, now)
    kept = [c for c in previous.get("conditions", []) if c["type"] not in {t["type"] for t in turned}]
    conditions = sorted([*kept, *turned], key=lambda c: str(c["type"]))
    return {**previous, "observedGeneration": generation, "controller": install, "conditions": conditions}
