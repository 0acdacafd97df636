"""I8: what a pod template may not hold is refused by field, value and what would be accepted; anything else is rendered."""

from __future__ import annotations

from typing import Any

import builders
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_i8_refusals import only, refusals

from pd_operator.api.conditions import Reason

CONTAINER = "spec.prefill.template.spec.containers[engine]"
TEMPLATES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown part": ({"status": {}}, "spec.prefill.template.status", "metadata and spec only"),
    "metadata of the wrong shape": ({"metadata": []}, "spec.prefill.template", "as in a PodTemplateSpec"),
    "spec of the wrong shape": ({"spec": None}, "spec.prefill.template", "as in a PodTemplateSpec"),
    **{
        f"label {label}": ({"metadata": {"labels": {label: "x"}}}, "spec.prefill.template.metadata.labels", "remove it")
        for label in (
            "app.kubernetes.io/managed-by",
            "app.kubernetes.io/component",
            "pdserve.dev/slice",
            "pdserve.dev/front",
            "llm-d.ai/role",
        )
    },
    "annotation of the handoff": (
        {"metadata": {"annotations": {"smg.ai/kv-connector": "MultiConnector"}}},
        "spec.prefill.template.metadata.annotations",
        "remove it",
    ),
    "annotation of ours": (
        {"metadata": {"annotations": {"pdserve.dev/x": "y"}}},
        "spec.prefill.template.metadata.annotations",
        "remove it",
    ),
    "labels taken away": ({"metadata": {"labels": None}}, "spec.prefill.template.metadata.labels", "an object"),
    "annotations taken away": ({"metadata": {"annotations": None}}, "spec.prefill.template.metadata.annotations", "an object"),
    **{
        f"pod field {key}": ({"spec": {key: value}}, f"spec.prefill.template.spec.{key}", "remove it")
        for key, value in {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "enableServiceLinks": True}.items()
    },
    **{
        f"container field {key}": ({"spec": {"containers": [{"name": "engine", key: "x"}]}}, f"{CONTAINER}.{key}", use)
        for key, use in {
            "image": "spec.engine.image",
            "command": "spec.engine.args",
            "args": "spec.engine.args",
            "lifecycle": "spec.rollout.drainTimeout",
        }.items()
    },
    "owned variable": (
        {"spec": {"containers": [{"name": "engine", "env": [{"name": "VLLM_PORT", "value": "1"}]}]}},
        f"{CONTAINER}.env",
        "set by the operator",
    ),
    "own container without an image": (
        {"spec": {"containers": [{"name": "mine"}]}},
        "spec.prefill.template.spec.containers[mine]",
        "needs an image; ours are engine",
    ),
    "server where there is none": (
        {"spec": {"initContainers": [{"name": "lmcache", "env": []}]}},
        "spec.prefill.template.spec.initContainers[lmcache]",
        "needs an image; ours are engine",
    ),
    "engine in the wrong list": (
        {"spec": {"initContainers": [{"name": "engine"}]}},
        "spec.prefill.template.spec.initContainers[engine]",
        "stand under containers",
    ),
    "containers taken away": ({"spec": {"containers": None}}, "spec.prefill.template.spec.containers", "a list of objects"),
    "containers without names": ({"spec": {"containers": [{}]}}, "spec.prefill.template.spec.containers", "each with name"),
    "volumes taken away": ({"spec": {"volumes": None}}, "spec.prefill.template.spec.volumes", "each with name"),
    "volumes of the wrong shape": ({"spec": {"volumes": ["x"]}}, "spec.prefill.template.spec.volumes", "each with name"),
    "tolerations of the wrong shape": (
        {"spec": {"tolerations": "x"}},
        "spec.prefill.template.spec.tolerations",
        "a list of objects",
    ),
    **{
        f"{key} taken away": ({"spec": {"containers": [{"name": "engine", key: None}]}}, f"{CONTAINER}.{key}", "a list of objects")
        for key in ("env", "ports", "volumeMounts", "envFrom")
    },
}


