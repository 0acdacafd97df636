"""I8: every refusal names the field, the value and what would be accepted."""

from __future__ import annotations

from typing import Any

import builders
import pytest
from builders import deep, make_spec
from pydantic import ValidationError

from pd_operator.api.conditions import Reason
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.capabilities import Refusal
from pd_operator.core.compatibility import invalid, review
from pd_operator.core.names import ROLES
from pd_operator.core.snapshot import Reference
from pd_operator.upstream import catalog, smg, vllm, vllm_router


def refusals(changes: dict[str, Any], **fields: Any) -> list[Refusal]:
    spec = make_spec(changes)
    return review(spec, catalog.upstream(spec), **{"images": builders.images(spec), **fields})


def only(changes: dict[str, Any], **fields: Any) -> Refusal:
    """The one refusal, complete."""
    found = refusals(changes, **fields)
    assert len(found) == 1, found
    refusal = found[0]
    assert refusal.field.startswith("spec.") and len(refusal.accepted) > 10 and refusal.field in refusal.message
    assert refusal.value in refusal.message and refusal.accepted in refusal.message
    return refusal


# --- versions -------------------------------------------------------------------------------------------------------------


def engine(version: str, **more: Any) -> dict[str, Any]:
    return {"engine": {"version": version}, **more}


VERSIONS: dict[str, tuple[dict[str, Any], Reason | None, str, list[str]]] = {
    "too old": (engine("0.22.0"), Reason.UNSUPPORTED_VERSION, "engine.version", ["0.22.1 or later", "tested: 0.32.0"]),
    "oldest": (engine("0.22.1"), None, "", []),
    "too old for a cache": (
        engine("0.25.1", lmcache={}),
        Reason.UNSUPPORTED_VERSION,
        "engine.version",
        ["with lmcache", "0.26.0 or later", "46865"],
    ),
    "release candidate": (engine("0.26.0rc1", lmcache={}), Reason.UNSUPPORTED_VERSION, "engine.version", ["0.26.0"]),
    "oldest with a cache": (engine("0.26.0", lmcache={}), None, "", []),
    "tested": (engine("0.32.0", lmcache={}), None, "", []),
    "newer": (engine("0.33.0", lmcache={}), None, "", []),
    "local build": (engine("0.32.0+cpu", lmcache={}), None, "", []),
    "no version": (engine("0.32.0-x.y"), Reason.UNSUPPORTED_VERSION, "engine.version", ["such as 0.32.0"]),
    "old cache": ({"lmcache": {"version": "0.5.4"}}, Reason.UNSUPPORTED_VERSION, "lmcache.version", ["0.5.5 or later"]),
    "no cache version": ({"lmcache": {"version": "0.5.5-x.y"}}, Reason.UNSUPPORTED_VERSION, "lmcache.version", ["such as 0.5.5"]),
    "fail without a cache": ({"handoff": {"onFailure": "Fail"}}, None, "", []),
    "fail kills decode": (
        {"handoff": {"onFailure": "Fail"}, "lmcache": {}},
        Reason.UNSAFE_FAILURE_POLICY,
        "handoff.onFailure",
        ["vLLM 0.32.0 and LMCache 0.5.5", "Recompute", "remove lmcache"],
    ),
    "fail with a cache that only loads": ({"handoff": {"onFailure": "Fail"}, "lmcache": {"version": "0.5.6"}}, None, "", []),
}


@pytest.mark.parametrize(("changes", "reason", "field", "words"), VERSIONS.values(), ids=VERSIONS)
def test_versions(changes: dict[str, Any], reason: Reason | None, field: str, words: list[str]) -> None:
    if reason is None:
        assert refusals(changes) == []
        return
    refusal = only(changes)
    assert (refusal.reason, refusal.field) == (reason, f"spec.{field}")
    assert refusal.value and all(word in refusal.accepted for word in words)


