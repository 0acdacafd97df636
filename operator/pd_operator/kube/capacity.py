"""Nodes and bound pods of the whole cluster -> the facts that the ledger counts. Bytes in, a few numbers out.

A cluster has tens of thousands of pods, so of each only its node and its requests are kept, and equal requests are one object.
The server leaves out pods without a node and finished ones (field selector), so those cost nothing here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from pydantic.alias_generators import to_camel
from typing_extensions import TypedDict  # pydantic needs this one before Python 3.12

from pd_operator.core.names import DEPLOYMENT, MANAGED_BY, MANAGER, ROLE, SLICE
from pd_operator.core.observed import NodeFact, UsageFact
from pd_operator.core.placement.capacity import NodeCapacity, Taint
from pd_operator.core.placement.requests import amounts, pod_requests
from pd_operator.kube.facts import Event, Page
from pd_operator.kube.store import Key

# A pod that gets a node starts to match, one that finishes stops: the watch says ADDED and DELETED.
BOUND_PODS: Final = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
INTERNED: Final = 8192  # different requests that are remembered; a cluster has dozens


class _Slim(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)


class _Meta(_Slim):
    namespace: str = ""
    name: str = ""
    resource_version: str = ""
    continue_: str = Field(default="", alias="continue")
    labels: dict[str, str] = {}
    creation_timestamp: datetime | None = None
    deletion_timestamp: str | None = None


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


class _Pod(_Slim):
    metadata: _Meta = _Meta()
    spec: _PodSpec = {}


class _Taint(_Slim):
    key: str = ""
    value: str = ""
    effect: str = ""


class _Condition(_Slim):
    type: str = ""
    status: str = ""


class _NodeSpec(_Slim):
    unschedulable: bool = False
    taints: tuple[_Taint, ...] = ()


class _NodeStatus(_Slim):
    allocatable: Quantities = {}
    conditions: tuple[_Condition, ...] = ()


class _Node(_Slim):
    metadata: _Meta = _Meta()
    spec: _NodeSpec = _NodeSpec()
    status: _NodeStatus = _NodeStatus()


class _PodPage(_Slim):
    metadata: _Meta
    items: list[_Pod] | None


class _NodePage(_Slim):
    metadata: _Meta
    items: list[_Node] | None


class _PodEvent(_Slim):
    type: str
    object: _Pod


class _NodeEvent(_Slim):
    type: str
    object: _Node


_POD_PAGE, _POD_EVENT = TypeAdapter(_PodPage), TypeAdapter(_PodEvent)
_NODE_PAGE, _NODE_EVENT = TypeAdapter(_NodePage), TypeAdapter(_NodeEvent)


class UsageDecoder:
    """Bound pods, keyed by (namespace, name)."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, int]] = {}

    def page(self, raw: bytes) -> Page[UsageFact]:
        """See facts.Decoder."""
        page = _POD_PAGE.validate_json(raw)
        items: list[tuple[Key, UsageFact]] = [((p.metadata.namespace, p.metadata.name), self._fact(p)) for p in page.items or ()]
        return Page(page.metadata.resource_version, page.metadata.continue_, items)

    def event(self, raw: bytes) -> Event[UsageFact]:
        """See facts.Decoder."""
        event = _POD_EVENT.validate_json(raw)
        meta = event.object.metadata
        if event.type in {"BOOKMARK", "ERROR"}:
            return Event(event.type, meta.resource_version)
        return Event(event.type, meta.resource_version, (meta.namespace, meta.name), self._fact(event.object))

    def _fact(self, pod: _Pod) -> UsageFact:
        labels, ours = pod.metadata.labels, pod.metadata.labels.get(MANAGED_BY) == MANAGER and ROLE in pod.metadata.labels
        return UsageFact(
            pod.metadata.namespace,
            pod.metadata.name,
            pod.spec.get("nodeName", ""),
            self._requests(pod.spec),
            labels.get(DEPLOYMENT, "") if ours else "",
            labels.get(SLICE, "") if ours else "",
            labels[ROLE] if ours else "",
            pod.metadata.deletion_timestamp is not None,
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


class NodeDecoder:
    """Nodes, keyed by (name,). `free` is left to the index."""

    def page(self, raw: bytes) -> Page[NodeFact]:
        """See facts.Decoder."""
        page = _NODE_PAGE.validate_json(raw)
        items: list[tuple[Key, NodeFact]] = [((n.metadata.name,), _node(n)) for n in page.items or ()]
        return Page(page.metadata.resource_version, page.metadata.continue_, items)

    def event(self, raw: bytes) -> Event[NodeFact]:
        """See facts.Decoder."""
        event = _NODE_EVENT.validate_json(raw)
        meta = event.object.metadata
        if event.type in {"BOOKMARK", "ERROR"}:
            return Event(event.type, meta.resource_version)
        return Event(event.type, meta.resource_version, (meta.name,), _node(event.object))


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
