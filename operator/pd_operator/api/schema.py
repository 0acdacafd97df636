"""Pydantic models to structural OpenAPI v3, as a CustomResourceDefinition wants it.

Structural means: no $ref, every level has a type, no anyOf around it, no `additionalProperties` beside `properties`
(kubernetes/website content/en/docs/tasks/extend-kubernetes/custom-resources/custom-resource-definitions.md, "Specifying a
structural schema"). A keyword that this module does not know is an error, so that nothing reaches the CRD by accident.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, NoDefault
from pydantic_core import core_schema

Schema = dict[str, Any]

VALIDATIONS: Final = "x-kubernetes-validations"
INT_OR_STRING: Final = "x-kubernetes-int-or-string"
PRESERVE: Final = "x-kubernetes-preserve-unknown-fields"
_INT32: Final = 2**31 - 1
# Output order; anything else that pydantic may emit is refused.
_KEYS: Final = tuple(
    f"description type format {INT_OR_STRING} {PRESERVE} default enum minimum maximum minLength maxLength pattern minItems maxItems"
    " x-kubernetes-list-type x-kubernetes-list-map-keys minProperties maxProperties required properties additionalProperties items"
    f" {VALIDATIONS}".split()
)


class _WithFactories(GenerateJsonSchema):
    """Also shows what a default factory gives; a model as a default is `{}`, whose own defaults the server fills in."""

    def get_default_value(self, schema: core_schema.WithDefaultSchema) -> Any:
        if "default_factory" not in schema:
            return super().get_default_value(schema)
        factory: Any = schema["default_factory"]
        value = factory()
        return {} if isinstance(value, BaseModel) else value

    def encode_default(self, dft: Any) -> Any:
        return NoDefault if dft is None else super().encode_default(dft)


def structural(model: type[BaseModel], *, defaults: bool = True) -> Schema:
    """The structural schema of a model.

    Status takes `defaults=False`: what the server fills in would differ for ever from what the operator writes.

    Raises:
        ValueError: the model uses something that a structural schema cannot say.
    """
    raw = model.model_json_schema(by_alias=True, schema_generator=_WithFactories)
    return _Walk(raw.get("$defs", {}), defaults).node(raw, "")


class _Walk:
    """Resolves references and rewrites one node after the other; `path` is the field's path below the root."""

    def __init__(self, definitions: Mapping[str, Schema], defaults: bool) -> None:
        self.definitions = definitions
        self.defaults = defaults

    def node(self, raw: Schema, path: str) -> Schema:
        """One node and all below it."""
        node = self._plain(raw, path)
        if "properties" in node:
            node["properties"] = {name: self.node(child, _join(path, name)) for name, child in node["properties"].items()}
            node.pop("additionalProperties", None)  # extra="forbid" says false: what every structural object does anyway
        elif node.get("type") == "object":
            values = node.pop("additionalProperties", True)
            node.update({PRESERVE: True} if values is True else {"additionalProperties": self._item(values, f"{path}[*]")})
        if "items" in node:
            node["items"] = self._item(node["items"], f"{path}[*]")
        if node.get("type") == "integer":
            node["format"] = "int32" if node.get("maximum", _INT32 + 1) <= _INT32 else "int64"
        if VALIDATIONS in node:
            node[VALIDATIONS] = [{**rule, "message": _at(path, rule["message"])} for rule in node[VALIDATIONS]]
        if not self.defaults:
            node.pop("default", None)
        unknown = set(node) - set(_KEYS)
        if unknown:
            raise ValueError(f"{path or 'root'}: a structural schema has no {sorted(unknown)}")
        return {key: node[key] for key in _KEYS if key in node}

    def _item(self, raw: Schema, path: str) -> Schema:
        item = self.node(raw, path)
        item.setdefault("description", "An entry.")
        return {key: item[key] for key in _KEYS if key in item}

    def _plain(self, raw: Schema, path: str) -> Schema:
        """The node without references, null, titles and constants."""
        node = dict(raw)
        node.pop("$defs", None)
        node.pop("title", None)
        if "$ref" in node:
            target = self.definitions[node.pop("$ref").removeprefix("#/$defs/")]
            return self._plain({**target, **node}, path)
        if "anyOf" in node:
            kept = [branch for branch in node.pop("anyOf") if branch.get("type") != "null"]
            if len(kept) != 1:
                raise ValueError(f"{path}: a union of {len(kept)} types; a structural schema takes one")
            return self._plain({**kept[0], **node}, path)
        if "const" in node:
            node["enum"] = [node.pop("const")]
        if node.get("default", NoDefault) is None or node.get("default", NoDefault) is NoDefault:
            node.pop("default", None)
        return node


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _at(path: str, message: str) -> str:
    """The message with `{self}` replaced by the path; at the root it vanishes together with its dot."""
    return message.replace("{self}.", f"{path}." if path else "").replace("{self}", path)