@pytest.mark.parametrize(("server", "accepted"), [((1, 29), False), ((1, 34), False), ((1, 35), True), ((1, 37), True)])
def test_image_volumes_need_a_server_that_has_them(server: tuple[int, int], accepted: bool) -> None:
    changes = {"model": {"uri": "oci://example.org/model:1"}}
    if accepted:
        assert refusals(changes, server_version=server) == []
        return
    refusal = only(changes, server_version=server)
    assert (refusal.reason, refusal.value) == (Reason.UNSUPPORTED_VERSION, "oci://example.org/model:1")
    assert "1.35 or later" in refusal.accepted and f"1.{server[1]}" in refusal.accepted and "pvc://" in refusal.accepted


# --- images and references ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("component", "what"), [("engine", "vllm"), ("router", "smg")])
def test_no_image_names_both_ways_to_give_one(component: str, what: str) -> None:
    images = {"engine": "e", "router": "r", component: ""}
    refusal = only({}, images=images)
    assert (refusal.reason, refusal.field) == (Reason.IMAGE_REQUIRED, f"spec.{component}.image")
    assert what in refusal.accepted and "set this field" in refusal.accepted and "image table" in refusal.accepted


def test_missing_references() -> None:
    missing = [Reference("Secret", "hf", "spec.engine.env[HF_TOKEN].secretKeyRef"), Reference("ConfigMap", "c", "spec.x")]
    found = refusals({}, missing=missing)
    assert [(r.reason, r.field, r.value) for r in found] == [
        (Reason.MISSING_REFERENCE, "spec.engine.env[HF_TOKEN].secretKeyRef", "hf"),
        (Reason.MISSING_REFERENCE, "spec.x", "c"),
    ]
    assert found[0].accepted == "Secret hf does not exist in this namespace; create it"


def test_order_of_refusals() -> None:
    """What the user must change in the spec comes before what may appear by itself."""
    changes = {"rollout": {"maxSurge": 1}, "engine": {"version": "0.1.0", "args": ["--port=1"]}}
    found = refusals(changes, images={}, missing=[Reference("Secret", "s", "spec.x")])
    assert [r.reason for r in found] == [
        Reason.NOT_IMPLEMENTED,
        Reason.UNSUPPORTED_VERSION,
        Reason.INVALID_SPEC,
        Reason.IMAGE_REQUIRED,
        Reason.IMAGE_REQUIRED,
        Reason.MISSING_REFERENCE,
    ]


# --- flags ----------------------------------------------------------------------------------------------------------------

SPELLINGS = {
    "--port": "--port",
    "--port=9000": "--port",
    "--por=9000": "--port",
    "--served-model-name=x": "--served-model-name",
    "--served_model_name=x": "--served-model-name",
    "--served-model": "--served-model-name",
    "--ser": "--served-model-name",
    "--kv-transfer-config={}": "--kv-transfer-config",
    "--kv_transfer_config": "--kv-transfer-config",
    "--kv_transfer_config.kv_role=kv_both": "--kv-transfer-config",
    "--kv-transfer-config.kv_connector_extra_config.backends+": "--kv-transfer-config",
    "--kv-transfer": "--kv-transfer-config",
    "--kv_tr.kv_role": "--kv-transfer-config",
    "-tp": "-tp",
    "-tp=2": "-tp",
    "--tensor_parallel_size=2": "--tensor-parallel-size",
    "--tensor=2": "--tensor-parallel-size",
    "-dp": "-dp",
    "-pp": "-pp",
    "-ep": "-ep",
    "--enable-expert-parallel": "--enable-expert-parallel",
    "--no-enable-expert-parallel": "--enable-expert-parallel",
    "--shutdown": "--shutdown-timeout",
    "--config=x.yaml": "--config",
    "--host": "--host",
    "--headless": "--headless",
}


