"""Fixtures that give a test a real Kubernetes cluster.

PDD_KUBECONFIG=FILE uses that cluster as it is, PDD_CLUSTER=NAME one that `python -m cluster up --name NAME` made; else each pytest
session makes its own and removes it at the end.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from cluster import named, session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from cluster.progress import wait_for

# Tests count, they do not time: on a loaded machine generating an input may take seconds. pytest-timeout bounds a hang.
# The same inputs in each run, unless PDD_RANDOM=1 asks for others: who changed nothing breaks nothing.
settings.register_profile(
    "pdd", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=os.environ.get("PDD_RANDOM") != "1"
)
settings.load_profile("pdd")

_CLUSTER_FIXTURES = ("nodes_cluster", "kwok_cluster", "control_plane")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "alone: makes clusters with real nodes itself; runs before the session's own cluster is made"
    )
    # What `timeout` and CI send: end as after Ctrl-C, so that fixtures take their clusters down.
    signal.signal(signal.SIGTERM, _interrupt)


def pytest_runtest_logfinish() -> None:
    """After a test whose event loop handled SIGTERM (a Manager in this process): when the loop closed, the default was back."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(f"signal {number}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that asks for a cluster fixture carries the marker by itself; those that need the host's node addresses run first."""
    items.sort(key=lambda item: item.get_closest_marker("alone") is None)
    for item in items:
        names = getattr(item, "fixturenames", ())
        if "nodes_cluster" in names:
            item.add_marker("nodes")
        elif any(name in names for name in ("kwok_cluster", "control_plane", "namespace", "kubeconfig")):
            item.add_marker("cluster")


def _existing() -> Cluster | None:
    """The cluster that the environment names, None when the session is to make its own."""
    if os.environ.get("PDD_KUBECONFIG"):
        return session.external(os.environ["PDD_KUBECONFIG"])
    if os.environ.get("PDD_CLUSTER"):
        return named.get(os.environ["PDD_CLUSTER"])
    return None


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """API server, etcd, controller manager and scheduler, without any node: pods stay Pending. RBAC and Pod Security are on."""
    existing = _existing()
    with nullcontext(existing) if existing else session.control_plane() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def kwok_cluster() -> Iterator[Cluster]:
    """A control plane of its own with 16 fake nodes of 8 GPUs, 4 in each of 4 domains (label pdserve.dev/domain).

    A cluster that the environment names is used only if it has fake nodes (label type=kwok). Add more with kwok.FakeNodes and
    Cluster.apply(*group.manifests()).
    """
    existing = _existing()
    with nullcontext(existing) if existing and existing.kwok_nodes else session.control_plane(FakeNodes(16)) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def nodes_cluster() -> Iterator[Cluster]:
    """A control plane with the real nodes n0 and n1, 8 GPUs each. Images: cluster.images.load(nodes_cluster, "standin", ...)."""
    existing = _existing()
    with nullcontext(existing) if existing else session.nodes_cluster() as cluster:
        if not cluster.nodes:
            raise RuntimeError(
                f"the cluster {cluster.name} has no real nodes: python -m cluster up --name {cluster.name} --nodes 2"
            )
        yield cluster


@pytest.fixture
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """The cluster that this test works on: the one whose fixture it asks for, else the control plane."""
    for name in _CLUSTER_FIXTURES:
        if name in request.fixturenames:
            break
    else:
        name = "control_plane"
    cluster: Cluster = request.getfixturevalue(name)
    return cluster


@pytest.fixture
def kubeconfig(any_cluster: Cluster) -> Path:
    """The administrator's kubeconfig of this test's cluster."""
    return any_cluster.kubeconfig


@pytest.fixture
def namespace(any_cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[str]:
    """A namespace of this test alone, deleted at the end: with fake nodes until it is gone, with real ones until its pods are."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")[:40].strip("-")
    name = f"{stem}-{secrets.token_hex(3)}"
    any_cluster.kubectl("create", "namespace", name)
    yield name
    wait = bool(any_cluster.kwok_nodes)
    any_cluster.kubectl("delete", "namespace", name, f"--wait={'true' if wait else 'false'}", "--ignore-not-found", timeout=120)
    if any_cluster.nodes:
        pods = ("get", "pods", "-n", name, "-o", "name")
        wait_for(f"no pod in {name}", lambda: not any_cluster.kubectl(*pods).strip(), timeout=120, interval=0.5)
