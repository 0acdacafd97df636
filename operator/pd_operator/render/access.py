"""ServiceAccounts, and the least Role for the router: list and watch pods, measured to be enough for smg and vllm-router."""

from __future__ import annotations

from pd_operator.core.names import base_labels, service_account
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render import objects

RBAC = "rbac.authorization.k8s.io"


def accounts(snapshot: Snapshot) -> list[objects.Manifest]:
    """ServiceAccounts and the Role. Engines get no token at all."""
    engine, router = (service_account(snapshot.name, c) for c in ("engine", "router"))
    labels = base_labels(snapshot.name, ROUTER)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    tokenless = {"automountServiceAccountToken": False}
    return [
        objects.manifest("v1", "ServiceAccount", snapshot, engine, base_labels(snapshot.name, "engine"), **tokenless),
        objects.manifest("v1", "ServiceAccount", snapshot, router, labels),
        objects.manifest(f"{RBAC}/v1", "Role", snapshot, router, labels, rules=rules),
    ]


def binding(snapshot: Snapshot) -> objects.Manifest:
    """RoleBinding of the router: after its Role, whose rights the server compares with ours, and before its pod.

    vllm-router waits 60 s after a refused watch (measured).
    """
    router = service_account(snapshot.name, "router")
    subjects = [{"kind": "ServiceAccount", "name": router, "namespace": snapshot.namespace}]
    reference = {"apiGroup": RBAC, "kind": "Role", "name": router}
    labels = base_labels(snapshot.name, ROUTER)
    return objects.manifest(f"{RBAC}/v1", "RoleBinding", snapshot, router, labels, roleRef=reference, subjects=subjects)
