"""docs/recipes on a real API server and controller-manager: HPAs that move the pools, KEDA's objects, Argo CD's script, kstatus."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from lupa import lua51

import generated
from cluster.handle import Cluster, KubectlError
from cluster.tools import module_files, tool
from monitor.front import certificate
from monitor.metrics_api import MetricsApi
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.process import Operator
from opsrunner.recording import Recording
from pd_operator.api.types import API_VERSION

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(300)

RECIPES = generated.ROOT / "docs" / "recipes"
KEDA_CRD = "config/crd/bases/keda.sh_scaledobjects.yaml"
BOUNDS = {"minReplicas": 1, "maxReplicas": 6}


def documents(page: str) -> list[Object]:
    """The YAML blocks of a page."""
    return [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```$", (RECIPES / page).read_text(), flags=re.M | re.S)]


def replicas(api: Api, space: str, role: str) -> tuple[int, int]:
    """Number of the pool, and of the workload that follows it."""
    pool = api.must_get("PDPool", space, f"chat-{role}")
    workloads = state.children(api, space, "chat", ("Deployment",))
    (workload,) = (obj for (_, name), obj in workloads.items() if name.endswith(f"-{role}"))
    return pool["spec"]["replicas"], workload["spec"]["replicas"]


@pytest.fixture
def chat(operator: Operator, api: Api, space: str) -> Iterator[Object]:
    """The object of the recipe on HPAs, Ready; everything of it is gone at the end."""
    spec = documents("hpa.md")[0]["spec"]
    api.create(state.pdd(space, "chat", router={"replicas": 1}, **spec))
    yield waits.ready(api, space, "chat")
    api.delete("PDDeployment", space, "chat", propagation="Foreground")
    waits.until("chat to be gone", lambda: api.get("PDDeployment", space, "chat") is None)


def test_hpas_move_the_pools_and_the_workloads_follow(
    kwok_cluster: Cluster, api: Api, space: str, chat: Object, tmp_path: Path
) -> None:
    _, prefill, decode, _ = documents("hpa.md")
    (pod,) = (p["metadata"]["name"] for p in state.pods(api, space, "chat", role="decode"))
    with MetricsApi(kwok_cluster, space, certificate(tmp_path)) as metrics:
        metrics.external |= {"pdserve_prefill_waiting": 16, "pdserve_handoff_waiting": 0}
        metrics.pods["vllm_num_requests_running"] = {pod: 300}
        kwok_cluster.apply(prefill, decode, namespace=space)
        waits.until("16 that wait to make 4 prefill", lambda: replicas(api, space, "prefill") == (4, 4), timeout=90)
        waits.until("300 that run to make 3 decode", lambda: replicas(api, space, "decode") == (3, 3), timeout=90)
        assert ("pdserve_prefill_waiting", "pdserve_dev_deployment=chat") in metrics.asked
        assert ("vllm_num_requests_running", "pdserve.dev/deployment=chat,pdserve.dev/role=decode") in metrics.asked
        metrics.external["pdserve_handoff_waiting"] = 10
        waits.until("10 handoffs that wait to make 5 decode", lambda: replicas(api, space, "decode") == (5, 5), timeout=90)

        metrics.external.clear()  # the adapter knows nothing any more: nobody moves
        count = len(metrics.asked)
        waits.until("the HPAs to look again, in vain", lambda: len(metrics.asked) > count + 6, timeout=90)
        assert (replicas(api, space, "prefill"), replicas(api, space, "decode")) == ((4, 4), (5, 5))

        metrics.external["pdserve_prefill_waiting"] = 4
        at_once = {"spec": {"behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}}}}
        kwok_cluster.kubectl("patch", "hpa", "chat-prefill", "-n", space, "--type=merge", "-p", json.dumps(at_once))
        waits.until("4 that wait to make 1 prefill", lambda: replicas(api, space, "prefill") == (1, 1), timeout=90)
        kwok_cluster.kubectl("delete", "hpa", "--all", "-n", space)
    active = waits.conditions(api.must_get("PDPool", space, "chat-prefill"))["ScalingActive"]
    assert (active["status"], active["reason"]) == ("False", "External")


def test_keda_s_objects_are_accepted_and_lead_to_the_pools(kwok_cluster: Cluster, api: Api, space: str, chat: Object) -> None:
    (file,) = module_files("crds", "github.com/kedacore/keda/v2", (KEDA_CRD,))
    kwok_cluster.kubectl("apply", "--server-side", "-f", str(file))
    try:
        kwok_cluster.established("scaledobjects.keda.sh")
        scaled = documents("keda.md")
        apply = ("apply", "--server-side", "--validate=strict", "-n", space, "-f", "-")
        kwok_cluster.kubectl(*apply, stdin=yaml.safe_dump_all(scaled))
        for document in scaled:
            target = document["spec"]["scaleTargetRef"]
            assert (target["apiVersion"], target["kind"], target["name"]) == (API_VERSION, "PDPool", document["metadata"]["name"])
            scale = api.must_get("PDPool", space, target["name"], "/scale")
            assert scale["spec"]["replicas"] == 1 and scale["status"]["selector"]
            assert document["spec"]["minReplicaCount"] >= 1
        wrong = {**scaled[0], "spec": {**scaled[0]["spec"], "minReplicaCount": "one"}}
        with pytest.raises(KubectlError, match="minReplicaCount"):
            kwok_cluster.kubectl(*apply, stdin=yaml.safe_dump(wrong))
    finally:
        kwok_cluster.kubectl("delete", "crd", "scaledobjects.keda.sh", "--ignore-not-found")


class Lua:
    """A health script as Argo CD runs it: Lua 5.1, `obj` is the object, and a table with status and message comes back."""

    def __init__(self) -> None:
        self._script = documents("argocd.md")[0]["data"]["resource.customizations.health.pdserve.dev_PDDeployment"]

    def __call__(self, obj: Object) -> tuple[str, str]:
        runtime = lua51.LuaRuntime(unpack_returned_tuples=True)
        runtime.globals()["obj"] = runtime.table_from(json.loads(json.dumps(obj), parse_int=float), recursive=True)
        answer = runtime.execute(self._script)
        return answer["status"], answer["message"] or ""


def kstatus(objects: list[Object]) -> list[str]:
    """What the real kstatus says of each."""
    text = "\n".join(json.dumps(obj) for obj in objects)
    done = subprocess.run([str(tool("kstatus"))], input=text, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return [line.partition("\t")[0] for line in done.stdout.splitlines()]


def test_a_life_as_argo_cd_and_flux_see_it(operator: Operator, api: Api, spaces: list[str]) -> None:
    """Every version of the object that the server ever stored: made, Ready, refused, mended, suspended."""
    space, health = spaces[1], Lua()
    marks = []
    with Recording(api, space, "PDDeployment") as recording:
        made = api.create(state.pdd(space, "life", router={"replicas": 1}))
        assert health(made) == ("Progressing", "not looked at by the operator yet")
        marks.append(waits.ready(api, space, "life"))
        api.merge("PDDeployment", space, "life", {"spec": {"engine": {"version": "0.1.0"}}})
        marks.append(waits.condition(api, space, "life", "Accepted", "False"))
        api.merge("PDDeployment", space, "life", {"spec": {"engine": {"version": "0.32.0"}}})
        marks.append(waits.ready(api, space, "life"))
        api.merge("PDDeployment", space, "life", {"spec": {"suspend": True}})
        marks.append(waits.condition(api, space, "life", "Ready", "False", "Suspended"))
        waits.until("the recording", lambda: _versions(recording)[-1] >= int(marks[-1]["metadata"]["resourceVersion"]))
    seen = [event.object for event in recording.events("PDDeployment")]
    said, told = kstatus(seen), [health(obj)[0] for obj in seen]
    assert said == [waits.kstatus(obj) for obj in seen], "what other tests take for kstatus is it"
    at = [[o["metadata"]["resourceVersion"] for o in seen].index(m["metadata"]["resourceVersion"]) for m in marks]
    assert [said[n] for n in at] == ["Current", "Failed", "Current", "InProgress"]
    assert [told[n] for n in at] == ["Healthy", "Degraded", "Healthy", "Suspended"]
    first = said.index("Current")
    assert set(said[:first]) == {"InProgress"} and set(told[:first]) == {"Progressing"}, "neither is told too early"
    for word, colour in zip(said, told, strict=True):
        assert colour in {"Current": ("Healthy",), "Failed": ("Degraded",), "InProgress": ("Progressing", "Suspended")}[word]
    assert "engine.version" in health(marks[1])[1] and "suspend" in health(marks[3])[1]


def _versions(recording: Recording) -> list[int]:
    return [event.version for event in recording.events("PDDeployment")] or [0]


@pytest.mark.parametrize("way", ["client", "server"])
def test_nothing_drifts(way: str, operator: Operator, kwok_cluster: Cluster, api: Api, spaces: list[str], tmp_path: Path) -> None:
    """What is in Git against what is there, after the operator worked on it and somebody else moved the numbers."""
    space, name = spaces[2], f"git-{way}"
    tracking = {"app.kubernetes.io/instance": "fleet", "argocd.argoproj.io/instance": "fleet"}
    manifest = state.pdd(space, name, router={"replicas": 1}, scaling={"mode": "External", "prefill": BOUNDS, "decode": BOUNDS})
    manifest["metadata"] |= {"labels": tracking, "annotations": {"argocd.argoproj.io/tracking-id": "fleet:x"}}
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(manifest))
    how = ("--server-side", "--field-manager=argocd-controller") if way == "server" else ()
    kwok_cluster.kubectl("apply", *how, "-f", str(file))
    waits.ready(api, space, name)
    kwok_cluster.kubectl("scale", f"pdp/{name}-decode", "-n", space, "--replicas=3")
    waits.until("3 decode", lambda: api.must_get("PDPool", space, f"{name}-decode")["status"].get("readyReplicas") == 3)
    assert kwok_cluster.kubectl("diff", *how, "-f", str(file)) == ""  # raises when it finds a difference: exit code 1
    children = state.children(api, space, name)
    assert len(children) > 8
    for child in children.values():
        metadata = child["metadata"]
        assert not set(tracking) & set(metadata["labels"]), "Argo CD would take it for its own and prune it"
        assert not [key for key in metadata.get("annotations", {}) if key.startswith("argocd.")]
    api.merge("PDDeployment", space, name, {"spec": {"scaling": {"decode": {"maxReplicas": 5}}}})  # somebody's edit is one
    with pytest.raises(KubectlError):
        kwok_cluster.kubectl("diff", *how, "-f", str(file))
