"""Saved snapshots: what is read back is what was written, and plans the same."""

from __future__ import annotations

import json
from typing import Any

import pytest
from placement_world import GIB, GPU, RACK, demand, node, pod, random_world

from pd_operator.core.names import WORKER
from pd_operator.core.placement import saved, table
from pd_operator.core.placement.capacity import NodeCapacity, PodShape, Requirement, Taint, Term, Toleration
from pd_operator.core.placement.index import CapacityIndex
from pd_operator.core.placement.planner import place
from pd_operator.core.placement.saved import Saved, SavedPod

OURS = {"app.kubernetes.io/managed-by": "pd-operator", "pdserve.dev/deployment": "chat"}


def raw_node(name: str, rack: str, **more: Any) -> dict[str, Any]:
    """A Node as the API server gives it."""
    status = {"allocatable": {GPU: "8", "cpu": "63500m", "memory": "512Gi", "pods": "110"}}
    status["conditions"] = [{"type": "Ready", "status": more.pop("ready", "True")}]  # type: ignore[assignment]
    return {"metadata": {"name": name, "labels": {RACK: rack}}, "spec": more, "status": status}


def raw_pod(
    name: str, where: str = "", role: str = "", gpus: int = 8, phase: str = "Running", worker: bool = False
) -> dict[str, Any]:
    """A Pod as the API server gives it."""
    mine = {**OURS, WORKER if worker else "pdserve.dev/role": role} if role else {}
    containers = [{"name": "engine", "resources": {"limits": {GPU: gpus, "cpu": "1"}}, "env": [{"name": "A", "value": "b"}]}]
    spec = {"nodeName": where, "containers": containers, "nodeSelector": {RACK: "a"}, "tolerations": [{"operator": "Exists"}]}
    return {"metadata": {"namespace": "demo", "name": name, "labels": mine}, "spec": spec, "status": {"phase": phase}}


def test_objects_become_nodes_and_pods() -> None:
    found = saved.observed(
        [
            raw_node("n2", "b", unschedulable=True, taints=[{"key": "spot", "effect": "NoSchedule"}]),
            raw_node("n1", "a", ready="Unknown"),
        ],
        [
            raw_pod("p", "n1", "prefill"),
            raw_pod("w", "n1", "decode", worker=True),
            raw_pod("new", "", "decode"),
            raw_pod("foreign-new"),  # holds nothing yet
            raw_pod("foreign", "n2", gpus=1),
            raw_pod("done", "n1", phase="Succeeded"),
        ],
        "2026-01-01T00:00:00Z",
    )
    allocatable = {GPU: 8, "cpu": 63_500, "memory": 512 * GIB, "pods": 110}
    assert found.nodes == (
        NodeCapacity("n1", {RACK: "a"}, allocatable, ready=False),
        NodeCapacity("n2", {RACK: "b"}, allocatable, taints=(Taint("spot"),), unschedulable=True),
    )
    requests = {GPU: 8, "cpu": 1000}
    assert found.pods == (
        SavedPod("demo", "foreign", "n2", {GPU: 1, "cpu": 1000}),
        SavedPod(
            "demo",
            "new",
            "",
            requests,
            "chat",
            "decode",
            False,
            PodShape(requests, {RACK: "a"}, None, (Toleration(operator="Exists"),)),
        ),
        SavedPod("demo", "p", "n1", requests, "chat", "prefill"),
        SavedPod("demo", "w", "n1", requests, "chat", "decode", True),
    )
    assert found.running("demo", "chat", RACK) == {"a": (1, 0)}  # the worker is part of a replica whose leader is elsewhere
    assert found.running("other", "chat", RACK) == {}
    assert saved.load(saved.dump(found)) == found
    assert "env" not in saved.dump(found) and "nodeName" not in saved.dump(found)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_read_back_plans_the_same(seed: int) -> None:
    world = random_world(seed, most_nodes=16, most_domains=4, most=6)
    pods = tuple(
        SavedPod("demo", f"pod-{n.name}", n.name, {k: v - n.free.get(k, 0) for k, v in n.allocatable.items()}) for n in world.nodes
    )
    bare = tuple(
        sorted(
            (NodeCapacity(n.name, n.labels, n.allocatable, {}, n.taints, n.unschedulable, n.ready) for n in world.nodes),
            key=lambda n: n.name,
        )
    )
    before = Saved(bare, pods, "2026-01-01T00:00:00Z")
    after = saved.load(saved.dump(before))
    assert after == before and saved.dump(after) == saved.dump(before)
    assert place(world.demand, after.view()) == place(world.demand, world.view)


def test_every_field_of_a_shape_survives() -> None:
    term = Term((Requirement("gpu", "Gt", ("7",)),), (Requirement("metadata.name", "NotIn", ("a", "b")),))
    for affinity in (None, (), (Term(),), (term, term)):
        shape = PodShape({GPU: 1}, {"a": "b"}, affinity, (Toleration("k", "Equal", "v", "NoExecute"),))
        one = Saved(pods=(SavedPod("demo", "x", shape=shape),), taken="now")
        assert saved.load(saved.dump(one)) == one


def test_engine_pods_that_wait_for_a_node_hold_room_but_for_their_own_plan() -> None:
    shape = pod(8, node_selector={RACK: "a"})
    found = Saved((node("n1", "a"), node("n2", "b")), (SavedPod("demo", "new", deployment="chat", role="decode", shape=shape),))
    assert [found.view().room(RACK, rack).get(GPU, 0) for rack in "ab"] == [0, 8]
    assert found.view(frozenset({("demo", "chat")})).room(RACK, "a")[GPU] == 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"not JSON \(.*\); a file that `kubectl pdd plan --save` wrote is accepted"),
        ("[]", "kind and version are list; CapacitySnapshot and 1 are accepted"),
        ('{"kind": "CapacitySnapshot", "version": 2}', r"'version': 2\}; CapacitySnapshot and 1 are accepted"),
        ('{"kind": "CapacitySnapshot", "version": 1, "pods": []}', "a field that is missing or not known: KeyError"),
        ('{"kind": "CapacitySnapshot", "version": 1, "nodes": [{"nome": 1}], "pods": []}', "missing or not known"),
    ],
)
def test_other_files_are_refused(text: str, message: str) -> None:
    with pytest.raises(saved.SavedError, match=message):
        saved.load(text)


def test_the_table_that_a_person_reads() -> None:
    index = CapacityIndex([node("a1", "a"), node("a2", "a"), node("b1", "b", 4)])
    wanted = demand(1, 2, pod(8), pod(4))
    placement = place(wanted, index)
    assert table.text(wanted, placement) == (
        "default/chat: Placed: 1 prefill and 2 decode in a\n"
        "\n"
        "DOMAIN  PREFILL  DECODE  FITS  WHY\n"
        "a       1        2       1/2   1 prefill and 2 decode chosen\n"
        "b       0        0       0/1   1 decode replica fits, 0 prefill: "
        "nodes with nvidia.com/gpu=8 free: 0 of 1; largest free is 4\n"
    )
    nothing = demand(1, 1, pod(16), pod(4))
    assert table.text(nothing, place(nothing, index)).startswith(
        f"default/chat: NoCapacity: no domain of {RACK} holds one prefill and one decode replica\n"
        "nothing fits now: a slice would wait for room, without a fixed domain\n\nDOMAIN"
    )
    document = table.document(wanted, placement)
    assert json.loads(json.dumps(document)) == document
    assert document["slices"] == [{"domain": "a", "prefill": 1, "decode": 2, "crossing": False}]