@pytest.mark.parametrize("field", ["engine", *ROLES])
@pytest.mark.parametrize(("spelling", "owned"), SPELLINGS.items())
def test_owned_flags_of_the_engine_in_every_spelling(field: str, spelling: str, owned: str) -> None:
    refusal = only({field: {"args": ["--seed=1", spelling]}})
    assert refusal.reason is Reason.INVALID_SPEC and refusal.field == f"spec.{field}.args"
    assert f"{owned} is set by the operator; remove it" == refusal.accepted
    assert "9000" not in refusal.message  # the flag is shown, never what follows it


@pytest.mark.parametrize("flag", sorted(vllm.OWNED_FLAGS))
def test_every_owned_flag_of_vllm(flag: str) -> None:
    assert only({"engine": {"args": [flag]}}).value == flag


@pytest.mark.parametrize(
    ("kind", "flag"), [(k, f) for k, m in (("smg", smg), ("vllm-router", vllm_router)) for f in sorted(m.OWNED_FLAGS)]
)
def test_every_owned_flag_of_the_routers(kind: str, flag: str) -> None:
    refusal = only({"router": {"type": kind, "args": [f"{flag}=x"]}})
    assert (refusal.field, refusal.value) == ("spec.router.args", flag)


FREE = [
    "--enforce-eager",
    "--model-impl=auto",
    "--data-parallel-rank=1",
    "--data-parallel-size-local=1",
    "--config-format=hf",
    "--tokenizer=x",
    "--max-model-len",
    "-1",
    "-0.5",
    "--5",
    "serve",
    "value.with.dots",
    "-O3",
    '{"a": "--port"}',
    "--prefix-caching-hash-algo=sha256",
    "--hf-overrides.a.b=c",
    "--api-server-count=2",
    "--distributed-executor-backend",
]


@pytest.mark.parametrize("arg", FREE)
def test_other_flags_are_the_users_own(arg: str) -> None:
    assert refusals({"engine": {"args": [arg]}, "decode": {"args": [arg]}}) == []


@pytest.mark.parametrize(
    "arg", ["--policy=random", "--prefill-policy=random", "--decode-policy", "--request-timeout-secs=9", "--retry-max-retries=5"]
)
@pytest.mark.parametrize("kind", ["smg", "vllm-router"])
def test_other_flags_of_routers_are_the_users_own(kind: str, arg: str) -> None:
    assert refusals({"router": {"type": kind, "args": [arg]}}) == []


# --- variables ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(vllm.OWNED_ENV))
@pytest.mark.parametrize("field", ["engine", *ROLES])
def test_owned_variables(field: str, name: str) -> None:
    refusal = only({field: {"env": [{"name": name, "value": "x"}]}})
    assert (refusal.reason, refusal.field, refusal.value) == (Reason.INVALID_SPEC, f"spec.{field}.env", name)


# --- specs that the models do not accept ----------------------------------------------------------------------------------

UNREADABLE: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "unknown field": ({"engine": {"modle": "x"}}, "spec.engine.modle", "x", "not permitted"),
    "missing field": ({"model": {"uri": None}}, "spec.model.uri", "", "required"),
    "not one of": ({"engine": {"type": "other"}}, "spec.engine.type", "other", "'vllm', 'sglang' or 'trtllm'"),
    "out of bounds": (
        {"prefill": {"parallelism": {"tensor": 0}}},
        "spec.prefill.parallelism.tensor",
        "0",
        "greater than or equal to 1",
    ),
    "pattern": ({"handoff": {"leaseDuration": "soon"}}, "spec.handoff.leaseDuration", "soon", "pattern"),
}


@pytest.mark.parametrize(("changes", "field", "value", "words"), UNREADABLE.values(), ids=UNREADABLE)
def test_unreadable_specs(changes: dict[str, Any], field: str, value: str, words: str) -> None:
    """An object may be older than the CRD that is installed now."""
    raw = deep(builders.MINIMAL, changes)
    with pytest.raises(ValidationError) as caught:
        PDDeploymentSpec.model_validate(raw)
    refusal = invalid(caught.value)
    assert (refusal.reason, refusal.field, refusal.value) == (Reason.INVALID_SPEC, field, value)
    assert words in refusal.accepted
