"""A real node: its own containerd and kubelet, pods with their own network namespaces, GPUs that only the API knows of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster import cgroups, pause, tools
from cluster.controlplane import ControlPlane
from cluster.handle import kubectl
from cluster.identity import Identity
from cluster.kwok import DOMAIN_LABEL
from cluster.network import command
from cluster.progress import wait_for

DNS_IP = "10.96.0.10"
CNI_PLUGINS = "/usr/lib/cni"


@dataclass
class Node:
    """Node `index` of a cluster, called n0, n1, ...; `gpus` of nvidia.com/gpu are put on its status."""

    plane: ControlPlane
    index: int
    gpus: int = 8

    @property
    def name(self) -> str:
        return f"n{self.index}"

    @property
    def identity(self) -> Identity:
        return Identity(self.plane.state)

    @property
    def files(self) -> Path:
        return self.plane.state / "nodes" / self.name

    @property
    def run(self) -> Path:
        return self.identity.run / self.name

    @property
    def socket(self) -> Path:
        return self.run / "containerd.sock"

    def start_containerd(self) -> None:
        """Write its files and start containerd; raises RuntimeError when it ends, TimeoutError after 30 s."""
        for folder in (self.files / "cni", self.files / "kubelet", self.files / "logs", self.run):
            folder.mkdir(parents=True, exist_ok=True)
        cgroups.make(self.identity.node_tag(self.index))
        (self.files / "containerd.toml").write_text(self._containerd_config())
        (self.files / "cni" / "10-pdd.conflist").write_text(json.dumps(self._network_config()))
        self.plane.processes.start(f"containerd-{self.name}", ["containerd", "--config", self.files / "containerd.toml"])
        wait_for(f"containerd of {self.name}", self._containerd_ready, timeout=30)
        self.import_image(pause.NAME, pause.archive())

    def start_kubelet(self) -> None:
        """Start the kubelet (the API server, containerd and the bridge must be up)."""
        config = self.files / "kubelet.yaml"
        config.write_text(yaml.safe_dump(self._kubelet_config()))
        (self.files / "resolv.conf").write_text(f"nameserver {self.identity.gateway(0)}\n")
        self.plane.processes.start(
            f"kubelet-{self.name}",
            [
                *(tools.tool("kubelet"), "--config", config, "--kubeconfig", self.plane.kubeconfig_of(f"node-{self.name}")),
                *("--root-dir", self.files / "kubelet", "--cert-dir", self.files / "kubelet-certs"),
                *("--hostname-override", self.name, "--node-ip", self.identity.gateway(self.index)),
                *("--node-labels", f"{DOMAIN_LABEL}=d0"),
            ],
        )

    def wait_ready(self, timeout: float = 60) -> None:
        """Wait until the node is Ready and its GPUs are allocatable, at most `timeout` seconds each."""
        wait_for(f"the node {self.name} to be Ready", self._ready, timeout=timeout, interval=0.3)
        self.set_extended_resource("nvidia.com/gpu", self.gpus)

    def set_extended_resource(self, resource: str, count: int, timeout: float = 30) -> None:
        """Put an extended resource on the node's status; the kubelet keeps it and makes it allocatable."""
        patch = json.dumps({"status": {"capacity": {resource: str(count)}, "allocatable": {resource: str(count)}}})
        kubectl(self.plane.kubeconfig, "patch", "node", self.name, "--subresource=status", "--type=merge", "-p", patch)
        wait_for(
            f"{resource} to be allocatable on {self.name}",
            lambda: self._status().get("allocatable", {}).get(resource) == str(count),
            timeout=timeout,
            interval=0.3,
        )

    def ctr(self, *arguments: str, timeout: float = 60) -> str:
        """Run containerd's `ctr` in the namespace that the kubelet uses."""
        return command("ctr", "--address", str(self.socket), "-n", "k8s.io", *arguments, timeout=timeout)

    def import_image(self, name: str, archive: Path, timeout: float = 300) -> None:
        """Import the archive of an image unless it is the one that this node has under that name."""
        record = self.files / "images" / name.replace("/", "_")
        if record.is_file() and record.read_text() == archive.name:
            return
        self.ctr("images", "import", str(archive), timeout=timeout)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(archive.name)

    def _containerd_ready(self) -> bool | str:
        self.plane.processes.check(f"containerd-{self.name}")
        if not self.socket.exists():
            return "wait: no socket yet"
        try:
            command("ctr", "--address", str(self.socket), "version", timeout=5)
        except (RuntimeError, OSError) as error:
            return f"wait: {error}"
        return True

    def _ready(self) -> bool | str:
        self.plane.processes.check(f"kubelet-{self.name}")
        conditions = {c["type"]: c for c in self._status().get("conditions", [])}
        ready = conditions.get("Ready", {"status": "Unknown", "message": "the kubelet has not registered it"})
        return ready["status"] == "True" or f"wait: {ready.get('message')}"

    def _status(self) -> dict[str, Any]:
        text = kubectl(self.plane.kubeconfig, "get", "node", self.name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(text)["status"]) if text else {}

    def _containerd_config(self) -> str:
        cri = '[plugins."io.containerd.grpc.v1.cri"'
        return f"""version = 2
root = "{self.files}/containerd"
state = "{self.run}/containerd"
disabled_plugins = ["io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.aufs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp"]
[grpc]
address = "{self.socket}"
{cri}]
sandbox_image = "{pause.NAME}"
# Without CAP_SYS_RESOURCE no process may lower its OOM score, and runc ends with "can't get final child's PID from pipe".
restrict_oom_score_adj = true
# Under our own folder, so that a teardown finds the network namespaces of killed pods.
netns_mounts_under_state_dir = true
stream_server_address = "127.0.0.1"
{cri}.cni]
bin_dir = "{CNI_PLUGINS}"
conf_dir = "{self.files}/cni"
{cri}.containerd]
default_runtime_name = "runc"
{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
{cri}.containerd.runtimes.runc.options]
Root = "{self.run}/runc"
SystemdCgroup = false
"""

    def _network_config(self) -> dict[str, object]:
        tag = self.identity.node_tag(self.index)
        bridge = {
            "type": "bridge",
            "bridge": tag,
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": str(self.files / "ipam"),
                "ranges": [[{"subnet": self.identity.subnet(self.index), "gateway": self.identity.gateway(self.index)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        return {"cniVersion": "0.4.0", "name": tag, "plugins": [bridge]}

    def _kubelet_config(self) -> dict[str, object]:
        address = self.identity.gateway(self.index)
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": address,
            "healthzPort": 0,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.identity.node_tag(self.index)}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            "evictionHard": {
                "memory.available": "100Mi",
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "nodefs.inodesFree": "1%",
            },
            "imageGCHighThresholdPercent": 100,
            "clusterDNS": [DNS_IP],
            "clusterDomain": "cluster.local",
            "resolvConf": str(self.files / "resolv.conf"),
            # With the default, two kubelets on one host delete each other's pod logs.
            "podLogsDir": str(self.files / "logs"),
            "nodeStatusUpdateFrequency": "10s",
            "shutdownGracePeriod": "0s",
        }
