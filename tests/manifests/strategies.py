"""Hypothesis strategies made from the CRD's schema: valid specs, and specs with one fault that a schema can express.

Rules that only CEL knows are kept by construction (`_consistent`), because the models do not repeat them.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from pd_operator.api.crdgen import deployment_crd
from pd_operator.api.scalars import QUANTITY, seconds
from pd_operator.api.schema import INT_OR_STRING, PRESERVE, VALIDATIONS, Schema

SPEC: Schema = deployment_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
_ANYTHING = st.recursive(
    st.booleans() | st.integers(-5, 5) | st.text("abc é", max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["a", "b", "spec"]), inner, max_size=2),
    max_leaves=4,
)
_NAMES = st.sampled_from(["cpu", "memory", "nvidia.com/gpu", "amd.com/gpu", "hugepages-2Mi"])
FAULTS = (
    "wrong type", "beyond minimum", "beyond maximum", "not in enum", "too long", "too short", "against the pattern",
    "neither number nor pattern", "too many", "twice", "unknown field", "without a required field", "too many keys", "too few keys",
)  # fmt: skip
_PATTERN = re.compile(r"self\.matches\(r'(.*?)'\)")


@functools.cache
def specs() -> st.SearchStrategy[dict[str, Any]]:
    """Specs that the server accepts."""
    return _value(SPEC, "spec").map(_consistent)


def _value(schema: Schema, path: str) -> st.SearchStrategy[Any]:
    """Values that the schema of one node accepts."""
    if INT_OR_STRING in schema:
        return _int_or_string(schema)
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    kinds: dict[str, Callable[[Schema, str], st.SearchStrategy[Any]]] = {
        "boolean": lambda *_: st.booleans(),
        "integer": lambda node, _: st.integers(node["minimum"], node["maximum"]),
        "string": lambda node, _: _string(node),
        "array": _array,
        "object": _object,
    }
    return kinds[schema["type"]](schema, path)


def _int_or_string(schema: Schema) -> st.SearchStrategy[Any]:
    if QUANTITY in schema[VALIDATIONS][0]["rule"]:
        return st.integers(0, 64) | st.integers(0, 64).map(str)
    return st.integers(0, 10000) | st.integers(0, 100).map(lambda n: f"{n}%")


def _string(schema: Schema) -> st.SearchStrategy[str]:
    rule = "".join(r["rule"] for r in schema.get(VALIDATIONS, []))
    bounds = re.findall(r"duration\('(.*?)'\)", rule)
    if bounds:
        low, high = (round(seconds(bound) * 1000) for bound in bounds)
        return st.integers(low, high).map(lambda ms: f"{ms // 1000}s" if ms % 1000 == 0 else f"{ms // 1000}s{ms % 1000}ms")
    if "quantity(self)" in rule:
        return st.integers(1, 16 * 1024).map(lambda gib: f"{gib}Gi")
    pattern = _PATTERN.search(rule)
    if pattern is None:
        return st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=schema.get("minLength", 0), max_size=20)
    text = st.from_regex(pattern[1].removeprefix("^").removesuffix("$"), fullmatch=True, alphabet=st.characters(codec="ascii"))
    return text.filter(lambda s: schema.get("minLength", 0) <= len(s) <= schema["maxLength"])


def _array(schema: Schema, path: str) -> st.SearchStrategy[list[Any]]:
    key = {"map": lambda item: item["name"], "set": lambda item: item}.get(schema["x-kubernetes-list-type"])
    return st.lists(_value(schema["items"], f"{path}[]"), max_size=3, unique_by=key)


def _object(schema: Schema, path: str) -> st.SearchStrategy[dict[str, Any]]:
    if PRESERVE in schema:
        one = schema.get("maxProperties")
        keys = st.sampled_from(["secretKeyRef", "fieldRef"]) if one else st.sampled_from(["metadata", "spec"])
        return st.dictionaries(keys, _ANYTHING, min_size=schema.get("minProperties", 0), max_size=one or 2)
    if "additionalProperties" in schema:
        return st.dictionaries(_NAMES, _value(schema["additionalProperties"], f"{path}[*]"), min_size=1, max_size=3)
    required = schema.get("required", [])
    fields = {name: _value(child, f"{path}.{name}") for name, child in schema["properties"].items()}
    return st.fixed_dictionaries(
        {name: fields[name] for name in required}, optional={name: s for name, s in fields.items() if name not in required}
    )


def _consistent(spec: dict[str, Any]) -> dict[str, Any]:
    """The spec with what only CEL refuses put right."""
    for name in ("prefill", "decode"):
        spec[name]["resources"] = {"limits": spec[name]["resources"].get("limits", {"nvidia.com/gpu": 1})}
        if "scaling" in spec:
            spec[name].pop("replicas", None)
            bounds = spec["scaling"][name]
            bounds["maxReplicas"] = max(bounds["maxReplicas"], bounds.get("minReplicas", 1))
    for holder in (spec["engine"], spec["prefill"], spec["decode"], spec.get("router", {})):
        if "args" in holder:
            holder["args"] = [arg.lstrip("-") or "x" for arg in holder["args"]]
        for var in holder.get("env", []):
            var["name"] += "_"
            if "value" in var:
                var.pop("valueFrom", None)
    if "gateway" in spec:
        spec["gateway"]["parentRefs"] = spec["gateway"].get("parentRefs") or [{"name": "public"}]
    if str(spec.get("rollout", {}).get("maxSurge")) in ("0", "0%"):
        spec["rollout"]["maxSurge"] = 1
    return spec


@dataclass(frozen=True)
class Spot:
    """A node of the schema at which a spec has a value: `holder[key]` is that value."""

    path: str
    schema: Schema
    holder: Any
    key: Any


def spots(value: Any, schema: Schema = SPEC, path: str = "spec") -> Iterator[Spot]:
    """All nodes below a value, in a fixed order."""
    if "properties" in schema:
        inside = [(key, schema["properties"][key]) for key in value]
    elif "additionalProperties" in schema:
        inside = [(key, schema["additionalProperties"]) for key in value]
    elif "items" in schema:
        inside = [(index, schema["items"]) for index in range(len(value))]
    else:
        return
    for key, child in inside:
        yield Spot(f"{path}.{key}", child, value, key)
        yield from spots(value[key], child, f"{path}.{key}")


@st.composite
def faulty(draw: st.DrawFn, name: str) -> tuple[dict[str, Any], str]:
    """A spec with one fault of this name (one of FAULTS), and where it is."""
    spec = copy.deepcopy(draw(specs()))
    found = [(spot, fault) for spot in spots(spec) for called, fault in _faults(spot) if called == name]
    assume(found)
    spot, fault = found[draw(st.integers(0, len(found) - 1))]
    fault(draw)
    return spec, spot.path


def _faults(spot: Spot) -> Iterator[tuple[str, Callable[[st.DrawFn], None]]]:
    """Faults that a node can have, by name."""
    schema = spot.schema

    def put(*values: Any) -> Callable[[st.DrawFn], None]:
        def change(draw: st.DrawFn) -> None:
            spot.holder[spot.key] = draw(st.sampled_from(values))

        return change

    yield "wrong type", put(*_wrong(schema))
    for bound, step in (("minimum", -1), ("maximum", 1)):
        if bound in schema:
            yield f"beyond {bound}", put(schema[bound] + step)
    if "enum" in schema:
        yield "not in enum", put("", "None", f"{schema['enum'][0]} ")
    elif schema.get("type") == "string":
        yield "too long", put("1" * (schema["maxLength"] + 1))
        if VALIDATIONS in schema and any("matches" in rule["rule"] for rule in schema[VALIDATIONS]):
            yield "against the pattern", put("a b", "\u00e9", "1\n", "a\u00a0b")
        if schema.get("minLength"):
            yield "too short", put("")
    elif INT_OR_STRING in schema:
        yield "neither number nor pattern", put(-1, "many", "1 %", "-1", "1e3", 10**16)
    if "items" in schema:
        yield from _list_faults(spot, put)
    if "properties" in schema:
        yield "unknown field", put({**spot.holder[spot.key], "unknown": 1})
        for name in schema.get("required", []):
            yield "without a required field", put({k: v for k, v in spot.holder[spot.key].items() if k != name})
    if schema.get("maxProperties"):
        yield "too many keys", put({f"k{n}": 1 for n in range(schema["maxProperties"] + 1)})
    if schema.get("minProperties"):
        yield "too few keys", put({})


def _list_faults(spot: Spot, put: Callable[..., Callable[[st.DrawFn], None]]) -> Iterator[tuple[str, Callable[[st.DrawFn], None]]]:
    present = spot.holder[spot.key]
    if present:
        yield "too many", put([*present, *present * spot.schema["maxItems"]])
        if spot.schema["x-kubernetes-list-type"] != "atomic":
            yield "twice", put([*present, present[0]])


def _wrong(schema: Schema) -> list[Any]:
    """Values of every type but the node's own; null and floats are told apart elsewhere, the server rewrites both."""
    samples: dict[str, Any] = {"string": "x", "integer": 1, "boolean": True, "array": [1], "object": {"x": 1}}
    own = ("string", "integer") if INT_OR_STRING in schema else (schema["type"],)
    return [value for kind, value in samples.items() if kind not in own]
