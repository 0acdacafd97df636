"""The CRD and the models accept and refuse the same specs, as far as a schema can say it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

import manifests
from cluster.handle import Cluster
from manifests import strategies
from manifests.server import Server, install_crds
from pd_operator.api.types import PDDeploymentSpec

BOUNDED = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def server(control_plane: Cluster) -> Server:
    install_crds(control_plane)
    return Server(control_plane.kubeconfig)


def problem(spec: dict[str, Any]) -> str:
    """What the model says against a spec; empty when it accepts it."""
    try:
        PDDeploymentSpec.model_validate(spec, strict=True)
    except ValidationError as refused:
        return str(refused)
    return ""


def dry_run(server: Server, spec: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    return server.create({**manifests.minimal(), "spec": spec})


@BOUNDED
@given(spec=strategies.specs())
def test_both_accept(server: Server, spec: dict[str, Any]) -> None:
    code, answer = dry_run(server, spec)
    assert code == 201, answer
    assert problem(spec) == ""
    stored = PDDeploymentSpec.model_validate(answer["spec"], strict=True)
    assert stored == PDDeploymentSpec.model_validate(spec, strict=True)
    assert stored.model_dump(by_alias=True, exclude_none=True) == answer["spec"]


@pytest.mark.parametrize("fault", strategies.FAULTS)
@settings(BOUNDED, max_examples=12)
@given(data=st.data())
def test_both_refuse(server: Server, fault: str, data: st.DataObject) -> None:
    spec, where = data.draw(strategies.faulty(fault))
    code, answer = dry_run(server, spec)
    assert code in (400, 422), f"{where}: the server accepts it: {json.dumps(answer)[:1000]}"
    assert problem(spec), f"{where}: the model accepts it; the server says {answer['message'][:1000]}"
