"""Placement on fake nodes with the real scheduler: a slice's prefill and decode are in one transfer domain, or nothing starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.handle import Cluster
from cluster.kwok import DOMAIN_LABEL
from cluster.process import Processes
from cluster.tools import tool
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.domains import GPU, Pool, pool
from opsrunner.process import Operator
from opsrunner.spaces import namespaces

pytestmark = pytest.mark.cluster

PAIR = ["decode", "prefill"]
PAGE = Path(__file__).resolve().parents[3] / "docs" / "placement.md"


@contextmanager
def stopped_scheduler(cluster: Cluster) -> Iterator[None]:
    """The scheduler binds nothing meanwhile."""
    assert cluster.state is not None
    pid = Processes(cluster.state).recorded()["kube-scheduler"]
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def watched(api: Api, namespace: str) -> Iterator[list[Object]]:
    """Every state of every pod of a namespace, from now on."""
    seen: list[Object] = []
    begin = api.page("Pod", namespace)
    done = threading.Event()

    def watch() -> None:
        version = begin["metadata"]["resourceVersion"]
        for event in api.watch("Pod", namespace, version, seconds=60):
            seen.append(event["object"])
            if done.is_set():
                return

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()


def test_eight_at_once_each_in_one_domain(nodes: Pool, api: Api, space: str) -> None:
    """24 GPUs in 4 domains, 8 objects of 1 + 2 created together; a foreign pod comes and goes meanwhile."""
    nodes.add("n", 8, per_domain=2, gpus=3)
    with watched(api, space) as seen:
        for number in range(8):
            nodes.pdd(f"many{number}", 1, 2)
            if number == 3:
                nodes.foreign("guest", "n-0", 2)
        time.sleep(1)
        api.delete("Pod", space, "guest")
        for number in range(8):
            nodes.ready(f"many{number}", timeout=60)
        assert nodes.crossings(seen) == {}
    for number in range(8):
        places = nodes.places(f"many{number}")
        assert len(places) == 1
        ((_, where),) = places.items()
        assert [role for role, _ in where] == ["decode", "decode", "prefill"] and len({domain for _, domain in where}) == 1
        status = api.must_get("PDDeployment", space, f"many{number}")["status"]
        assert [s["domain"] for s in status["slices"]] == [where[0][1]]


def test_room_for_one_role_only(nodes: Pool, api: Api, space: str) -> None:
    """Required: nothing starts and the reason names what is missing; then an autoscaler's node takes the whole slice."""
    nodes.add("n", 2, per_domain=1, gpus=1)
    nodes.pdd("strict")
    message = nodes.placed("strict", "False", "NoCapacity")
    waits.until("pods for an autoscaler to see", lambda: len(nodes.engines("strict")) == 2)
    time.sleep(2)
    assert nodes.places("strict") == {} and len(nodes.engines("strict")) == 2
    message = nodes.placed("strict", "False", "NoCapacity")
    assert all(f"{nodes.node('n')}-d{n}: " in message for n in (0, 1)) and GPU in message
    nodes.add("new", 1, per_domain=1, gpus=2)
    nodes.ready("strict")
    ((_, where),) = nodes.places("strict").items()
    assert where == [(role, nodes.node("new-d0")) for role in PAIR]
    assert nodes.placed("strict", "True", "Bound").endswith(nodes.node("new-d0"))


def test_preferred_crosses_and_says_so(nodes: Pool) -> None:
    nodes.add("n", 2, per_domain=1, gpus=1)
    nodes.pdd("soft", domain={"mode": "Preferred"})
    nodes.ready("soft")
    ((_, where),) = nodes.places("soft").items()
    assert {domain for _, domain in where} == {nodes.node("n-d0"), nodes.node("n-d1")}
    assert "different transfer domains" in nodes.placed("soft", "True", "Bound")


def test_two_in_the_same_second_and_room_for_one(nodes: Pool, api: Api, space: str) -> None:
    """One gets all of it, the other nothing; never half a slice each. The second starts when the first goes."""
    nodes.add("n", 2, per_domain=2, gpus=1)
    names = ["first", "second"]
    with watched(api, space) as seen:
        for name in names:
            nodes.pdd(name)
        (winner,) = waits.until(
            "one of them to serve", lambda: [n for n in names if len(nodes.engines(n)) == 2 and nodes.places(n)]
        )
        loser = next(n for n in names if n != winner)
        nodes.ready(winner)
        nodes.placed(loser, "False", "NoCapacity")
        assert nodes.places(loser) == {}
        api.delete("PDDeployment", space, winner)
        nodes.ready(loser)
        assert nodes.crossings(seen) == {}
    assert [len(where) for where in nodes.places(loser).values()] == [2]


