"""Replicas that span nodes, with the real LeaderWorkerSet controller and the real scheduler on fake nodes.

The cluster begins without the kind: the first test is about that, and brings it for the others.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import lws
from cluster.handle import Cluster
from cluster.tools import tool
from opsrunner import state, waits, wide
from opsrunner.api import Api, Object
from opsrunner.domains import Pool, pool
from opsrunner.process import Operator
from pd_operator.core.names import DEPLOYMENT, ROLE, SLICE, WORKER

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "nodes.md"
GROUP = "decode", "decode worker"
TWO: dict[str, Any] = {"prefill": {"parallelism": {"tensor": 2}}, "decode": {"nodes": 2, "parallelism": {"tensor": 2}}}

plane, api, space, operator = wide.fixtures("module", "groups")


@pytest.fixture(scope="module")
def groups(plane: Cluster) -> Iterator[None]:
    """LeaderWorkerSet is installed and runs."""
    with lws.controller(plane):
        yield


@pytest.fixture
def nodes(plane: Cluster, api: Api, space: str, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Pool]:
    name = request.node.name.removeprefix("test_").replace("_", "-")[:20].strip("-")
    with pool(plane, api, space, name) as made:
        yield made


def sets(api: Api, space: str, name: str) -> dict[str, Object]:
    """LeaderWorkerSets of a PDDeployment by name."""
    return {s["metadata"]["name"]: s for s in api.list("LeaderWorkerSet", space, f"{DEPLOYMENT}={name}")}


def hosts(pods: list[Object]) -> dict[str, set[str]]:
    """Group -> nodes of its pods, for decode."""
    found: dict[str, set[str]] = {}
    for pod in pods:
        labels = pod["metadata"]["labels"]
        if "decode" in (labels.get(ROLE), labels.get(WORKER)):
            found.setdefault(labels["leaderworkerset.sigs.k8s.io/group-index"], set()).add(pod["spec"]["nodeName"])
    return found


def test_a_cluster_without_the_kind_then_with_it(
    nodes: Pool, api: Api, space: str, operator: Operator, request: pytest.FixtureRequest
) -> None:
    """One waits and says for what, another is served meanwhile, and nobody touches the first when the kind is there."""
    nodes.add("n", 6, per_domain=3, gpus=1)
    nodes.pdd("wide", spec=TWO)
    obj = waits.condition(api, space, "wide", "Accepted", "False", "MissingKind")
    message = waits.conditions(obj)["Accepted"]["message"]
    assert message.startswith("spec.decode.nodes=2: ") and "install LeaderWorkerSet" in message and "or set 1" in message
    nodes.pdd("narrow")
    nodes.ready("narrow")
    assert state.children(api, space, "wide") == {}
    request.getfixturevalue("groups")
    found = nodes.ready("wide", timeout=60)
    assert found["metadata"]["generation"] == obj["metadata"]["generation"]
    assert [s["spec"]["replicas"] for s in sets(api, space, "wide").values()] == [1]
    assert not operator.tracebacks()


def test_a_group_is_one_replica_through_its_life(nodes: Pool, plane: Cluster, api: Api, space: str, groups: None) -> None:
    """It comes up in one domain, on two nodes, grows and shrinks by a group, rolls, is replaced by a new revision, and goes."""
    nodes.add("n", 10, per_domain=10, gpus=1)
    nodes.add("small", 2, per_domain=2, gpus=1)
    nodes.pdd("life", spec=TWO)
    nodes.ready("life")
    ((first, where),) = nodes.places("life").items()
    assert [part for part, _ in where] == [*GROUP, "prefill"] and {domain for _, domain in where} == {nodes.node("n-d0")}
    assert [len(found) for found in hosts(nodes.engines("life")).values()] == [2]
    counted(api, space, "life", 1)
    commands(plane, space, "life")

    before = state.uids(nodes.engines("life"))
    api.merge("PDDeployment", space, "life", {"spec": {"decode": {"replicas": 2}}})
    nodes.ready("life")
    assert before < state.uids(nodes.engines("life")) and {len(found) for found in hosts(nodes.engines("life")).values()} == {2}
    counted(api, space, "life", 2)

    api.merge("PDDeployment", space, "life", {"spec": {"decode": {"replicas": 1}}})
    nodes.ready("life")
    waits.until("the second group to be gone", lambda: state.uids(nodes.engines("life")) == before)  # the highest index goes
    counted(api, space, "life", 1)

    edit = {"decode": {"template": {"metadata": {"labels": {"rolled": "yes"}}}}, "rollout": {"paused": True}}
    api.merge("PDDeployment", space, "life", {"spec": edit})
    waits.condition(api, space, "life", "Progressing", "False", "Paused")
    assert state.uids(nodes.engines("life")) == before
    api.merge("PDDeployment", space, "life", {"spec": {"rollout": {"paused": False}}})
    waits.until("pods of the new template", lambda: rolled(nodes) == {"decode", "decode worker"})
    nodes.ready("life")
    assert list(nodes.places("life")) == [first]

    api.merge("PDDeployment", space, "life", {"spec": {"engine": {"args": ["--seed=7"]}}})
    nodes.ready("life")
    ((second, where),) = waits.until("one slice", lambda: [p for p in [nodes.places("life")] if len(p) == 1])[0].items()
    assert second != first and len({domain for _, domain in where}) == 1

    api.delete("PDDeployment", space, "life")
    waits.until("nothing to be left", lambda: leftovers(plane, space, "life") == "")


def counted(api: Api, space: str, name: str, replicas: int) -> None:
    """Scale, status and the scale's selector count groups."""
    status = waits.until(
        "the pool to count groups",
        lambda: (
            (s := api.must_get("PDPool", space, f"{name}-decode")["status"])["readyReplicas"] == replicas == s["replicas"] and s
        ),
    )
    labels = dict(part.split("=", 1) for part in status["selector"].split(","))
    assert len([p for p in state.pods(api, space, name) if state.selects(labels, p["metadata"]["labels"])]) == replicas
    (role,) = (r for r in api.must_get("PDDeployment", space, name)["status"]["roles"] if r["name"] == "decode")
    assert (role["replicas"], role["readyReplicas"], role["gpus"]) == (replicas, replicas, 2 * replicas)


