"""Stored form: a manifest as the API server writes it, where that differs from how it was sent.

An unchanged object is recognised by a hash of what was sent (core/revision.py). A new process has only what is stored, so both are
hashed in this form: quantities of pods (`1` is stored as "1", `0.5` as "500m") and empty variables (stored without a value).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import ROUND_CEILING, Decimal
from functools import lru_cache
from operator import is_
from typing import Any, Final

from pd_operator.api.scalars import quantity
from pd_operator.core.names import DEPLOYMENT_KIND, GROUP_KIND

_BINARY: Final = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_PODS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    DEPLOYMENT_KIND: (("spec", "template", "spec"),),
    GROUP_KIND: tuple(("spec", "leaderWorkerTemplate", part, "spec") for part in ("leaderTemplate", "workerTemplate")),
}
_MILLI: Final = Decimal("0.001")
_DECIMAL: Final = {-3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}


def stored_form(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """A manifest in stored form: another one only where it differs. Nothing but the pods of workloads is looked at."""
    paths = _PODS.get(manifest.get("kind", ""), ())
    for path in paths:
        manifest = _at(manifest, path)
    return manifest


def _at(value: Mapping[str, Any], path: tuple[str, ...]) -> Mapping[str, Any]:
    """The value with the pod spec at a path in stored form."""
    key, rest = path[0], path[1:]
    before = value.get(key)
    if not isinstance(before, Mapping):
        return value
    after = _at(before, rest) if rest else _with(before, _POD)
    return value if after is before else {**value, key: after}


def _with(value: Mapping[str, Any], forms: Mapping[str, Callable[[Any], Any]]) -> Mapping[str, Any]:
    """The value with these fields in stored form; itself where they are."""
    changed = {key: form for key, make in forms.items() if key in value and (form := make(value[key])) is not value[key]}
    return {**value, **changed} if changed else value


def _each(form: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The form of a list."""

    def make(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        items = [form(item) if isinstance(item, Mapping) else item for item in value]
        return value if all(map(is_, items, value)) else items

    return make


def _inside(**forms: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The form of an object with these fields."""
    return lambda value: _with(value, forms) if isinstance(value, Mapping) else value


def _amounts(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    amounts = {name: stored_quantity(amount) for name, amount in value.items()}
    return value if amounts == value else amounts


def _variable(value: Mapping[str, Any]) -> Mapping[str, Any]:
    plain = {k: v for k, v in value.items() if k != "value"} if value.get("value") == "" else value
    return _with(plain, {"valueFrom": _inside(resourceFieldRef=_inside(divisor=stored_quantity))})


@lru_cache(maxsize=4096)
def stored_quantity(value: Any) -> Any:
    """A quantity as the server writes it: whole thousandths, rounded up (kubernetes/pkg/apis/core/v1/defaults.go), in the form of
    apimachinery (resource/quantity.go, CanonicalizeBytes). Anything else, exponents too, stays as it is."""
    text = str(value).strip()
    try:
        number = quantity(text)
    except ValueError:
        return value
    if "e" in text or "E" in text or isinstance(value, bool):
        return value
    number = number.quantize(_MILLI, ROUND_CEILING)
    if not number:
        return "0"
    if text.endswith("i") and number >= 1024 and number == int(number):
        whole, power = int(number), 0
        while whole % 1024 == 0 and power < len(_BINARY) - 1:
            whole, power = whole // 1024, power + 1
        return f"{whole}{_BINARY[power]}"
    _, digits, exponent = number.normalize().as_tuple()
    if not isinstance(exponent, int):
        return value
    mantissa = int("".join(map(str, digits)))
    mantissa, exponent = mantissa * 10 ** (exponent % 3), exponent - exponent % 3
    return f"{mantissa}{_DECIMAL[exponent]}" if exponent in _DECIMAL and number > 0 else value


_resources = _inside(limits=_amounts, requests=_amounts)
_containers = _each(_inside(resources=_resources, env=_each(_variable)))
_POD: Final[Mapping[str, Callable[[Any], Any]]] = {
    "containers": _containers,
    "initContainers": _containers,
    "volumes": _each(
        _inside(
            emptyDir=_inside(sizeLimit=stored_quantity),
            ephemeral=_inside(volumeClaimTemplate=_inside(spec=_inside(resources=_resources))),
        )
    ),
    "resources": _resources,
    "overhead": _amounts,
}
