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
