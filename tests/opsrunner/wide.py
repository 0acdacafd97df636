"""Fixtures of a module or package whose operator serves a whole cluster of its own.

It reads nodes, and would meddle with the objects of other tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest

from cluster import session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from faults.objects import install_crds
from opsrunner.api import Api
from opsrunner.process import Operator
from opsrunner.spaces import namespaces


def fixtures(scope: Literal["module", "package"], stem: str) -> tuple[Any, Any, Any, Any]:
    """`plane, api, space, operator = fixtures("module", "gateway")`: the cluster (tests add nodes of their own; optional kinds
    are not installed), its client, a namespace that begins with `stem`, and the operator."""

    @pytest.fixture(scope=scope)
    def plane() -> Iterator[Cluster]:
        with session.control_plane(FakeNodes(1, prefix="base", gpus=0)) as cluster:
            install_crds(cluster)
            yield cluster

    @pytest.fixture(scope=scope)
    def api(plane: Cluster) -> Api:
        return Api(plane.kubeconfig)

    @pytest.fixture(scope=scope)
    def space(plane: Cluster) -> Iterator[str]:
        with namespaces(plane, stem, 1) as names:
            yield names[0]

    @pytest.fixture(scope=scope)
    def operator(plane: Cluster, space: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
        with Operator(plane.kubeconfig, [], home=space, folder=Path(tmp_path_factory.mktemp("operator"))) as running:
            yield running

    return plane, api, space, operator
