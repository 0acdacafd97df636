"""What nodes have free, what pods ask for, and when the two match: the filters of kube-scheduler, without its scores.

Amounts are integers in the scheduler's own units: milli-CPU for `cpu`, bytes for memory and storage, a count for anything
else. `pods` is a resource like any other: a node has its `allocatable.pods`, each pod asks for one.

Sources: kubernetes/pkg/scheduler/framework/plugins/{noderesources/fit.go, tainttoleration, nodeaffinity, nodeunschedulable},
component-helpers/scheduling/corev1 and apimachinery/pkg/labels/selector.go, v1.29 to v1.35. Host ports, volumes and pod
(anti-)affinity are not looked at: engine pods of ours use none that bind them to a node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from pd_operator.core.names import Role

PODS: Final = "pods"
CPU: Final = "cpu"
HOSTNAME: Final = "kubernetes.io/hostname"
UNSCHEDULABLE_KEY: Final = "node.kubernetes.io/unschedulable"
NOT_READY_KEY: Final = "node.kubernetes.io/not-ready"
_REPELS: Final = ("NoSchedule", "NoExecute")  # PreferNoSchedule is a score, not a filter
_INT64: Final = re.compile(r"[+-]?[0-9]+\Z")

Operator = Literal["In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"]


@dataclass(frozen=True, slots=True)
class Taint:
    """A taint of a node."""

    key: str
    value: str = ""
    effect: str = "NoSchedule"


@dataclass(frozen=True, slots=True)
class Toleration:
    """A toleration of a pod; empty key with `Exists` tolerates all, empty effect is every effect."""

    key: str = ""
    operator: str = "Equal"
    value: str = ""
    effect: str = ""

    def tolerates(self, taint: Taint) -> bool:
        """v1.Toleration.ToleratesTaint. Operators that it does not know (Lt and Gt are alpha) tolerate nothing."""
        if (self.effect and self.effect != taint.effect) or (self.key and self.key != taint.key):
            return False
        if self.operator == "Exists":
            return True
        return self.operator in ("", "Equal") and self.value == taint.value


@dataclass(frozen=True, slots=True)
class Requirement:
    """One `matchExpressions` entry of a node selector term, or a `matchFields` entry when it stands in `fields`."""

    key: str
    operator: Operator
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        """labels.Requirement.Matches: an absent key satisfies NotIn and DoesNotExist only."""
        value = labels.get(self.key)
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case _:
                return self._compares(value)

    def _compares(self, value: str | None) -> bool:
        """Gt and Lt: both sides must be integers of 64 bits, and there must be exactly one value."""
        if value is None or len(self.values) != 1 or not _INT64.match(value) or not _INT64.match(self.values[0]):
            return False
        left, right = int(value), int(self.values[0])
        if max(abs(left), abs(right)) >= 2**63:
            return False
        return left > right if self.operator == "Gt" else self.operator == "Lt" and left < right


@dataclass(frozen=True, slots=True)
class Term:
    """One `nodeSelectorTerms` entry: all of its requirements must hold; an empty term matches no node."""

    expressions: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()  # only metadata.name exists

    def matches(self, name: str, labels: Mapping[str, str]) -> bool:
        """nodeaffinity.nodeSelectorTerm.match."""
        if not self.expressions and not self.fields:
            return False
        names = {"metadata.name": name}
        return all(r.matches(labels) for r in self.expressions) and all(r.matches(names) for r in self.fields)


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A node: what it gives and what it repels. `free` is `allocatable` less the requests of all bound pods; it may be negative."""

    name: str
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    free: Mapping[str, int] = field(default_factory=dict)
    taints: tuple[Taint, ...] = ()
    unschedulable: bool = False  # cordoned
    ready: bool = True  # condition Ready is True


@dataclass(frozen=True, slots=True)
class PodShape:
    """What one pod asks of a node."""

    requests: Mapping[str, int] = field(default_factory=dict)  # `pods` is added by itself
    node_selector: Mapping[str, str] = field(default_factory=dict)
    affinity: tuple[Term, ...] | None = None  # required node affinity: any term; None = none, () matches no node
    tolerations: tuple[Toleration, ...] = ()

    def needs(self) -> dict[str, int]:
        """Requests that the scheduler checks: those above zero, and one pod. A resource that a node lacks is zero there."""
        return {name: amount for name, amount in self.requests.items() if amount > 0 and name != PODS} | {PODS: 1}

    def names_nodes(self) -> bool:
        """Whether the shape tells nodes apart by name, so that nodes which are equal otherwise are not interchangeable."""
        terms = self.affinity or ()
        return HOSTNAME in self.node_selector or any(t.fields or any(r.key == HOSTNAME for r in t.expressions) for t in terms)

    def admits(self, node: NodeCapacity) -> bool:
        """Every filter but resources: cordon, taints, readiness, node selector, required node affinity."""
        return self.rejection(node) == ""

    def rejection(self, node: NodeCapacity) -> str:
        """Why the node is no candidate whatever it has free, in the scheduler's words; "" when it is one."""
        if node.unschedulable and not self._tolerates(Taint(UNSCHEDULABLE_KEY)):
            return "node is cordoned"
        for taint in node.taints:
            if taint.effect in _REPELS and not self._tolerates(taint):
                return (
                    f"untolerated taint {taint.key}={taint.value}:{taint.effect}"
                    if taint.value
                    else f"untolerated taint {taint.key}:{taint.effect}"
                )
        # the node lifecycle controller adds this taint a moment after the condition turned
        if not node.ready and not self._tolerates(Taint(NOT_READY_KEY)):
            return "node is not ready"
        if any(node.labels.get(key) != value for key, value in self.node_selector.items()):
            return "node selector does not match"
        if self.affinity is not None and not any(term.matches(node.name, node.labels) for term in self.affinity):
            return "node affinity does not match"
        return ""

    def _tolerates(self, taint: Taint) -> bool:
        return any(toleration.tolerates(taint) for toleration in self.tolerations)


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """One replica of a role: a pod, or a leader and its workers, which sit on as many nodes of one domain as there are pods."""

    role: Role
    pods: tuple[PodShape, ...]
    gpus: int = 0  # accelerators of the whole replica, for people and reports

    def __post_init__(self) -> None:
        if not self.pods:
            raise ValueError(f"ReplicaShape.pods of {self.role} is empty; give at least one pod shape")

    def accelerators(self) -> frozenset[str]:
        """Names of the extended resources that the replica asks for (those with a domain, such as nvidia.com/gpu)."""
        return frozenset(name for pod in self.pods for name, amount in pod.requests.items() if "/" in name and amount > 0)


def accelerators_of(*shapes: ReplicaShape) -> tuple[str, ...]:
    """The resources by which room is measured: the shapes' extended resources, or `cpu` where they ask for none."""
    names: Iterable[str] = frozenset().union(*(shape.accelerators() for shape in shapes))
    return tuple(sorted(names)) or (CPU,)
