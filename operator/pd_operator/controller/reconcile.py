"""The shell of one reconcile: live GET -> Snapshot -> Plan -> apply -> status. Decisions are made in `core`, not here."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from pd_operator import __version__
from pd_operator.api.conditions import Reason, Type
from pd_operator.api.types import API_VERSION, PDDeploymentSpec
from pd_operator.controller.applier import EXPECTATION, Applier
from pd_operator.controller.object_metrics import Shown
from pd_operator.controller.roster import Roster
from pd_operator.core.autoscalers import REASON as AUTOSCALER_CONFLICT
from pd_operator.core.autoscalers import news
from pd_operator.core.capabilities import Refusal
from pd_operator.core.compatibility import invalid
from pd_operator.core.compatibility_model import Model, read_model
from pd_operator.core.ledger import Need, Part
from pd_operator.core.names import ROLE, ROLES, WORKLOADS, Role, pool
from pd_operator.core.observed import AutoscalerFact, ChildFact
from pd_operator.core.placement.requests import replica_shape
from pd_operator.core.placing import uncounted
from pd_operator.core.plan import Plan, make_plan
from pd_operator.core.prune import prune
from pd_operator.core.references import references
from pd_operator.core.result import Done, Result, Terminal, Waiting
from pd_operator.core.snapshot import Install, Reference, Snapshot, StoredRevision
from pd_operator.core.status import build_pool_status, build_status, refused_status
from pd_operator.core.transitions import transitions
from pd_operator.core.verification import WAYS_OUT
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError, Conflict, Forbidden, Invalid, is_retryable
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.store import Stores
from pd_operator.render.bundle import Bundle, engine_templates, render, replica_specs
from pd_operator.settings import Settings
from pd_operator.upstream import catalog

RECHECK = 15.0  # seconds until a missing reference or a conflicting object is looked at again
SAFETY = 20.0  # seconds; events bring us back earlier, but for a pod that goes on being unschedulable
LEFTOVERS = 2.0  # seconds; garbage collection of a deleted object of the same name
WAITING_REASONS = frozenset({Reason.MISSING_REFERENCE, Reason.NAME_CONFLICT, Reason.WRITE_REFUSED})

logger = logging.getLogger(__name__)
Object = dict[str, Any]


class Reconciler:
    """Brings one PDDeployment to what its spec asks for."""

    def __init__(self, client: KubeClient, stores: Stores, settings: Settings, recorder: EventRecorder) -> None:
        self._client = client
        self._stores = stores
        self._settings = settings
        self._recorder = recorder
        self._applier = Applier(client, stores.children)
        self.roster = Roster(stores)  # what scales; the scaling tick reads it
        self.shown = Shown()  # for the metrics
        self._pool_status: dict[tuple[str, str, Role], tuple[str, Object]] = {}  # (uid of the PDPool, what we wrote last)
        self._wrote: set[tuple[str, str, Role]] = set()  # PDPools whose status we wrote: what a list said of it may be older
        self._told: dict[tuple[str, str], tuple[str, str]] = {}  # (uid, the other install) of objects that are not ours
        self._server_version: tuple[int, int] | None = None
        self._install = Install(settings.install, settings.namespace, settings.pull_policy, settings.monitoring_namespace)

    async def reconcile(self, key: tuple[str, str]) -> Result:
        """One pass for the key (namespace, name).

        Raises:
            kube.errors.ApiError, aiohttp.ClientError, TimeoutError: the caller backs off and tries again.
        """
        namespace, name = key
        obj = await self._client.get("PDDeployment", namespace, name)
        if obj is None or "deletionTimestamp" in obj["metadata"]:
            self._forget(namespace, name)
            return Done()  # children go by their owner references; there is no finalizer (invariant I1)
        self._stores.read[key] = obj["metadata"]["resourceVersion"]
        other = obj.get("status", {}).get("controller", "")
        if other and other != self._install.name:
            return await self._managed_by_other(obj, other)
        try:
            spec = PDDeploymentSpec.model_validate(obj["spec"])
        except ValidationError as exc:
            return await self._refuse_unreadable(obj, invalid(exc))
        return await self._pass(obj, await self._snapshot(obj, spec))

    async def _pass(self, obj: Object, snapshot: Snapshot) -> Result:
        snapshot = self._with_room(snapshot)  # no await from here to _assume: the view is of one instant, and nobody plans between
        plan = make_plan(snapshot)
        self._assume(snapshot, plan)
        if plan.refusal is None:
            bundle = render(snapshot, plan)
            plan = replace(plan, renderer_changed=bundle.renderer_changed)
            foreign = await self._applier.foreign(m for stage in bundle.stages for m in stage)
            leftovers = [f for f in foreign if f[2].get("kind") == "PDDeployment" and f[2].get("name") == snapshot.name]
            if leftovers:
                kind, name, _ = leftovers[0]
                return Waiting(f"{kind} {name} of a deleted PDDeployment of the same name is still being removed", LEFTOVERS)
            if foreign:
                snapshot = replace(
                    snapshot, conflicts=tuple(f"{kind} {name}" for kind, name, _ in sorted(foreign, key=lambda f: f[:2]))
                )
                plan = make_plan(snapshot)
                self._assume(snapshot, plan)
            else:
                plan = await self._try(snapshot, plan, bundle)
                changed = self._changed(snapshot, bundle)
                plan = self._await_watch(plan, changed) if changed else await self._start_canaries(plan, bundle)
        self.roster.put(snapshot, plan)
        status = await self._write_status(obj, build_status(snapshot, plan))
        if plan.refusal is not None:
            return _refused(plan.refusal)
        await self._write_pools(snapshot, plan)
        return _result(plan, status, self._applier.unseen(m for stage in bundle.stages for m in stage))

    def _with_room(self, snapshot: Snapshot) -> Snapshot:
        """What placement reads: the shapes of the replicas, and what nodes have free for them."""
        key, ledger = snapshot.spec.placement.transfer_domain.topology_key, self._stores.ledger
        if not key:
            return snapshot
        templates = engine_templates(snapshot)
        try:
            shapes = {role: replica_shape(role, replica_specs(snapshot, templates, role)) for role in ROLES}
        except (ValueError, KeyError, TypeError, AttributeError):  # the user's template; the server says what is wrong with it
            return replace(snapshot, unseen="its template cannot be read")
        room = ledger.room((snapshot.namespace, snapshot.name), key) if ledger else None
        return replace(snapshot, shapes=shapes, room=room, unseen=next(filter(None, map(uncounted, templates.values())), ""))

    def _assume(self, snapshot: Snapshot, plan: Plan) -> None:
        """Reserve what the plan asks for, until the watch shows its workloads. What is refused is not made and reserves nothing."""
        if self._stores.ledger is None or not snapshot.shapes:
            return
        needs: dict[Part, Need] = {
            (s.name, role): Need((s.replicas or {}).get(role, 0), s.site, snapshot.shapes[role].pods)
            for s in plan.targets
            for role in ROLES
            if plan.refusal is None
        }
        self._stores.ledger.assume((snapshot.namespace, snapshot.name), needs)

    async def _try(self, snapshot: Snapshot, plan: Plan, bundle: Bundle) -> Plan:
        """Apply; a write that the server will not take becomes a refusal that the user can read, not a silent retry."""
        try:
            await self._apply(snapshot, plan, bundle)
        except (Invalid, Forbidden) as exc:
            logger.warning("refused: %s", exc)
            refusal = Refusal(Reason.WRITE_REFUSED, "spec", "", f"the API server refuses what is made from it: {exc.message}")
            plan = replace(plan, refusal=refusal)
            self._assume(snapshot, plan)
        return plan

    async def _start_canaries(self, plan: Plan, bundle: Bundle) -> Plan:
        """Create Jobs. One that exists already was made by the pass before, which the watch has not shown yet.

        Not in a pass that changed a workload: what the snapshot shows as ready is then about to go.
        """
        if plan.refusal is not None:
            return plan
        try:
            for manifest in bundle.canaries:
                try:
                    await self._client.create(manifest)
                    logger.info("created Job %s", manifest["metadata"]["name"])
                except Conflict:
                    continue
        except ApiError as exc:
            if is_retryable(exc) and exc.status != 500:  # 500: a webhook that nobody answers, for as long as nobody mends it
                raise
            logger.warning("canary refused: %s", exc)
            return replace(plan, canary_refused=f"the API server takes no Job: {exc.message}; {WAYS_OUT}")
        return plan

    def _changed(self, snapshot: Snapshot, bundle: Bundle) -> list[str]:
        """Workloads that were written after the snapshot: it shows their old pods."""
        known = {(c.kind, c.name): int(c.resource_version) for c in snapshot.children if c.kind in WORKLOADS}
        written = {(m["kind"], m["metadata"]["name"]): m for stage in bundle.stages for m in stage if m["kind"] in WORKLOADS}
        return [name for (kind, name), m in written.items() if self._applier.version(m) > known.get((kind, name), 0)]

    def _await_watch(self, plan: Plan, changed: Sequence[str]) -> Plan:
        """A workload that was just written is not up to date because the snapshot shows its old pods ready.

        Without this the status of a new generation would say so until the next reconcile (kstatus: Current, and then not).
        """
        if plan.rollout.reason is not Reason.UPDATED:
            return plan
        return replace(plan, rollout=replace(plan.rollout, reason=Reason.ROLLING_OUT, message=f"{changed[0]} was changed"))

    async def _apply(self, snapshot: Snapshot, plan: Plan, bundle: Bundle) -> None:
        """Writes in an order from which a crash after any of them leads to the same end (invariant I9)."""
        writes = 0
        for stage in bundle.stages:
            writes += await self._applier.apply(stage)
        for one in plan.scalings:
            patch = {"metadata": {"uid": one.uid}, "spec": {"replicas": one.replicas}}
            await self._client.merge(one.kind, snapshot.namespace, one.name, patch)
            writes += 1
        for role, mine in plan.pools.items():
            if mine.scale:
                await self._client.scale("PDPool", snapshot.namespace, pool(snapshot.name, role), mine.number)
                writes += 1
        deletions = prune(snapshot, plan, bundle.keys)
        gone = await self._applier.delete(snapshot.namespace, deletions)
        if writes or gone:
            logger.info("applied %d objects, deleted %d", writes, gone)
        for deletion in deletions:
            logger.info("deleted %s %s: %s", deletion.kind, deletion.name, deletion.reason)

    async def _snapshot(self, obj: Object, spec: PDDeploymentSpec) -> Snapshot:
        metadata = obj["metadata"]
        namespace, name, uid = metadata["namespace"], metadata["name"], metadata["uid"]
        missing, model = await self._missing(namespace, spec), await self._model(namespace, spec)
        if self._server_version is None:
            self._server_version = await self._client.server_version()
        now = datetime.now(UTC)
        children = tuple(c for c in self._stores.children.by_owner(namespace, name) if c.owner_uid == uid)
        return Snapshot(
            namespace=namespace,
            name=name,
            uid=uid,
            generation=metadata["generation"],
            spec=spec,
            now=now,
            upstream=catalog.upstream(spec),
            images=self._images(spec),
            status=obj.get("status", {}),
            children=children,
            pods=tuple(p for p in self._stores.pods.by_owner(namespace, name) if not p.lost(now)),
            unshown=self._applier.unshown(uid),
            revisions=_revisions(children),
            missing=missing,
            install=self._install,
            server_version=self._server_version,
            missing_kinds=self._stores.missing_kinds(namespace),
            autoscalers=self._autoscalers(namespace, name, children),
            scaled=self.roster.scaled((namespace, name), uid),
            evidence=self.roster.evidence((namespace, name), uid),
            model=model,
        )

    def _autoscalers(self, namespace: str, name: str, children: Sequence[ChildFact]) -> tuple[AutoscalerFact, ...]:
        """HPAs of its pools and of its engine workloads, whoever made them."""
        targets = [pool(name, role) for role in ROLES] + [c.name for c in children if c.workload and c.labels.get(ROLE)]
        return tuple(a for target in targets for a in self._stores.autoscalers.by_owner(namespace, target))

    def _images(self, spec: PDDeploymentSpec) -> dict[str, str]:
        """The user's image, else the install's table; LMCache also runs from the engine's image, which holds the same version."""
        table = self._settings
        engine = spec.engine.image or table.image(spec.engine.type, spec.engine.version)
        router = spec.router.image or table.image(spec.router.type, catalog.router_version(spec))
        server = (spec.lmcache.image or table.image("lmcache", spec.lmcache.version) or engine) if spec.lmcache else ""
        return {"engine": engine, "router": router, "lmcache": server, "canary": table.image("canary", __version__)}

    async def _missing(self, namespace: str, spec: PDDeploymentSpec) -> tuple[Reference, ...]:
        wanted = references(spec)
        found = await asyncio.gather(*(self._client.exists(r.kind, namespace, r.name) for r in wanted))
        return tuple(r for r, exists in zip(wanted, found, strict=True) if exists is None)

    async def _model(self, namespace: str, spec: PDDeploymentSpec) -> Model | Refusal | None:
        """The model's config.json; a ConfigMap that is not there is among the missing references."""
        name = spec.model.config_map_ref.name if spec.model.config_map_ref else ""
        found = await self._client.get("ConfigMap", namespace, name) if name else None
        return None if found is None else read_model(name, found.get("data"), frozenset(found.get("binaryData") or ()))

    async def _write_status(self, obj: Object, status: Object) -> Object:
        """Apply the status when it differs, and record events for conditions that turned."""
        self.shown.put((obj["metadata"]["namespace"], obj["metadata"]["name"]), status)
        previous = obj.get("status", {})
        if any(previous.get(key) != value for key, value in status.items()):
            await self._client.apply_status(_reference(obj) | {"status": status})
        for event in transitions(previous.get("conditions", []), status["conditions"]):
            await self._recorder.event(obj, event.type, event.reason, event.note)
        return status

    async def _write_pools(self, snapshot: Snapshot, plan: Plan) -> None:
        for role in ROLES:
            child = snapshot.child("PDPool", pool(snapshot.name, role))
            if child is not None:
                await self._write_pool(snapshot, plan, role, child)

    async def _write_pool(self, snapshot: Snapshot, plan: Plan, role: Role, child: ChildFact) -> None:
        key = (snapshot.namespace, snapshot.name, role)
        uid, previous = self._pool_status.get(key, ("", {}))
        if uid != child.uid and child.status is not None and key not in self._wrote:
            previous = child.status
        elif uid != child.uid:
            live = await self._client.get("PDPool", snapshot.namespace, child.name)
            if live is None:
                return  # its deletion event brings us back, and it is made again
            previous = live.get("status", {})
        status = build_pool_status(snapshot, plan, role, previous, child.generation)
        self.shown.put_pool((snapshot.namespace, snapshot.name), role, status)
        if status != {k: previous.get(k) for k in status}:
            if note := news(previous.get("conditions") or (), status["conditions"]):
                owner = {"namespace": snapshot.namespace, "name": snapshot.name, "uid": snapshot.uid}
                reference = {"apiVersion": API_VERSION, "kind": "PDDeployment", "metadata": owner}
                await self._recorder.event(reference, "Warning", AUTOSCALER_CONFLICT, f"{child.name}: {note}")
            # A write whose answer is lost may have been made: what was remembered before it may be neither what is there nor
            # what is to be, and a count that comes back to it would never be written. The next pass asks the server.
            self._pool_status.pop(key, None)
            self._wrote.add(key)
            metadata = {"name": child.name, "namespace": snapshot.namespace, "uid": child.uid}
            await self._client.apply_status({"apiVersion": API_VERSION, "kind": "PDPool", "metadata": metadata, "status": status})
        self._pool_status[key] = (child.uid, status)

    def _forget(self, namespace: str, name: str) -> None:
        self._applier.forget(namespace, name)
        self._stores.read.pop((namespace, name), None)
        self.roster.forget((namespace, name))
        self.shown.forget((namespace, name))
        if self._stores.ledger is not None:
            self._stores.ledger.forget((namespace, name))
        self._told.pop((namespace, name), None)
        for role in ROLES:
            self._pool_status.pop((namespace, name, role), None)
            self._wrote.discard((namespace, name, role))

    async def _refuse_unreadable(self, obj: Object, refusal: Refusal) -> Result:
        metadata = obj["metadata"]
        status = refused_status(obj.get("status", {}), refusal, metadata["generation"], self._install.name, datetime.now(UTC))
        await self._write_status(obj, status)
        return Terminal(refusal.message)

    async def _managed_by_other(self, obj: Object, other: str) -> Result:
        """Another install owns it: say so once, write nothing, or both would write its status in turn."""
        note = f"status.controller is {other}, this install is {self._install.name}; let one install watch this namespace"
        metadata = obj["metadata"]
        key, told = (metadata["namespace"], metadata["name"]), (metadata["uid"], other)
        self.shown.forget(key)
        if self._told.get(key) != told:  # each write of the owner brings us here
            await self._recorder.event(obj, "Warning", Reason.MANAGED_BY_OTHER.value, note)
            self._told[key] = told
        return Terminal(note)


