"""What the routers are given: exact arguments for both, defaults that a user may replace, probes and programs."""

from __future__ import annotations

from typing import Any

import builders
import pytest
from builders import make_spec

from pd_operator.upstream import catalog, smg, vllm_router

PREFILL = {"pdserve.dev/slice": "s", "pdserve.dev/role": "prefill"}
DECODE = {"pdserve.dev/slice": "s", "pdserve.dev/role": "decode"}
DISCOVERY = [
    *["--service-discovery", "--service-discovery-namespace", "demo", "--service-discovery-port", "8000"],
    *["--prefill-selector", "pdserve.dev/role=prefill", "pdserve.dev/slice=s"],
    *["--decode-selector", "pdserve.dev/role=decode", "pdserve.dev/slice=s"],
    *["--prometheus-host", "0.0.0.0", "--prometheus-port", "29000"],
]


def arguments(module: Any, *user: str) -> list[str]:
    found: list[str] = module.arguments("demo", PREFILL, DECODE, 8000, list(user))
    return found


def test_smg() -> None:
    assert arguments(smg) == [
        *["launch", "--host", "0.0.0.0", "--port", "30000", "--pd-disaggregation", "--backend", "vllm"],
        *DISCOVERY,
        *["--shutdown-grace-period-secs", "180", "--disable-tokenizer-autoload", "--retry-max-retries", "2"],
        *["--health-check-interval-secs", "5", "--health-failure-threshold", "3", "--health-success-threshold", "1"],
        *["--health-check-timeout-secs", "5"],
    ]


def test_vllm_router() -> None:
    assert arguments(vllm_router) == [
        *["--host", "0.0.0.0", "--port", "30000", "--vllm-pd-disaggregation"],
        *DISCOVERY,
        *["--policy", "round_robin", "--worker-startup-timeout-secs", "5", "--worker-startup-check-interval", "1"],
        *["--health-check-interval-secs", "5", "--health-success-threshold", "1", "--health-failure-threshold", "3"],
        *["--health-check-timeout-secs", "5"],
    ]


@pytest.mark.parametrize("module", [smg, vllm_router])
def test_the_user_replaces_a_default_and_not_what_is_owned(module: Any) -> None:
    found = arguments(module, "--health_check_interval_secs=9", "--policy", "random")
    assert found[-3:] == ["--health_check_interval_secs=9", "--policy", "random"]
    assert "--health-check-interval-secs" not in found and found.count("--policy") == 1
    owned = [a for a in found if a in module.OWNED_FLAGS]
    assert len(owned) == len(set(owned)) and "--prefill-selector" in owned


@pytest.mark.parametrize("module", [smg, vllm_router])
def test_readiness_asks_for_both_roles_and_start_up_does_not(module: Any) -> None:
    probes = module.probes()
    paths = {kind: probe["httpGet"]["path"] for kind, probe in probes.items()}
    assert paths == {"startupProbe": "/liveness", "readinessProbe": "/readiness", "livenessProbe": "/liveness"}


@pytest.mark.parametrize("module", [smg, vllm_router])
def test_a_router_needs_a_writable_home(module: Any) -> None:
    assert {"name": "HOME", "value": "/tmp"} in module.environment(None)


@pytest.mark.parametrize(("kind", "module"), catalog.ROUTERS.items())
def test_catalog(kind: str, module: Any) -> None:
    spec = make_spec({"router": {"type": kind}})
    assert catalog.router(spec) is module and catalog.router_version(spec) == module.TESTED
    assert catalog.router_version(make_spec({"router": {"type": kind, "version": "9.9.9"}})) == "9.9.9"
    found = catalog.upstream(spec)
    assert (found.engine.name, found.router.name, found.lmcache) == ("vllm", kind, None)
    assert found.engine.proven and found.router.proven and found.refusals == ()


def test_catalog_of_what_is_not_built_yet_does_not_break() -> None:
    """Such a spec is refused, and the refusal is what the user must see."""
    found = catalog.upstream(make_spec({"engine": {"type": "sglang", "version": "0.5.0"}, "router": {"type": "dynamo"}}))
    assert found.refusals == ()


def test_unproven_combinations_are_known_as_such() -> None:
    found = catalog.upstream(make_spec({"engine": {"version": "0.33.0"}, "lmcache": {"version": "0.5.6"}}))
    assert found.lmcache is not None and not found.engine.proven and not found.lmcache.proven


def test_the_tested_versions_are_those_of_the_goldens() -> None:
    _, _, bundle = builders.rendered()
    images = {c["image"] for pod in builders.pod_specs(bundle).values() for c in builders.containers(pod).values()}
    assert images == {"vllm/vllm-openai:v0.32.0", "lightseekorg/smg:1.13.0"}
