"""The operator as the chart's ServiceAccount: nothing is refused, and what is granted is used (so says the audit log)."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import generated
from cluster import audit, gateway_api, session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from cluster.tools import tool
from faults.objects import install_crds
from opsrunner import state, waits
from opsrunner.api import Api
from opsrunner.process import Operator

pytestmark = pytest.mark.cluster

CHART = generated.ROOT / "charts" / "pd-operator"
LWS = "leaderworkerset.x-k8s.io"  # not installed here; test_reconcile_rbac.py has groups
Right = tuple[str, str, str]  # verb, group, resource
# Granted, and not used by what happens below.
UNUSED: set[Right] = {
    # For the admission plugin OwnerReferencesPermissionEnforcement, which this API server does not have.
    ("update", "pdserve.dev", "pddeployments/finalizers"),
    # A PDPool is created, and applied only when somebody changed it: test_reconcile_drift.py does.
    ("patch", "pdserve.dev", "pdpools"),
    # Every PDDeployment has these children as long as it lives; a later version that plans one of them no more must remove it.
    ("delete", "", "serviceaccounts"),
    ("delete", "networking.k8s.io", "networkpolicies"),
    ("delete", "policy", "poddisruptionbudgets"),
    ("delete", "rbac.authorization.k8s.io", "roles"),
    ("delete", "rbac.authorization.k8s.io", "rolebindings"),
}


@pytest.fixture(scope="module")
def plane() -> Iterator[Cluster]:
    """A cluster of its own: a cluster-wide operator would meddle with the objects of other tests."""
    with session.control_plane(FakeNodes(4)) as cluster:
        install_crds(cluster)
        gateway_api.install(cluster)
        yield cluster


def granted(cluster: Cluster, home: str, values: dict[str, Any]) -> set[Right]:
    """Apply the chart's ServiceAccount and rights (release and namespace are called `home`); returns them."""
    cluster.apply(*({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in (home, f"{home}-models")))
    argv = [str(tool("helm")), "template", home, str(CHART), "--namespace", home, "--set", "image.repository=x", "--values", "-"]
    done = subprocess.run(argv, input=yaml.safe_dump(values), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = {"ServiceAccount", "Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding"}
    manifests = [
        m
        for m in yaml.safe_load_all(done.stdout)
        if m and m["kind"] in kinds and not m["metadata"]["name"].endswith(("-view", "-edit"))
    ]
    cluster.apply(*manifests)
    rules = [rule for m in manifests for rule in m.get("rules", [])]
    return {
        (verb, group, resource)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def live(api: Api, space: str) -> None:
    """A life of one PDDeployment in which every kind of child is made, changed, and removed."""
    api.create(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "token", "namespace": space}, "stringData": {"token": "x"}}
    )
    api.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "some", "namespace": space}, "data": {"key": "x"}})
    claim = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Gi"}}}
    api.create(
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "weights", "namespace": space}, "spec": claim}
    )
    env = [
        {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}},
        {"name": "SOME", "valueFrom": {"configMapKeyRef": {"name": "some", "key": "key"}}},
    ]
    engine = {"type": "vllm", "version": "0.32.0", "env": env}
    route = {"parentRefs": [{"name": "public"}]}
    lmcache = {"l1Size": "1Gi", "p2p": {"enabled": True}}
    # Advisory: canaries run, and nothing waits for what pods of fake nodes cannot prove.
    api.create(state.pdd(space, "chat", engine=engine, gateway=route, lmcache=lmcache, verification="Advisory"))
    waits.ready(api, space, "chat")
    api.merge("PDDeployment", space, "chat", {"spec": {"gateway": None}})
    waits.until("the route to go", lambda: not api.list("HTTPRoute", space))
    api.merge("PDDeployment", space, "chat", {"spec": {"decode": {"replicas": 2}}})
    waits.ready(api, space, "chat")
    for number in range(7):  # more revisions than are kept
        api.merge(
            "PDDeployment", space, "chat", {"spec": {"prefill": {"template": {"metadata": {"annotations": {"n": str(number)}}}}}}
        )
        waits.ready(api, space, "chat")
    api.merge("PDDeployment", space, "chat", {"spec": {"rollout": {"restartID": "two"}}})
    waits.ready(api, space, "chat")
    waits.until("one slice", lambda: len(api.list("Deployment", space)) == 4, timeout=120)
    api.merge("PDDeployment", space, "chat", {"spec": {"model": {"uri": "pvc://weights/model"}}})
    waits.condition(api, space, "chat", "Accepted", "True")
    api.delete("PDDeployment", space, "chat")
    waits.until("its children to go", lambda: not state.children(api, space, "chat"), timeout=120)


@pytest.mark.parametrize("profile", ["cluster-wide", "namespaced"])
def test_rights_are_enough_and_not_more(profile: str, plane: Cluster, tmp_path: Path) -> None:
    space = f"{profile}-models"
    values = yaml.safe_load((CHART / "profiles" / f"{profile}.yaml").read_text())
    watched = [] if profile == "cluster-wide" else [space]
    rights = granted(plane, profile, {**values, "watchNamespaces": watched})
    account = f"{profile}-pd-operator"
    kubeconfig = plane.service_account_kubeconfig(profile, account, tmp_path / "kubeconfig")
    with Operator(kubeconfig, watched, home=profile, folder=tmp_path, settings={"LEASE_NAME": account}):
        live(Api(plane.kubeconfig), space)
    assert plane.audit_log is not None
    used: set[Right] = set()
    for event in audit.events(plane.audit_log, user=f"system:serviceaccount:{profile}:{account}"):
        reference = event.get("objectRef", {})
        if not reference.get("resource"):
            continue  # /version, /apis: open to every client
        resource = "/".join(part for part in (reference["resource"], reference.get("subresource")) if part)
        right = (event["verb"], reference.get("apiGroup", ""), resource)
        assert event["responseStatus"].get("code") not in (401, 403), event
        used.add(right)
        if right[0] == "patch" and event["responseStatus"].get("code") == 201:
            used.add(("create", *right[1:]))  # an apply that creates is authorized for both
    assert used <= rights
    # `get` of a child: who has the name that we want? Asked for after a first write that was refused, so seldom.
    seldom = {right for right in rights if right[1] == LWS or (right[0] == "get" and right[1] != "pdserve.dev")}
    assert rights - used - seldom == UNUSED - seldom
