"""What a test gets: one running cluster, with kubectl and kubeconfig files for less privileged clients."""

from __future__ import annotations

import base64
import json
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from cluster.progress import wait_for
from cluster.tools import tool


class KubectlError(RuntimeError):
    """kubectl ended with an error; `stderr` holds what it said."""

    def __init__(self, arguments: tuple[str, ...], stderr: str) -> None:
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")
        self.stderr = stderr


def write_kubeconfig(path: Path, *, server: str, token: str, ca: bytes | None, namespace: str = "default") -> Path:
    """Write a kubeconfig with one cluster, one user with a bearer token, mode 0600. Without `ca` the certificate is not checked."""
    cluster: dict[str, Any] = {"server": server}
    if ca is None:
        cluster["insecure-skip-tls-verify"] = True
    else:
        cluster["certificate-authority-data"] = base64.b64encode(ca).decode()
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "pdd",
        "clusters": [{"name": "pdd", "cluster": cluster}],
        "users": [{"name": "pdd", "user": {"token": token}}],
        "contexts": [{"name": "pdd", "context": {"cluster": "pdd", "user": "pdd", "namespace": namespace}}],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o600)
    path.write_text(yaml.safe_dump(document))
    return path


@dataclass(frozen=True)
class Cluster:
    """A running cluster. `audit_log` and `state` are None for a cluster that the user brought (PDD_KUBECONFIG).

    `nodes` are the names of the real nodes, `kwok_nodes` those of the fake ones.
    """

    name: str
    kubeconfig: Path
    audit_log: Path | None = None
    state: Path | None = None
    nodes: tuple[str, ...] = ()
    kwok_nodes: tuple[str, ...] = field(default=(), repr=False)

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout: float = 30, check: bool = True) -> str:
        """Run kubectl as the administrator; returns its standard output. `timeout` (seconds) bounds each request and the call.

        Raises KubectlError when it fails (check=False: returns standard output and error joined), TimeoutError when it hangs.
        """
        return kubectl(self.kubeconfig, *arguments, stdin=stdin, timeout=timeout, check=check)

    def json(self, *arguments: str, timeout: float = 30) -> Any:
        """`kubectl ... -o json`, parsed."""
        return json.loads(self.kubectl(*arguments, "-o", "json", timeout=timeout))

    def apply(self, *documents: dict[str, Any], namespace: str | None = None, timeout: float = 30) -> str:
        """`kubectl apply -f -` of these documents."""
        scope = ["-n", namespace] if namespace else []
        return self.kubectl("apply", *scope, "-f", "-", stdin=yaml.safe_dump_all(documents), timeout=timeout)

    def established(self, *crds: str, timeout: float = 30) -> None:
        """Wait until these CRDs are served. `kubectl wait` fails at once on one whose conditions are still null."""

        def served() -> bool | str:
            found = [self.json("get", "crd", name) for name in crds]
            met = {
                (f["metadata"]["name"], c["type"])
                for f in found
                for c in f["status"].get("conditions") or ()
                if c["status"] == "True"
            }
            late = [name for name in crds if (name, "Established") not in met]
            return not late or f"wait: not yet {', '.join(late)}"

        wait_for(f"CRDs {', '.join(crds)} to be established", served, timeout=timeout, interval=0.2)

    def service_account_kubeconfig(self, namespace: str, name: str, path: Path, *, duration_s: int = 7200) -> Path:
        """A kubeconfig at `path` that acts as this ServiceAccount (created when missing; it has no rights unless you bind some)."""
        self.apply({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": name}}, namespace=namespace)
        token = self.kubectl("create", "token", name, "-n", namespace, f"--duration={duration_s}s").strip()
        admin = yaml.safe_load(self.kubectl("config", "view", "--raw", "--minify", "--flatten"))["clusters"][0]["cluster"]
        encoded = admin.get("certificate-authority-data")
        ca = base64.b64decode(encoded) if encoded else None
        return write_kubeconfig(path, server=admin["server"], token=token, ca=ca, namespace=namespace)


def kubectl(kubeconfig: Path, *arguments: str, stdin: str | None = None, timeout: float = 30, check: bool = True) -> str:
    """kubectl with this kubeconfig; see Cluster.kubectl."""
    argv = [str(tool("kubectl")), "--kubeconfig", str(kubeconfig), f"--request-timeout={max(1, int(timeout))}s", *arguments]
    try:
        done = subprocess.run(argv, input=stdin, capture_output=True, text=True, timeout=timeout + 5)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"waited {timeout + 5:.0f} s for kubectl {' '.join(arguments)}") from None
    if check and done.returncode != 0:
        raise KubectlError(arguments, done.stderr)
    return done.stdout if check else done.stdout + done.stderr
