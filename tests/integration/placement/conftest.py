"""A cluster of their own for the tests of placement, and one operator that reads nodes and watches all of it.

A cluster-wide operator would meddle with the objects of other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster import session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from faults.objects import install_crds
from opsrunner.api import Api
from opsrunner.deaths import deaths
from opsrunner.domains import Pool, pool
from opsrunner.process import Operator
from opsrunner.spaces import namespaces

__all__ = ["deaths"]


@pytest.fixture(scope="package")
def plane() -> Iterator[Cluster]:
    """Every test adds nodes of its own."""
    with session.control_plane(FakeNodes(1, prefix="base", gpus=0)) as cluster:
        install_crds(cluster)
        yield cluster


@pytest.fixture(scope="package")
def api(plane: Cluster) -> Api:
    return Api(plane.kubeconfig)


@pytest.fixture(scope="package")
def space(plane: Cluster) -> Iterator[str]:
    with namespaces(plane, "placement", 1) as names:
        yield names[0]


@pytest.fixture(scope="package")
def operator(plane: Cluster, space: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One cluster-wide operator: it reads nodes."""
    with Operator(plane.kubeconfig, [], home=space, folder=Path(tmp_path_factory.mktemp("operator"))) as running:
        yield running


@pytest.fixture
def nodes(plane: Cluster, api: Api, space: str, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Nodes of this test."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:24].strip("-")
    with pool(plane, api, space, name) as made:
        yield made
