"""Which nodes a pod may use, and what it asks for: the scheduler's rules as tables."""

from __future__ import annotations

from typing import Any

import pytest
from placement_world import GIB, GPU, node, pod

from pd_operator.core.placement.capacity import (
    HOSTNAME,
    PodShape,
    ReplicaShape,
    Requirement,
    Taint,
    Term,
    Toleration,
    accelerators_of,
)
from pd_operator.core.placement.requests import pod_requests, pod_shape, replica_shape, units

KEYED = Taint("dedicated", "serving", "NoSchedule")


@pytest.mark.parametrize(
    ("toleration", "taint", "tolerated"),
    [
        (Toleration("dedicated", "Equal", "serving", "NoSchedule"), KEYED, True),
        (Toleration("dedicated", "Equal", "serving"), KEYED, True),  # no effect: every effect
        (Toleration("dedicated", "", "serving"), KEYED, True),  # no operator: Equal
        (Toleration("dedicated", "Equal", "batch"), KEYED, False),
        (Toleration("dedicated", "Exists"), KEYED, True),
        (Toleration("dedicated", "Exists", effect="NoExecute"), KEYED, False),
        (Toleration("", "Exists"), KEYED, True),  # tolerates all
        (Toleration("", "Exists", effect="NoExecute"), KEYED, False),
        (Toleration("other", "Exists"), KEYED, False),
        (Toleration("dedicated", "Gt", "1"), KEYED, False),  # an operator that is not known tolerates nothing
        (Toleration("dedicated", "Equal", ""), Taint("dedicated", "", "NoSchedule"), True),
    ],
)
def test_tolerations(toleration: Toleration, taint: Taint, tolerated: bool) -> None:
    assert toleration.tolerates(taint) is tolerated


@pytest.mark.parametrize(
    ("operator", "values", "labels", "matches"),
    [
        ("In", ("a", "b"), {"k": "b"}, True),
        ("In", ("a", "b"), {"k": "c"}, False),
        ("In", ("a",), {}, False),
        ("NotIn", ("a",), {"k": "b"}, True),
        ("NotIn", ("a",), {"k": "a"}, False),
        ("NotIn", ("a",), {}, True),  # an absent key is not in any set
        ("Exists", (), {"k": ""}, True),
        ("Exists", (), {}, False),
        ("DoesNotExist", (), {}, True),
        ("DoesNotExist", (), {"k": "a"}, False),
        ("Gt", ("7",), {"k": "8"}, True),
        ("Gt", ("8",), {"k": "8"}, False),
        ("Lt", ("8",), {"k": "7"}, True),
        ("Lt", ("8",), {"k": "-9"}, True),
        ("Gt", ("7",), {"k": "eight"}, False),
        ("Gt", ("seven",), {"k": "8"}, False),
        ("Gt", ("7",), {}, False),
        ("Gt", ("7", "8"), {"k": "9"}, False),
        ("Gt", ("7",), {"k": str(2**63)}, False),  # not an int64
        ("Lt", ("7",), {"k": "1_0"}, False),
        ("Near", ("7",), {"k": "7"}, False),
    ],
)
def test_match_expressions(operator: Any, values: tuple[str, ...], labels: dict[str, str], matches: bool) -> None:
    assert Requirement("k", operator, values).matches(labels) is matches


NAMED = Requirement("metadata.name", "In", ("n1",))


@pytest.mark.parametrize(
    ("shape", "more", "why"),
    [
        ({}, {}, ""),
        ({}, {"unschedulable": True}, "node is cordoned"),
        ({"tolerations": (Toleration("node.kubernetes.io/unschedulable", "Exists"),)}, {"unschedulable": True}, ""),
        ({}, {"taints": (KEYED,)}, "untolerated taint dedicated=serving:NoSchedule"),
        ({}, {"taints": (Taint("gone", effect="NoExecute"),)}, "untolerated taint gone:NoExecute"),
        ({}, {"taints": (Taint("dedicated", "serving", "PreferNoSchedule"),)}, ""),
        ({"tolerations": (Toleration("dedicated", "Exists"),)}, {"taints": (KEYED,)}, ""),
        ({"tolerations": (Toleration("dedicated", "Exists"),)}, {"taints": (KEYED, Taint("b"))}, "untolerated taint b:NoSchedule"),
        ({}, {"ready": False}, "node is not ready"),
        (
            {"tolerations": (Toleration("node.kubernetes.io/not-ready", "Exists", effect="NoExecute"),)},
            {"ready": False},
            "node is not ready",
        ),
        ({"tolerations": (Toleration("node.kubernetes.io/not-ready", "Exists"),)}, {"ready": False}, ""),
        ({"node_selector": {"gpu": "h100"}}, {"labels": {"gpu": "h100"}}, ""),
        ({"node_selector": {"gpu": "h100"}}, {"labels": {"gpu": "l40"}}, "node selector does not match"),
        ({"node_selector": {"gpu": ""}}, {}, "node selector does not match"),
        ({"affinity": ()}, {}, "node affinity does not match"),  # no term: no node
        ({"affinity": (Term(),)}, {}, "node affinity does not match"),  # an empty term matches nothing
        ({"affinity": (Term(fields=(NAMED,)),)}, {}, ""),
        ({"affinity": (Term(fields=(Requirement("metadata.name", "NotIn", ("n1",)),)),)}, {}, "node affinity does not match"),
        ({"affinity": (Term(), Term((Requirement("gpu", "Exists"),)))}, {"labels": {"gpu": "x"}}, ""),  # terms are alternatives
        (
            {"affinity": (Term((Requirement("gpu", "Exists"), Requirement("b", "Exists"))),)},
            {"labels": {"gpu": "x"}},
            "node affinity does not match",
        ),
        ({"affinity": (Term((Requirement("gpu", "Exists"),), (NAMED,)),)}, {}, "node affinity does not match"),
    ],
)
def test_nodes_that_a_pod_may_use(shape: dict[str, Any], more: dict[str, Any], why: str) -> None:
    assert pod(**shape).rejection(node("n1", **more)) == why
    assert pod(**shape).admits(node("n1", **more)) is (why == "")


