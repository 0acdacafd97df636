"""The administrator's client, and a proxy in between that breaks what passes through it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from cluster.handle import Cluster
from faults.objects import install_crds
from faults.proxy import FaultProxy
from pd_operator.kube.client import KubeClient


@pytest.fixture
async def client(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    """Straight to the server: the world in which things happen."""
    made = await KubeClient.connect(str(kubeconfig))
    yield made
    await made.close()


@pytest.fixture
async def proxy(kubeconfig: Path, tmp_path: Path) -> AsyncIterator[FaultProxy]:
    """Clients that take its kubeconfig go through it."""
    async with FaultProxy(kubeconfig, tmp_path) as made:
        yield made


@pytest.fixture
def our_kinds(control_plane: Cluster) -> None:
    """Both CRDs are installed."""
    install_crds(control_plane)
