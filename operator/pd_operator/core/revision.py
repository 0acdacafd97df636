"""Which edit does what: every field of the spec stands in exactly one class (invariants I3 and I12 start here).

A  pairing   decides whether P and D can hand over: an edit makes a new revision, hence new slices
B  pods      shape of one role's pods: that role rolls inside its slice
C  live      no engine pod is touched
"""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, Literal

from pd_operator.api.types import PDDeploymentSpec
from pd_operator.core.names import ROLES, Role
from pd_operator.core.stored_form import stored_form

Class = Literal["A", "B", "C"]

# Longest prefix wins. tests/unit/test_i3_revision_classes.py walks the schema and compares.
CLASSES: Mapping[str, Class] = {
    "suspend": "C",
    "model.uri": "A",
    "model.name": "A",
    "model.configMapRef": "C",
    "engine": "A",
    "handoff": "A",
    "prefill.args": "A",
    "prefill.env": "A",
    "decode.args": "A",
    "decode.env": "A",
    "prefill.replicas": "C",
    "decode.replicas": "C",
    "prefill.parallelism": "B",
    "decode.parallelism": "B",
    "prefill.nodes": "B",
    "decode.nodes": "B",
    "prefill.resources": "B",
    "decode.resources": "B",
    "prefill.template": "B",
    "decode.template": "B",
    "lmcache": "A",
    "lmcache.l1Size": "B",
    "router": "C",
    "gateway": "C",
    "placement.transferDomain": "A",
    "placement.maxDomains": "C",
    "placement.schedulingTimeout": "C",
    "slo": "C",
    "scaling": "C",
    "backpressure": "A",
    "rollout": "C",
    "rollout.restartID": "A",
    "rollout.drainTimeout": "B",  # decode's shutdown time and grace period stand in its pod template
    "verification": "C",
}


_INNER = frozenset(path[:at] for path in CLASSES for at, char in enumerate(path) if char == ".")  # objects whose fields differ


@lru_cache(maxsize=1024)
def class_of(path: str) -> Class:
    """Class of a field such as `engine.image`.

    Raises:
        KeyError: no entry covers the path.
    """
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        found = CLASSES.get(".".join(parts[:length]))
        if found:
            return found
    raise KeyError(path)


def pairing_hash(spec: PDDeploymentSpec) -> str:
    """Hash of class A: the revision, 8 hex digits.

    Only what differs from the defaults counts, so a later version that adds a field leaves existing hashes alone.
    """
    return _hash({path: value for path, value, class_ in _parts(spec) if class_ == "A"}, 8)


def role_hash(spec: PDDeploymentSpec, role: Role) -> str:
    """Hash of class B of one role, 6 hex digits."""
    parts = (role, "lmcache", "rollout") if role == "decode" else (role, "lmcache")
    mine = {path: value for path, value, class_ in _parts(spec) if class_ == "B" and path.split(".")[0] in parts}
    return _hash(mine, 6)


def pods_hash(spec: PDDeploymentSpec) -> str:
    """Hash of class B of both roles, 6 hex digits."""
    return _hash({role: role_hash(spec, role) for role in ROLES}, 6)


def manifest_hash(manifest: Mapping[str, Any]) -> str:
    """Hash of a manifest as it is, 16 hex digits."""
    return _hash(manifest, 16)


def applied_hash(manifest: Mapping[str, Any]) -> str:
    """Hash of a desired manifest, 16 hex digits: the applied-hash annotation. What the server stores of it has the same one."""
    return _hash(stored_form(manifest), 16)


def canonical(value: Any) -> str:
    """The one JSON text of a value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def intent(spec: PDDeploymentSpec) -> dict[str, Any]:
    """What the user asked for, without what is a default anyway; JSON."""
    return spec.model_dump(by_alias=True, exclude_defaults=True, mode="json")


def _parts(spec: PDDeploymentSpec) -> tuple[tuple[str, Any, Class], ...]:
    """Path, value and class of all that the user asked for. One reconcile asks for it ten times: the last specs are kept."""
    for known, parts in _recent:
        if known is spec:
            return parts
    made = tuple((path, value, class_of(path)) for path, value in _leaves(intent(spec)))
    _recent.append((spec, made))
    return made


_recent: deque[tuple[PDDeploymentSpec, tuple[tuple[str, Any, Class], ...]]] = deque(maxlen=4)


def _leaves(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Paths down to the depth at which a class is decided; an empty object is a leaf (`lmcache: {}` differs from none)."""
    for key, item in value.items():
        path = f"{prefix}{key}"
        if path in _INNER and isinstance(item, Mapping):
            if path in CLASSES:
                yield path, {}
            yield from _leaves(item, path + ".")
        else:
            yield path, item


def _hash(value: Any, length: int) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()[:length]
