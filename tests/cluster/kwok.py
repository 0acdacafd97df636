"""KWOK: fake nodes whose pods become Ready at once, for scale and placement (https://kwok.sigs.k8s.io)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from cluster import tools
from cluster.controlplane import ControlPlane
from cluster.handle import kubectl
from cluster.ports import free_ports
from cluster.progress import say, wait_for

DOMAIN_LABEL = "pdserve.dev/domain"
MANAGED = "kwok.x-k8s.io/node"  # annotation of the nodes that it runs
_STAGES = tuple(
    f"kustomize/stage/{name}.yaml"
    for name in (
        "node/fast/node-initialize",
        "node/heartbeat-with-lease/node-heartbeat-with-lease",
        "pod/fast/pod-ready",
        "pod/fast/pod-complete",
        "pod/fast/pod-delete",
    )
)


@dataclass(frozen=True)
class FakeNodes:
    """A group of equal fake nodes PREFIX-0, PREFIX-1, ...; `per_domain` of them share one value of DOMAIN_LABEL."""

    count: int
    prefix: str = "kwok"
    gpus: int = 8
    cpus: int = 64
    memory: str = "512Gi"
    per_domain: int = 4
    labels: Mapping[str, str] = field(default_factory=dict)
    taints: Sequence[Mapping[str, str]] = ()
    extended: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{self.prefix}-{index}" for index in range(self.count))

    def manifests(self) -> list[dict[str, Any]]:
        """The Node objects."""
        resources = {"cpu": str(self.cpus), "memory": self.memory, "pods": "110", **self.extended}
        if self.gpus:
            resources["nvidia.com/gpu"] = str(self.gpus)
        return [
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {
                    "name": name,
                    "annotations": {MANAGED: "fake"},
                    "labels": {
                        "kubernetes.io/hostname": name,
                        "kubernetes.io/os": "linux",
                        "kubernetes.io/arch": "amd64",
                        "type": "kwok",
                        DOMAIN_LABEL: f"{self.prefix}-d{index // self.per_domain}",
                        **self.labels,
                    },
                },
                "spec": {"taints": [dict(taint) for taint in self.taints]},
                "status": {"allocatable": resources, "capacity": resources},
            }
            for index, name in enumerate(self.names)
        ]


def start(plane: ControlPlane) -> None:
    """Start the kwok controller on a control plane. Raises RuntimeError when it ends at once."""
    files = tools.module_files("kwok", "sigs.k8s.io/kwok", _STAGES)
    config = plane.state / "kwok-stages.yaml"
    config.write_text("\n---\n".join(file.read_text() for file in files))
    (port,) = free_ports(1)
    plane.processes.start(
        "kwok",
        [
            *(tools.tool("kwok"), "--kubeconfig", plane.kubeconfig_of("kwok"), "--config", config),
            *("--manage-nodes-with-annotation-selector", f"{MANAGED}=fake", "--node-lease-duration-seconds", "40"),
            *(
                "--cidr",
                "10.250.0.0/16",
                "--node-ip",
                "10.251.0.1",
                "--node-port",
                str(port),
                "--server-address",
                f"127.0.0.1:{port}",
            ),
        ],
    )


def add_nodes(plane: ControlPlane, group: FakeNodes, *, timeout: float = 60) -> tuple[str, ...]:
    """Create the nodes and wait until all are Ready, at most `timeout` seconds. Returns their names."""
    kubectl(plane.kubeconfig, "apply", "--server-side", "-f", "-", stdin=yaml.safe_dump_all(group.manifests()), timeout=timeout)

    def ready() -> bool | str:
        plane.processes.check("kwok")
        path = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status}{"\\n"}{end}'
        lines = set(kubectl(plane.kubeconfig, "get", "nodes", "-l", "type=kwok", "-o", f"jsonpath={path}").split())
        missing = [name for name in group.names if f"{name}=True" not in lines]
        return not missing or f"wait: {len(missing)} of {group.count} not Ready, {missing[0]} among them"

    wait_for(f"{group.count} KWOK nodes", ready, timeout=timeout, interval=0.3)
    say(f"{group.count} KWOK nodes ready")
    return group.names
