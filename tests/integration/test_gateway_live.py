"""The HTTPRoute on a real API server with the Gateway API's own CRD: weights, joining, leaving, repair, a cluster without the kind.

No gateway controller runs; where one would speak, the test writes the route's status as it would.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster import gateway_api
from cluster.handle import Cluster
from cluster.tools import tool
from opsrunner import state, waits, wide
from opsrunner.api import Api, Object
from opsrunner.domains import GPU, POOL, Pool, pool
from opsrunner.process import Operator
from opsrunner.recording import Recording

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).resolve().parents[2] / "docs" / "front-door.md"
GATEWAY: dict[str, Any] = {"parentRefs": [{"name": "public", "namespace": "infra"}], "hostnames": ["chat.example.org"]}

# A kind that comes and goes is no other test's business: a cluster of its own.
plane, api, space, operator = wide.fixtures("module", "gateway")


@pytest.fixture(scope="module")
def racks(plane: Cluster, api: Api, space: str, operator: Operator) -> Iterator[Pool]:
    """Two domains of two nodes with 3 GPUs; somebody else holds the second node of each."""
    with pool(plane, api, space, "gw") as made:
        made.add("n", 4, per_domain=2, gpus=3)
        for node in ("n-1", "n-3"):
            made.foreign(f"guest-{node}", node, 3)
        yield made


def backends(api: Api, space: str, name: str) -> dict[str, int]:
    """Service -> weight of the route; empty without one."""
    route = api.get("HTTPRoute", space, name)
    rules = route["spec"]["rules"] if route else []
    return {b["name"]: b["weight"] for rule in rules for b in rule["backendRefs"]}


def told(api: Api, space: str, name: str) -> dict[str, int]:
    """The same as status has it."""
    slices = api.must_get("PDDeployment", space, name)["status"]["slices"]
    return {s["name"]: s["weight"] for s in slices if "weight" in s}


def until_weights(api: Api, space: str, name: str, expected: list[int]) -> dict[str, int]:
    """Wait for these weights, whoever has which, in the route and in status."""

    def there() -> dict[str, int]:
        found = backends(api, space, name)
        return found if sorted(found.values()) == expected and told(api, space, name) == found else {}

    return waits.until(
        f"weights {expected} of {name}", there, show=lambda: f"{backends(api, space, name)}, {told(api, space, name)}"
    )


def quiet(look: Callable[[], object]) -> bool:
    """Whether it is the same twice, two seconds apart."""
    first = look()
    time.sleep(2)
    return look() == first


def test_a_cluster_without_the_kind_refuses_one_spec_and_serves_the_others(
    api: Api, space: str, operator: Operator, plane: Cluster
) -> None:
    """And goes on by itself when the kind is installed."""
    api.create(state.pdd(space, "plain", router={"replicas": 1}))
    api.create(state.pdd(space, "early", router={"replicas": 1}, gateway=GATEWAY))
    found = waits.condition(api, space, "early", "Accepted", "False", "MissingKind")
    message = str(waits.conditions(found)["Accepted"]["message"])
    assert message.startswith("spec.gateway: the API server does not know HTTPRoute of gateway.networking.k8s.io/v1")
    waits.ready(api, space, "plain")
    assert not state.children(api, space, "early")
    gateway_api.install(plane)
    waits.ready(api, space, "early")
    ((name, weight),) = backends(api, space, "early").items()
    assert (name, weight) == (api.must_get("PDDeployment", space, "early")["status"]["slices"][0]["name"], 100)
    assert not operator.tracebacks()


def test_setting_and_removing_it_touches_no_pod(api: Api, space: str) -> None:
    waits.ready(api, space, "early")
    pods = state.uids(state.pods(api, space, "early"))
    api.merge("PDDeployment", space, "early", {"spec": {"gateway": None}})
    waits.until("the route to go", lambda: not backends(api, space, "early"))
    obj = waits.ready(api, space, "early")
    assert "weight" not in obj["status"]["slices"][0] and obj["status"]["url"] == f"http://early.{space}.svc"
    api.merge("PDDeployment", space, "early", {"spec": {"gateway": GATEWAY}})
    until_weights(api, space, "early", [100])
    assert state.uids(state.pods(api, space, "early")) == pods
    assert waits.ready(api, space, "early")["status"]["url"] == "http://chat.example.org"


@pytest.fixture(scope="module")
def two(racks: Pool, api: Api, space: str) -> str:
    """A PDDeployment of 2 + 4 replicas: 1 + 2 in each of two domains."""
    template = {"spec": {"nodeSelector": {POOL: racks.name}}}
    roles = {
        role: {"replicas": count, "template": template, "resources": {"limits": {GPU: 1}}}
        for role, count in (("prefill", 2), ("decode", 4))
    }
    domain = {"transferDomain": {"topologyKey": "pdserve.dev/domain"}, "maxDomains": 2}
    api.create(state.pdd(space, "two", **roles, router={"replicas": 1}, placement=domain, gateway=GATEWAY))
    racks.ready("two")
    return "two"


def test_two_domains_two_slices_two_weights(racks: Pool, two: str, api: Api, space: str) -> None:
    found = until_weights(api, space, two, [50, 50])
    assert set(found) == set(racks.places(two))
    spec = api.must_get("HTTPRoute", space, two)["spec"]
    assert [p["name"] for p in spec["parentRefs"]] == ["public"] and spec["hostnames"] == ["chat.example.org"]
    for name in found:
        assert api.get("Service", space, name), "a backend that does not exist"
    said = _commands_of_the_page(racks.cluster, space, two)
    assert all(f"{name}\t{weight}" in said[0] and f"{name}\tServing\t{weight}" in said[1] for name, weight in found.items())


def _commands_of_the_page(cluster: Cluster, space: str, name: str) -> list[str]:
    """Run every command of docs/front-door.md for an object; what each printed."""
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), flags=re.S)
    said = []
    for line in block.splitlines():
        command = line.replace("NAME", name).replace("kubectl ", f"{tool('kubectl')} -n {space} --request-timeout 20s ", 1)
        environment = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        done = subprocess.run(["bash", "-eu", "-c", command], capture_output=True, text=True, timeout=60, env=environment)
        assert done.returncode == 0, f"{line}: {done.stderr}"
        said.append(done.stdout)
    return said


EDITS: dict[str, dict[str, Any]] = {
    "rules": {"spec": {"rules": [{"backendRefs": [{"name": "elsewhere", "port": 80}]}]}},
    "no-rules": {"spec": {"rules": None}},
    "hostnames": {"spec": {"hostnames": ["evil.example.org"]}},
    "parents": {"spec": {"parentRefs": [{"name": "other"}]}},
    "label": {"metadata": {"labels": {"app.kubernetes.io/managed-by": "me"}}},
    "owner": {"metadata": {"ownerReferences": None}},
}


@pytest.mark.parametrize("what", [*EDITS, "weights", "deleted"])
def test_whoever_edits_the_route_finds_it_undone(two: str, api: Api, space: str, what: str) -> None:
    def shown() -> object:
        route = api.get("HTTPRoute", space, two)
        return route and (route["spec"], route["metadata"]["labels"], route["metadata"]["ownerReferences"][0]["uid"])

    wanted = shown()
    assert wanted
    if what == "deleted":
        api.delete("HTTPRoute", space, two)
    elif what == "weights":  # within the band of the hysteresis
        refs = [
            {"name": name, "port": 80, "weight": weight} for name, weight in zip(backends(api, space, two), (53, 47), strict=True)
        ]
        api.merge("HTTPRoute", space, two, {"spec": {"rules": [{"backendRefs": refs}]}})
    else:
        api.merge("HTTPRoute", space, two, EDITS[what])

    def same() -> bool:
        try:
            return shown() == wanted
        except KeyError:
            return False

    waits.until(f"{what} to be undone", same, timeout=20)


def test_what_a_gateway_says_is_told_and_ready_stays(two: str, api: Api, space: str, plane: Cluster) -> None:
    ready = waits.conditions(waits.ready(api, space, two))["Ready"]
    assert ready["message"] == "serving at http://chat.example.org; no gateway has accepted HTTPRoute two yet"
    _say(plane, space, two, "False", "NotAllowedByListeners")
    found = waits.conditions(waits.condition(api, space, two, "Degraded", "True", "RouteRefused"))
    assert found["Degraded"]["message"].startswith(
        "Gateway infra/public (example.org/gw): Accepted is False, NotAllowedByListeners"
    )
    assert found["Ready"]["status"] == "True"
    _say(plane, space, two, "True", "Accepted")
    found = waits.conditions(waits.condition(api, space, two, "Degraded", "False"))
    assert found["Ready"]["message"] == "serving at http://chat.example.org"


def _say(plane: Cluster, space: str, name: str, status: str, reason: str) -> None:
    """What a gateway's controller would write."""
    generation = plane.json("get", "httproute", name, "-n", space)["metadata"]["generation"]
    said = {"type": "Accepted", "status": status, "reason": reason, "message": "so it is", "observedGeneration": generation}
    said["lastTransitionTime"] = "2026-01-02T03:04:05Z"
    parent = {"parentRef": GATEWAY["parentRefs"][0], "controllerName": "example.org/gw", "conditions": [said]}
    patch = json.dumps({"status": {"parents": [parent]}})
    plane.kubectl("patch", "httproute", name, "-n", space, "--subresource=status", "--type=merge", "-p", patch)


