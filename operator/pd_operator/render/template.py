"""Laying the user's partial PodTemplateSpec over ours: lists merge by name, tolerations append."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

# List field -> (key of an item, whether the user's item replaces ours whole). A volume has one source and a variable one
# value, so those are replaced; a container is merged.
LISTS: Mapping[str, tuple[str, bool]] = {
    "containers": ("name", False),
    "initContainers": ("name", False),
    "volumes": ("name", True),
    "env": ("name", True),
    "volumeMounts": ("mountPath", True),
    "ports": ("name", True),
    "imagePullSecrets": ("name", True),
}
APPENDED = frozenset({"tolerations", "envFrom", "hostAliases", "readinessGates", "schedulingGates", "resourceClaims"})
HANDLERS = frozenset({"httpGet", "exec", "tcpSocket", "grpc"})


def merge(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `theirs` into `ours`; null removes a field."""
    merged = dict(ours)
    for key, value in theirs.items():
        if value is None:
            merged.pop(key, None)
            continue
        mine = merged.get(key)
        if isinstance(mine, Mapping) and isinstance(value, Mapping):
            base = (
                {k: v for k, v in mine.items() if k not in HANDLERS} if key.endswith("Probe") and HANDLERS & value.keys() else mine
            )
            merged[key] = merge(base, value)
        elif isinstance(value, list) and isinstance(mine, list):
            merged[key] = _merge_list(key, mine, value)
        else:
            merged[key] = value
    return merged


def _merge_list(key: str, ours: Sequence[Any], theirs: Sequence[Any]) -> list[Any]:
    if key in APPENDED:
        return [*ours, *(item for item in theirs if item not in ours)]
    if key not in LISTS:
        return list(theirs)
    name, whole = LISTS[key]
    known = {item[name]: index for index, item in enumerate(ours)}
    merged = list(ours)
    for item in theirs:
        index = known.get(item.get(name))
        if index is None:
            merged.append(item)
        else:
            merged[index] = item if whole else merge(merged[index], item)
    return merged


def merge_env(owned: Sequence[Mapping[str, Any]], *layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Environment: owned variables first (others may refer to them), then layers, a later one winning by name."""
    names = {str(var["name"]) for var in owned}
    rest: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for var in layer:
            if var["name"] not in names:
                rest[str(var["name"])] = dict(var)
    return [*(dict(var) for var in owned), *rest.values()]
