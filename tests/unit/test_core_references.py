"""Objects that a spec names and that must exist: found wherever they may stand, each once, optional ones left out."""

from __future__ import annotations

from typing import Any

import pytest
from builders import make_spec

from pd_operator.core.references import references

SECRET, CONFIG, CLAIM = "Secret", "ConfigMap", "PersistentVolumeClaim"


def found(changes: dict[str, Any]) -> set[tuple[str, str, str]]:
    return {(r.kind, r.name, r.field) for r in references(make_spec(changes))}


def key(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "key": "k", **more}


def engine(**container: Any) -> dict[str, Any]:
    return {"prefill": {"template": {"spec": {"containers": [{"name": "engine", **container}]}}}}


def volume(**source: Any) -> dict[str, Any]:
    return {"decode": {"template": {"spec": {"volumes": [{"name": "v", **source}]}}}}


CASES: dict[str, tuple[dict[str, Any], set[tuple[str, str, str]]]] = {
    "none": ({}, set()),
    "claim of the model": ({"model": {"uri": "pvc://weights/a/b"}}, {(CLAIM, "weights", "spec.model.uri")}),
    "env of the engine": (
        {"engine": {"env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key("hf")}}]}},
        {(SECRET, "hf", "spec.engine.env[HF_TOKEN].secretKeyRef")},
    ),
    "env of a role": (
        {"decode": {"env": [{"name": "A", "valueFrom": {"configMapKeyRef": key("c")}}]}},
        {(CONFIG, "c", "spec.decode.env[A].configMapKeyRef")},
    ),
    "env in a template": (
        engine(env=[{"name": "A", "valueFrom": {"secretKeyRef": key("s")}}]),
        {(SECRET, "s", "spec.prefill.template.spec.containers.env.secretKeyRef")},
    ),
    "envFrom": (
        engine(envFrom=[{"secretRef": {"name": "s"}}, {"configMapRef": {"name": "c"}}]),
        {
            (SECRET, "s", "spec.prefill.template.spec.containers.envFrom.secretRef"),
            (CONFIG, "c", "spec.prefill.template.spec.containers.envFrom.configMapRef"),
        },
    ),
    "secret volume": (volume(secret={"secretName": "s"}), {(SECRET, "s", "spec.decode.template.spec.volumes[v].secret")}),
    "config volume": (volume(configMap={"name": "c"}), {(CONFIG, "c", "spec.decode.template.spec.volumes[v].configMap")}),
    "claim volume": (
        volume(persistentVolumeClaim={"claimName": "p"}),
        {(CLAIM, "p", "spec.decode.template.spec.volumes[v].persistentVolumeClaim")},
    ),
    "projected volume": (
        volume(projected={"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}, {"serviceAccountToken": {}}]}),
        {
            (SECRET, "s", "spec.decode.template.spec.volumes[v].projected.secret"),
            (CONFIG, "c", "spec.decode.template.spec.volumes[v].projected.configMap"),
        },
    ),
    "template of the router": (
        {"router": {"template": {"spec": {"volumes": [{"name": "v", "secret": {"secretName": "s"}}]}}}},
        {(SECRET, "s", "spec.router.template.spec.volumes[v].secret")},
    ),
    "fields of the pod": ({"engine": {"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}]}}, set()),
    "optional": (
        {
            "engine": {"env": [{"name": "A", "valueFrom": {"secretKeyRef": key("s", optional=True)}}]},
            **volume(secret={"secretName": "s", "optional": True}),
            **engine(envFrom=[{"configMapRef": {"name": "c", "optional": True}}]),
        },
        set(),
    ),
    "malformed templates name nothing": (
        {"prefill": {"template": {"spec": {"containers": "x", "volumes": [1, None]}}}, "decode": {"template": {"spec": None}}},
        set(),
    ),
}


@pytest.mark.parametrize(("changes", "expected"), CASES.values(), ids=CASES)
def test_references(changes: dict[str, Any], expected: set[tuple[str, str, str]]) -> None:
    assert found(changes) == expected


def test_each_object_once_under_its_first_field() -> None:
    env = [{"name": n, "valueFrom": {"secretKeyRef": key("s")}} for n in ("A", "B")]
    assert found({"engine": {"env": env}, "decode": {"env": env}}) == {(SECRET, "s", "spec.engine.env[A].secretKeyRef")}