def _refused(refusal: Refusal) -> Result:
    if refusal.reason in WAITING_REASONS or refusal.outside:
        return Waiting(refusal.message, RECHECK)
    return Terminal(refusal.message)


def _result(plan: Plan, status: Mapping[str, Any], unseen: Sequence[str]) -> Result:
    ready = next(c for c in status["conditions"] if c["type"] == Type.READY.value)
    if ready["status"] == "True" and plan.rollout.reason is Reason.UPDATED:
        # What was deleted before any watch showed it (a gap) raises no event: then only a look after the expectation finds it.
        return Done(EXPECTATION) if unseen else Done(plan.canary_due)
    return Waiting(f"{ready['reason']}: {ready['message']}", min(SAFETY, plan.placing.due or SAFETY, plan.canary_due or SAFETY))


def _reference(obj: Object) -> Object:
    """Enough of an object to apply its status; the uid keeps us from writing to a namesake."""
    metadata = {key: obj["metadata"][key] for key in ("name", "namespace", "uid")}
    return {"apiVersion": API_VERSION, "kind": "PDDeployment", "metadata": metadata}


def _revisions(children: tuple[ChildFact, ...]) -> tuple[StoredRevision, ...]:
    found = []
    for child in children:
        if child.kind == "ControllerRevision" and child.data:
            stored = json.loads(child.data)
            data = stored["data"] or {}
            found.append(
                StoredRevision(
                    child.name,
                    int(stored["revision"]),
                    data.get("pairing", ""),
                    data.get("roles", {}),
                    data.get("templates", {}),
                    data.get("spec", {}),
                )
            )
    return tuple(sorted(found, key=lambda r: r.number))
