"""Objects that a spec names and that must exist before anything is made from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pd_operator.api.types import EnvVar, PDDeploymentSpec
from pd_operator.core.compatibility_model import FIELD as MODEL
from pd_operator.core.snapshot import Reference


def references(spec: PDDeploymentSpec) -> tuple[Reference, ...]:
    """Secrets, ConfigMaps and PersistentVolumeClaims that the pods cannot start without, each once."""
    found: dict[tuple[str, str], Reference] = {}
    for reference in _all(spec):
        found.setdefault((reference.kind, reference.name), reference)
    return tuple(found.values())


def _all(spec: PDDeploymentSpec) -> Iterator[Reference]:
    if spec.model.uri.startswith("pvc://"):
        yield Reference("PersistentVolumeClaim", spec.model.uri.removeprefix("pvc://").split("/")[0], "spec.model.uri")
    if spec.model.config_map_ref is not None and spec.model.config_map_ref.name:
        yield Reference("ConfigMap", spec.model.config_map_ref.name, MODEL)
    yield from _env("spec.engine.env", spec.engine.env)
    for name, role in spec.roles.items():
        yield from _env(f"spec.{name}.env", role.env)
        yield from _template(f"spec.{name}.template", role.template)
    yield from _template("spec.router.template", spec.router.template)


def _env(field: str, env: Iterable[EnvVar]) -> Iterator[Reference]:
    for var in env:
        yield from _source(f"{field}[{var.name}]", var.value_from or {})


def _source(field: str, source: Mapping[str, Any]) -> Iterator[Reference]:
    for key, kind in (
        ("secretKeyRef", "Secret"),
        ("configMapKeyRef", "ConfigMap"),
        ("secretRef", "Secret"),
        ("configMapRef", "ConfigMap"),
    ):
        selector = _dict(source.get(key))
        if selector.get("name") and not selector.get("optional"):
            yield Reference(kind, str(selector["name"]), f"{field}.{key}")


def _template(field: str, template: Mapping[str, Any]) -> Iterator[Reference]:
    pod = _dict(template.get("spec"))
    for kind in ("initContainers", "containers"):
        for container in _dicts(pod.get(kind)):
            for var in _dicts(container.get("env")):
                yield from _source(f"{field}.spec.{kind}.env", _dict(var.get("valueFrom")))
            for source in _dicts(container.get("envFrom")):
                yield from _source(f"{field}.spec.{kind}.envFrom", source)
    for volume in _dicts(pod.get("volumes")):
        yield from _volume(f"{field}.spec.volumes[{volume.get('name')}]", volume)


def _volume(field: str, volume: Mapping[str, Any]) -> Iterator[Reference]:
    for key, name_key, kind in (
        ("secret", "secretName", "Secret"),
        ("configMap", "name", "ConfigMap"),
        ("persistentVolumeClaim", "claimName", "PersistentVolumeClaim"),
    ):
        source = _dict(volume.get(key))
        if source.get(name_key) and not source.get("optional"):
            yield Reference(kind, str(source[name_key]), f"{field}.{key}")
    for source in _dicts(_dict(volume.get("projected")).get("sources")):
        for key, kind in (("secret", "Secret"), ("configMap", "ConfigMap")):
            part = _dict(source.get(key))
            if part.get("name") and not part.get("optional"):
                yield Reference(kind, str(part["name"]), f"{field}.projected.{key}")


def _dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _dicts(value: Any) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []
