"""Clusters that live as long as one pytest session, each with its own ports and state folder."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cluster import kwok, nodes, paths
from cluster.controlplane import ControlPlane
from cluster.handle import Cluster, kubectl
from cluster.process import Processes, start_ticks
from cluster.teardown import destroy, keep_logs, sweep


def new_state() -> Path:
    """A fresh state folder named after this process, after removing what sessions that died have left."""
    sweep()
    state = paths.clusters_root() / f"s{os.getpid()}-{start_ticks(os.getpid())}-{secrets.token_hex(2)}"
    state.mkdir(parents=True)
    return state


@contextmanager
def control_plane(*groups: kwok.FakeNodes, node_grace: float = 0) -> Iterator[Cluster]:
    """A control plane for the length of the context, with these groups of fake nodes, none unless given.

    `node_grace`: seconds without a heartbeat after which a node is not ready, Kubernetes' own unless given. Hundreds of fake nodes
    on a busy machine are late, and KWOK does not make a pod ready again that was ready once.
    """
    state = new_state()
    plane = ControlPlane(Processes(state, die_with_parent=True), node_grace=node_grace)
    try:
        plane.start()
        names: tuple[str, ...] = ()
        if groups:
            kwok.start(plane)
            for group in groups:
                names += kwok.add_nodes(plane, group)
        yield Cluster(name=state.name, kubeconfig=plane.kubeconfig, audit_log=plane.audit_log, state=state, kwok_nodes=names)
    except (RuntimeError, TimeoutError):
        keep_logs(state)
        raise
    finally:
        destroy(state)


@contextmanager
def nodes_cluster() -> Iterator[Cluster]:
    """A cluster with two real nodes of 8 GPUs for the length of the context."""
    state = new_state()
    try:
        plane, members = nodes.start(state, die_with_parent=True)
        names = tuple(node.name for node in members)
        yield Cluster(name=state.name, kubeconfig=plane.kubeconfig, audit_log=plane.audit_log, state=state, nodes=names)
    except (RuntimeError, TimeoutError):
        keep_logs(state)
        raise
    finally:
        destroy(state)


def external(kubeconfig: str) -> Cluster:
    """The user's own cluster (PDD_KUBECONFIG), used as it is. Raises KubectlError when it does not answer."""
    path = Path(kubeconfig).expanduser().resolve()
    names = kubectl(path, "get", "nodes", "-l", "type!=kwok", "-o", "name").split()
    fake = kubectl(path, "get", "nodes", "-l", "type=kwok", "-o", "name").split()
    return Cluster(
        name="external",
        kubeconfig=path,
        nodes=tuple(name.removeprefix("node/") for name in names),
        kwok_nodes=tuple(name.removeprefix("node/") for name in fake),
    )