def test_requests_of_zero_are_not_looked_at() -> None:
    assert PodShape({GPU: 0, "cpu": 100, "pods": 7}).needs() == {"cpu": 100, "pods": 1}


def test_shapes_that_tell_nodes_apart_by_name() -> None:
    assert not pod().names_nodes()
    assert pod(node_selector={HOSTNAME: "n1"}).names_nodes()
    assert pod(affinity=(Term(fields=(NAMED,)),)).names_nodes()
    assert pod(affinity=(Term((Requirement(HOSTNAME, "In", ("n1",)),)),)).names_nodes()


def test_room_is_measured_in_what_the_shapes_ask_for() -> None:
    cpu = ReplicaShape("decode", (PodShape({"cpu": 1000}),))
    assert accelerators_of(cpu, cpu) == ("cpu",)
    assert accelerators_of(cpu, ReplicaShape("prefill", (pod(2),))) == (GPU,)


def test_a_replica_needs_a_pod() -> None:
    with pytest.raises(ValueError, match=r"ReplicaShape.pods of decode is empty; give at least one pod shape"):
        ReplicaShape("decode", ())


@pytest.mark.parametrize(
    ("resource", "value", "amount"),
    [
        ("cpu", "1", 1000),
        ("cpu", "250m", 250),
        ("cpu", "0.1m", 1),
        ("memory", "1Gi", GIB),
        ("memory", "1500m", 2),
        (GPU, 8, 8),
        ("cpu", 2, 2000),
    ],
)
def test_units(resource: str, value: str | int, amount: int) -> None:
    assert units(resource, value) == amount


def container(cpu: str = "", gpu: str = "", **more: Any) -> dict[str, Any]:
    """A container with requests."""
    return {"resources": {"requests": {k: v for k, v in (("cpu", cpu), (GPU, gpu)) if v}}} | more


@pytest.mark.parametrize(
    ("spec", "total"),
    [
        ({}, {}),
        ({"containers": [container("1"), container("500m", "2")]}, {"cpu": 1500, GPU: 2}),
        ({"containers": [container("1")], "initContainers": [container("3")]}, {"cpu": 3000}),  # the larger of the two
        ({"containers": [container("4")], "initContainers": [container("3")]}, {"cpu": 4000}),
        # a native sidecar runs beside the containers and beside init containers after it, not before it
        ({"containers": [container("1")], "initContainers": [container("2", restartPolicy="Always")]}, {"cpu": 3000}),
        (
            {"containers": [container("1")], "initContainers": [container("2", restartPolicy="Always"), container("3")]},
            {"cpu": 5000},
        ),
        (
            {"containers": [container("1")], "initContainers": [container("3"), container("2", restartPolicy="Always")]},
            {"cpu": 3000},
        ),
        ({"containers": [container("1")], "overhead": {"cpu": "250m", "memory": "1Gi"}}, {"cpu": 1250, "memory": GIB}),
        (
            {"containers": [{"resources": {"limits": {GPU: 8, "cpu": "2"}}}]},
            {"cpu": 2000, GPU: 8},
        ),  # a limit is the request by default
        ({"containers": [{"resources": {"limits": {"cpu": "2"}, "requests": {"cpu": "1"}}}]}, {"cpu": 1000}),
        ({"containers": [container("1"), container("1")], "resources": {"requests": {"cpu": "5"}}}, {"cpu": 5000}),  # pod level
    ],
)
def test_requests_of_a_pod(spec: dict[str, Any], total: dict[str, int]) -> None:
    assert pod_requests(spec) == total


def test_shape_of_a_pod_spec() -> None:
    terms = [
        {"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100"]}]},
        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["n1"]}]},
    ]
    spec = {
        "containers": [container("1", "8")],
        "nodeSelector": {"zone": "a"},
        "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}},
        "tolerations": [{"key": "x", "operator": "Exists"}, {"key": "y", "value": "1", "effect": "NoSchedule"}],
    }
    assert pod_shape(spec) == PodShape(
        {"cpu": 1000, GPU: 8},
        {"zone": "a"},
        (Term((Requirement("gpu", "In", ("h100",)),)), Term(fields=(NAMED,))),
        (Toleration("x", "Exists"), Toleration("y", "Equal", "1", "NoSchedule")),
    )
    assert pod_shape({}).affinity is None
    assert replica_shape("decode", [spec, spec]).gpus == 16
