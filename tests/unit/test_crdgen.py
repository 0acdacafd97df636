"""The CRDs: up to date, structural, bounded, described; defaults are those of the models."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
import yaml
from pydantic import Field

import manifests
from pd_operator.api import crdgen
from pd_operator.api.schema import INT_OR_STRING, PRESERVE, VALIDATIONS, Schema, structural
from pd_operator.api.types import Model, PDDeploymentSpec
from pd_operator.upstream import smg, vllm, vllm_router
from pd_operator.upstream.flags import flag_of

KINDS = {crd["spec"]["names"]["kind"]: crd for crd in crdgen.crds()}
FREE = {  # the only places where the API server keeps fields that the schema does not know
    "PDDeployment.spec.engine.env[].valueFrom",
    "PDDeployment.spec.prefill.env[].valueFrom",
    "PDDeployment.spec.prefill.template",
    "PDDeployment.spec.decode.env[].valueFrom",
    "PDDeployment.spec.decode.template",
    "PDDeployment.spec.router.template",
    "PDDeployment.spec.gateway.parentRefs[]",
}


def version(kind: str) -> dict[str, Any]:
    return KINDS[kind]["spec"]["versions"][0]


def root(kind: str) -> Schema:
    return version(kind)["schema"]["openAPIV3Schema"]


def nodes(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    """Every node of a schema with its path."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(f"{path}.{name}", child)
    for key, mark in (("items", "[]"), ("additionalProperties", "{}")):
        if key in schema:
            yield from nodes(path + mark, schema[key])


NODES = [node for kind in KINDS for part in ("spec", "status") for node in nodes(f"{kind}.{part}", root(kind)["properties"][part])]
SPEC_NODES = [(path, schema) for path, schema in NODES if ".spec" in path]


def test_files_are_yaml_of_the_crds_and_safe_in_a_chart() -> None:
    for text, crd in zip(crdgen.files().values(), crdgen.crds(), strict=True):
        assert yaml.safe_load(text) == crd
        assert "{{" not in text, "helm would take this for a template"
        assert len(text) < 200_000, "kubectl apply keeps a copy in an annotation of at most 262144 bytes"


@pytest.mark.parametrize(("kind", "short"), [("PDDeployment", "pdd"), ("PDPool", "pdp")])
def test_names(kind: str, short: str) -> None:
    crd = KINDS[kind]
    names = crd["spec"]["names"]
    assert crd["metadata"]["name"] == f"{kind.lower()}s.pdserve.dev" == f"{names['plural']}.{crd['spec']['group']}"
    assert (names["shortNames"], names["categories"]) == ([short], ["pdserve"])
    assert crd["spec"]["scope"] == "Namespaced"
    assert "status" in version(kind)["subresources"]


def test_scale_is_on_the_pool_only() -> None:
    assert version("PDPool")["subresources"]["scale"] == {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    }
    assert "scale" not in version("PDDeployment")["subresources"]


def test_columns() -> None:
    columns = version("PDDeployment")["additionalPrinterColumns"]
    shown = "Prefill Decode Slices Ready Reason Bottleneck Age"
    assert [c["name"] for c in columns if "priority" not in c] == shown.split()
    assert [c["name"] for c in columns if c.get("priority") == 1] == ["Model", "Revision", "URL"]


@pytest.mark.parametrize(("path", "schema"), NODES, ids=[path for path, _ in NODES])
def test_node(path: str, schema: Schema) -> None:
    """Structural, described and bounded, node by node."""
    assert schema.get("description", "").strip(), "no description"
    assert ("type" in schema) != (INT_OR_STRING in schema), "exactly one of type and int-or-string"
    assert not {"$ref", "anyOf", "allOf", "oneOf", "not", "nullable", "title", "const"} & set(schema)
    assert not ("properties" in schema and {"additionalProperties", PRESERVE} & set(schema))
    assert (PRESERVE in schema) == (path in FREE)
    kind = schema.get("type", "string")
    if kind == "string":
        assert "enum" in schema or schema.get("maxLength", 0) > 0, "unbounded string: CEL takes it for 1.5 MB"
    elif kind == "integer":
        assert {"minimum", "maximum", "format"} <= set(schema)
    elif kind == "array":
        assert schema["maxItems"] > 0
        assert schema["x-kubernetes-list-type"] in ("atomic", "set", "map")
        for key in schema.get("x-kubernetes-list-map-keys", []):
            assert key in schema["items"]["required"]
    elif kind == "object":
        assert "properties" in schema or PRESERVE in schema or schema.get("maxProperties", 0) > 0
    else:
        assert kind == "boolean"
    for value in schema.get("enum", []):
        assert value in schema["description"], f"the description does not explain {value}"


@pytest.mark.parametrize(
    ("path", "schema"), [n for n in NODES if VALIDATIONS in n[1]], ids=lambda v: v if isinstance(v, str) else ""
)
def test_rules_have_messages_that_name_the_field(path: str, schema: Schema) -> None:
    below = path.split(".spec", 1)[1].lstrip(".").replace("[]", "[*]").replace("{}", "[*]")
    fields = [below] if below else list(schema["properties"])
    for rule in schema[VALIDATIONS]:
        assert rule["message"].startswith(tuple(fields)), rule["message"]
        assert "{self}" not in rule["message"]
        assert "\n" not in rule["message"] and len(rule["message"]) <= 1024


