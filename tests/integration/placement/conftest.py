"""A cluster of their own for the tests of placement, and one operator that reads nodes and watches all of it.

A cluster-wide operator would meddle with the objects of other tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cluster.handle import Cluster
from opsrunner import wide
from opsrunner.api import Api
from opsrunner.deaths import deaths
from opsrunner.domains import Pool, pool
from opsrunner.process import Operator

__all__ = ["deaths"]

plane, api, space, operator = wide.fixtures("package", "placement")


@pytest.fixture
def nodes(plane: Cluster, api: Api, space: str, operator: Operator, request: pytest.FixtureRequest) -> Iterator[Pool]:
    """Nodes of this test."""
    name = request.node.name.removeprefix("test_").replace("_", "-")[:24].strip("-")
    with pool(plane, api, space, name) as made:
        yield made
