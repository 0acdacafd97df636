"""LeaderWorkerSet of a role whose replicas span nodes: one group of pods is one replica, and its leader serves.

The workers are the leader's pods without what serves: no role label, so that no router, scale, budget or count of replicas takes
them for replicas; no probes, since they serve no HTTP; no drain of their own, since requests end at the leader, and the workers go
when it has gone (their StatefulSet is owned by the leader pod).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from pd_operator.core.names import GROUP_KIND, LLMD_ROLE, ROLE, SLICE, WORKER, Role, slice_labels, workload
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.snapshot import Snapshot
from pd_operator.render import objects, site
from pd_operator.upstream import smg, vllm_nodes

API_VERSION: Final = "leaderworkerset.x-k8s.io/v1"
GROUP_KEY: Final = "leaderworkerset.sigs.k8s.io/group-key"  # label that LWS gives all pods of one group, and no others
PROBES: Final = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle", "ports")
WORKER_GRACE: Final = 30  # seconds; a worker has nothing to finish
# Below, the API server drops matchLabelKeys of a pod affinity term, which then would keep all groups apart (kubernetes.io, feature
# gate MatchLabelKeysInPodAffinity: on by default since 1.31).
APART_SINCE: Final = (1, 31)


def templates(
    leader: Mapping[str, Any], role: Role, slice_: str, server_version: tuple[int, int]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(leader, worker) pod templates of a group, from that of the pod that serves, the user's template included."""
    apart = _apart(leader, slice_) if server_version >= APART_SINCE else dict(leader)
    return apart, _worker(apart, role, slice_)


def manifest(
    snapshot: Snapshot, role: Role, slice_: SlicePlan, replicas: int, leader: Mapping[str, Any], worker: Mapping[str, Any]
) -> objects.Manifest:
    """The LeaderWorkerSet of a role of a slice. It scales by groups, ends its highest index first, and rolls group by group."""
    rollout = snapshot.spec.rollout
    # It knows no Recreate: all groups at once are the same.
    surge, unavailable = (rollout.max_surge, rollout.max_unavailable) if rollout.type == "RollingUpdate" else (0, "100%")
    # Groups below the partition keep the template that they have; paused, that is all of them.
    held = replicas if rollout.paused and snapshot.child(GROUP_KIND, workload(slice_.name, role)) else 0
    if held:  # groups of a surge lie above the partition and would be made (measured, LWS 0.9.0); both 0 is refused
        surge, unavailable = 0, 1
    labels = slice_labels(snapshot.name, "engine", slice_.name, slice_.revision) | {ROLE: role}
    body = {
        "replicas": replicas,
        "startupPolicy": "LeaderCreated",  # the leader waits for its workers, so they must not wait for it to be ready
        "networkConfig": {"subdomainPolicy": "Shared"},
        "rolloutStrategy": {
            "type": "RollingUpdate",
            "rollingUpdateConfiguration": {"partition": held, "maxSurge": surge, "maxUnavailable": unavailable},
        },
        "leaderWorkerTemplate": {
            "size": snapshot.spec.roles[role].nodes,
            "restartPolicy": "RecreateGroupOnPodRestart",  # an engine that lost a rank does not come back without the others
            "leaderTemplate": site.template_of(leader, snapshot, slice_, role),
            "workerTemplate": site.template_of(worker, snapshot, slice_, role),
        },
    }
    return objects.manifest(API_VERSION, GROUP_KIND, snapshot, workload(slice_.name, role), labels, spec=body)


def _apart(template: Mapping[str, Any], slice_: str) -> dict[str, Any]:
    """Pods of one group on nodes of their own, as `nodes` says and as placement counts them. Laid over the user's affinity; one
    that is malformed is left for the API server to refuse."""
    pod = dict(template["spec"])
    affinity = pod.get("affinity") or {}
    anti = (affinity.get("podAntiAffinity") or {}) if isinstance(affinity, Mapping) else None
    if not isinstance(anti, Mapping) or not isinstance(anti.get(site.FIELD) or [], list):
        return {**template, "spec": pod}
    term = {"labelSelector": {"matchLabels": {SLICE: slice_}}, "matchLabelKeys": [GROUP_KEY], "topologyKey": site.HOSTNAME}
    terms = [*(anti.get(site.FIELD) or []), term]
    pod["affinity"] = {**affinity, "podAntiAffinity": {**anti, site.FIELD: terms}}
    return {**template, "spec": pod}


def _worker(leader: Mapping[str, Any], role: Role, slice_: str) -> dict[str, Any]:
    metadata, pod = leader["metadata"], dict(leader["spec"])
    labels = {k: v for k, v in metadata["labels"].items() if k not in (ROLE, LLMD_ROLE)} | {WORKER: role}
    annotations = {k: v for k, v in (metadata.get("annotations") or {}).items() if k not in smg.ENGINE_ANNOTATIONS}
    pod["terminationGracePeriodSeconds"] = WORKER_GRACE
    spread = objects.spread({SLICE: slice_, ROLE: role})
    if pod.get("topologySpreadConstraints") == spread:  # ours, not the user's
        pod["topologySpreadConstraints"] = objects.spread({SLICE: slice_, WORKER: role})
    pod["containers"] = [_engine(c) if c["name"] == "engine" else c for c in pod["containers"]]
    return {**leader, "metadata": {**metadata, "labels": labels, "annotations": annotations}, "spec": pod}


def _engine(container: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in container.items() if key not in PROBES}
    return {**kept, "args": vllm_nodes.worker_arguments(container["args"]), "env": _named(container)}


def _named(container: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Environment in which the leader's name is read from where a worker has it."""
    mine, theirs = vllm_nodes.leader_name(worker=False), vllm_nodes.leader_name(worker=True)
    return [theirs if var == mine else var for var in container["env"]]
