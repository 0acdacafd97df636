"""A saved snapshot of capacity: the nodes and pods that a plan reads, as a file, so that it can be made again without a cluster.

Amounts are the planner's integers (milli-CPU, bytes, counts). Of a pod the file keeps its node and requests; of an engine pod
of ours also what it belongs to, and its shape while it has no node. No environment, image or annotation is in it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pd_operator.core.names import DEPLOYMENT, MANAGED_BY, MANAGER, ROLE, ROLES, WORKER
from pd_operator.core.placement.capacity import NodeCapacity, PodShape, Requirement, Taint, Term, Toleration
from pd_operator.core.placement.index import CapacityIndex, CapacityView, domain_of
from pd_operator.core.placement.requests import amounts, pod_requests, pod_shape

KIND: Final = "CapacitySnapshot"
VERSION: Final = 1
_OVER: Final = ("Succeeded", "Failed")  # phases in which a pod holds nothing


class SavedError(ValueError):
    """The file is not a snapshot; the message names the field and what would be accepted."""


@dataclass(frozen=True, slots=True)
class SavedPod:
    """A pod that holds room, or an engine pod of ours that will."""

    namespace: str
    name: str
    node: str = ""
    requests: Mapping[str, int] = field(default_factory=dict)
    deployment: str = ""  # PDDeployment of an engine pod of ours
    role: str = ""
    worker: bool = False  # not the first pod of its replica
    shape: PodShape | None = None  # of an engine pod of ours without a node


@dataclass(frozen=True, slots=True)
class Saved:
    """Nodes and pods at one instant, both by name."""

    nodes: tuple[NodeCapacity, ...] = ()  # `free` is empty: it follows from the pods
    pods: tuple[SavedPod, ...] = ()
    taken: str = ""  # when, RFC 3339

    def view(self, but: frozenset[tuple[str, str]] = frozenset()) -> CapacityView:
        """What is free after all bound pods and after engine pods of ours that wait for a node.

        Those of the PDDeployments (namespace, name) in `but` are left out: they are planned anew.
        """
        index = CapacityIndex(self.nodes)
        for pod in self.pods:
            if pod.node:
                index.bind(f"{pod.namespace}/{pod.name}", pod.node, pod.requests)
        view = index.fork()
        for pod in self.pods:
            if pod.shape is not None and (pod.namespace, pod.deployment) not in but:
                _take(view, pod.shape)
        return view

    def running(self, namespace: str, name: str, topology_key: str) -> dict[str, tuple[int, int]]:
        """Domain -> bound (prefill, decode) replicas of a PDDeployment, all revisions. A node without a domain counts nowhere."""
        labels = {node.name: node for node in self.nodes}
        found: dict[str, list[int]] = {}
        for pod in self.pods:
            node = labels.get(pod.node)
            domain = domain_of(node, topology_key) if node else None
            if (pod.namespace, pod.deployment) == (namespace, name) and domain is not None and not pod.worker and pod.role in ROLES:
                found.setdefault(domain, [0, 0])[ROLES.index(pod.role)] += 1
        return {domain: (counts[0], counts[1]) for domain, counts in sorted(found.items())}


def observed(nodes: Iterable[Mapping[str, Any]], pods: Iterable[Mapping[str, Any]], taken: str) -> Saved:
    """A snapshot of Node and Pod objects as the API server gives them.

    Raises:
        ValueError: an amount is not a quantity.
    """
    kept = (_pod(pod) for pod in pods if pod.get("status", {}).get("phase") not in _OVER)
    return Saved(
        tuple(sorted(map(_node, nodes), key=lambda n: n.name)),
        tuple(sorted((p for p in kept if p.node or p.shape), key=lambda p: (p.namespace, p.name))),
        taken,
    )


def dump(saved: Saved) -> str:
    """The file's text."""
    body = {
        "kind": KIND,
        "version": VERSION,
        "taken": saved.taken,
        "nodes": [{k: v for k, v in asdict(node).items() if k != "free"} for node in saved.nodes],
        "pods": [{k: v for k, v in asdict(pod).items() if v or k in ("namespace", "name")} for pod in saved.pods],
    }
    return json.dumps(body, indent=1, sort_keys=True) + "\n"


