"""The part of an object that our server-side applies own, from its managedFields: what we said, if nobody has changed it since.

A field that somebody else changes leaves our entry, and one that somebody removes is not there: either way the part is not what we
applied any more. What the server writes in another form than it was sent (a quantity, an empty value) counts as changed too.

Source of the format: sigs.k8s.io/structured-merge-diff/v6/fieldpath/serialize.go (f:name, k:{keys}, v:value, i:index, "." the item
itself; an empty object is a leaf).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pd_operator.core.names import APPLIED_HASH
from pd_operator.core.revision import manifest_hash
from pd_operator.kube.client import FIELD_MANAGER


def intact(kind: str, api_version: str, obj: Mapping[str, Any]) -> bool:
    """Whether the object still holds exactly the manifest whose hash its annotation carries.

    Args:
        api_version: of the kind; items of lists leave it out.
    """
    meta = obj["metadata"]
    claimed = (meta.get("annotations") or {}).get(APPLIED_HASH)
    mine = [e for e in meta.get("managedFields") or () if e.get("manager") == FIELD_MANAGER and e.get("operation") == "Apply"]
    if not claimed or len(mine) != 1 or mine[0].get("subresource") or mine[0].get("apiVersion") != api_version:
        return False
    part = _pick(obj, mine[0].get("fieldsV1") or {})
    if not isinstance(part, dict):
        return False
    metadata = {**part.get("metadata", {}), "name": meta["name"], "namespace": meta.get("namespace", "")}
    annotations = {k: v for k, v in metadata.pop("annotations", {}).items() if k != APPLIED_HASH}
    if annotations:
        metadata["annotations"] = annotations
    return bool(manifest_hash({**part, "apiVersion": api_version, "kind": kind, "metadata": metadata}) == claimed)


def _pick(value: Any, fields: Mapping[str, Any]) -> Any:
    """The owned part of a value."""
    if not fields:
        return value
    if isinstance(value, Mapping):
        names = ((key[2:], sub) for key, sub in fields.items() if key.startswith("f:"))
        return {name: _pick(value[name], sub) for name, sub in names if name in value}
    if isinstance(value, list):
        items = [(_keys(key[2:]), sub) for key, sub in fields.items() if key.startswith("k:")]
        values = {key[2:] for key in fields if key.startswith("v:")}
        found = []
        for item in value:
            if isinstance(item, Mapping):
                found += [_pick(item, sub) for keys, sub in items if all(item.get(k) == v for k, v in keys)]
            elif json.dumps(item) in values:
                found.append(item)
        return found
    return value


@lru_cache(maxsize=1024)
def _keys(text: str) -> tuple[tuple[str, Any], ...]:
    return tuple(json.loads(text).items())
