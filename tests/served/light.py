"""Parts of a spec for many small objects at once: no GPU, little CPU and memory, and faults of the stand-ins."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from pd_operator.render.template import merge

CPU: Final[dict[str, Any]] = {"resources": {"limits": {"cpu": "500m", "nvidia.com/gpu": None}, "requests": {"cpu": "20m"}}}


def faulty(**faults: Any) -> dict[str, Any]:
    """A role with faults in its engine (tests/standin/README.md)."""
    return {**CPU, "env": [{"name": "STANDIN_FAULTS", "value": json.dumps(faults)}]}


def cached(
    prefill: Mapping[str, Any] = CPU,
    decode: Mapping[str, Any] = CPU,
    lmcache: Mapping[str, Any] | None = None,
    server_faults: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Both roles with LMCache servers of little memory and chunks of 64 tokens, which may have faults too."""
    server: dict[str, Any] = {"name": "lmcache", "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
    if server_faults:
        server["env"] = [{"name": "STANDIN_CACHE_FAULTS", "value": json.dumps(server_faults)}]
    template = {"template": {"spec": {"initContainers": [server]}}}
    roles = {"prefill": merge(prefill, template), "decode": merge(decode, template)}
    return {**roles, "lmcache": {"l1Size": "64Mi", "chunkSize": 64, **(lmcache or {})}}
