"""Wait until a PDDeployment is Ready, and say on the way what it waits for."""

from __future__ import annotations

import time
from typing import Any

from cluster.handle import Cluster
from cluster.progress import say

# Shown once they are as they should be only as a count; these say nothing about the way to Ready.
_ASIDE = frozenset({"Ready", "Reconciling", "Stalled", "Degraded", "UpdateAvailable"})


def wait(cluster: Cluster, namespace: str, name: str, limit: float) -> dict[str, Any]:
    """Print each change of a condition until Ready is True for the current generation; returns the object.

    Raises TimeoutError after `limit` seconds, with the conditions and the pods as they are then.
    """
    begin = time.monotonic()
    seen: dict[str, str] = {}
    while True:
        found: dict[str, Any] = cluster.json("get", "pdd", name, "-n", namespace)
        status = found.get("status", {})
        conditions = {c["type"]: c for c in status.get("conditions", [])}
        for type_, condition in conditions.items():
            line = describe(condition)
            if type_ not in _ASIDE and seen.get(type_) != line:
                say(f"  {line}")
                seen[type_] = line
        current = status.get("observedGeneration") == found["metadata"]["generation"]
        if current and conditions.get("Ready", {}).get("status") == "True":
            say(f"Ready after {time.monotonic() - begin:.1f} s")
            return found
        if time.monotonic() - begin > limit:
            shown = "\n".join(f"  {describe(c)}" for c in conditions.values()) or "  no condition: is the operator running?"
            pods = cluster.kubectl("get", "pods", "-n", namespace, "-o", "wide", check=False)
            raise TimeoutError(f"waited {limit:.0f} s for {namespace}/{name} to be Ready:\n{shown}\n{pods}")
        time.sleep(0.5)


def describe(condition: dict[str, Any]) -> str:
    """One line: `PrefillReady=False Starting: 0 of 1 ready`."""
    return f"{condition['type']}={condition['status']} {condition['reason']}: {condition.get('message', '')}".rstrip(": ")
