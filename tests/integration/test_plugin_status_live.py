"""kubectl pdd status on a real API server: objects in every state, and rights that are missing."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.chart import rights_of
from opsrunner.plugin import Pdd, environment
from opsrunner.process import Operator

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(240)

RBAC = Path(__file__).parents[2] / "docs" / "examples" / "rbac" / "kubectl-pdd.yaml"


@pytest.fixture
def pdd(kwok_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Pdd:
    """The plugin as administrator."""
    return Pdd(kwok_cluster.kubeconfig, capsys)


def verdicts(document: dict[str, Any]) -> dict[str, str]:
    return {link["name"]: link["verdict"] for link in document["links"]}


def test_status_of_objects_in_every_state(kwok_cluster: Cluster, api: Api, operator: Operator, spaces: list[str], pdd: Pdd) -> None:
    space = spaces[1]
    code, _, err = pdd("status", "chat", "-n", space)
    assert (
        code == 2
        and err
        == f"kubectl pdd: {space}/chat: there is no such PDDeployment; namespace {space} has none: -n takes another namespace\n"
    )
    huge = {"resources": {"limits": {"cpu": "99999"}}}
    api.create(state.pdd(space, "chat"))
    api.create(state.pdd(space, "stuck", decode=huge))
    api.create(state.pdd(space, "wrong", engine={"version": "0.1.0"}))
    api.create(state.pdd(space, "asleep", suspend=True))
    waits.condition(api, space, "chat", "Ready", "True")
    waits.condition(api, space, "stuck", "Ready", "False", "Unschedulable")
    waits.condition(api, space, "wrong", "Accepted", "False", "UnsupportedVersion")
    waits.condition(api, space, "asleep", "Ready", "False", "Suspended")

    code, out, _ = pdd("status", "chat", "-n", space)
    assert code == 0 and out.startswith(f"{space}/chat READY for ")
    code, out, _ = pdd("status", "chat", "-n", space, "-o", "json")
    told = json.loads(out)
    assert (code, told["ready"], told["unread"]) == (0, True, {})
    assert set(verdicts(told).items()) - {("handoff", "unknown")} == {
        (n, "ok") for n in ("model", "placement", "prefill", "decode", "router", "door")
    }
    assert {p["part"] for p in told["pods"]} == {"prefill", "decode", "router"} and all(
        p["ready"] and p["node"] for p in told["pods"]
    )

    code, out, _ = pdd("status", "stuck", "-n", space, "-o", "json")
    told = json.loads(out)
    assert (
        code == 1 and verdicts(told)["decode"] == verdicts(told)["placement"] == "not"
    )  # the door: fake nodes call a router ready that sees no decode
    assert verdicts(told)["prefill"] == verdicts(told)["model"] == "ok"
    (pod,) = (p["name"] for p in told["pods"] if p["part"] == "decode")
    (decode,) = (link for link in told["links"] if link["name"] == "decode")
    assert decode["next"][0] == f"kubectl -n {space} describe pod {pod}" and "Insufficient cpu" in decode["evidence"]
    assert any(e["object"] == f"Pod/{pod}" and e["reason"] == "FailedScheduling" for e in told["events"])
    for step in {s for link in told["links"] for s in link["next"]}:
        _runs(step, kwok_cluster)

    code, out, _ = pdd("status", "wrong", "-n", space)
    assert code == 1 and "NOT      model" in out and "0.1.0" in out.splitlines()[0]
    assert f"kubectl -n {space} edit pdd wrong" in out.splitlines()[1]
    code, out, _ = pdd("status", "asleep", "-n", space)
    assert code == 1 and "NOT READY" in out and """-p '{"spec": {"suspend": false}}'""" in out

    code, _, err = pdd("status", "chatt", "-n", space)
    assert (
        code == 2
        and err == f"kubectl pdd: {space}/chatt: there is no such PDDeployment; namespace {space} has asleep, chat, stuck, wrong\n"
    )
    code, _, err = pdd("explain", "chat", "-n", "nowhere")
    assert code == 2 and err == "kubectl pdd: nowhere/chat: namespace nowhere does not exist\n"
    code, out, _ = pdd("explain", "chat", "-n", space)
    assert code == 0 and "Static: the number is that of the spec" in out and "1 of 1 ready" in out


def _runs(step: str, cluster: Cluster) -> None:
    """A step that is a command which only reads does what it says."""
    found = re.search(r"kubectl (?:-n \S+ )?(?:get|describe|logs) .*$", step)
    if found is None or "previous" in step:
        return
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", found[0].replace("--tail=50", "--tail=1")],
        env=environment(cluster.kubeconfig),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0 or "pdd plan" in step, f"{step}\n{done.stderr}"  # a plan that does not fit answers 1


def test_rights(
    kwok_cluster: Cluster, api: Api, operator: Operator, spaces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ClusterRole of the page is enough, each of its rights is needed, and one that is missing is named."""
    space = spaces[2]
    api.create(state.pdd(space, "chat"))
    waits.condition(api, space, "chat", "Ready", "True")
    pdd = Pdd(kwok_cluster.service_account_kubeconfig(space, "reader", tmp_path / "reader"), capsys)
    code, _, err = pdd("status", "chat")  # the namespace is that of the kubeconfig
    assert code == 2 and f"the right to get pddeployments.pdserve.dev in namespace {space} is missing" in err

    role = next(doc for doc in yaml.safe_load_all(RBAC.read_text()) if doc["metadata"]["name"] == "kubectl-pdd")
    kwok_cluster.apply({**role, "metadata": {"name": f"kubectl-pdd-{space}"}})
    bind = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "reader", "namespace": space},
        "subjects": [{"kind": "ServiceAccount", "name": "reader", "namespace": space}],
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": f"kubectl-pdd-{space}"},
    }
    kwok_cluster.apply(bind)
    try:
        code, out, err = waits.until(
            "the binding", lambda: (found := pdd("status", "chat")) and found[0] == 0 and found, timeout=20
        )
        assert "not read" not in out and err == ""
        assert pdd("explain", "chat")[0] == 0
        assert f"namespace {space} has chat" in pdd("status", "chatt")[2]
        for group, resource, verb in sorted(rights_of(role)):
            fewer = [_without(rule, group, resource, verb) for rule in role["rules"]]
            kwok_cluster.apply({**role, "metadata": {"name": f"kubectl-pdd-{space}"}, "rules": fewer})
            named = f"{resource}.{group}" if group else resource
            shown = waits.until(
                f"{verb} {named} to be missed",
                lambda named=named, verb=verb: _misses(pdd, f"{verb} {named}"),  # type: ignore[misc]
                timeout=20,
            )
            assert shown
    finally:
        kwok_cluster.kubectl("delete", "clusterrole", f"kubectl-pdd-{space}")


def _without(rule: dict[str, Any], group: str, resource: str, verb: str) -> dict[str, Any]:
    if rule["apiGroups"] == [group] and resource in rule["resources"]:
        return {**rule, "verbs": [v for v in rule["verbs"] if v != verb] or ["deletecollection"]}
    return rule


def _misses(pdd: Pdd, right: str) -> bool:
    """Whether the program names the right as missing: in what it prints, or of a name that does not exist."""
    verb, resource = right.split()
    said = "".join([*pdd("status", "chat")[1:], *pdd("explain", "chat")[1:], *pdd("status", "chatt")[1:]])
    return f"the right to {right} in" in said or f'cannot {verb} resource "{resource.split(".")[0]}"' in said
