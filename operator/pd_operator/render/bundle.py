"""All manifests of one plan, in the order in which they are applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pd_operator.api.types import API_VERSION
from pd_operator.core.kept import followers, spec_of
from pd_operator.core.names import (
    APPLIED_HASH,
    COMPONENT,
    DEPLOYMENT,
    GROUP_KIND,
    REVISION,
    REVISION_COMPONENT,
    ROLE,
    ROLES,
    WORKER,
    Role,
    base_labels,
    controller_revision,
    pool,
)
from pd_operator.core.plan import Plan
from pd_operator.core.pools import bounds_of
from pd_operator.core.revision import applied_hash, intent, pairing_hash, pods_hash, role_hash
from pd_operator.core.snapshot import ROUTER, Snapshot, StoredRevision
from pd_operator.core.verification import mode_of
from pd_operator.render import access, canary, coordinator, engine, network, objects, router


@dataclass(frozen=True, slots=True)
class Bundle:
    """Manifests by stage: a stage is applied when the one before it is."""

    stages: tuple[tuple[objects.Manifest, ...], ...]
    renderer_changed: bool  # the stored templates are not what this version of the operator would render
    canaries: tuple[objects.Manifest, ...] = ()  # Jobs to create, once everything else is applied

    @property
    def keys(self) -> frozenset[tuple[str, str]]:
        """(kind, name) of everything in it."""
        return frozenset((m["kind"], m["metadata"]["name"]) for stage in self.stages for m in stage)


def render(snapshot: Snapshot, plan: Plan) -> Bundle:
    """Manifests of the target slices and of what all slices share.

    The ControllerRevision comes first: after a crash the next reconcile finds the same templates (invariant I9). Pod
    templates of engines come from it, so that another version of the operator changes none (invariant I12). Slices of
    other revisions are not rendered, but for their routers: they stay as they are until they go.
    """
    accounts = access.accounts(snapshot) + ([canary.account(snapshot)] if mode_of(snapshot) != "Disabled" else [])
    shared = [access.binding(snapshot), network.front_service(snapshot), network.engine_policy(snapshot), *_budgets(snapshot)]
    pools = [_pool(snapshot, plan, role) for role in ROLES]
    gateway = snapshot.spec.gateway
    routes = [network.route(snapshot, plan.front, gateway)] if gateway is not None else []  # after the Services that it names
    others = _old_routers(snapshot, plan)
    if not plan.targets:
        return _bundle([accounts, [*shared, *pools], [*routes, *others]], False)
    fresh, stored, templates = _templates(snapshot, plan.revision, plan.pods)
    services: list[objects.Manifest] = []
    workloads: list[objects.Manifest] = [*routes, *others]
    for target in plan.targets:
        services.append(network.slice_service(snapshot, target))
        counts = target.replicas or {}
        made = (engine.manifest(snapshot, role, target, counts[role], templates) for role in ROLES)
        workloads += [manifest for manifest in made if manifest is not None]
        workloads.append(router.deployment(snapshot, target))
        if snapshot.spec.lmcache is not None and snapshot.spec.lmcache.p2p.enabled:
            service, deployment = coordinator.manifests(snapshot, target, snapshot.spec.lmcache)
            services.append(service)
            workloads.append(deployment)
    first = [] if stored else [_revision(snapshot, plan, templates)]
    changed = stored is not None and any(dict(templates[key]) != fresh[key] for key in fresh)
    bundle = _bundle([[*first, *accounts], [*shared, *pools, *services], workloads], changed)
    return replace(bundle, canaries=tuple(canary.job(snapshot, c) for c in plan.canaries))


def _old_routers(snapshot: Snapshot, plan: Plan) -> list[objects.Manifest]:
    """Routers of older revisions that serve: what is live in spec.router reaches them (core/kept.py)."""
    made = []
    for slice_ in followers(plan.revision, plan.rollout):
        spec = spec_of(snapshot, slice_.revision)
        if spec is not None:
            made.append(router.deployment(replace(snapshot, spec=spec), slice_))
    return made


def _bundle(stages: list[list[objects.Manifest]], changed: bool) -> Bundle:
    return Bundle(tuple(tuple(_hashed(m) for m in stage) for stage in stages if stage), changed)


def _hashed(manifest: objects.Manifest) -> objects.Manifest:
    """Add the hash of the desired manifest, by which an unchanged child is recognised without a write (invariant I2)."""
    hashed = manifest
    if manifest["kind"] == "PDPool":  # its first number is written once: the manifest without it is the same one
        hashed = {**manifest, "spec": {k: v for k, v in manifest["spec"].items() if k != "replicas"}}
    annotations = {**manifest["metadata"].get("annotations", {}), APPLIED_HASH: applied_hash(hashed)}
    metadata = {**manifest["metadata"], "annotations": annotations}
    return {**manifest, "metadata": metadata}


def engine_templates(snapshot: Snapshot) -> Mapping[str, Mapping[str, Any]]:
    """Pod templates that the engines of the current revision have, or would have: by role, and of the workers of groups."""
    return _templates(snapshot, pairing_hash(snapshot.spec), pods_hash(snapshot.spec))[2]


def replica_specs(snapshot: Snapshot, templates: Mapping[str, Mapping[str, Any]], role: Role) -> list[Mapping[str, Any]]:
    """Specs of the pods of one replica, the one that serves first."""
    nodes = snapshot.spec.roles[role].nodes
    return [templates[key].get("spec") or {} for key in (role, *[engine.worker_key(role)] * (nodes - 1))]


def _templates(
    snapshot: Snapshot, revision: str, pods: str
) -> tuple[dict[str, dict[str, Any]], StoredRevision | None, Mapping[str, Mapping[str, Any]]]:
    """(fresh templates, the stored revision, the templates to use): the stored ones where there are any.

    A new shape takes over the stored template of a role whose own part did not change.
    """
    fresh = engine.pod_templates(snapshot, revision)
    stored = next((r for r in snapshot.revisions if r.pairing == revision and r.name.endswith(f"-{pods}")), None)
    if stored is not None:
        return fresh, stored, stored.templates
    chosen: dict[str, Mapping[str, Any]] = dict(fresh)
    for role in ROLES:
        mine = role_hash(snapshot.spec, role)
        same = [r for r in snapshot.revisions if r.pairing == revision and r.roles.get(role) == mine]
        if same:
            old = max(same, key=lambda r: r.number).templates
            chosen |= {key: old[key] for key in (role, engine.worker_key(role)) if key in fresh}
    return fresh, None, chosen


def _revision(snapshot: Snapshot, plan: Plan, templates: Mapping[str, Mapping[str, Any]]) -> objects.Manifest:
    name = controller_revision(snapshot.name, plan.revision, plan.pods)
    labels = base_labels(snapshot.name, REVISION_COMPONENT) | {REVISION: plan.revision}
    data = {
        "pairing": plan.revision,
        "roles": {role: role_hash(snapshot.spec, role) for role in ROLES},
        "spec": intent(snapshot.spec),
        "templates": {key: dict(template) for key, template in templates.items()},
    }
    number = 1 + max((r.number for r in snapshot.revisions), default=0)
    return objects.manifest("apps/v1", "ControllerRevision", snapshot, name, labels, data=data, revision=number)


def _pool(snapshot: Snapshot, plan: Plan, role: Role) -> objects.Manifest:
    """PDPool of a role. `replicas` stands in the manifest that creates it and in no later one."""
    mine, bounds = plan.pools[role], bounds_of(snapshot.spec, role)
    spec: dict[str, Any] = {"deploymentName": snapshot.name, "role": role}
    if bounds is not None:  # for whoever writes an HPA, or looks at one
        spec |= {"minReplicas": bounds.min_replicas, "maxReplicas": bounds.max_replicas}
    if mine.create:
        spec["replicas"] = mine.number
    return objects.manifest(
        API_VERSION, "PDPool", snapshot, pool(snapshot.name, role), base_labels(snapshot.name, "pool") | {ROLE: role}, spec=spec
    )


def _budgets(snapshot: Snapshot) -> list[objects.Manifest]:
    """One pod of a kind at a time; a pod that is not healthy may always go, or it would block a node's drain.

    A worker takes its group down as much as a leader, so workers have a budget of their own.
    """
    parts = {"prefill": {ROLE: "prefill"}, "decode": {ROLE: "decode"}, ROUTER: {COMPONENT: ROUTER}}
    parts |= {engine.worker_key(role): {WORKER: role} for role in ROLES if snapshot.kind_of(role) == GROUP_KIND}
    return [
        objects.manifest(
            "policy/v1",
            "PodDisruptionBudget",
            snapshot,
            f"{snapshot.name}-{part}",
            base_labels(snapshot.name, ROUTER if part == ROUTER else "engine"),
            spec={
                "maxUnavailable": 1,
                "unhealthyPodEvictionPolicy": "AlwaysAllow",
                "selector": {"matchLabels": {DEPLOYMENT: snapshot.name, **labels}},
            },
        )
        for part, labels in parts.items()
    ]
