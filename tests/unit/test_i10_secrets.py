"""I10: no secret in status, events, rendered environment values or arguments; each test plants one and looks for it everywhere."""

from __future__ import annotations

import json
from typing import Any

import builders
import pytest
from builders import deep, make_snapshot, make_spec, rendered
from pydantic import ValidationError

from pd_operator.api.conditions import Reason
from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.compatibility import invalid, review
from pd_operator.core.diagnosis import diagnose
from pd_operator.core.names import ROLES
from pd_operator.core.observed import ContainerFact, PodFact
from pd_operator.core.plan import make_plan
from pd_operator.core.status import build_status, refused_status
from pd_operator.core.transitions import transitions
from pd_operator.upstream import catalog

SECRET = "hf_planted0123456789"
NAMES = ["HF_TOKEN", "VLLM_API_KEY", "DB_PASSWORD", "CLIENT_SECRET", "hf_token", "apikey"]
REFERENCE = {"secretKeyRef": {"name": "hf", "key": "token"}}


def literal(name: str) -> list[dict[str, Any]]:
    return [{"name": name, "value": SECRET}]


def in_container(kind: str, name: str, var: str) -> dict[str, Any]:
    return {"template": {"spec": {kind: [{"name": name, "image": "x", "env": literal(var)}]}}}


PLACES: dict[str, dict[str, Any]] = {
    "engine.env": {"engine": {"env": "@"}},
    "prefill.env": {"prefill": {"env": "@"}},
    "decode.env": {"decode": {"env": "@"}},
    "prefill.template containers": {"prefill": {"template": {"spec": {"containers": [{"name": "engine", "env": "@"}]}}}},
    "decode.template initContainers": {"decode": {"template": {"spec": {"initContainers": [{"name": "lmcache", "env": "@"}]}}}},
    "container of the user's own": {
        "decode": {"template": {"spec": {"containers": [{"name": "mine", "image": "example.org/mine:1", "env": "@"}]}}}
    },
    "router.template": {"router": {"template": {"spec": {"containers": [{"name": "router", "env": "@"}]}}}},
}


def plant(place: Any, env: list[dict[str, Any]]) -> Any:
    if isinstance(place, dict):
        return {key: plant(value, env) for key, value in place.items()}
    if isinstance(place, list):
        return [plant(item, env) for item in place]
    return env if place == "@" else place


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES)
def test_a_literal_secret_is_refused_wherever_it_stands(place: str, name: str) -> None:
    changes = deep({"lmcache": {}}, plant(PLACES[place], literal(name)))
    spec = make_spec(changes)
    found = review(spec, catalog.upstream(spec), builders.images(spec))
    assert [(r.reason, r.value) for r in found] == [(Reason.INVALID_SPEC, name)]
    assert found[0].field.endswith("env") and "valueFrom.secretKeyRef" in found[0].accepted
    snapshot = make_snapshot(spec)
    status = build_status(snapshot, make_plan(snapshot))
    assert SECRET not in json.dumps(status)
    assert SECRET not in json.dumps([e.note for e in transitions([], status["conditions"])])


@pytest.mark.parametrize("place", PLACES)
def test_a_reference_is_rendered_as_a_reference(place: str) -> None:
    changes = deep({"lmcache": {}}, plant(PLACES[place], [{"name": "HF_TOKEN", "valueFrom": REFERENCE}]))
    _, _, bundle = rendered(changes)
    seen = [
        var
        for pod in builders.pod_specs(bundle).values()
        for container in builders.containers(pod).values()
        for var in container.get("env", [])
        if var["name"] == "HF_TOKEN"
    ]
    assert seen and all(var == {"name": "HF_TOKEN", "valueFrom": REFERENCE} for var in seen)


@pytest.mark.parametrize("name", ["HF_TOKEN_PATH", "TOKENIZERS_PARALLELISM", "KEYBOARD", "SECRETARY", "NCCL_DEBUG"])
def test_names_that_only_look_alike_are_accepted(name: str) -> None:
    spec = make_spec({"engine": {"env": [{"name": name, "value": "x"}]}})
    assert review(spec, catalog.upstream(spec), builders.images(spec)) == []


FLAGS = [
    ("engine", f"--api-key={SECRET}", "VLLM_API_KEY"),
    ("prefill", f"--api_key={SECRET}", "VLLM_API_KEY"),
    ("decode", f"--api-k={SECRET}", "VLLM_API_KEY"),
    ("engine", f"--hf-token={SECRET}", "HF_TOKEN"),
    ("engine", f"--hf_tok={SECRET}", "HF_TOKEN"),
    ("router", f"--api-key={SECRET}", "in front of the Service"),
]


@pytest.mark.parametrize(("field", "flag", "instead"), FLAGS)
def test_a_secret_as_an_argument_is_refused_and_not_repeated(field: str, flag: str, instead: str) -> None:
    spec = make_spec({field: {"args": [flag]}})
    (refusal,) = review(spec, catalog.upstream(spec), builders.images(spec))
    assert refusal.reason is Reason.INVALID_SPEC and instead in refusal.accepted
    assert SECRET not in refusal.message and refusal.field == f"spec.{field}.args"


