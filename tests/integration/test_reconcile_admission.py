"""Everything that we make passes the restricted Pod Security standard, enforced by the real API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Refused
from opsrunner.process import Operator
from opsrunner.spaces import namespaces

pytest_plugins = ("opsrunner.fixtures",)

P2P = {"p2p": {"enabled": True}}
SHAPES: dict[str, tuple[dict[str, Any], int]] = {  # spec, pods
    "plain": ({}, 4),
    "lmcache": ({"lmcache": {}}, 4),
    "p2p": ({"lmcache": P2P}, 5),
    "vllm-router": ({"router": {"type": "vllm-router"}}, 4),
    "server-transfer": ({"lmcache": {"transfer": "Server"} | P2P, "router": {"type": "vllm-router"}}, 5),
    "oci": ({"model": {"uri": "oci://example.org/model:1"}}, 4),
    "path": ({"model": {"uri": "/models/llama"}, "decode": {"replicas": 2}}, 5),
}


@pytest.fixture(scope="module")
def restricted(kwok_cluster: Cluster, crds: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A namespace that enforces the standard, with an operator."""
    with namespaces(kwok_cluster, "restricted", 1, **{"pod-security.kubernetes.io/enforce": "restricted"}) as (space,):
        folder = Path(tmp_path_factory.mktemp("restricted"))
        with Operator(kwok_cluster.kubeconfig, [space], home=space, folder=folder):
            yield space


def test_the_namespace_does_enforce_it(api: Api, restricted: str) -> None:
    with pytest.raises(Refused, match="violates PodSecurity"):
        container = {"name": "a", "image": "example.org/a:1"}
        api.create(
            {
                "apiVersion": "v1",
                "kind": "Pod",
                "metadata": {"name": "a", "namespace": restricted},
                "spec": {"containers": [container]},
            }
        )


def test_every_shape_is_admitted(api: Api, restricted: str) -> None:
    for name, (spec, _) in SHAPES.items():
        api.create(state.pdd(restricted, name, **spec))
    for name, (_, count) in SHAPES.items():
        waits.ready(api, restricted, name, timeout=120)
        pods = state.pods(api, restricted, name)
        assert len(pods) == count, name
        for pod in pods:
            every = [*pod["spec"]["containers"], *pod["spec"].get("initContainers", [])]
            assert all(c["securityContext"]["readOnlyRootFilesystem"] for c in every)
            assert pod["spec"]["securityContext"]["runAsUser"] == 65532 and not pod["spec"].get("hostIPC")
    failed = [e for e in api.list("Event", restricted) if e["reason"] == "FailedCreate"]
    assert failed == []


def test_a_template_that_breaks_it_is_told_to_the_user(api: Api, restricted: str) -> None:
    """The pods are refused long after our write was taken: the refusal has to come to the status all the same."""
    api.create(state.pdd(restricted, "open", decode={"template": {"spec": {"hostNetwork": True}}}))
    obj = waits.condition(api, restricted, "open", "DecodeReady", "False", "PodsRefused", timeout=90)
    message = waits.conditions(obj)["DecodeReady"]["message"]
    assert "violates PodSecurity" in message and "hostNetwork" in message
    assert waits.has(obj, "Ready", "False", "PodsRefused")
    api.merge("PDDeployment", restricted, "open", {"spec": {"decode": {"template": None}}})
    waits.ready(api, restricted, "open")
