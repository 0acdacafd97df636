"""The part of an object that our server-side applies own, from its managedFields: what we said, if nobody has changed it since.

A field that somebody else changes leaves our entry, and one that somebody removes is not there: either way the part is not what we
applied any more. What the server writes in another form than it was sent counts as changed too, but for core/stored_form.py.

Source of the format: sigs.k8s.io/structured-merge-diff/v6/fieldpath/serialize.go (f:name, k:{keys}, v:value, i:index, "." the item
itself; an empty object is a leaf).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

from pd_operator.core.names import APPLIED_HASH, GROUP_KIND
from pd_operator.core.revision import applied_hash, manifest_hash
from pd_operator.kube.client import FIELD_MANAGER


def intact(kind: str, api_version: str, obj: Mapping[str, Any]) -> bool:
    """Whether the object still holds exactly the manifest whose hash its annotation carries.

    Args:
        api_version: of the kind; items of lists leave it out.
    """
    claimed = (obj["metadata"].get("annotations") or {}).get(APPLIED_HASH)
    return bool(claimed) and owned_hash(kind, api_version, obj) == claimed


def owned_hash(kind: str, api_version: str, obj: Mapping[str, Any]) -> str:
    """Hash of the part that our applies own; "" where we own nothing."""
    meta = obj["metadata"]
    fields = _fields(kind, api_version, meta.get("managedFields") or ())
    part = _pick(obj, fields) if fields else None
    if not isinstance(part, dict):
        return ""
    if kind == "PDPool" and "replicas" in part.get("spec", {}):  # those of its creation, which the hash leaves out
        part = {**part, "spec": {k: v for k, v in part["spec"].items() if k != "replicas"}}
    metadata = {**part.get("metadata", {}), "name": meta["name"], "namespace": meta.get("namespace", "")}
    annotations = {k: v for k, v in metadata.pop("annotations", {}).items() if k != APPLIED_HASH}
    if annotations:
        metadata["annotations"] = annotations
    hashed = applied_hash if kind == GROUP_KIND else manifest_hash  # what is built in is in stored form already
    return hashed({**part, "apiVersion": api_version, "kind": kind, "metadata": metadata})


def _fields(kind: str, api_version: str, entries: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Fields of our one apply. A PDPool without bounds was created and never applied: then those of its creation."""
    ours = [e for e in entries if e.get("manager") == FIELD_MANAGER and not e.get("subresource")]
    mine = [e for e in ours if e.get("operation") == "Apply"]
    if not mine and kind == "PDPool":
        mine = [e for e in ours if e.get("operation") == "Update"]
    if len(mine) != 1 or mine[0].get("apiVersion") != api_version:
        return None
    return mine[0].get("fieldsV1") or None


def _pick(value: Any, fields: Mapping[str, Any]) -> Any:
    """The owned part of a value. Thousands of children go through it at a start: no generators here."""
    if not fields:
        return value
    if isinstance(value, dict):
        found = {}
        for key, sub in fields.items():
            if key[:2] == "f:" and (name := key[2:]) in value:
                found[name] = _pick(value[name], sub) if sub else value[name]
        return found
    return _items(value, fields) if isinstance(value, list) else value


def _items(value: list[Any], fields: Mapping[str, Any]) -> list[Any]:
    """The owned items of a list, in its order: an associative one, or a set."""
    wanted = [(_keys(key[2:]), sub) for key, sub in fields.items() if key[:2] == "k:"]
    values = {key[2:] for key in fields if key[:2] == "v:"}
    found = []
    for item in value:
        if isinstance(item, dict):
            for keys, sub in wanted:
                for name, part in keys:
                    if item.get(name) != part:
                        break
                else:
                    found.append(_pick(item, sub))
        elif json.dumps(item) in values:
            found.append(item)
    return found


@lru_cache(maxsize=4096)
def _keys(text: str) -> tuple[tuple[str, Any], ...]:
    return tuple(json.loads(text).items())
