"""A whole cluster with real nodes: network, control plane, containerd and kubelets, kube-proxy, DNS."""

from __future__ import annotations

import os
import time
from pathlib import Path

from cluster import network, packages, services, tools
from cluster.controlplane import ControlPlane
from cluster.identity import Identity
from cluster.node import Node
from cluster.process import Processes
from cluster.progress import say

MAX_NODES = 2


def start(state: Path, *, count: int = MAX_NODES, gpus: int = 8, die_with_parent: bool) -> tuple[ControlPlane, list[Node]]:
    """Start a cluster with `count` real nodes in an empty state folder.

    Raises RuntimeError (not root, addresses in use, a component ended) or TimeoutError; the caller destroys the state folder then.
    """
    if os.geteuid() != 0:
        raise RuntimeError("real nodes need root (or set PDD_KUBECONFIG to a cluster of your own)")
    if not 1 <= count <= MAX_NODES:
        raise RuntimeError(f"the number of real nodes is 1 to {MAX_NODES}, not {count}")
    packages.ensure(packages.NODE_PROGRAMS)
    tools.tools(*tools.CONTROL_PLANE, *tools.NODES)
    identity = Identity(state)
    begin = time.monotonic()
    (state / "nodes").mkdir(parents=True)
    identity.run.mkdir(parents=True)
    network.claim(identity, count)
    network.set_sysctls(state)
    names = tuple(f"n{index}" for index in range(count))
    plane = ControlPlane(Processes(state, die_with_parent=die_with_parent), address=identity.gateway(0), nodes=names)
    nodes = [Node(plane, index, gpus) for index in range(count)]
    plane.start()
    for node in nodes:
        node.start_containerd()
        node.start_kubelet()
    services.start_kube_proxy(plane)
    services.start_coredns(plane)
    for node in nodes:
        node.wait_ready()
    say(f"{count} real nodes ready after {time.monotonic() - begin:.1f} s")
    return plane, nodes


def of(state: Path) -> list[Node]:
    """The nodes of a running cluster, from its state folder."""
    plane = ControlPlane(Processes(state))
    return [Node(plane, int(folder.name[1:])) for folder in sorted((state / "nodes").glob("n*"))]