def load(text: str) -> Saved:
    """What `dump` wrote.

    Raises:
        SavedError: something else.
    """
    try:
        body = json.loads(text)
    except ValueError as exc:
        raise SavedError(f"not JSON ({exc}); a file that `kubectl pdd plan --save` wrote is accepted") from exc
    if not isinstance(body, dict) or body.get("kind") != KIND or body.get("version") != VERSION:
        got = {k: body.get(k) for k in ("kind", "version")} if isinstance(body, dict) else type(body).__name__
        raise SavedError(f"kind and version are {got}; {KIND} and {VERSION} are accepted")
    try:
        nodes = tuple(_read_node(node) for node in body["nodes"])
        return Saved(nodes, tuple(_read_pod(pod) for pod in body["pods"]), body["taken"])
    except (KeyError, TypeError, AttributeError) as exc:
        raise SavedError(f"a node or pod has a field that is missing or not known: {exc!r}") from exc


def _node(obj: Mapping[str, Any]) -> NodeCapacity:
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    ready = any(c.get("type") == "Ready" and c.get("status") == "True" for c in status.get("conditions") or ())
    return NodeCapacity(
        meta["name"],
        dict(meta.get("labels") or {}),
        amounts(status.get("allocatable")),
        taints=tuple(Taint(t["key"], t.get("value", ""), t["effect"]) for t in spec.get("taints") or ()),
        unschedulable=bool(spec.get("unschedulable")),
        ready=ready,
    )


def _pod(obj: Mapping[str, Any]) -> SavedPod:
    meta, spec = obj["metadata"], obj.get("spec") or {}
    labels = meta.get("labels") or {}
    ours = labels.get(MANAGED_BY) == MANAGER and (ROLE in labels or WORKER in labels)
    node = spec.get("nodeName") or ""
    return SavedPod(
        meta.get("namespace", ""),
        meta["name"],
        node,
        pod_requests(spec),
        deployment=labels.get(DEPLOYMENT, "") if ours else "",
        role=(labels.get(ROLE) or labels[WORKER]) if ours else "",
        worker=ours and ROLE not in labels,
        shape=pod_shape(spec) if ours and not node else None,
    )


def _read_node(node: Mapping[str, Any]) -> NodeCapacity:
    return NodeCapacity(**{**node, "taints": tuple(Taint(**taint) for taint in node["taints"])})


def _read_pod(pod: Mapping[str, Any]) -> SavedPod:
    shape = pod.get("shape")
    return SavedPod(**{**pod, "shape": _read_shape(shape) if shape else None})


def _read_shape(shape: Mapping[str, Any]) -> PodShape:
    affinity = shape["affinity"]
    terms = None if affinity is None else tuple(Term(_read(t["expressions"]), _read(t["fields"])) for t in affinity)
    return PodShape(shape["requests"], shape["node_selector"], terms, tuple(Toleration(**t) for t in shape["tolerations"]))


def _read(requirements: Sequence[Mapping[str, Any]]) -> tuple[Requirement, ...]:
    return tuple(Requirement(r["key"], r["operator"], tuple(r["values"])) for r in requirements)


def _take(view: CapacityView, shape: PodShape) -> None:
    """Room for one pod on the node that has least left for it; none where it fits nowhere."""
    needs = shape.needs()
    fits = [n for n in view.nodes("", "") if all(n.free.get(r, 0) >= a for r, a in needs.items()) and shape.admits(n)]
    if fits:
        order = sorted(needs, key=lambda name: ("/" not in name, name))
        view.take(min(fits, key=lambda n: ([n.free.get(r, 0) for r in order], n.name)).name, needs)
