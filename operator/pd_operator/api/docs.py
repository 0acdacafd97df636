"""docs/reference/api.md, from the CRDs."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any, Final

from pd_operator.api.crdgen import PROGRAMS, crds
from pd_operator.api.schema import INT_OR_STRING, PRESERVE, VALIDATIONS, Schema

_INTRO: Final = """\
<!-- Generated from the CRDs by `make generate`; do not edit. -->
# API reference

Both kinds are namespaced and belong to the group `pdserve.dev`, version `v1alpha1`. Users write `PDDeployment`; the operator
makes the `PDPool` objects. The API server checks every rule on this page when an object is applied. What depends on
versions, images or other objects is checked by the operator, and shown as the condition `Accepted`.
"""
_BOUNDS: Final = (
    ("minimum", "at least {}"),
    ("maximum", "at most {}"),
    ("maxLength", "at most {} characters"),
    ("maxItems", "at most {} entries"),
    ("maxProperties", "at most {} keys"),
)
_OBVIOUS: Final = 64  # a length that a rule already implies is not worth a line


def markdown() -> str:
    """The whole page."""
    return "\n".join([_INTRO, *(line for crd in crds() for line in _kind(crd)), *_owned()])


def _owned() -> Iterator[str]:
    """Flags and variables that are refused."""
    yield "## Flags and variables that are refused\n"
    yield "The operator sets these itself, from other fields of spec. A flag is refused in every spelling: with `=`, with"
    yield "underscores for dashes, and with a dotted key.\n"
    yield "| Where | Program | Set by the operator | Refused for another reason |\n|---|---|---|---|"
    for program in PROGRAMS:
        forbidden = "; ".join(f"`{flag}`: {reason}" for flag, reason in program.forbidden)
        fields = " ".join(f"`{field}.args`" for field in program.fields)
        yield f"| {fields} | {program.value} | {_code(program.flags)} | {forbidden} |"
        if program.env:
            yield f"| {fields.replace('args', 'env')} | {program.value} | {_code(program.env)} | |"
    yield ""


def _code(names: Collection[str]) -> str:
    return " ".join(f"`{name}`" for name in sorted(names))


def _kind(crd: dict[str, Any]) -> Iterator[str]:
    names, version = crd["spec"]["names"], crd["spec"]["versions"][0]
    root = version["schema"]["openAPIV3Schema"]
    yield f"## {names['kind']}\n"
    yield f"{root['description']}\n"
    short, category = names["shortNames"][0], names["categories"][0]
    scale = " It has the subresource `/scale`." if "scale" in version["subresources"] else ""
    yield f"`kubectl get {short}` lists them, `kubectl get {category}` lists both kinds.{scale}\n"
    yield from (f"* {_cell(rule['message'])}" for rule in root[VALIDATIONS])
    yield "\n| Column | Shows |\n|---|---|"
    for column in version["additionalPrinterColumns"]:
        wide = " (with `-o wide`)" if column.get("priority") else ""
        yield f"| {column['name']} | {_cell(column['description'])}{wide} |"
    yield ""
    seen: dict[str, str] = {}
    for name in ("spec", "status"):
        yield from _object(names["kind"], name, root["properties"][name], seen)


def _object(kind: str, path: str, schema: Schema, seen: dict[str, str]) -> Iterator[str]:
    """One object's heading, rules and table, then those of the objects inside it."""
    yield f"### {kind} `{path}`\n"
    yield f"{_cell(schema['description'])}\n"
    inside = {f"{path}.{name}": child for name, child in schema["properties"].items()}
    body = "\n".join([*_rules(schema), "| Field | Type | Default | Description |", "|---|---|---|---|", *_rows(path, schema)])
    same = seen.setdefault(body.replace(path.removeprefix("spec."), "@"), path)
    if same != path:
        yield f"The same fields as `{same}`.\n"
        return
    yield f"{body}\n"
    for name, child in inside.items():
        item = child.get("items", child)
        if "properties" in item:
            yield from _object(kind, name if item is child else f"{name}[]", item, seen)


def _rules(schema: Schema) -> list[str]:
    """Rules about the object as a whole, one bullet each; those about flags and variables have a section of their own."""
    found = [f"* {_cell(rule['message'])}" for rule in schema.get(VALIDATIONS, []) if "fieldPath" not in rule]
    return [*found, ""] if found else []


def _rows(path: str, schema: Schema) -> Iterator[str]:
    required = schema.get("required", [])
    for name, child in schema["properties"].items():
        default = "required" if name in required else _default(child)
        accepted = (
            [] if path.startswith("status") else _accepted(f"{path}.{name}".removeprefix("spec.").replace("[]", "[*]"), child)
        )
        yield f"| `{name}` | {_type(child)} | {default} | {_cell(' '.join([child['description'], *accepted]))} |"


def _type(schema: Schema) -> str:
    if INT_OR_STRING in schema:
        return "integer or string"
    if "items" in schema:
        return f"list of {_type(schema['items'])}s"
    if "additionalProperties" in schema:
        return f"map to {_type(schema['additionalProperties'])}"
    return str(schema.get("format") if schema.get("format") == "date-time" else schema["type"])


def _default(schema: Schema) -> str:
    if "default" not in schema or schema["default"] in ("", [], {}):
        return ""
    return f"`{json.dumps(schema['default'])}`" if not isinstance(schema["default"], str) else f"`{schema['default']}`"


def _accepted(path: str, schema: Schema) -> Iterator[str]:
    """What the server accepts, in sentences."""
    items: Schema = schema.get("items") or schema.get("additionalProperties") or {}
    if PRESERVE in schema:
        yield "One key, with any content." if schema.get("maxProperties") == 1 else "Any content."
    else:
        bounds, each = _bounds(schema), _bounds(items)
        if bounds:
            yield f"{', '.join(bounds).capitalize()}{'; each ' + ', '.join(each) if each else ''}."
    own = [] if "properties" in schema else [rule["message"] for rule in schema.get(VALIDATIONS, [])]
    yield from (_sentence(text.removeprefix(path)) for text in own)
    inner = [] if "properties" in items else [rule["message"] for rule in items.get(VALIDATIONS, [])]
    yield from (_sentence(f"each {text.removeprefix(f'{path}[*]').lstrip()}") for text in inner)


def _sentence(text: str) -> str:
    text = text.lstrip(": ")
    return f"{text[0].upper()}{text[1:]}."


def _bounds(schema: Schema) -> list[str]:
    small = VALIDATIONS in schema and schema.get("maxLength", 0) <= _OBVIOUS
    return [text.format(schema[key]) for key, text in _BOUNDS if key in schema and not (key == "maxLength" and small)]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
