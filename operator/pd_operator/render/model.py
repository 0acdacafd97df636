"""Where the weights are: what vLLM is given, and what has to be mounted. Prefill and decode get the same string."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MOUNT = "/model"


@dataclass(frozen=True, slots=True)
class Model:
    """The path that the engine loads, with its volumes."""

    path: str
    volumes: tuple[dict[str, Any], ...] = ()
    mounts: tuple[dict[str, Any], ...] = ()


def locate(uri: str, pull_policy: str) -> Model:
    """Model of a URI that the schema accepted: hf://org/name, pvc://claim/path, oci://image or an absolute path."""
    if uri.startswith("hf://"):
        return Model(uri.removeprefix("hf://"))
    if uri.startswith("pvc://"):
        claim, path = uri.removeprefix("pvc://").split("/", 1)
        source: dict[str, Any] = {"persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        return Model(f"{MOUNT}/{path.strip('/')}".rstrip("/"), *_volume(source))
    if uri.startswith("oci://"):
        return Model(MOUNT, *_volume({"image": {"reference": uri.removeprefix("oci://"), "pullPolicy": pull_policy}}))
    return Model(uri)


def _volume(source: dict[str, Any]) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    return ({"name": "model", **source},), ({"name": "model", "mountPath": MOUNT, "readOnly": True},)
