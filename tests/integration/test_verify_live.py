"""Canary Jobs on a real API server. Fake nodes end a Job's pod without a word, so each canary fails for want of evidence."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.handle import Cluster
from opsrunner import state, waits
from opsrunner.api import Api, Object
from opsrunner.plugin import Pdd
from opsrunner.process import Operator
from pd_operator.core.canary_case import Case

pytest_plugins = ("opsrunner.fixtures",)
pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def pdd(kwok_cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> Pdd:
    return Pdd(kwok_cluster.kubeconfig, capsys)


def slice_of(api: Api, space: str, name: str) -> dict[str, Any]:
    slices = (api.get("PDDeployment", space, name) or {}).get("status", {}).get("slices") or [{}]
    return dict(slices[0])


def jobs(api: Api, space: str, name: str) -> list[Object]:
    return api.list("Job", space, f"pdserve.dev/deployment={name}")


def test_a_canary_without_evidence_opens_nothing_and_verify_runs_it_again(
    api: Api, operator: Operator, space: str, pdd: Pdd
) -> None:
    api.create(state.pdd(space, "dark", verification="Required"))
    first = waits.until("a canary that ended", lambda: slice_of(api, space, "dark").get("canary"), timeout=90)
    assert (first["handoffReason"], first["failures"]) == ("CanaryFailed", 1)
    assert not [p for p in state.pods(api, space, "dark") if "pdserve.dev/front" in p["metadata"]["labels"]]
    ready = waits.conditions(waits.condition(api, space, "dark", "Ready", "False"))["Ready"]
    assert ready["reason"] in ("NotYetRun", "CanaryFailed"), ready
    code, out, err = pdd("verify", "dark", "-n", space, "--timeout", "90")
    assert code == 1 and "handoff: CanaryFailed" in out, (out, err)
    assert slice_of(api, space, "dark")["canary"]["number"] > first["number"]
    assert len(jobs(api, space, "dark")) <= 1, "the older ones are gone"


def test_verify_says_when_no_canary_runs(api: Api, operator: Operator, space: str, pdd: Pdd) -> None:
    api.create(state.pdd(space, "off", verification="Disabled"))
    waits.ready(api, space, "off")
    assert not jobs(api, space, "off")
    code, _, err = pdd("verify", "off", "-n", space)
    assert code == 2 and "spec.verification is Disabled" in err
    code, _, err = pdd("verify", "absent", "-n", space)
    assert code == 2 and "no such PDDeployment" in err


def test_a_change_of_the_router_is_asked_about_when_it_is_through(api: Api, operator: Operator, spaces: list[str]) -> None:
    """The case of the new canary names pods of the new router only."""
    space = spaces[2]
    api.create(state.pdd(space, "chat", verification="Advisory"))
    first = waits.until("a canary that ended", lambda: slice_of(api, space, "chat").get("canary"), timeout=90)
    api.merge("PDDeployment", space, "chat", {"spec": {"router": {"type": "vllm-router"}}})

    def asked() -> list[Object]:
        return [j for j in jobs(api, space, "chat") if j["metadata"]["labels"]["pdserve.dev/about"] != first["about"]]

    (job,) = waits.until("a canary of the new router", asked, timeout=90)
    env = job["spec"]["template"]["spec"]["containers"][0]["env"][0]["value"]
    case = Case.model_validate_json(env)
    named = {url.split("//")[1].split(":")[0] for url in case.routers}
    assert case.router == "vllm-router" and named
    fresh = state.pods(api, space, "chat", component="router")
    assert all("vllm-router" in p["spec"]["containers"][0]["command"] for p in fresh)
    assert named <= {p["status"].get("podIP") for p in fresh}, "the old router was asked"
