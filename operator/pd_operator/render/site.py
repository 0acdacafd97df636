"""The pod template of one slice: its own name, and the affinity of its site (invariant I3: one transfer domain a slice).

A revision's stored template is that of its slice 0. Affinity is laid over the user's and never replaces it: a node must suit both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pd_operator.core.names import COMPONENT, ROLE, SLICE, Role, slice_name
from pd_operator.core.rollout import SlicePlan
from pd_operator.core.sites import Kind, Site
from pd_operator.core.snapshot import Snapshot

HOSTNAME: Final = "kubernetes.io/hostname"  # set by the kubelet on every node
FIELD: Final = "requiredDuringSchedulingIgnoredDuringExecution"
SOFT: Final = "preferredDuringSchedulingIgnoredDuringExecution"


def template_of(template: Mapping[str, Any], snapshot: Snapshot, slice_: SlicePlan, role: Role) -> dict[str, Any]:
    """The template for a role of a slice."""
    named: dict[str, Any] = _renamed(template, slice_name(snapshot.name, slice_.revision), slice_.name)
    if slice_.site.kind is Kind.ANYWHERE:
        return named
    pod = dict(named["spec"])
    pod["affinity"] = _affinity(pod.get("affinity") or {}, slice_, role)
    return {**named, "spec": pod}


def _renamed(template: Mapping[str, Any], old: str, new: str) -> Any:
    """A copy with the slice's name in place of that of slice 0, also inside a longer text (the coordinator's address)."""
    return json.loads(json.dumps(template).replace(old, new))  # names of slices are never escaped, and no key holds one


def _affinity(theirs: Mapping[str, Any], slice_: SlicePlan, role: Role) -> dict[str, Any]:
    affinity, site = dict(theirs), slice_.site
    expressions = _nodes(site, role)
    if expressions:
        affinity["nodeAffinity"] = _with_nodes(affinity.get("nodeAffinity") or {}, expressions)
    if site.kind is Kind.CROSSING and site.domain:
        nodes = dict(affinity.get("nodeAffinity") or {})
        preference = {"matchExpressions": [{"key": site.key, "operator": "In", "values": [site.domain]}]}
        nodes[SOFT] = [*(nodes.get(SOFT) or []), {"weight": 50, "preference": preference}]
        affinity["nodeAffinity"] = nodes
    if site.kind in (Kind.FLOATING, Kind.CROSSING):
        pods = dict(affinity.get("podAffinity") or {})
        term = _own_pods(slice_, role)
        if site.kind is Kind.FLOATING:
            pods[FIELD] = [*(pods.get(FIELD) or []), term]
        else:
            pods[SOFT] = [*(pods.get(SOFT) or []), {"weight": 100, "podAffinityTerm": term}]
        affinity["podAffinity"] = pods
    return affinity


def _nodes(site: Site, role: Role) -> list[dict[str, Any]]:
    """What nodes must be like. In a floating slice only the anchor chooses; the other role follows it."""
    if site.kind is Kind.PINNED:
        return [{"key": site.key, "operator": "In", "values": [site.domain]}]
    if role != site.anchor:
        return []
    found = []
    for name, values in ((site.key, site.avoid_domains), (HOSTNAME, site.avoid_nodes)):
        if values:
            found.append({"key": name, "operator": "NotIn", "values": list(values)})
    return found


def _with_nodes(theirs: Mapping[str, Any], expressions: list[dict[str, Any]]) -> dict[str, Any]:
    """Terms of a node selector are alternatives, so ours goes into each of the user's."""
    required = dict(theirs.get(FIELD) or {})
    terms = required.get("nodeSelectorTerms") or [{}]
    required["nodeSelectorTerms"] = [
        {**term, "matchExpressions": [*(term.get("matchExpressions") or []), *(dict(e) for e in expressions)]} for term in terms
    ]
    return {**theirs, FIELD: required}


def _own_pods(slice_: SlicePlan, role: Role) -> dict[str, Any]:
    """Engine pods of this slice. The first of the anchor's pods matches its own term, which the scheduler then lets pass

    (kube-scheduler, interpodaffinity/filtering.go, satisfyPodAffinity); the other role's pods wait for it, so the larger shape
    chooses the domain.
    """
    labels = {SLICE: slice_.name, COMPONENT: "engine"}
    if slice_.site.kind is Kind.FLOATING and role != slice_.site.anchor:
        labels[ROLE] = slice_.site.anchor
    return {"labelSelector": {"matchLabels": labels}, "topologyKey": slice_.site.key}