def rolled(nodes: Pool) -> set[str]:
    """Parts whose pods have all been made anew."""
    marked: dict[str, set[bool]] = {}
    for pod in nodes.engines("life"):
        labels = pod["metadata"]["labels"]
        marked.setdefault(labels.get(ROLE) or f"{labels[WORKER]} worker", set()).add("rolled" in labels)
    return {part for part, found in marked.items() if found == {True}}


def leftovers(plane: Cluster, space: str, name: str) -> str:
    """Everything in the namespace that bears the object's name."""
    kinds = "leaderworkersets,statefulsets,deployments,pods,services,controllerrevisions,poddisruptionbudgets,pdpools"
    return "\n".join(line for line in plane.kubectl("get", kinds, "-n", space, "-o", "name").splitlines() if f"/{name}" in line)


def commands(plane: Cluster, space: str, name: str) -> None:
    """Every command of docs/nodes.md works for an object, and shows something."""
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.S)
    for line in block.splitlines():
        command = line.replace("NAME", name).replace("kubectl ", f"{tool('kubectl')} -n {space} --request-timeout 20s ", 1)
        environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig)}
        done = subprocess.run(["bash", "-eu", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0 and name in done.stdout, f"{line}: {done.stdout}{done.stderr}"


def test_a_group_that_loses_a_pod_comes_back_whole(nodes: Pool, api: Api, space: str, groups: None) -> None:
    """An engine cannot go on without a rank: all of that group is made anew, the other one stays."""
    nodes.add("n", 6, per_domain=6, gpus=1)
    nodes.pdd("loses", 1, 2, spec=TWO)
    nodes.ready("loses")
    before = {p["metadata"]["name"]: p for p in nodes.engines("loses")}
    victim = next(name for name, p in before.items() if p["metadata"]["labels"].get(WORKER) and name.endswith("-0-1"))
    lost = {victim, victim.removesuffix("-1")}
    api.delete("Pod", space, victim)

    def again() -> bool:
        now = {p["metadata"]["name"]: p for p in nodes.engines("loses")}
        anew = {n for n in now if n in before and now[n]["metadata"]["uid"] != before[n]["metadata"]["uid"]}
        return now.keys() == before.keys() and anew == lost

    waits.until("the group to be made anew", again)
    nodes.ready("loses")


def test_two_groups_are_planned_and_one_fits(nodes: Pool, api: Api, space: str, groups: None) -> None:
    """Two objects in the same second, each needs three nodes of a domain, and there are two such domains with room for one each
    and a third that holds only half. None is split, and the third waits with the reason."""
    nodes.add("n", 6, per_domain=3, gpus=1)
    nodes.add("half", 2, per_domain=2, gpus=1)
    names = ["one", "two", "three"]
    for name in names:
        nodes.pdd(name, spec=TWO)
    served = waits.until("two of them to serve", lambda: _served(nodes, names))
    waiting = next(name for name in names if name not in served)
    for name in served:
        nodes.ready(name)
        assert len(set(bound(nodes, name))) == 1
    assert len({bound(nodes, name)[0] for name in served}) == 2
    message = nodes.placed(waiting, "False", "NoCapacity")
    assert "nvidia.com/gpu" in message and bound(nodes, waiting) == []
    api.delete("PDDeployment", space, served[0])
    nodes.ready(waiting, timeout=60)
    assert len(set(bound(nodes, waiting))) == 1


def bound(nodes: Pool, name: str) -> list[str]:
    """Domains of the bound pods of an object."""
    return [domain for where in nodes.places(name).values() for _, domain in where]


def _served(nodes: Pool, names: list[str]) -> list[str]:
    found = [name for name in names if len(bound(nodes, name)) == 3]
    return found if len(found) == 2 else []


def test_from_one_node_to_two_and_back(nodes: Pool, api: Api, space: str, groups: None) -> None:
    """The role rolls inside its slice, from a Deployment to a LeaderWorkerSet: the old one goes when the new one is ready."""
    nodes.add("n", 6, per_domain=6, gpus=1)
    nodes.pdd("turns", spec={**TWO, "decode": {"parallelism": {"tensor": 2}}})
    nodes.ready("turns")
    (slice_,) = nodes.places("turns")
    for count, kind, gone in ((2, "LeaderWorkerSet", "Deployment"), (1, "Deployment", "LeaderWorkerSet")):
        api.merge("PDDeployment", space, "turns", {"spec": {"decode": {"nodes": count}}})
        waits.until(f"the {gone} to be gone", lambda gone=gone: api.get(gone, space, f"{slice_}-decode") is None)  # type: ignore[misc]
        made = api.must_get(kind, space, f"{slice_}-decode")
        assert made["status"]["readyReplicas"] == 1
        nodes.ready("turns")
        assert list(nodes.places("turns")) == [slice_]
        assert made["metadata"]["labels"][SLICE] == slice_