def test_an_unchanged_world_costs_no_write(two: str, api: Api, space: str) -> None:
    """Invariant I2: the route is among the children that are compared."""

    def look() -> object:
        obj = api.must_get("PDDeployment", space, two)["metadata"]["resourceVersion"]
        versions = state.versions(api, space, two)
        assert ("HTTPRoute", two) in versions
        return obj, versions

    waits.looked(api, space, two)
    waits.until("quiet", lambda: quiet(look), timeout=30)
    before = look()
    time.sleep(3)
    assert look() == before


def test_a_slice_that_doubles_gets_more(racks: Pool, two: str, api: Api, space: str) -> None:
    """1 + 2 and 2 + 4 replicas: 33 to 67. Nothing that runs moves."""
    before = state.uids(racks.engines(two))
    api.delete("Pod", space, "guest-n-3")
    api.merge("PDDeployment", space, two, {"spec": {"prefill": {"replicas": 3}, "decode": {"replicas": 6}}})
    found = until_weights(api, space, two, [33, 67])
    racks.ready(two)
    assert before < state.uids(racks.engines(two))
    sizes = {name: len(where) for name, where in racks.places(two).items()}
    assert {name: sizes[name] for name in found} == {name: 6 if weight == 67 else 3 for name, weight in found.items()}


