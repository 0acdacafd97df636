"""Laying the user's partial pod template over ours: lists merge by name, tolerations append, null takes away."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.render.model import locate
from pd_operator.render.template import merge, merge_env

OURS: dict[str, Any] = {
    "metadata": {"labels": {"a": "1"}},
    "spec": {
        "terminationGracePeriodSeconds": 53,
        "securityContext": {"runAsUser": 65532, "runAsNonRoot": True},
        "topologySpreadConstraints": [{"maxSkew": 1}],
        "volumes": [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "emptyDir": {}}],
        "containers": [
            {
                "name": "engine",
                "image": "e",
                "env": [{"name": "HOME", "value": "/tmp"}, {"name": "IP", "valueFrom": {"fieldRef": {}}}],
                "ports": [{"name": "http", "containerPort": 8000}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, {"name": "cache", "mountPath": "/cache"}],
                "resources": {"limits": {"nvidia.com/gpu": 1}},
                "livenessProbe": {"httpGet": {"path": "/health"}, "periodSeconds": 10},
            }
        ],
    },
}
NOTHING: dict[str, Any] = {}


def engine(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def merged(theirs: dict[str, Any]) -> Any:
    before = copy.deepcopy((OURS, theirs))
    result = merge(OURS, theirs)
    assert (OURS, theirs) == before  # neither side is changed
    return result


def at(value: Any, *path: str | int) -> Any:
    for part in path:
        value = value[part]
    return value


CASES: dict[str, tuple[dict[str, Any], tuple[str | int, ...], Any]] = {
    "label is added": ({"metadata": {"labels": {"b": "2"}}}, ("metadata", "labels"), {"a": "1", "b": "2"}),
    "annotations are made": ({"metadata": {"annotations": {"x": "y"}}}, ("metadata", "annotations"), {"x": "y"}),
    "scalar wins": ({"spec": {"terminationGracePeriodSeconds": 9}}, ("spec", "terminationGracePeriodSeconds"), 9),
    "object merges": (
        {"spec": {"securityContext": {"runAsUser": 1000}}},
        ("spec", "securityContext"),
        {"runAsUser": 1000, "runAsNonRoot": True},
    ),
    "volume is replaced whole": (
        {"spec": {"volumes": [{"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}]}},
        ("spec", "volumes"),
        [{"name": "tmp", "emptyDir": {}}, {"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}],
    ),
    "variable is replaced whole": (
        engine(env=[{"name": "HOME", "valueFrom": {"secretKeyRef": {}}}]),
        ("spec", "containers", 0, "env", 0),
        {"name": "HOME", "valueFrom": {"secretKeyRef": {}}},
    ),
    "variable is added last": (
        engine(env=[{"name": "X", "value": "1"}]),
        ("spec", "containers", 0, "env", 2),
        {"name": "X", "value": "1"},
    ),
    "mount is replaced by its path": (
        engine(volumeMounts=[{"name": "other", "mountPath": "/cache"}]),
        ("spec", "containers", 0, "volumeMounts", 1),
        {"name": "other", "mountPath": "/cache"},
    ),
    "port without a name is added": (
        engine(ports=[{"containerPort": 1}]),
        ("spec", "containers", 0, "ports"),
        [{"name": "http", "containerPort": 8000}, {"containerPort": 1}],
    ),
    "resource is added": (
        engine(resources={"limits": {"memory": "1Gi"}}),
        ("spec", "containers", 0, "resources", "limits"),
        {"nvidia.com/gpu": 1, "memory": "1Gi"},
    ),
    "handler replaces handler": (
        engine(livenessProbe={"exec": {"command": ["true"]}}),
        ("spec", "containers", 0, "livenessProbe"),
        {"periodSeconds": 10, "exec": {"command": ["true"]}},
    ),
    "probe keeps its handler": (
        engine(livenessProbe={"periodSeconds": 3}),
        ("spec", "containers", 0, "livenessProbe"),
        {"httpGet": {"path": "/health"}, "periodSeconds": 3},
    ),
    "container is added": (
        {"spec": {"containers": [{"name": "mine", "image": "m"}]}},
        ("spec", "containers", 1),
        {"name": "mine", "image": "m"},
    ),
    "init containers are made": (
        {"spec": {"initContainers": [{"name": "first", "image": "f"}]}},
        ("spec", "initContainers"),
        [{"name": "first", "image": "f"}],
    ),
    "tolerations are made": ({"spec": {"tolerations": [{"key": "k"}]}}, ("spec", "tolerations"), [{"key": "k"}]),
    "other lists are replaced": (
        {"spec": {"topologySpreadConstraints": [{"maxSkew": 2}]}},
        ("spec", "topologySpreadConstraints"),
        [{"maxSkew": 2}],
    ),
    "node selector": ({"spec": {"nodeSelector": {"a": "b"}}}, ("spec", "nodeSelector"), {"a": "b"}),
}


@pytest.mark.parametrize(("theirs", "path", "expected"), CASES.values(), ids=CASES)
def test_merge(theirs: dict[str, Any], path: tuple[str | int, ...], expected: Any) -> None:
    assert at(merged(theirs), *path) == expected


def test_an_empty_template_changes_nothing() -> None:
    assert merged({}) == OURS
    assert merged({"metadata": {}, "spec": {"containers": []}}) == OURS


def test_null_takes_a_field_away() -> None:
    found = merged({"spec": {"topologySpreadConstraints": None, "containers": [{"name": "engine", "livenessProbe": None}]}})
    assert "topologySpreadConstraints" not in found["spec"]
    assert "livenessProbe" not in found["spec"]["containers"][0] and found["spec"]["containers"][0]["image"] == "e"


def test_tolerations_append_without_doubles() -> None:
    base = merge(OURS, {"spec": {"tolerations": [{"key": "a"}]}})
    for theirs in ([{"key": "b"}], [{"key": "a"}, {"key": "b"}]):
        assert merge(base, {"spec": {"tolerations": theirs}})["spec"]["tolerations"] == [{"key": "a"}, {"key": "b"}]


NAMES = st.sampled_from(["engine", "mine", "lmcache"])
TEMPLATES = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries({}, optional={"labels": st.dictionaries(st.sampled_from("ab"), st.sampled_from("12"))}),
        "spec": st.fixed_dictionaries(
            {},
            optional={
                "containers": st.lists(
                    st.fixed_dictionaries({"name": NAMES}, optional={"image": st.sampled_from("ef")}), max_size=3
                ),
                "tolerations": st.lists(st.fixed_dictionaries({"key": st.sampled_from("ab")}), max_size=3),
                "nodeSelector": st.dictionaries(st.sampled_from("ab"), st.sampled_from("12")),
            },
        ),
    },
)


@given(TEMPLATES)
def test_merging_the_same_twice_is_merging_it_once(theirs: dict[str, Any]) -> None:
    names = [c["name"] for c in theirs.get("spec", {}).get("containers", [])]
    if len(names) == len(set(names)):
        once = merge(OURS, theirs)
        assert merge(once, theirs) == once


def test_environment_layers() -> None:
    owned = [{"name": "IP", "value": "1"}]
    layers = [
        [{"name": "A", "value": "default"}, {"name": "B", "value": "default"}],
        [{"name": "A", "value": "engine"}, {"name": "IP", "value": "stolen"}],
        [{"name": "C", "value": "role"}, {"name": "A", "value": "role"}],
    ]
    assert merge_env(owned, *layers) == [
        {"name": "IP", "value": "1"},
        {"name": "A", "value": "role"},
        {"name": "B", "value": "default"},
        {"name": "C", "value": "role"},
    ]


@pytest.mark.parametrize(
    ("uri", "path", "source"),
    [
        ("hf://org/model", "org/model", None),
        ("/models/llama", "/models/llama", None),
        ("pvc://claim/a/b/", "/model/a/b", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("pvc://claim//", "/model", {"persistentVolumeClaim": {"claimName": "claim", "readOnly": True}}),
        ("oci://example.org/m:1", "/model", {"image": {"reference": "example.org/m:1", "pullPolicy": "Always"}}),
    ],
)
def test_where_the_model_is(uri: str, path: str, source: dict[str, Any] | None) -> None:
    model = locate(uri, "Always")
    assert model.path == path
    assert list(model.volumes) == ([{"name": "model", **source}] if source else [])
    assert list(model.mounts) == ([{"name": "model", "mountPath": "/model", "readOnly": True}] if source else [])
