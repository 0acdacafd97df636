"""The rights and settings of an install, taken from the chart by the real helm, for an operator that runs outside the cluster."""

from __future__ import annotations

import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.handle import Cluster
from cluster.tools import tool
from opsrunner.calls import CallLog, resource_of

CHART = Path(__file__).parents[2] / "charts" / "pd-operator"
Right = tuple[str, str, str]  # (group, resource or resource/subresource, verb)
CLUSTERED = ("ClusterRole", "ClusterRoleBinding")
APPLIED = ("ServiceAccount", "Role", "RoleBinding", *CLUSTERED)


@dataclass(frozen=True)
class Install:
    """An install whose rights are in the cluster."""

    namespace: str
    user: str
    kubeconfig: Path
    settings: Path
    rights: frozenset[Right]  # in the namespaces that it watches

    def environment(self) -> dict[str, str]:
        """Settings for process.Operator."""
        return {"CONFIG": str(self.settings), "INSTALL": yaml.safe_load(self.settings.read_text())["install"]}


def rights_of(role: dict[str, Any]) -> frozenset[Right]:
    """Every verb on every resource of a role."""
    return frozenset(
        (group, resource, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    )


def used(calls: CallLog) -> frozenset[Right]:
    """Rights that a user exercised with success (or found nothing, or lost a race).

    A server-side apply that creates is a `patch` answered 201, for which the server asks for `create` too
    (k8s.io/apiserver pkg/endpoints/handlers/patch.go, createAuthorizerAttributes).
    """
    found: set[Right] = set()
    for event in calls.events():
        code = int(event.get("responseStatus", {}).get("code", 0))
        if "objectRef" in event and (code < 400 or code in (404, 409)):
            group, resource = event["objectRef"].get("apiGroup", ""), resource_of(event)
            found |= {(group, resource, event["verb"])}
            found |= {(group, resource, "create")} if event["verb"] == "patch" and code == 201 else set()
    return frozenset(found)


@contextmanager
def install(cluster: Cluster, namespace: str, folder: Path, profile: str, watch: Sequence[str] = ()) -> Iterator[Install]:
    """Render the chart for this namespace, apply its rights, and take the cluster-wide ones away at the end."""
    release = f"h{secrets.token_hex(3)}"
    values = folder / f"{release}-values.yaml"
    values.write_text(yaml.safe_dump({"image": {"repository": "example.org/pd-operator"}, "watchNamespaces": list(watch)}))
    argv = [str(tool("helm")), "template", release, str(CHART), "--namespace", namespace]
    argv += ["--values", str(CHART / "profiles" / f"{profile}.yaml"), "--values", str(values)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode != 0:
        raise RuntimeError(f"helm template: {done.stderr}")
    documents = [doc for doc in yaml.safe_load_all(done.stdout) if doc]
    name = next(doc["metadata"]["name"] for doc in documents if doc["kind"] == "ServiceAccount")
    mine = [doc for doc in documents if doc["kind"] in APPLIED and doc["metadata"]["name"] in {name, f"{name}-lease"}]
    cluster.apply(*mine, namespace=None)
    settings = folder / f"{release}-settings.yaml"
    settings.write_text(next(doc["data"]["settings.yaml"] for doc in documents if doc["kind"] == "ConfigMap"))
    role = next(doc for doc in mine if doc["kind"] in ("ClusterRole", "Role") and doc["metadata"]["name"] == name)
    try:
        yield Install(
            namespace=namespace,
            user=f"system:serviceaccount:{namespace}:{name}",
            kubeconfig=cluster.service_account_kubeconfig(namespace, name, folder / f"{release}-kubeconfig"),
            settings=settings,
            rights=rights_of(role),
        )
    finally:
        for doc in mine:
            if doc["kind"] in CLUSTERED:
                cluster.kubectl("delete", doc["kind"], doc["metadata"]["name"], "--ignore-not-found")