@pytest.mark.parametrize(("template", "field", "words"), TEMPLATES.values(), ids=TEMPLATES)
def test_templates(template: dict[str, Any], field: str, words: str) -> None:
    refusal = only({"prefill": {"template": template}})
    assert (refusal.reason, refusal.field) == (Reason.INVALID_SPEC, field)
    assert words in refusal.accepted


def test_fields_of_the_server_are_owned_too() -> None:
    server = {"name": "lmcache", "image": "x", "env": [{"name": "PYTHONHASHSEED", "value": "1"}]}
    found = refusals({"lmcache": {}, "decode": {"template": {"spec": {"initContainers": [server]}}}})
    here = "spec.decode.template.spec.initContainers[lmcache]"
    assert [(r.field, r.value) for r in found] == [(f"{here}.image", ""), (f"{here}.env", "PYTHONHASHSEED")]
    assert "spec.lmcache.image" in found[0].accepted


def test_router_template() -> None:
    found = only({"router": {"template": {"spec": {"containers": [{"name": "router", "image": "x"}]}}}})
    assert found.field == "spec.router.template.spec.containers[router].image" and "spec.router.image" in found.accepted


GOOD_TEMPLATE = {
    "metadata": {"labels": {"team": "a"}, "annotations": {"example.org/x": "y"}},
    "spec": {
        "nodeSelector": {"a": "b"},
        "serviceAccountName": "mine",
        "runtimeClassName": "nvidia",
        "tolerations": [{"operator": "Exists"}],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "topologySpreadConstraints": None,
        "containers": [
            {
                "name": "engine",
                "livenessProbe": None,
                "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                "ports": [{"containerPort": 1}],
            },
            {"name": "mine", "image": "example.org/mine:1", "command": ["x"], "args": ["--port"], "lifecycle": {}},
        ],
        "initContainers": [{"name": "lmcache", "resources": {}}, {"name": "first", "image": "example.org/first:1"}],
    },
}


def test_what_a_template_may_hold() -> None:
    assert refusals({"lmcache": {}, "prefill": {"template": GOOD_TEMPLATE}}) == []


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.sampled_from(["", "x", "engine", "lmcache", "name", "example.org/a:1"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "env", "value", "image", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
OF_A_CONTAINER = ("image", "env", "envFrom", "ports", "volumeMounts", "resources", "securityContext", "livenessProbe")
OF_A_POD = ("volumes", "tolerations", "imagePullSecrets", "nodeSelector", "affinity", "hostAliases", "securityContext")
CONTAINERS = st.lists(
    st.fixed_dictionaries(
        {"name": st.sampled_from(["engine", "lmcache", "mine"])},
        optional=dict.fromkeys(OF_A_CONTAINER, JSON),
    ),
    max_size=2,
)
POD = st.fixed_dictionaries(
    {},
    optional={
        "containers": CONTAINERS | JSON,
        "initContainers": CONTAINERS | JSON,
        **dict.fromkeys(OF_A_POD, JSON),
    },
)
TEMPLATE = st.fixed_dictionaries(
    {}, optional={"spec": POD | JSON, "metadata": st.fixed_dictionaries({}, optional={"labels": JSON, "annotations": JSON}) | JSON}
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEMPLATE, st.booleans())
def test_any_template_is_either_refused_in_words_or_rendered(template: dict[str, Any], cache: bool) -> None:
    """The schema lets any JSON through, so nothing that it holds may end in a traceback."""
    changes = {"prefill": {"template": template}, **({"lmcache": {"p2p": {"enabled": True}}} if cache else {})}
    found = refusals(changes)
    for refusal in found:
        assert refusal.field.startswith("spec.prefill.template") and refusal.accepted
    if not found:
        _, _, bundle = builders.rendered(changes)
        pod = next(t for n, t in builders.pod_specs(bundle).items() if n.endswith("-prefill"))
        assert pod["metadata"]["labels"]["pdserve.dev/role"] == "prefill"
        assert pod["metadata"]["annotations"]["smg.ai/kv-connector"] == "NixlConnector"
        assert builders.containers(pod)["engine"]["command"] == ["vllm"]
