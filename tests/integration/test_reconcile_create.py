"""One object makes exactly its children, tells the truth while they start, and takes them all with it."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import manifests
from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator
from opsrunner.recording import Recording

pytest_plugins = ("opsrunner.fixtures",)

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "chat.yaml"
MANAGED = {"app.kubernetes.io/managed-by": "pd-operator"}


def example(namespace: str, name: str, source: str) -> Object:
    """The minimal object or the documented example, under a name of its own; without a canary: no container runs here."""
    obj: Object = manifests.minimal() if source == "minimal" else yaml.safe_load(EXAMPLE.read_text())
    obj["metadata"] = {"name": name, "namespace": namespace}
    obj["spec"]["verification"] = "Disabled"
    return obj


def expected(name: str, revision: str, pods: str) -> set[tuple[str, str]]:
    """Kinds and names of all children of a PDDeployment without P2P."""
    slice_ = f"{name}-{revision}-0"
    return {
        ("ControllerRevision", f"{name}-{revision}-{pods}"),
        ("Service", name),
        ("Service", slice_),
        ("NetworkPolicy", f"{name}-engine"),
        ("ServiceAccount", f"{name}-engine"),
        ("ServiceAccount", f"{name}-router"),
        ("Role", f"{name}-router"),
        ("RoleBinding", f"{name}-router"),
        *(("PodDisruptionBudget", f"{name}-{part}") for part in ("prefill", "decode", "router")),
        *(("PDPool", f"{name}-{role}") for role in ("prefill", "decode")),
        *(("Deployment", f"{slice_}-{part}") for part in ("prefill", "decode", "router")),
    }


@pytest.fixture(scope="module", params=["minimal", "example"])
def made(
    request: pytest.FixtureRequest, api: Api, operator: Operator, spaces: list[str]
) -> tuple[Object, dict[Any, Object], Recording]:
    """An object that is Ready, its children, and what its conditions said meanwhile."""
    namespace = spaces[("minimal", "example").index(request.param)]
    with Recording(api, namespace, "PDDeployment") as recording:
        begin = time.monotonic()
        api.create(example(namespace, "chat", request.param))
        obj = waits.ready(api, namespace, "chat")
        print(f"{request.param}: created to Ready in {time.monotonic() - begin:.2f} s")
    return obj, state.children(api, namespace, "chat"), recording


def test_exactly_the_expected_children(made: tuple[Object, dict[Any, Object], Recording], api: Api) -> None:
    obj, children, _ = made
    revision = obj["status"]["updatedRevision"]
    assert re.fullmatch(r"[0-9a-f]{8}", revision)
    (stored,) = (name for kind, name in children if kind == "ControllerRevision")
    assert re.fullmatch(rf"chat-{revision}-[0-9a-f]{{6}}", stored)
    assert set(children) == expected("chat", revision, stored.rsplit("-", 1)[1])
    # Nothing without our labels either, but what Kubernetes itself and the Lease put there.
    namespace = obj["metadata"]["namespace"]
    for kind in {kind for kind, _ in children}:
        others = {item["metadata"]["name"] for item in api.list(kind, namespace)} - {
            name for known, name in children if known == kind
        }
        assert others <= {"default"}, (kind, others)


def test_owner_labels_and_field_manager(made: tuple[Object, dict[Any, Object], Recording]) -> None:
    obj, children, _ = made
    slice_ = f"chat-{obj['status']['updatedRevision']}-0"
    components = {
        "Role": "router", "RoleBinding": "router", "NetworkPolicy": "engine", "PDPool": "pool", "ControllerRevision": "revision",
    }  # fmt: skip
    for (kind, name), child in children.items():
        metadata = child["metadata"]
        assert metadata["ownerReferences"] == [
            {
                "apiVersion": "pdserve.dev/v1alpha1",
                "kind": "PDDeployment",
                "name": "chat",
                "uid": obj["metadata"]["uid"],
                "controller": True,
                "blockOwnerDeletion": True,
            }
        ], (kind, name)
        labels = metadata["labels"]
        assert labels["app.kubernetes.io/managed-by"] == "pd-operator" and labels["pdserve.dev/deployment"] == "chat"
        assert labels["app.kubernetes.io/component"] == components.get(kind, labels["app.kubernetes.io/component"])
        assert labels["app.kubernetes.io/component"] in {"engine", "router", "coordinator", "pool", "front", "revision"}
        if name.startswith(slice_):
            assert labels["pdserve.dev/slice"] == slice_ and labels["pdserve.dev/revision"] == obj["status"]["updatedRevision"]
        assert re.fullmatch(r"[0-9a-f]{16}", metadata["annotations"]["pdserve.dev/applied-hash"])
        assert "finalizers" not in metadata
        managers = {(e["manager"], e["operation"], e.get("subresource", "")) for e in metadata["managedFields"]}
        managers = {entry for entry in managers if not entry[0].startswith("kube-")}  # Kubernetes' own: status, a revision number
        if kind == "PDPool":  # created, so that no apply of ours owns its number; and its status
            assert managers == {("pd-operator", "Update", ""), ("pd-operator", "Apply", "status")}
        else:
            assert managers == {("pd-operator", "Apply", "")}, (kind, name)


def test_roles_of_pods(made: tuple[Object, dict[Any, Object], Recording], api: Api) -> None:
    obj, children, _ = made
    namespace, slice_ = obj["metadata"]["namespace"], f"chat-{obj['status']['updatedRevision']}-0"
    for role, count in (("prefill", 1), ("decode", 1)):
        pods = state.pods(api, namespace, "chat", role=role)
        assert len(pods) == count
        assert pods[0]["metadata"]["annotations"]["smg.ai/kv-connector"] == "NixlConnector"
        assert pods[0]["metadata"]["labels"]["pdserve.dev/slice"] == slice_
        engine = pods[0]["spec"]["containers"][0]
        assert engine["name"] == "engine" and engine["image"] == "example.org/vllm:0.32.0"
        servers = [c["name"] for c in pods[0]["spec"].get("initContainers", [])]
        assert servers == (["lmcache"] if "lmcache" in obj["spec"] else [])
    routers = state.pods(api, namespace, "chat", component="router")
    assert len(routers) == 2 and all(p["metadata"]["labels"]["pdserve.dev/front"] == "chat" for p in routers)
    front = children["Service", "chat"]["spec"]
    assert front["selector"] == {"pdserve.dev/front": "chat"}
    assert [(p["port"], p["targetPort"]) for p in front["ports"]] == [(80, "http")]


def test_status_says_what_is(made: tuple[Object, dict[Any, Object], Recording]) -> None:
    obj, _, _ = made
    namespace, status = obj["metadata"]["namespace"], obj["status"]
    found = {type_: (c["status"], c["reason"]) for type_, c in waits.conditions(obj).items()}
    offload = {"OffloadVerified": ("Unknown", "NotYetRun")} if "lmcache" in obj["spec"] else {}
    assert found == offload | {
        "Accepted": ("True", "Accepted"),
        "Placed": ("True", "Bound"),
        "PrefillReady": ("True", "Ready"),
        "DecodeReady": ("True", "Ready"),
        "RouterReady": ("True", "Ready"),
        "HandoffVerified": ("Unknown", "NotYetRun"),
        "Progressing": ("True", "Updated"),
        "Degraded": ("False", "AsExpected"),
        "UpdateAvailable": ("False", "AsExpected"),
        "Ready": ("True", "Ready"),
        "Reconciling": ("False", "AsExpected"),
        "Stalled": ("False", "AsExpected"),
    }
    assert all(c["observedGeneration"] == obj["metadata"]["generation"] for c in status["conditions"])
    assert status["url"] == f"http://chat.{namespace}.svc" and status["controller"] == "pd-operator"
    assert status["currentRevision"] == status["updatedRevision"] and status["servingSlices"] == 1
    assert [(r["name"], r["ready"], r["replicas"], r["updatedReplicas"], r["gpus"]) for r in status["roles"]] == [
        ("prefill", "1/1", 1, 1, 1),
        ("decode", "1/1", 1, 1, 1),
    ]
    (slice_,) = status["slices"]
    assert slice_ == {
        "name": f"chat-{status['updatedRevision']}-0",
        "revision": status["updatedRevision"],
        "domain": "",
        "prefill": 1,
        "decode": 1,
        "state": "Serving",
    }


def test_kstatus_is_right_all_the_time(made: tuple[Object, dict[Any, Object], Recording]) -> None:
    _, _, recording = made
    seen = [event.object for event in recording.events("PDDeployment", "chat")]
    assert seen[0]["status"] == {"observedGeneration": 0}, "before the operator has looked"
    said = [waits.kstatus(obj) for obj in seen]
    assert said[0] == "InProgress" and said[-1] == "Current" and set(said) == {"InProgress", "Current"}, said
    for obj, word in list(zip(seen, said, strict=True))[1:]:
        ready = waits.conditions(obj)["Ready"]["status"] == "True"
        assert (word == "Current") <= ready, waits.describe(obj)
        assert not ready or all(role["readyReplicas"] >= 1 for role in obj["status"]["roles"]), waits.describe(obj)
        assert all(re.fullmatch(r"[A-Z][A-Za-z]+", c["reason"]) for c in obj["status"]["conditions"])


def test_columns(made: tuple[Object, dict[Any, Object], Recording], kwok_cluster: Cluster) -> None:
    obj, _, _ = made
    namespace = obj["metadata"]["namespace"]
    lines = kwok_cluster.kubectl("get", "pdd", "chat", "-n", namespace).splitlines()
    assert lines[0].split() == ["NAME", "PREFILL", "DECODE", "SLICES", "READY", "REASON", "BOTTLENECK", "AGE"]
    assert lines[1].split()[:-1] == ["chat", "1/1", "1/1", "1", "True", "Ready", "Unknown"]
    pools = kwok_cluster.kubectl("get", "pdp", "-n", namespace, "--no-headers").splitlines()
    assert [line.split()[:-1] for line in pools] == [
        ["chat-decode", "decode", "1", "1", "1", "False", "Static"],
        ["chat-prefill", "prefill", "1", "1", "1", "False", "Static"],
    ]
    kwok_cluster.kubectl("wait", "--for=condition=Ready", "pdd/chat", "-n", namespace, "--timeout=10s")


def test_scale_of_a_pool_is_readable_and_static_puts_it_back(
    made: tuple[Object, dict[Any, Object], Recording], api: Api, kwok_cluster: Cluster
) -> None:
    obj, _, _ = made
    namespace = obj["metadata"]["namespace"]
    api.merge("PDDeployment", namespace, "chat", {"spec": {"decode": {"replicas": 1}}})
    waits.ready(api, namespace, "chat")
    before = state.uids(state.pods(api, namespace, "chat"))
    for role in ("prefill", "decode"):
        scale = api.must_get("PDPool", namespace, f"chat-{role}", "/scale")
        assert scale["spec"]["replicas"] == 1 and scale["status"]["replicas"] == 1
        selected = api.list("Pod", namespace, scale["status"]["selector"])
        assert len(selected) == 1 and selected[0]["metadata"]["labels"]["pdserve.dev/role"] == role
    with Recording(api, namespace, "PDPool") as recording:
        kwok_cluster.kubectl("scale", "pdp/chat-decode", "--replicas=3", "-n", namespace)

        def back() -> bool:
            return [e.object["spec"]["replicas"] for e in recording.events("PDPool") if e.name == "chat-decode"][-1:] == [
                1
            ] and any(e.object["spec"]["replicas"] == 3 for e in recording.events("PDPool"))

        waits.until("the number of the spec to come back", back)
    assert state.uids(state.pods(api, namespace, "chat")) == before
    found = waits.conditions(api.must_get("PDPool", namespace, "chat-decode"))
    assert {t: (c["status"], c["reason"]) for t, c in found.items()} == {
        "ScalingActive": ("False", "Static"),
        "ScalingLimited": ("False", "AsExpected"),
    }


def test_more_replicas_and_p2p(api: Api, operator: Operator, space: str) -> None:
    """Another shape: three prefill, two decode, P2P with its coordinator, and vllm-router."""
    api.create(
        state.pdd(
            space,
            "wide",
            prefill={"replicas": 3},
            decode={"replicas": 2},
            lmcache={"p2p": {"enabled": True}},
            router={"type": "vllm-router"},
        )
    )
    obj = waits.ready(api, space, "wide")
    children = state.children(api, space, "wide")
    revision = obj["status"]["updatedRevision"]
    (stored,) = (name for kind, name in children if kind == "ControllerRevision")
    more = {("Service", f"wide-{revision}-0-coordinator"), ("Deployment", f"wide-{revision}-0-coordinator")}
    assert set(children) == expected("wide", revision, stored.rsplit("-", 1)[1]) | more
    assert [r["ready"] for r in obj["status"]["roles"]] == ["3/3", "2/2"]
    for role, count in (("prefill", 3), ("decode", 2)):
        scale = api.must_get("PDPool", space, f"wide-{role}", "/scale")
        assert (scale["spec"]["replicas"], scale["status"]["replicas"]) == (count, count)
        assert len(api.list("Pod", space, scale["status"]["selector"])) == count
    assert len(state.pods(api, space, "wide", component="coordinator")) == 1
    (router,) = {p["spec"]["containers"][0]["image"] for p in state.pods(api, space, "wide", component="router")}
    assert router.startswith("example.org/vllm-router:")


def all_gone(api: Api, namespace: str, name: str) -> list[tuple[str, str]]:
    """What is left of a PDDeployment, pods and ReplicaSets' pods included."""
    left = list(state.children(api, namespace, name))
    return left + [("Pod", p["metadata"]["name"]) for p in api.list("Pod", namespace, f"pdserve.dev/deployment={name}")]


