"""ServiceAccounts, and the least Role for the router: list and watch pods, measured to be enough for smg and vllm-router."""

from __future__ import annotations

from pd_operator.core.names import base_labels, service_account
from pd_operator.core.snapshot import ROUTER, Snapshot
from pd_operator.render import objects

RBAC = "rbac.authorization.k8s.io"


def manifests(snapshot: Snapshot) -> list[objects.Manifest]:
    """Engines get no token at all; the router's Role is there before its pod (vllm-router waits 60 s after a refusal)."""
    engine, router = (service_account(snapshot.name, c) for c in ("engine", "router"))
    labels = base_labels(snapshot.name, ROUTER)
    rules = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    subjects = [{"kind": "ServiceAccount", "name": router, "namespace": snapshot.namespace}]
    reference = {"apiGroup": RBAC, "kind": "Role", "name": router}
    return [
        objects.manifest(
            "v1", "ServiceAccount", snapshot, engine, base_labels(snapshot.name, "engine"), automountServiceAccountToken=False
        ),
        objects.manifest("v1", "ServiceAccount", snapshot, router, labels),
        objects.manifest(f"{RBAC}/v1", "Role", snapshot, router, labels, rules=rules),
        objects.manifest(f"{RBAC}/v1", "RoleBinding", snapshot, router, labels, roleRef=reference, subjects=subjects),
    ]