def test_a_leader_that_dies_between_two_plans(nodes: Pool, plane: Cluster, api: Api, space: str, operator: Operator) -> None:
    """Nothing is bound yet: what the first was promised is known to the next leader from its workloads alone."""
    nodes.add("n", 2, per_domain=2, gpus=1)
    with watched(api, space) as seen:
        with stopped_scheduler(plane):
            nodes.pdd("first")
            waits.until("a plan", lambda: f'"domain":"{nodes.node("n-d0")}"' in _sites(api, space, "first"))
            operator.kill()
            plane.kubectl("delete", "lease", "pd-operator", "-n", space)  # as if it had expired: other tests wait for that
            nodes.pdd("second")
            operator.start()
            nodes.placed("second", "False", "NoCapacity")
        nodes.ready("first")
        nodes.placed("second", "False", "NoCapacity")
        assert (nodes.places("second"), nodes.crossings(seen)) == ({}, {})
    assert [len(where) for where in nodes.places("first").values()] == [2]


def test_a_foreign_pod_takes_the_gpu_first(nodes: Pool, plane: Cluster, api: Api, space: str) -> None:
    """The slice was planned in d0 and finds it taken: it goes to d1 whole, at once and without the wedge rule."""
    nodes.add("n", 4, per_domain=2, gpus=1)
    with stopped_scheduler(plane):
        nodes.pdd("late")
        waits.until("a plan", lambda: f'"domain":"{nodes.node("n-d0")}"' in _sites(api, space, "late"))
        waits.until("both pods", lambda: len(nodes.engines("late")) == 2)
        nodes.foreign("thief", "n-1", 1)
        waits.until("another plan", lambda: f'"domain":"{nodes.node("n-d1")}"' in _sites(api, space, "late"))
        # A scheduler that wakes up may bind the old pods before it has heard of the foreign one.
        waits.until("the old slice to go", lambda: nodes.node("n-d0") not in _sites(api, space, "late"))
    nodes.ready("late")
    assert list(nodes.places("late").values()) == [[(role, nodes.node("n-d1")) for role in PAIR]]
    assert "excludedDomains" not in api.must_get("PDDeployment", space, "late")["status"]


def _sites(api: Api, space: str, name: str) -> str:
    found = state.children(api, space, name, ["Deployment"]).values()
    return " ".join(d["metadata"]["annotations"].get("pdserve.dev/site", "") for d in found)


def test_a_drained_node_moves_the_slice_whole(nodes: Pool, plane: Cluster, api: Api, space: str) -> None:
    """Half of the slice is left in a domain that cannot take the other half any more."""
    nodes.add("n", 4, per_domain=2, gpus=1)
    nodes.pdd("moves")
    nodes.ready("moves")
    ((before, where),) = nodes.places("moves").items()
    home = where[0][1]
    victim = nodes.engines("moves")[0]
    plane.kubectl("cordon", victim["spec"]["nodeName"])
    api.delete("Pod", space, victim["metadata"]["name"])
    waits.until("the slice to be elsewhere", lambda: before not in nodes.places("moves"))
    nodes.ready("moves")
    ((after, where),) = nodes.places("moves").items()
    assert after != before and len({domain for _, domain in where}) == 1 and where[0][1] != home


def test_a_label_that_changes_under_running_pods_is_reported(nodes: Pool, plane: Cluster, api: Api, space: str) -> None:
    nodes.add("n", 2, per_domain=2, gpus=1)
    nodes.pdd("label")
    nodes.ready("label")
    uids = state.uids(nodes.engines("label"))
    home = f"pdserve.dev/domain={nodes.node('n-d0')}"
    plane.kubectl("label", "node", nodes.node("n-1"), "pdserve.dev/domain=elsewhere", "--overwrite")
    found = waits.condition(api, space, "label", "Degraded", "True", "PairingNotEnforced")
    assert f"{nodes.node('n-1')} (elsewhere)" in waits.conditions(found)["Degraded"]["message"]
    plane.kubectl("label", "node", nodes.node("n-1"), home, "--overwrite")
    waits.condition(api, space, "label", "Degraded", "False")
    assert state.uids(nodes.engines("label")) == uids