@pytest.mark.parametrize("propagation", ["Background", "Foreground"])
def test_delete_takes_everything_with_it(api: Api, operator: Operator, space: str, propagation: str) -> None:
    name = propagation.lower()
    api.create(state.pdd(space, name, lmcache={}))
    waits.ready(api, space, name)
    begin = time.monotonic()
    api.delete("PDDeployment", space, name, propagation=propagation)
    last: list[Any] = []

    def gone() -> bool:
        last[:] = all_gone(api, space, name)
        return not last and api.get("PDDeployment", space, name) is None

    waits.until("everything to be gone", gone, show=lambda: json.dumps(last))
    print(f"{propagation}: gone in {time.monotonic() - begin:.2f} s")
    time.sleep(1)  # a late event of a child must not make anything again
    assert all_gone(api, space, name) == []


@pytest.mark.parametrize("running", [True, False], ids=["operator-running", "operator-stopped"])
def test_namespace_goes_in_seconds(api: Api, operator: Operator, spaces: list[str], kwok_cluster: Cluster, running: bool) -> None:
    """No finalizer is in the way, whether or not the operator runs (invariants I1 and I11)."""
    namespace = spaces[1] if running else spaces[2]
    api.create(state.pdd(namespace, "last"))
    waits.ready(api, namespace, "last")
    if not running:
        assert operator.stop() == 0
    try:
        begin = time.monotonic()
        api.delete("Namespace", None, namespace)
        waits.until(
            f"namespace {namespace} to be gone",
            lambda: api.get("Namespace", None, namespace) is None,
            timeout=90,
            show=lambda: json.dumps((api.get("Namespace", None, namespace) or {}).get("status", {})),
        )
        print(f"namespace gone in {time.monotonic() - begin:.2f} s, operator {'running' if running else 'stopped'}")
    finally:
        if not running:
            operator.start()
