"""Roster: the PDDeployments whose pods are read, as the last reconcile of each saw them: those that scale, and those whose evidence
is watched. A start reconciles every object."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pd_operator.api.scalars import seconds
from pd_operator.api.types import API_VERSION, PDDeploymentSpec
from pd_operator.controller.loop import Key
from pd_operator.core.autoscalers import conflict_of
from pd_operator.core.evidence.watch import Evidence
from pd_operator.core.names import COMPONENT, ROLE, ROLES, SLICE, Role
from pd_operator.core.observed import PodFact, WorkloadFact
from pd_operator.core.plan import Plan
from pd_operator.core.pools import Mode, bounds_of, gpus_of, mode_of
from pd_operator.core.scaled import DEFAULT_LEAD, LeadTime, Missing, Scaled
from pd_operator.core.scaling.bounds import Bounds, RoleBounds
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.core.traffic import told
from pd_operator.kube.store import Stores
from pd_operator.signals.fleet import Deployment, Side, Target
from pd_operator.upstream import catalog, lmcache, vllm

# Counters need no sample each 5 s: pages that only they are read from, and those of caches, are scraped in every third sweep.
SELDOM = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """One PDDeployment whose pods are read."""

    key: Key
    uid: str
    spec: PDDeploymentSpec
    serving: frozenset[str]  # slices
    rollout: bool
    missing: Mapping[Role, Missing]  # replicas that cannot be
    should: Mapping[str, int] = field(default_factory=dict)  # slice -> points of the requests that it should get
    uneven: str = ""  # what status says of that
    scales: bool = True
    watched: bool = True  # its evidence is; not with verification Disabled
    yields: frozenset[Role] = frozenset()  # whose number an HPA writes although the mode is Auto

    @property
    def mode(self) -> Mode:
        """Its scaling mode."""
        return mode_of(self.spec)

    def reference(self) -> dict[str, Any]:
        """Enough of the object for an Event."""
        metadata = {"namespace": self.key[0], "name": self.key[1], "uid": self.uid}
        return {"apiVersion": API_VERSION, "kind": "PDDeployment", "metadata": metadata}


@dataclass(frozen=True, slots=True)
class Holder:
    """One PDDeployment, whether it scales or not: what its replicas take of a budget."""

    key: Key
    uid: str
    mode: str  # Static, ...; or why it does not scale
    gpus: Mapping[Role, int]  # of one replica
    counts: Mapping[Role, int]  # replicas that it uses


class Roster:
    """Entries by key, and what the last tick found for each.

    Attributes:
        budgets: of the last tick, by name: GPUs that there are, and that are held.
    """

    def __init__(self, stores: Stores) -> None:
        self._stores = stores
        self._holders: dict[Key, Holder] = {}
        self._gone: dict[Key, Holder] = {}  # deleted, and their pods may still end
        self.budgets: dict[str, tuple[int, int]] = {}
        self._entries: dict[Key, Entry] = {}
        self._scaled: dict[Key, tuple[str, Scaled]] = {}  # (uid, result)
        self._evidence: dict[Key, tuple[str, Evidence]] = {}
        self._made: dict[Key, tuple[Entry, tuple[PodFact, ...], Deployment]] = {}  # of the last fleet, and what each was made of

    def put(self, snapshot: Snapshot, plan: Plan) -> None:
        """Take what a reconcile saw. One that is suspended is not read; one that is refused does not scale, and what serves of it
        is watched as before."""
        key = snapshot.namespace, snapshot.name
        self._holders[key] = _holder(key, snapshot, plan, self._holders.get(key))
        self._gone.pop(key, None)
        scales, watched = snapshot.spec.scaling is not None, snapshot.spec.verification != "Disabled"
        if plan.refusal is not None:
            old = self._entries.pop(key, None)
            if old is not None and old.watched and old.uid == snapshot.uid:
                self._entries[key] = replace(old, scales=False)
            return
        if snapshot.spec.suspend or not (scales or watched):
            self._entries.pop(key, None)
            return
        fronts = frozenset(s.name for s in plan.rollout.slices if s.front)
        revisions = {s.revision for s in plan.rollout.slices if s.keep_engines}
        short = dict(zip(ROLES, plan.placing.short, strict=True))
        engines = {role: [d[role].workload for d in snapshot.deployments().values() if role in d] for role in ROLES}
        rolling = any(w.updated < w.replicas for facts in engines.values() for w in facts if w)  # one role, inside its slices
        missing = {role: Missing(short[role], sum(_refused(w) for w in engines[role] if w)) for role in ROLES}
        moving = rolling or len(revisions) > 1
        yields = frozenset(role for role in ROLES if (c := conflict_of(snapshot, role)) is not None and c.yields)
        shares = (plan.front.should, told(snapshot))
        self._entries[key] = Entry(key, snapshot.uid, snapshot.spec, fronts, moving, missing, *shares, scales, watched, yields)

    def forget(self, key: Key) -> None:
        """Drop an object that is gone."""
        self._entries.pop(key, None)
        self._scaled.pop(key, None)
        if (holder := self._holders.pop(key, None)) is not None:
            self._gone[key] = replace(holder, mode="deleted", counts=dict.fromkeys(ROLES, 0))
        self._gone = {k: h for k, h in self._gone.items() if self._stores.pods.by_owner(*k)}
        self._evidence.pop(key, None)

    def entries(self) -> list[Entry]:
        """All that scale, by key."""
        return [entry for entry in self._all() if entry.scales]

    def watched(self) -> list[Entry]:
        """All whose evidence is watched, by key."""
        return [entry for entry in self._all() if entry.watched]

    def _all(self) -> list[Entry]:
        return [self._entries[key] for key in sorted(self._entries)]

    def holders(self) -> list[Holder]:
        """All that a reconcile has seen, scaling or not, and those that are deleted as long as they have pods."""
        return [*self._holders.values(), *self._gone.values()]

    def scaled(self, key: Key, uid: str) -> Scaled | None:
        """What the last tick found for exactly this object."""
        owner, found = self._scaled.get(key, ("", None))
        return found if owner == uid else None

    def tell(self, entry: Entry, scaled: Scaled) -> None:
        """Keep what a tick found, unless the object went meanwhile."""
        if entry.key in self._entries:
            self._scaled[entry.key] = (entry.uid, scaled)

    def evidence(self, key: Key, uid: str) -> Evidence | None:
        """What the last look found for exactly this object."""
        owner, found = self._evidence.get(key, ("", None))
        return found if owner == uid else None

    def saw(self, entry: Entry, evidence: Evidence) -> None:
        """Keep what a look found, unless the object went meanwhile."""
        if entry.key in self._entries:
            self._evidence[entry.key] = (entry.uid, evidence)

    def fleet(self) -> tuple[Deployment, ...]:
        """The pages to read: engines, routers and LMCache servers of the serving slices of every entry."""
        found = {entry.key: self._kept(entry) for entry in self._all()}
        self._made = found
        return tuple(made for _, _, made in found.values())

    def _kept(self, entry: Entry) -> tuple[Entry, tuple[PodFact, ...], Deployment]:
        """As it was made the last time, unless the entry or one of its pods is another one since: most have not changed."""
        pods, old = self._stores.pods.by_owner(*entry.key), self._made.get(entry.key)
        if old is not None and old[0] is entry and old[1] is pods:
            return old
        return entry, pods, self._deployment(entry, pods)

    def _deployment(self, entry: Entry, pods: tuple[PodFact, ...]) -> Deployment:
        namespace, name = entry.key
        targets = [t for pod in pods for t in (_target(entry, pod), _cache_target(entry, pod)) if t is not None]
        percentile = entry.spec.slo.percentile if entry.spec.slo else 95
        ordered = tuple(sorted(targets, key=lambda t: (t.pod, t.side)))
        return Deployment(namespace, name, ordered, percentile, entry.scales)


def _holder(key: Key, snapshot: Snapshot, plan: Plan, before: Holder | None) -> Holder:
    """A refused spec changes nothing of what runs, so what was known before it stands."""
    if plan.refusal is not None and before is not None and before.uid == snapshot.uid:
        return before
    spec = snapshot.spec
    mode = "refused" if plan.refusal is not None else "suspended" if spec.suspend else mode_of(spec)
    counts = {role: 0 if plan.refusal is not None else plan.pools[role].desired for role in ROLES}
    gpus = {role: gpus_of(spec, role) for role in ROLES}
    return Holder(key, snapshot.uid, mode, gpus, counts)


def _refused(workload: WorkloadFact) -> int:
    """Pods that a Deployment may not make."""
    return max(0, (workload.spec_replicas or 0) - workload.replicas) if workload.failure else 0


def _target(entry: Entry, pod: PodFact) -> Target | None:
    part = pod.labels.get(ROLE) or pod.labels.get(COMPONENT, "")
    slice_ = pod.labels.get(SLICE, "")
    if slice_ not in entry.serving or not pod.ip:
        return None
    sides: dict[str, Side] = {"prefill": "prefill", "decode": "decode", ROUTER: "router"}
    if part not in sides:
        return None
    program = entry.spec.engine.type if part in ROLES else entry.spec.router.type
    version = entry.spec.engine.version if part in ROLES else catalog.router_version(entry.spec)
    port = vllm.PORT if part in ROLES else catalog.router(entry.spec).METRICS_PORT
    return _page(entry, pod, sides[part], port, (program, version), 1 if entry.scales else SELDOM)


def _cache_target(entry: Entry, pod: PodFact) -> Target | None:
    """The page of the LMCache server beside an engine; nothing scales by it."""
    mine = entry.spec.lmcache is not None and pod.labels.get(ROLE, "") in ROLES and pod.labels.get(SLICE, "") in entry.serving
    if not mine or entry.spec.lmcache is None or not entry.watched or not pod.ip:
        return None
    return _page(entry, pod, "cache", lmcache.HTTP_PORT, ("lmcache", entry.spec.lmcache.version), SELDOM)


def _page(entry: Entry, pod: PodFact, side: Side, port: int, program: tuple[str, str], every: int) -> Target:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    container = {"router": ROUTER, "cache": "lmcache"}.get(side, "engine")
    return Target(
        entry.key[0], entry.key[1], pod.labels.get(SLICE, ""), side, pod.name, pod.uid, f"http://{host}:{port}/metrics", *program,
        ready=pod.ready and not pod.deleting,
        deleting=pod.deleting,
        running=next((c.ready for c in pod.containers if c.name == container), None),
        created=pod.created.timestamp() if pod.created else 0.0,
        every=every,
        since=pod.ready_since.timestamp() if pod.ready_since else 0.0,
    )  # fmt: skip


def bounds(entry: Entry, lead: Mapping[Role, LeadTime], tick: float) -> Bounds:
    """Bounds of `decide`. The counts are those of the spec; what the pool itself clamps is the same."""
    spec = entry.spec
    slo = spec.slo

    def role(name: Role) -> RoleBounds:
        own = bounds_of(spec, name)
        assert own is not None  # an entry scales
        found = lead.get(name)
        return RoleBounds(own.min_replicas, own.max_replicas, gpus_of(spec, name), found.p90 if found else DEFAULT_LEAD)

    return Bounds(
        role("prefill"),
        role("decode"),
        max_gpus=spec.scaling.max_gpus if spec.scaling else None,
        slo_ttft=seconds(slo.ttft) if slo and slo.ttft else None,
        slo_ttft_per_thousand=seconds(slo.ttft_per_thousand_tokens) if slo and slo.ttft_per_thousand_tokens else 0.0,
        slo_itl=seconds(slo.itl) if slo and slo.itl else None,
        percentile=slo.percentile if slo else 95,
        max_queue_time=seconds(spec.backpressure.max_queue_time),
        lease=seconds(spec.handoff.lease_duration),
        max_num_seqs=vllm.running_bound([*spec.engine.args, *spec.decode.args]),
        tick=tick,
    )
