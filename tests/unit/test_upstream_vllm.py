"""What vLLM is given: exact arguments, the transfer configuration, environment and probes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pd_operator.api.types import HandoffSpec, LMCacheSpec, Parallelism
from pd_operator.core.names import ROLES, Role
from pd_operator.upstream import vllm


def handoff(**fields: Any) -> HandoffSpec:
    return HandoffSpec.model_validate(fields)


def cache(**fields: Any) -> LMCacheSpec:
    return LMCacheSpec.model_validate(fields)


def config(role: Role, lmcache: LMCacheSpec | None = None, **fields: Any) -> dict[str, Any]:
    text = vllm.kv_transfer_config(role, handoff(**fields), lmcache)
    parsed: dict[str, Any] = json.loads(text)
    assert text == json.dumps(parsed, sort_keys=True, separators=(",", ":"))  # one text for one configuration
    return parsed


NIXL = {"backends": ["UCX"], "kv_lease_duration": 30}


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_nixl_alone(role: Role, kv_role: str) -> None:
    assert config(role) == {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": NIXL,
        "kv_load_failure_policy": "recompute",
    }


@pytest.mark.parametrize(("role", "kv_role"), [("prefill", "kv_producer"), ("decode", "kv_consumer")])
def test_nixl_and_lmcache(role: Role, kv_role: str) -> None:
    assert config(role, cache()) == {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector", "kv_role": kv_role, "kv_connector_extra_config": NIXL},
                {
                    "kv_connector": "LMCacheMPConnector",
                    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": "tcp://127.0.0.1",
                        "lmcache.mp.port": 5555,
                        "lmcache.mp.mq_timeout": 10,
                        "lmcache.mp.heartbeat_interval": 2,
                        "lmcache.mp.mp_transfer_mode": "engine_driven",
                    },
                },
            ]
        },
    }


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("lmcache", [None, cache(version="0.5.6")])
def test_the_failure_policy_stands_at_the_top_and_nowhere_else(role: Role, policy: str, lmcache: LMCacheSpec | None) -> None:
    """The scheduler reads it there only; inside a child it parses and does nothing."""
    found = config(role, lmcache, onFailure="Fail" if policy == "fail" else "Recompute")
    assert found.pop("kv_load_failure_policy") == policy
    assert "kv_load_failure_policy" not in json.dumps(found)


def test_decode_only_loads_where_a_failed_load_would_end_it() -> None:
    """Under fail, a cache child that stores ends the decode engine; from LMCache 0.5.6 on a consumer does not store."""

    def roles(role: Role, **fields: Any) -> list[str]:
        found = config(role, cache(version="0.5.6"), **fields)
        return [child["kv_role"] for child in found["kv_connector_extra_config"]["connectors"]]

    assert roles("decode", onFailure="Fail") == ["kv_consumer", "kv_consumer"]
    assert roles("prefill", onFailure="Fail") == ["kv_producer", "kv_both"]
    assert roles("decode") == ["kv_consumer", "kv_both"]


@pytest.mark.parametrize(("lease", "seconds"), [("30s", 30), ("1m30s", 90), ("45.5s", 46), ("1h", 3600)])
def test_the_lease_is_rendered_in_whole_seconds_that_cover_it(lease: str, seconds: int) -> None:
    assert config("prefill", leaseDuration=lease)["kv_connector_extra_config"]["kv_lease_duration"] == seconds
    assert vllm.shutdown_timeout("prefill", handoff(leaseDuration=lease), "1s") == seconds + vllm.LEASE_MARGIN


def test_both_ends_have_the_same_lease() -> None:
    leases = {config(role, leaseDuration="77s")["kv_connector_extra_config"]["kv_lease_duration"] for role in ROLES}
    assert leases == {77}


def arguments(role: Role = "prefill", parallelism: dict[str, Any] | None = None, user: tuple[str, ...] = ()) -> list[str]:
    return vllm.arguments(
        "org/model", "chat", role, handoff(), None, Parallelism.model_validate(parallelism or {}), "120s", list(user)
    )


def test_arguments() -> None:
    assert arguments("decode", user=("--seed", "1")) == [
        "serve",
        "org/model",
        "--served-model-name",
        "chat",
        "--host",
        "0.0.0.0",
        "--port",
        "8000",
        "--shutdown-timeout",
        "120",
        "--kv-transfer-config",
        vllm.kv_transfer_config("decode", handoff(), None),
        "--seed",
        "1",
    ]


@pytest.mark.parametrize(
    ("parallelism", "flags"),
    [
        ({}, []),
        ({"tensor": 1, "pipeline": 1, "data": 1, "expert": False}, []),
        ({"tensor": 8}, ["--tensor-parallel-size", "8"]),
        ({"pipeline": 2}, ["--pipeline-parallel-size", "2"]),
        ({"data": 4, "expert": True}, ["--data-parallel-size", "4", "--enable-expert-parallel"]),
        (
            {"tensor": 2, "pipeline": 3, "data": 4},
            ["--tensor-parallel-size", "2", "--pipeline-parallel-size", "3", "--data-parallel-size", "4"],
        ),
    ],
)
def test_parallelism(parallelism: dict[str, Any], flags: list[str]) -> None:
    found = arguments(parallelism=parallelism)
    assert found[8 : found.index("--shutdown-timeout")] == flags


def test_every_flag_of_ours_is_one_that_the_user_may_not_set() -> None:
    parallelism = {"tensor": 2, "pipeline": 2, "data": 2, "expert": True}
    assert {arg for arg in arguments(parallelism=parallelism) if arg.startswith("--")} <= vllm.OWNED_FLAGS


def test_environment() -> None:
    owned, defaults = vllm.environment(handoff(leaseDuration="45s"))
    assert {var["name"] for var in owned} <= vllm.OWNED_ENV and not {var["name"] for var in defaults} & vllm.OWNED_ENV
    found = {var["name"]: var.get("value") or var["valueFrom"]["fieldRef"]["fieldPath"] for var in [*owned, *defaults]}
    assert found["POD_IP"] == "status.podIP"
    assert found["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$(POD_IP)"  # bound and advertised; its default is localhost
    assert found["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600"
    assert found["PYTHONHASHSEED"] == "0"
    assert found["LMCACHE_TRACK_USAGE"] == "false" and found["DO_NOT_TRACK"] == "1" and found["VLLM_NO_USAGE_STATS"] == "1"
    assert found["UCX_TCP_USER_TIMEOUT"] == "45s"  # a read from a prefill that is gone ends with its lease
    assert "VLLM_NIXL_ABORT_REQUEST_TIMEOUT" not in found  # replaced by kv_lease_duration, and read by nothing


def test_probes_agree_with_what_routers_check() -> None:
    probes = vllm.probes()
    assert {p["httpGet"]["path"] for p in probes.values()} == {"/health"}
    startup, live = probes["startupProbe"], probes["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 30 * 60  # weights
    assert live["periodSeconds"] * live["failureThreshold"] >= 300  # kernels compiled at run time block the loop for 70 s


def test_versions() -> None:
    assert vllm.program("0.32.0").proven and not vllm.program("0.33.0").proven
    assert vllm.TESTED == "0.32.0"
