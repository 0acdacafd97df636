"""Fixtures of the tiers with real nodes; a conftest.py imports what it needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster import images
from cluster.handle import Cluster
from demo import stack
from served.served import Served

DECISIONS = "/tmp/decisions.jsonl"  # in the operator's pod


@pytest.fixture(scope="session")
def install(nodes_cluster: Cluster) -> Cluster:
    """The nodes' cluster with the images and the operator, installed from its chart, in it."""
    images.load(nodes_cluster, "base", "router", "standin", "operator")
    stack.install(nodes_cluster, "standin", decisions=DECISIONS)
    return nodes_cluster


def decisions(cluster: Cluster) -> list[str]:
    """The lines of the decision log of the operator's pod; it begins anew with each start of that pod."""
    program = f"print(open({DECISIONS!r}).read())"
    read = ["exec", "deploy/pd-operator", "-n", stack.INSTALL_NAMESPACE, "--", "python3", "-c", program]
    return [line for line in cluster.kubectl(*read).splitlines() if line]


@pytest.fixture
def served(install: Cluster, namespace: str) -> Iterator[Served]:
    """A namespace under Pod Security `restricted`, and what a test does with one PDDeployment in it."""
    install.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    yield Served(install, namespace)
    clear(install, namespace)


def clear(cluster: Cluster, namespace: str) -> None:
    """Delete what a test made, without its drains.

    A namespace that is deleted with pods in it is looked at again only after half of their grace period (the namespace
    controller's estimate), a minute and a half for a router; an empty one goes at once.
    """
    cluster.kubectl("delete", "pdd", "--all", "-n", namespace, "--timeout=30s", timeout=40, check=False)
    cluster.kubectl("delete", "deployments,replicasets", "--all", "-n", namespace, "--timeout=30s", timeout=40, check=False)
    cluster.kubectl("delete", "pods", "--all", "-n", namespace, "--grace-period=1", "--timeout=60s", timeout=70, check=False)
