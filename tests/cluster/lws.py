"""LeaderWorkerSet: its CRD and its real controller, from its Go module (https://lws.sigs.k8s.io). Started only by tests that ask.

The controller runs on the host as the other components do, so its webhooks are reached by URL and their certificate is made here.
"""

from __future__ import annotations

import base64
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from cluster import tools
from cluster.controlplane import ControlPlane
from cluster.handle import Cluster
from cluster.ports import free_ports
from cluster.process import Processes
from cluster.progress import say, wait_for

MODULE = "sigs.k8s.io/lws"
_LIST = "leaderworkerset.x-k8s.io/v1/leaderworkersets?limit=1"
NAME = "lws"
# Its controller does not start without the second CRD, of a kind that nothing here uses.
_CRDS = tuple(f"config/crd/bases/{name}.yaml" for name in (
    "leaderworkerset.x-k8s.io_leaderworkersets", "disaggregatedset.x-k8s.io_disaggregatedsets",
))  # fmt: skip
_WEBHOOKS = ("config/webhook/manifests.yaml", "config/webhook/mutating-patch.yaml", "config/webhook/validating-patch.yaml")


def install(cluster: Cluster) -> None:
    """Install the CRD without a controller, and wait at most 60 s until LeaderWorkerSets are served."""
    _install(cluster, _CRDS[:1])


def _install(cluster: Cluster, crds: tuple[str, ...]) -> None:
    for file in tools.module_files(NAME, MODULE, crds):
        cluster.kubectl("apply", "--server-side", "-f", str(file), timeout=60)

    def served() -> bool | str:  # `kubectl wait` fails on a CRD that has no condition yet
        said = cluster.kubectl("get", "--raw", f"/apis/{_LIST}", check=False)
        return '"LeaderWorkerSetList"' in said or f"wait: {said.strip()[-200:]}"

    wait_for("LeaderWorkerSets to be served", served, timeout=60, interval=0.5)


@contextmanager
def controller(cluster: Cluster) -> Iterator[None]:
    """CRDs, webhooks and controller for the length of the context. The CRDs stay.

    Raises:
        RuntimeError: it ended, or the cluster is not one of ours.
        TimeoutError: it was not ready within 60 s.
    """
    if cluster.state is None:
        raise RuntimeError(f"the cluster {cluster.name} is not ours; it has to bring its own LeaderWorkerSet")
    begin = time.monotonic()
    tools.tool(NAME)
    _install(cluster, _CRDS)
    plane = ControlPlane(Processes(cluster.state, die_with_parent=True))
    webhook, health = free_ports(2)
    folder = cluster.state / NAME
    certificate = _certificate(folder)
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(_configuration(folder, webhook, health)))
    plane.processes.start(NAME, [tools.tool(NAME), "--config", config, "--kubeconfig", plane.kubeconfig_of(NAME)])
    try:
        wait_for("the webhooks of LeaderWorkerSet", lambda: _answers(plane, webhook, certificate), timeout=60, interval=0.2)
        documents = _webhooks(webhook, certificate)
        cluster.apply(*documents)
        say(f"LeaderWorkerSet ready after {time.monotonic() - begin:.1f} s")
        yield
    finally:
        for document in _webhooks(webhook, certificate):
            cluster.kubectl("delete", document["kind"], document["metadata"]["name"], "--ignore-not-found", check=False)
        plane.processes.stop(NAME)


def _certificate(folder: Path) -> Path:
    """tls.crt and tls.key in a folder, for 127.0.0.1."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    files = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(folder / "tls.key"), "-out", str(folder / "tls.crt")]
    subprocess.run([*argv, *files], check=True, capture_output=True, timeout=30)
    return folder / "tls.crt"


def _configuration(folder: Path, webhook: int, health: int) -> dict[str, Any]:
    return {
        "apiVersion": "config.lws.x-k8s.io/v1alpha1",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"host": "127.0.0.1", "port": webhook, "certDir": str(folder)},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
    }


def _answers(plane: ControlPlane, port: int, certificate: Path) -> bool | str:
    """Whether the pod webhook is registered, which is the last."""
    plane.processes.check(NAME)
    try:
        context = ssl.create_default_context(cafile=str(certificate))
        urllib.request.urlopen(f"https://127.0.0.1:{port}/validate--v1-pod", timeout=5, context=context)
    except urllib.error.HTTPError as error:
        return error.code != 404 or "wait: not registered"
    except OSError as error:
        return f"wait: {error}"
    return True


def _webhooks(port: int, certificate: Path) -> list[dict[str, Any]]:
    """The webhook configurations of the module with its patches (pods of LeaderWorkerSets only), reached by URL."""
    manifests, *patches = (file.read_text() for file in tools.module_files(NAME, MODULE, _WEBHOOKS))
    found = [document for document in yaml.safe_load_all(manifests) if document]
    bundle = base64.b64encode(certificate.read_bytes()).decode()
    for document, patch in zip(found, patches, strict=True):
        for change in yaml.safe_load(patch):
            document["webhooks"][int(change["path"].rpartition("/")[2])] = change["value"]
        document["metadata"]["name"] = f"lws-{document['metadata']['name']}"
        document["webhooks"] = [w for w in document["webhooks"] if "disaggregatedset" not in w["name"]]
        for webhook in document["webhooks"]:
            url = f"https://127.0.0.1:{port}{webhook['clientConfig']['service']['path']}"
            webhook["clientConfig"] = {"url": url, "caBundle": bundle}
    return found
