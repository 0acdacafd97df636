"""Dry runs against a real API server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config

from cluster.handle import Cluster
from pd_operator.api.crdgen import crds
from pd_operator.api.types import GROUP, VERSION

PLURALS = {"PDDeployment": "pddeployments", "PDPool": "pdpools"}


def install_crds(cluster: Cluster) -> None:
    """Apply both CRDs and wait at most 30 s until they are served."""
    cluster.kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", stdin=yaml.safe_dump_all(crds()))
    cluster.established(*(crd["metadata"]["name"] for crd in crds()))


class Server:
    """The API server that a kubeconfig names; safe for several threads."""

    def __init__(self, kubeconfig: Path) -> None:
        self.objects = client.CustomObjectsApi(config.new_client_from_config(str(kubeconfig)))

    def create(self, manifest: dict[str, Any], *, namespace: str = "default", dry_run: bool = True) -> tuple[int, dict[str, Any]]:
        """Create with strict field validation; the status code, and the object or the Status that came back."""
        kind = manifest["kind"]
        options: dict[str, Any] = {"dry_run": "All"} if dry_run else {}
        try:
            made = self.objects.create_namespaced_custom_object(
                GROUP, VERSION, namespace, PLURALS[kind], manifest, field_validation="Strict", _request_timeout=30, **options
            )
        except client.ApiException as refused:
            return int(refused.status), json.loads(refused.body)
        return 201, made
