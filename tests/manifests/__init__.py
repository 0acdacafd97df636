"""Tables of good and bad manifests, and the merge that makes a manifest from an entry.

An entry of good.yaml and bad.yaml is a merge patch (RFC 7396: null removes a key) over minimal.yaml, or over pool.yaml with
`kind: PDPool`. `repeat: {path: count}` repeats the string, or the entries of the list, at a path.

A bad entry says who refuses it. `by: server`: the API server answers `code` (422 unless given) and its text contains
`message`. `by: operator`: the server accepts it, and the operator's review contains a refusal with this `reason` and `field`
whose text contains `message`; `images` (component -> image; all are known unless given), `server` (minor version of
Kubernetes 1) and `missing: true` (nothing that the spec names exists) are what the review is told.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent


def minimal() -> dict[str, Any]:
    """The smallest PDDeployment."""
    return yaml.safe_load((HERE / "minimal.yaml").read_text())


def pool() -> dict[str, Any]:
    """A PDPool."""
    return yaml.safe_load((HERE / "pool.yaml").read_text())


@dataclasses.dataclass(frozen=True)
class Entry:
    """One row of a table."""

    name: str
    manifest: dict[str, Any]
    by: str = ""
    message: str = ""
    code: int = 422
    reason: str = ""
    field: str = ""
    images: dict[str, str] = dataclasses.field(default_factory=dict)
    server: int = 37
    missing: bool = False

    def __str__(self) -> str:
        return self.name


def good() -> list[Entry]:
    """Manifests that the server and the operator accept."""
    return _table("good.yaml")


def bad(by: str) -> list[Entry]:
    """Manifests that `by` (server or operator) refuses."""
    return [entry for entry in _table("bad.yaml") if entry.by == by]


def merge(base: Any, patch: Any) -> Any:
    """RFC 7396: the base with the patch merged in; null removes."""
    if not isinstance(patch, dict):
        return copy.deepcopy(patch)
    merged = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def _table(file: str) -> list[Entry]:
    return [_entry(row) for row in yaml.safe_load((HERE / file).read_text())]


def _entry(row: dict[str, Any]) -> Entry:
    base = pool() if row.pop("kind", "PDDeployment") == "PDPool" else minimal()
    manifest = merge(base, row.pop("patch"))
    for path, count in row.pop("repeat", {}).items():
        _repeat(manifest, path.split("."), count)
    return Entry(manifest=manifest, **row)


def _repeat(manifest: dict[str, Any], path: list[str], count: int) -> None:
    """Repeat the string, or the only entry of the list, at a path."""
    parent: Any = manifest
    *parents, last = [int(key) if key.isdigit() else key for key in path]
    for key in parents:
        parent = parent[key]
    parent[last] = parent[last] * count