def test_a_restart_changes_nothing(two: str, api: Api, space: str, operator: Operator) -> None:
    waits.until("quiet", lambda: quiet(lambda: state.versions(api, space, two)), timeout=30)
    before = api.must_get("HTTPRoute", space, two)["metadata"]["resourceVersion"]
    operator.stop()
    operator.start()
    waits.until("a look at all objects", lambda: operator.metric("pd_operator_reconcile_total") >= 3, timeout=60)
    time.sleep(2)
    assert api.must_get("HTTPRoute", space, two)["metadata"]["resourceVersion"] == before


def test_a_slice_leaves_the_route_before_its_routers_end(racks: Pool, two: str, api: Api, space: str) -> None:
    with Recording(api, space, "HTTPRoute", "Deployment") as recording:
        api.merge("PDDeployment", space, two, {"spec": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}}})
        (left,) = until_weights(api, space, two, [100])
        waits.until("one slice", lambda: list(racks.places(two)) == [left])
        racks.ready(two)
    led: set[str] = set()
    ended = 0
    for event in recording.events(name=two):
        if event.kind == "HTTPRoute":
            led = {b["name"] for rule in event.object["spec"]["rules"] for b in rule["backendRefs"]}
            assert led, "the route led nowhere"
        elif event.type == "DELETED":
            ended += 1
            assert event.labels["pdserve.dev/slice"] not in led, f"{event.name} ended while the route led to its slice"
    assert ended == 3


def test_a_new_revision_takes_over_in_the_route(two: str, racks: Pool, api: Api, space: str) -> None:
    """old -> (both ->) new; at every moment a slice that serves."""
    (old,) = backends(api, space, two)
    with Recording(api, space, "HTTPRoute") as recording:
        api.merge("PDDeployment", space, two, {"spec": {"rollout": {"restartID": "again"}}})
        (new,) = waits.until("another slice", lambda: set(backends(api, space, two)) - {old})
        waits.until("the old one to leave", lambda: set(backends(api, space, two)) == {new})
        racks.ready(two)
    seen: list[set[str]] = []
    for event in recording.events("HTTPRoute", two):
        names = {b["name"] for rule in event.object["spec"]["rules"] for b in rule["backendRefs"]}
        if not seen or seen[-1] != names:
            seen.append(names)
    assert [names for names in seen if names != {old, new}] == [{old}, {new}]  # both only where a look falls between two steps


def test_a_kind_that_goes_breaks_nothing_and_comes_back(two: str, api: Api, space: str, plane: Cluster, operator: Operator) -> None:
    pods = state.uids(state.pods(api, space, two))
    gateway_api.remove(plane)
    waits.condition(api, space, two, "Accepted", "False", "MissingKind")
    api.merge("PDDeployment", space, "plain", {"spec": {"router": {"replicas": 2}}})
    waits.ready(api, space, "plain")
    gateway_api.install(plane)
    waits.ready(api, space, two)
    until_weights(api, space, two, [100])
    assert state.uids(state.pods(api, space, two)) == pods
    assert not operator.tracebacks()


def test_delete_leaves_nothing(two: str, api: Api, space: str) -> None:
    for name in (two, "early"):
        assert ("HTTPRoute", name) in state.children(api, space, name)
        api.delete("PDDeployment", space, name)
    for name in (two, "early"):
        waits.until(f"everything of {name} to go", lambda name=name: not state.children(api, space, name), timeout=60)


def test_a_route_of_somebody_else_is_a_conflict(api: Api, space: str, operator: Operator) -> None:
    foreign: Object = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "theirs", "namespace": space},
        "spec": {"hostnames": ["theirs.example.org"]},
    }
    api.create(foreign)
    api.create(state.pdd(space, "theirs", router={"replicas": 1}, gateway=GATEWAY))
    found = waits.condition(api, space, "theirs", "Accepted", "False", "NameConflict")
    assert "HTTPRoute theirs" in str(waits.conditions(found)["Accepted"]["message"])
    assert api.must_get("HTTPRoute", space, "theirs")["spec"]["hostnames"] == ["theirs.example.org"]
