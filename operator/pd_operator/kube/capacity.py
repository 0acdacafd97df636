"""Nodes and bound pods of the whole cluster -> the facts that the ledger counts. Bytes in, a few numbers out.

A cluster has tens of thousands of pods, so of each only its node and its requests are kept, and equal requests are one object.
The server leaves out pods without a node and finished ones (field selector), so those cost nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from pydantic import Field
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from pd_operator.core.names import DEPLOYMENT, MANAGED_BY, MANAGER, ROLE, SLICE, WORKER
from pd_operator.core.observed import NodeFact, UsageFact
from pd_operator.core.placement.capacity import NodeCapacity, Taint
from pd_operator.core.placement.requests import amounts, pod_requests
from pd_operator.kube.pages import Meta, Slim, SlimDecoder, Thing, by_name, by_namespace

# A pod that gets a node starts to match, one that finishes stops: the watch says ADDED and DELETED.
BOUND_PODS: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
INTERNED: Final = 8192  # different requests that are remembered; a cluster has dozens


class _PodMeta(Meta):
    deletion_timestamp: str | None = None  # only whether it is there


class _NodeMeta(Meta):
    creation_timestamp: datetime | None = None


Quantities = dict[str, str | int]


# Plain dicts, not models: they are read once, by core/placement/requests.py, and cost half as much.
class _Resources(TypedDict, total=False):
    requests: Quantities
    limits: Quantities


class _Container(TypedDict, total=False):
    resources: _Resources
    restartPolicy: str


class _PodSpec(TypedDict, total=False):
    nodeName: str
    containers: list[_Container] | None  # null in a bookmark
    initContainers: list[_Container] | None
    overhead: Quantities
    resources: _Resources


class _Pod(Thing):
    metadata: _PodMeta = _PodMeta()
    spec: _PodSpec = Field(default=_PodSpec())


class _Taint(Slim):
    key: str = ""
    value: str = ""
    effect: str = ""


class _Condition(Slim):
    type: str = ""
    status: str = ""


class _NodeSpec(Slim):
    unschedulable: bool = False
    taints: tuple[_Taint, ...] = ()


class _NodeStatus(Slim):
    allocatable: Quantities = Field(default={})
    conditions: tuple[_Condition, ...] = ()


class _Node(Thing):
    metadata: _NodeMeta = _NodeMeta()
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


class UsageDecoder(SlimDecoder[_Pod, UsageFact]):
    """Bound pods, keyed by (namespace, name)."""

    def __init__(self) -> None:
        super().__init__(_Pod, by_namespace, self._usage)
        self._known: dict[str, Mapping[str, int]] = {}

    def _usage(self, pod: _Pod) -> UsageFact:
        labels = pod.metadata.labels
        role = (labels.get(ROLE) or labels.get(WORKER, "")) if labels.get(MANAGED_BY) == MANAGER else ""
        return UsageFact(
            pod.metadata.namespace,
            pod.metadata.name,
            pod.spec.get("nodeName", ""),
            self._requests(pod.spec),
            labels.get(DEPLOYMENT, "") if role else "",
            labels.get(SLICE, "") if role else "",
            role,
            pod.metadata.deletion_timestamp is not None,
            ROLE not in labels and bool(role),
        )

    def _requests(self, spec: _PodSpec) -> Mapping[str, int]:
        text = repr([spec.get(name) for name in ("containers", "initContainers", "overhead", "resources")])
        found = self._known.get(text)
        if found is None:
            if len(self._known) >= INTERNED:
                self._known.clear()
            try:
                found = pod_requests(spec)
            except ValueError:  # the server takes only quantities; should it know a form that we do not, the pod counts as one pod
                found = {}
            self._known[text] = found
        return found


class NodeDecoder(SlimDecoder[_Node, NodeFact]):
    """Nodes, keyed by (name,). `free` is left to the index."""

    def __init__(self) -> None:
        super().__init__(_Node, by_name, _node)


def _node(raw: _Node) -> NodeFact:
    ready = next((c.status for c in raw.status.conditions if c.type == "Ready"), "Unknown")
    capacity = NodeCapacity(
        raw.metadata.name,
        raw.metadata.labels,
        amounts(raw.status.allocatable),
        taints=tuple(Taint(t.key, t.value, t.effect) for t in raw.spec.taints),
        unschedulable=raw.spec.unschedulable,
        ready=ready == "True",
    )
    return NodeFact(capacity, raw.metadata.creation_timestamp)