def test_both_words_of_a_flag() -> None:
    spec = make_spec({"engine": {"args": ["--hf-token", SECRET]}})
    (refusal,) = review(spec, catalog.upstream(spec), builders.images(spec))
    assert SECRET not in refusal.message


UNREADABLE: list[dict[str, Any]] = [
    {"engine": {"env": [{"name": "HF_TOKEN", "value": [SECRET]}]}},
    {"engine": {"env": [{"name": "HF_TOKEN", "value": SECRET * 1000}]}},
    {"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": SECRET}]}},
    {"engine": {"env": [SECRET]}},
    {"prefill": {"args": ["--hf-token=" + SECRET * 1000]}},
    {"decode": {"template": SECRET}},
]


@pytest.mark.parametrize("changes", UNREADABLE)
def test_an_unreadable_spec_does_not_show_what_may_be_a_secret(changes: dict[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        PDDeploymentSpec.model_validate(deep(builders.MINIMAL, changes))
    refusal = invalid(caught.value)
    assert SECRET not in refusal.message
    assert SECRET not in json.dumps(refused_status({}, refusal, 1, "pd-operator", builders.NOW))


def test_the_engines_key_reaches_the_router_that_needs_it_as_a_reference() -> None:
    """vllm-router replaces the client's Authorization by its own key; smg forwards it."""
    changes = {"engine": {"env": [{"name": "VLLM_API_KEY", "valueFrom": REFERENCE}]}}
    for kind, expected in (("vllm-router", [{"name": "OPENAI_API_KEY", "valueFrom": REFERENCE}]), ("smg", [])):
        _, _, bundle = rendered({**changes, "router": {"type": kind}})
        pod = next(p for n, p in builders.pod_specs(bundle).items() if n.endswith("-router"))
        env = builders.containers(pod)["router"]["env"]
        assert [var for var in env if "API_KEY" in var["name"]] == expected


def test_the_router_that_has_no_key_is_told_the_models_name_where_engines_ask_for_one() -> None:
    """Its look at an engine's /v1/models is refused then. Engines without a key are as they were."""
    keyed = {"engine": {"env": [{"name": "VLLM_API_KEY", "valueFrom": REFERENCE}]}, "model": {"name": "big"}}
    for changes, kind, expected in ((keyed, "smg", True), (keyed, "vllm-router", False), ({}, "smg", False)):
        _, _, bundle = rendered({**changes, "router": {"type": kind}})
        pods = builders.pod_specs(bundle)
        router = next(p for n, p in pods.items() if n.endswith("-router"))
        args = builders.containers(router)["router"]["args"]
        assert ("--model-id-from annotation:pdserve.dev/model" in " ".join(args)) is expected, args
        names = [p["metadata"]["annotations"].get("pdserve.dev/model") for n, p in pods.items() if not n.endswith("-router")]
        assert names == 2 * ["big" if changes else None], names


def test_engines_get_no_token_of_the_api_server() -> None:
    _, _, bundle = rendered({"lmcache": {"p2p": {"enabled": True}}})
    found = builders.by_name(bundle)
    assert found["ServiceAccount", "chat-engine"]["automountServiceAccountToken"] is False
    for name, pod in builders.pod_specs(bundle).items():
        assert pod["spec"]["automountServiceAccountToken"] is name.endswith("-router"), name


def test_a_router_may_list_and_watch_pods_and_nothing_else() -> None:
    _, _, bundle = rendered()
    found = builders.by_name(bundle)
    assert found["Role", "chat-router"]["rules"] == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "watch"]}]
    binding = found["RoleBinding", "chat-router"]
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "chat-router"}
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": "chat-router", "namespace": "demo"}]
    for name, pod in builders.pod_specs(bundle).items():
        account = "chat-router" if name.endswith("-router") else "chat-engine"
        assert pod["spec"]["serviceAccountName"] == account


def test_roles_are_named_as_in_the_spec() -> None:
    assert set(ROLES) == set(make_spec().roles)


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer abcdef0123456789",
        "using HF_TOKEN=hf_abcdefghijklmnop",
        "login with hf_abcdefghijklmnop failed",
        '{"api_key": "sk-abcdefghijklmnop"}',
        "password: correcthorse",
    ],
)
def test_a_program_that_names_its_credential_does_not_put_it_into_status(line: str) -> None:
    container = ContainerFact(
        "engine", waiting_reason="CrashLoopBackOff", restarts=3, exit_code=1, exit_message=f"start\n{line}\nend"
    )
    pod = PodFact("demo", "p", "u", scheduled=True, containers=(container,))
    found = diagnose([pod])
    assert found is not None
    assert "[redacted]" in found[1]
    for secret in ("abcdef0123456789", "abcdefghijklmnop", "correcthorse"):
        assert secret not in found[1]
