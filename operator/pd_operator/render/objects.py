"""What all our manifests share: metadata, owner reference, restricted security contexts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pd_operator.api.types import API_VERSION
from pd_operator.core.snapshot import Snapshot

Manifest = dict[str, Any]
USER: Final = 65532
POD_SECURITY: Final[Mapping[str, Any]] = {
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
    "fsGroup": USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY: Final[Mapping[str, Any]] = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}


def manifest(api_version: str, kind: str, snapshot: Snapshot, name: str, labels: Mapping[str, str], **body: Any) -> Manifest:
    """An object owned by the PDDeployment. Nothing of the user's own labels and annotations is copied (invariant I1)."""
    owner = {
        "apiVersion": API_VERSION,
        "kind": "PDDeployment",
        "name": snapshot.name,
        "uid": snapshot.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }
    metadata = {"name": name, "namespace": snapshot.namespace, "labels": dict(labels), "ownerReferences": [owner]}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}


def container(name: str, image: str, snapshot: Snapshot, **body: Any) -> dict[str, Any]:
    """A container under the restricted profile; its last log lines become the termination message, for `diagnosis`."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": snapshot.install.pull_policy,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": {k: dict(v) if isinstance(v, Mapping) else v for k, v in CONTAINER_SECURITY.items()},
        **body,
    }


def spread(labels: Mapping[str, str]) -> list[dict[str, Any]]:
    """Prefer different nodes, so that a node's drain takes one replica at a time."""
    return [
        {
            "maxSkew": 1,
            "topologyKey": "kubernetes.io/hostname",
            "whenUnsatisfiable": "ScheduleAnyway",
            "labelSelector": {"matchLabels": dict(labels)},
        }
    ]