def test_status_has_no_defaults_and_spec_has_those_of_the_models() -> None:
    # What nobody has looked at says so (crdgen.NOT_SEEN); nothing else of status is made up.
    assert [path for path, schema in NODES if ".status" in path and "default" in schema] == ["PDDeployment.status"]
    minimal = manifests.minimal()["spec"]
    for extra in (
        {},
        {"lmcache": {}},
        {"slo": {}, "gateway": {}},
        {"scaling": {"prefill": {"maxReplicas": 2}, "decode": {"maxReplicas": 2}}},
    ):
        spec = manifests.merge(minimal, extra)
        filled = fill(root("PDDeployment")["properties"]["spec"], spec)
        assert filled == PDDeploymentSpec.model_validate(spec, strict=True).model_dump(by_alias=True, exclude_none=True)


def fill(schema: Schema, value: Any) -> Any:
    """The value with defaults filled in, as the API server does it."""
    if "properties" in schema:
        present = {**{k: s["default"] for k, s in schema["properties"].items() if "default" in s and k not in value}, **value}
        return {k: fill(schema["properties"][k], v) for k, v in present.items()}
    return [fill(schema["items"], v) for v in value] if "items" in schema else value


ABSENT = "prefill.replicas decode.replicas lmcache gateway slo scaling model.name model.configMapRef scaling.maxGPUs"


@pytest.mark.parametrize("path", ABSENT.split())
def test_absence_with_a_meaning_has_no_default(path: str) -> None:
    assert "default" not in dict(NODES)[f"PDDeployment.spec.{path}"]


def test_replicas_of_a_pool_have_no_default_and_are_optional() -> None:
    spec = root("PDPool")["properties"]["spec"]
    assert "default" not in spec["properties"]["replicas"]
    assert spec["required"] == ["role", "deploymentName"]


FIELDS = """
    suspend model.uri model.name model.configMapRef.name engine.type engine.version engine.image engine.args engine.env
    handoff.connector handoff.onFailure handoff.leaseDuration prefill.replicas prefill.parallelism.tensor
    prefill.parallelism.pipeline
    prefill.parallelism.data prefill.parallelism.expert prefill.nodes prefill.resources prefill.args prefill.env prefill.template
    decode.template lmcache.version lmcache.image lmcache.l1Size lmcache.chunkSize lmcache.transfer lmcache.p2p.enabled router.type
    router.version router.image router.replicas router.args router.template gateway.parentRefs gateway.hostnames
    placement.transferDomain.topologyKey placement.transferDomain.mode placement.maxDomains placement.schedulingTimeout slo.ttft
    slo.ttftPerThousandTokens slo.itl slo.percentile scaling.mode scaling.maxGPUs scaling.priority scaling.prefill.minReplicas
    scaling.decode.maxReplicas backpressure.maxQueueTime rollout.type rollout.maxSurge rollout.maxUnavailable rollout.paused
    rollout.restartID rollout.progressDeadlineSeconds rollout.drainTimeout verification"""


@pytest.mark.parametrize("path", FIELDS.split())
def test_field_exists(path: str) -> None:
    """Every field of the design is in the schema from the start, whether its feature is built or not."""
    assert f"PDDeployment.spec.{path}" in dict(NODES)


def test_owned_flags_and_variables_of_every_program_are_in_the_rules() -> None:
    rules = {r["message"].split(":")[0] + r["rule"] for r in root("PDDeployment")["properties"]["spec"][VALIDATIONS]}
    for fields, selector, flags, env in (
        (("engine", "prefill", "decode"), "self.engine.type != 'vllm'", vllm.OWNED_FLAGS, vllm.OWNED_ENV),
        (("router",), "self.router.type != 'smg'", smg.OWNED_FLAGS, ()),
        (("router",), "self.router.type != 'vllm-router'", vllm_router.OWNED_FLAGS, ()),
    ):
        for field in fields:
            for what, names in (("args", flags), ("env", env)):
                assert all(
                    any(f"'{name}'" in rule and selector in rule and rule.startswith(f"{field}.{what}") for rule in rules)
                    for name in names
                )


def test_owned_flags_are_spelt_as_the_renderer_spells_them() -> None:
    """The CEL rule normalises an argument as flag_of does; a name in another spelling would never match."""
    for flag in vllm.OWNED_FLAGS | smg.OWNED_FLAGS | vllm_router.OWNED_FLAGS:
        assert flag_of(flag) == flag
        assert re.fullmatch(r"-[a-z-]+", flag)


def test_a_union_or_an_unknown_keyword_is_an_error() -> None:
    class Union(Model):
        """Two types."""

        field: int | bool = Field(description="Either.")

    class Keyword(Model):
        """A keyword that OpenAPI v3 structural schemas do not have."""

        field: Annotated[int, Field(multiple_of=2)] = Field(description="Even.")

    with pytest.raises(ValueError, match="field: a union of 2 types"):
        structural(Union)
    with pytest.raises(ValueError, match="multipleOf"):
        structural(Keyword)


def test_generation_is_deterministic() -> None:
    assert json.dumps(crdgen.crds()) == json.dumps(crdgen.crds())
