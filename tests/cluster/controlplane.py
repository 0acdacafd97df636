"""A control plane on free ports: etcd, API server, controller manager, scheduler; no nodes. Ready in about 10 s, 500 MiB."""

from __future__ import annotations

import secrets
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import yaml

from cluster import tools
from cluster.handle import kubectl, write_kubeconfig
from cluster.ports import free_ports
from cluster.process import Processes
from cluster.progress import say, wait_for

SERVICE_CIDR = "10.96.0.0/16"

# Every request that ends is one line: verb, user, userAgent, objectRef, response code. The long ones (watch, exec) are also logged
# when they begin, else a test that ends first would not see them.
_AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata"}],
}

# By default each controller asks 20 times a second, the scheduler 50 times: a thousand pods that move take minutes.
_UNLIMITED = ("--kube-api-qps", "1000", "--kube-api-burst", "2000")

# name -> (user, groups); groups as in the bootstrap roles of k8s.io/kubernetes/plugin/pkg/auth/authorizer/rbac/bootstrappolicy
_USERS = {
    "admin": ("pdd-admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "kube-proxy": ("system:kube-proxy", ""),
    "coredns": ("pdd-coredns", "system:masters"),
    "kwok": ("pdd-kwok", "system:masters"),
    "lws": ("pdd-lws", "system:masters"),
}


@dataclass
class ControlPlane:
    """Control plane with its files in `processes.state`. `address`: where it listens; loopback unless pods must reach it."""

    processes: Processes
    scheduler: bool = True
    address: str = "127.0.0.1"
    nodes: tuple[str, ...] = ()
    node_grace: float = 0  # see session.control_plane

    @property
    def state(self) -> Path:
        return self.processes.state

    @property
    def kubeconfig(self) -> Path:
        """The administrator's kubeconfig."""
        return self.kubeconfig_of("admin")

    @property
    def audit_log(self) -> Path:
        return self.state / "audit.log"

    @property
    def service_ca(self) -> Path:
        return self.state / "certs" / "apiserver.crt"

    def kubeconfig_of(self, user: str) -> Path:
        return self.state / "kubeconfig" / user

    def start(self) -> None:
        """Start all of it and wait until the API answers and default service accounts exist.

        Raises RuntimeError when a component ends, TimeoutError when it does not become ready in 60 s.
        """
        wanted = tools.CONTROL_PLANE if self.scheduler else tuple(t for t in tools.CONTROL_PLANE if t != "kube-scheduler")
        tools.tools(*wanted)
        begin = time.monotonic()
        self._prepare()
        for attempt in range(3):
            client, peer, self.port, *rest = free_ports(5)
            try:
                self._start_api(client, peer)
                break
            except RuntimeError as error:
                # The one race left: another session took a port between our check and the listen.
                if "address already in use" not in str(error) or attempt == 2:
                    raise
                self.processes.stop("kube-apiserver", grace=0)
                self.processes.stop("etcd", grace=0)
        say(f"API server ready at https://{self.address}:{self.port} after {time.monotonic() - begin:.1f} s")
        self._start_controllers(*rest)
        wait_for("the default service account", self._has_service_account, timeout=60, interval=0.2)
        say(f"control plane ready after {time.monotonic() - begin:.1f} s")

    def stop(self) -> None:
        """End the control plane's processes. Its data is thrown away with the state folder, so nothing is asked politely."""
        for name in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            self.processes.stop(name, grace=0)

    def _prepare(self) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / "audit-policy.yaml").write_text(yaml.safe_dump(_AUDIT_POLICY))
        key = self.state / "service-account.key"
        subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True, timeout=30)
        accounts = {**_USERS, **{f"node-{node}": (f"system:node:{node}", "system:nodes") for node in self.nodes}}
        self.tokens = {name: secrets.token_hex(16) for name in accounts}
        lines = [f'{self.tokens[name]},{user},{user},"{groups}"' for name, (user, groups) in accounts.items()]
        token_file = self.state / "tokens.csv"
        token_file.touch(mode=0o600)
        token_file.write_text("\n".join(lines) + "\n")

    def _start_api(self, client: int, peer: int) -> None:
        start = self.processes.start
        etcd = f"http://127.0.0.1:{client}"
        start(
            "etcd",
            [
                *(tools.tool("etcd"), "--name", "pdd", "--data-dir", self.state / "etcd", "--unsafe-no-fsync"),
                *("--listen-client-urls", etcd, "--advertise-client-urls", etcd),
                *("--listen-peer-urls", f"http://127.0.0.1:{peer}", "--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
                *("--initial-cluster", f"pdd=http://127.0.0.1:{peer}", "--log-level", "warn"),
            ],
        )
        key = self.state / "service-account.key"
        loopback = self.address.startswith("127.")
        start(
            "kube-apiserver",
            [
                *(tools.tool("kube-apiserver"), "--etcd-servers", etcd, "--secure-port", str(self.port)),
                *("--bind-address", self.address, "--advertise-address", self.address),
                # The endpoint of the Service "kubernetes" may not be a loopback address.
                *(("--endpoint-reconciler-type", "none") if loopback else ()),
                *(
                    "--cert-dir",
                    self.service_ca.parent,
                    "--service-account-key-file",
                    key,
                    "--service-account-signing-key-file",
                    key,
                ),
                *("--service-account-issuer", "https://kubernetes.default.svc", "--service-cluster-ip-range", SERVICE_CIDR),
                *("--authorization-mode", "Node,RBAC", "--token-auth-file", self.state / "tokens.csv", "--allow-privileged"),
                *("--kubelet-preferred-address-types", "InternalIP"),
                *("--audit-policy-file", self.state / "audit-policy.yaml", "--audit-log-path", self.audit_log),
                *("--audit-log-maxsize", "1000", "--audit-log-maxbackup", "1"),
            ],
        )
        wait_for("the API server", self._api_ready, timeout=60, interval=0.1)
        for name in self.tokens:
            write_kubeconfig(
                self.kubeconfig_of(name),
                server=f"https://{self.address}:{self.port}",
                token=self.tokens[name],
                ca=self.service_ca.read_bytes(),
            )

    def _start_controllers(self, manager_port: int, scheduler_port: int) -> None:
        self.processes.start(
            "kube-controller-manager",
            [
                *(tools.tool("kube-controller-manager"), "--kubeconfig", self.kubeconfig_of("controller-manager")),
                *("--service-account-private-key-file", self.state / "service-account.key", "--use-service-account-credentials"),
                *("--root-ca-file", self.service_ca, "--leader-elect=false"),
                *("--bind-address", "127.0.0.1", "--secure-port", str(manager_port)),
                *_UNLIMITED,
                # 15 s by default: a test of an HPA needs several looks.
                *("--horizontal-pod-autoscaler-sync-period", "2s"),
                *(("--node-monitor-grace-period", f"{self.node_grace:.0f}s") if self.node_grace else ()),
            ],
        )
        if self.scheduler:
            self.processes.start(
                "kube-scheduler",
                [
                    *(tools.tool("kube-scheduler"), "--kubeconfig", self.kubeconfig_of("scheduler"), "--leader-elect=false"),
                    *("--bind-address", "127.0.0.1", "--secure-port", str(scheduler_port)),
                    *_UNLIMITED,
                ],
            )

    def _api_ready(self) -> bool | str:
        self.processes.check("etcd")
        self.processes.check("kube-apiserver")
        if not self.service_ca.is_file():
            return "wait: it has not written its certificate yet"
        request = urllib.request.Request(
            f"https://{self.address}:{self.port}/readyz", headers={"Authorization": f"Bearer {self.tokens['admin']}"}
        )
        try:
            context = ssl.create_default_context(cafile=str(self.service_ca))
            with urllib.request.urlopen(request, timeout=5, context=context) as answer:
                return bool(answer.status == 200)
        except urllib.error.HTTPError as error:
            return "wait: " + " ".join(line for line in error.read().decode().splitlines() if line.startswith("[-]"))
        except (OSError, ssl.SSLError) as error:
            return f"wait: {error}"

    def _has_service_account(self) -> bool:
        self.processes.check("kube-controller-manager")
        if self.scheduler:
            self.processes.check("kube-scheduler")
        return "default" in kubectl(self.kubeconfig, "get", "serviceaccounts", "-n", "default", "-o", "name", "--ignore-not-found")