def test_a_pool_grows_into_a_second_domain_and_shrinks_back(nodes: Pool, api: Api, space: str) -> None:
    """Running replicas never move for it, and each slice has a router and a Service of its own."""
    nodes.add("n", 4, per_domain=2, gpus=2)
    nodes.pdd("grows", 1, 1, maxDomains=2)
    nodes.ready("grows")
    first = state.uids(nodes.engines("grows"))
    api.merge("PDDeployment", space, "grows", {"spec": {"prefill": {"replicas": 4}, "decode": {"replicas": 4}}})
    nodes.ready("grows")
    assert first < state.uids(nodes.engines("grows"))
    places = nodes.places("grows")
    assert [len(where) for where in places.values()] == [4, 4]
    homes = sorted(sorted({domain for _, domain in where}) for where in places.values())
    assert homes == [[nodes.node("n-d0")], [nodes.node("n-d1")]]
    said = _commands_of_the_page(nodes.cluster, space, "grows")
    assert all(said) and f"\t{nodes.node('n-d0')}\t2\t2\tServing" in said[0] and nodes.node("n-d1") in said[1]
    made = state.children(api, space, "grows", ["Deployment", "Service"])
    assert all(("Service", name) in made and ("Deployment", f"{name}-router") in made for name in places)
    before = state.uids(nodes.engines("grows"))
    api.merge("PDDeployment", space, "grows", {"spec": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}}})
    waits.until("one slice", lambda: len(nodes.places("grows")) == 1)
    nodes.ready("grows")
    assert state.uids(nodes.engines("grows")) < before  # which pods of a Deployment go is Kubernetes' choice; none is made anew


def _commands_of_the_page(cluster: Cluster, space: str, name: str) -> list[str]:
    """Run every command of docs/placement.md for an object; what each printed."""
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.S)
    said = []
    for line in block.splitlines():
        command = line.replace("NAME", name).replace("example.org/rack", DOMAIN_LABEL)
        command = command.replace("kubectl ", f"{tool('kubectl')} -n {space} --request-timeout 20s ", 1)
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        done = subprocess.run(["bash", "-eu", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        said.append(done.stdout)
    return said


def test_an_unchanged_world_costs_no_write(nodes: Pool, api: Api, space: str) -> None:
    """Invariant I2, with one object placed, one that finds no room, and foreign pods that change nothing for them."""
    nodes.add("n", 1, per_domain=1, gpus=3)
    nodes.pdd("fits")
    nodes.ready("fits")
    nodes.pdd("waits")
    nodes.placed("waits", "False", "NoCapacity")
    waits.until("its pods", lambda: len(nodes.engines("waits")) == 2)

    def versions() -> list[object]:
        objects = [api.must_get("PDDeployment", space, name)["metadata"]["resourceVersion"] for name in ("fits", "waits")]
        return [*objects, state.versions(api, space, "fits"), state.versions(api, space, "waits")]

    for name in ("fits", "waits"):
        waits.looked(api, space, name)
    before = waits.until("quiet", lambda: _same(versions), timeout=30)
    for number in range(3):
        nodes.foreign(f"noise{number}", "n-0", 0)
        api.delete("Pod", space, f"noise{number}")
        time.sleep(1.2)
    assert versions() == before


def _same(look: object) -> list[object]:
    """What is the same twice, two seconds apart; empty when it is not."""
    assert callable(look)
    first: list[object] = look()
    time.sleep(2)
    return first if look() == first else []


def test_a_wedged_slice_is_given_up_and_its_place_left_alone(
    nodes: Pool, plane: Cluster, api: Api, operator: Operator, tmp_path: Path
) -> None:
    """A namespaced install sees no node: the slice floats. It survives a restart what it left alone, and where it may go."""
    with namespaces(plane, "floating", 1) as (home,), pool(plane, api, home, nodes.name + "f") as mine:
        mine.add("a", 1, per_domain=1, gpus=2)
        mine.add("b", 1, per_domain=1, gpus=3)
        plane.kubectl("cordon", mine.node("b-0"))
        operator.stop()  # it is cluster-wide and would take this namespace too
        floating = Operator(plane.kubeconfig, [home], home=home, folder=tmp_path)
        try:
            floating.start()
            mine.pdd("float", gpus=(1, 2), schedulingTimeout="10s")
            waits.until("the larger pods to have a node", lambda: mine.places("float"))
            assert [role for where in mine.places("float").values() for role, _ in where] == ["decode"]
            mine.placed("float", "False", "Wedged", timeout=40)
            floating.stop()
            floating.start()
            left = api.must_get("PDDeployment", home, "float")["status"]["excludedDomains"]
            assert [(e["name"], e["times"]) for e in left] == [(f"node/{mine.node('a-0')}", 1)]
            waits.until("the slice to go", lambda: mine.places("float") == {})
            plane.kubectl("uncordon", mine.node("b-0"))
            mine.ready("float")
            ((_, where),) = mine.places("float").items()
            assert where == [(role, mine.node("b-d0")) for role in PAIR]
            assert "not known which (nodes cannot be read)" in mine.placed("float", "True", "Bound")
            assert not floating.tracebacks()
        finally:
            floating.stop()
            operator.start()
