"""Fixtures for a test module that runs the operator: `pytest_plugins = ("opsrunner.fixtures",)`.

`operator` is one process a module, as administrator, watching the module's three namespaces only, with its own Lease.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.handle import Cluster
from faults.objects import install_crds
from opsrunner.api import Api
from opsrunner.process import Operator
from opsrunner.spaces import namespaces


@pytest.fixture(scope="session")
def crds(kwok_cluster: Cluster) -> None:
    """Both CRDs are installed."""
    install_crds(kwok_cluster)


@pytest.fixture(scope="session")
def api(kwok_cluster: Cluster, crds: None) -> Api:
    """The administrator's client."""
    return Api(kwok_cluster.kubeconfig)


@pytest.fixture(scope="module")
def spaces(kwok_cluster: Cluster, crds: None, request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Three namespaces of this module; objects of different names do not meet in them."""
    with namespaces(kwok_cluster, request.module.__name__.removeprefix("test_"), 3) as names:
        yield names


@pytest.fixture(scope="module")
def space(spaces: list[str]) -> str:
    """The first of them."""
    return spaces[0]


@pytest.fixture(scope="module")
def operator(kwok_cluster: Cluster, spaces: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """The operator of this module."""
    with Operator(kwok_cluster.kubeconfig, spaces, home=spaces[0], folder=Path(tmp_path_factory.mktemp("operator"))) as running:
        yield running
