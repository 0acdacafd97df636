"""Tables of good and bad manifests against the real API server: what the CRDs can refuse is refused there, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

import manifests
from cluster.handle import Cluster
from manifests.server import Server, install_crds
from pd_operator.api.crdgen import crds
from pd_operator.api.pool import PDPoolSpec
from pd_operator.api.schema import VALIDATIONS, Schema
from pd_operator.api.types import PDDeploymentSpec

SPECS = {"PDDeployment": PDDeploymentSpec, "PDPool": PDPoolSpec}


@pytest.fixture(scope="module")
def server(control_plane: Cluster) -> Server:
    install_crds(control_plane)
    return Server(control_plane.kubeconfig)


@pytest.mark.parametrize("entry", manifests.bad("server"), ids=str)
def test_server_refuses(server: Server, entry: manifests.Entry) -> None:
    code, status = server.create(entry.manifest)
    assert code == entry.code, status
    assert entry.message in status["message"]


@pytest.mark.parametrize("entry", manifests.good(), ids=str)
def test_server_accepts_and_the_models_change_nothing(server: Server, entry: manifests.Entry) -> None:
    code, made = server.create(entry.manifest)
    assert code == 201, made
    spec = SPECS[made["kind"]].model_validate(made["spec"], strict=True)
    assert spec.model_dump(by_alias=True, exclude_none=True) == made["spec"]


@pytest.mark.parametrize("entry", manifests.bad("operator"), ids=str)
def test_server_leaves_the_rest_to_the_operator(server: Server, entry: manifests.Entry) -> None:
    code, made = server.create(entry.manifest)
    assert code == 201, made
    spec = PDDeploymentSpec.model_validate(made["spec"], strict=True)
    assert spec.model_dump(by_alias=True, exclude_none=True) == made["spec"]


def test_every_rule_of_the_crds_has_a_bad_manifest(server: Server) -> None:
    """Rules that compare with the old object are in test_api_pool.py; engine, prefill and decode share theirs."""
    with ThreadPoolExecutor(4) as pool:
        said = "\n".join(answer["message"] for _, answer in pool.map(server.create, (e.manifest for e in manifests.bad("server"))))
    said = re.sub(r"\b(engine|prefill|decode)\b", "ROLE", said)
    unseen = {
        message
        for crd in crds()
        for rule in _rules(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"])
        if "oldSelf" not in rule["rule"] and (message := re.sub(r"\b(engine|prefill|decode)\b", "ROLE", _tail(rule))) not in said
    }
    assert not unseen


def _tail(rule: dict[str, str]) -> str:
    """What the answer contains for sure: the message, or the constant end of a message that is computed."""
    return rule["messageExpression"].rsplit(" + '", 1)[1].rstrip("'") if "messageExpression" in rule else rule["message"]


def _rules(schema: Schema) -> Iterator[dict[str, str]]:
    yield from schema.get(VALIDATIONS, [])
    children = [*schema.get("properties", {}).values(), schema.get("items"), schema.get("additionalProperties")]
    for child in children:
        if child:
            yield from _rules(child)
