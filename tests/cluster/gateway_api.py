"""CRDs of the Gateway API, from its Go module. They make the objects possible; no gateway controller runs here."""

from __future__ import annotations

from pathlib import Path

from cluster import tools
from cluster.handle import Cluster, KubectlError
from cluster.progress import wait_for

MODULE = "sigs.k8s.io/gateway-api"
HTTP_ROUTE = "httproutes.gateway.networking.k8s.io"
_FILES = ("config/crd/standard/gateway.networking.k8s.io_httproutes.yaml",)


def files() -> list[Path]:
    """The manifests, downloaded first when the cache lacks them.

    Raises:
        RuntimeError: Go cannot provide the module.
    """
    return tools.module_files("gateway-api", MODULE, _FILES)


def install(cluster: Cluster) -> None:
    """Install the CRD of HTTPRoute, and wait at most 30 s until it is served. Nothing changes where it is installed."""
    for file in files():
        cluster.kubectl("apply", "--server-side", "-f", str(file))
    wait_for("HTTPRoute to be served", lambda: _served(cluster), timeout=30, interval=0.2)


def _served(cluster: Cluster) -> bool | str:
    try:
        cluster.kubectl("get", "--raw", "/apis/gateway.networking.k8s.io/v1/httproutes")
    except KubectlError as error:
        return f"wait: {error}"
    return True


def remove(cluster: Cluster) -> None:
    """Remove it, with every HTTPRoute; waits until it is gone."""
    cluster.kubectl("delete", "crd", HTTP_ROUTE, "--ignore-not-found", "--wait", timeout=60)
