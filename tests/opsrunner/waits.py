"""Waits with a bound; what they say when it is reached is the object's last conditions."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from opsrunner.api import Api, Object
from pd_operator.core.names import DEPLOYMENT, ROLE

T = TypeVar("T")
TIMEOUT = 60.0  # seconds; a machine with other work on it takes several times what a quiet one does
INTERVAL = 0.05  # seconds between two looks


def until(what: str, probe: Callable[[], T], *, timeout: float = TIMEOUT, show: Callable[[], str] = lambda: "") -> T:
    """Poll until `probe` answers something true, and return it.

    Raises:
        TimeoutError: with `what`, the last answer and what `show` says.
    """
    start = time.monotonic()
    while True:
        answer = probe()
        if answer:
            return answer
        if time.monotonic() - start > timeout:
            raise TimeoutError(f"waited {timeout:.0f} s for {what}; last answer: {answer!r}\n{show()}")
        time.sleep(INTERVAL)


def conditions(obj: Object | None) -> dict[str, Object]:
    """Conditions by type."""
    return {c["type"]: c for c in ((obj or {}).get("status") or {}).get("conditions", [])}


def describe(obj: Object | None) -> str:
    """Generation, conditions, roles and slices on a few lines, for error messages."""
    if obj is None:
        return "the object does not exist"
    status = obj.get("status") or {}
    lines = [f"{obj['metadata']['namespace']}/{obj['metadata']['name']} generation {obj['metadata'].get('generation')}"]
    lines[0] += f", observed {status.get('observedGeneration')}"
    lines += [f"  {c['type']}={c['status']} {c['reason']}: {c['message']}" for c in status.get("conditions", [])]
    lines += [f"  role {role}" for role in status.get("roles", [])]
    lines += [f"  slice {slice_}" for slice_ in status.get("slices", [])]
    return "\n".join(lines)


def has(obj: Object | None, type_: str, status: str, reason: str = "") -> bool:
    """Whether a condition says this about the present generation."""
    found = conditions(obj).get(type_)
    if obj is None or found is None or found.get("observedGeneration") != obj["metadata"]["generation"]:
        return False
    return found["status"] == status and (not reason or found["reason"] == reason)


def condition(
    api: Api, namespace: str, name: str, type_: str, status: str, reason: str = "", *, timeout: float = TIMEOUT
) -> Object:
    """Wait until a condition of a PDDeployment says this about its present generation; returns the object."""
    what = f"{type_}={status} {reason}".strip() + f" of {namespace}/{name}"
    return _object(api, namespace, name, what, lambda obj: has(obj, type_, status, reason), timeout)


def ready(api: Api, namespace: str, name: str, *, timeout: float = TIMEOUT) -> Object:
    """Wait until a PDDeployment is Ready and no rollout is on its way, for its present generation; returns it.

    Its pools' status, which is written a moment later, is waited for too.
    """

    def done(obj: Object) -> bool:
        return has(obj, "Ready", "True") and has(obj, "Reconciling", "False") and has(obj, "Progressing", "True", "Updated")

    def counted() -> bool:
        pools = [api.get("PDPool", namespace, f"{name}-{role}") or {} for role in ("prefill", "decode")]
        counts = [[p.get("status", {}).get(k) for k in ("desiredReplicas", "readyReplicas", "replicas")] for p in pools]
        return all(len({*count}) == 1 and count[0] for count in counts)

    found = _object(api, namespace, name, f"{namespace}/{name} to be Ready and up to date", done, timeout)
    until(f"the pools of {namespace}/{name} to say so", counted, timeout=20, show=lambda: describe(found))
    return found


def looked(api: Api, namespace: str, name: str, *, timeout: float = 2 * TIMEOUT) -> Object:
    """Wait until status tells a look at the evidence of all ready engine pods, where no pod has a page that proves anything.

    A look every 15 s tells what changed since the one before. The first may come while pods are still starting, so that status
    has evidence is not enough for an object to be at rest. With verification Disabled nobody looks: there is nothing to wait for.
    """

    def told(obj: Object) -> bool:
        if obj["spec"].get("verification") == "Disabled":
            return True
        pods = api.list("Pod", namespace, f"{DEPLOYMENT}={name},{ROLE}")
        alive = [p for p in pods if not p["metadata"].get("deletionTimestamp")]
        ready = sorted(p["metadata"]["name"] for p in alive if any(map(_is_ready, p.get("status", {}).get("conditions", []))))
        handoff = (obj.get("status") or {}).get("handoff")
        return handoff is not None and handoff.get("unverified", []) == ready

    return _object(api, namespace, name, f"a look at the evidence of every engine of {namespace}/{name}", told, timeout)


def _is_ready(condition: Object) -> bool:
    return bool(condition["type"] == "Ready" and condition["status"] == "True")


def _object(api: Api, namespace: str, name: str, what: str, test: Callable[[Object], bool], timeout: float) -> Object:
    last: list[Object | None] = [None]

    def probe() -> Object | None:
        last[0] = api.get("PDDeployment", namespace, name)
        return last[0] if last[0] is not None and test(last[0]) else None

    found = until(what, probe, timeout=timeout, show=lambda: describe(last[0]))
    assert found is not None
    return found


def kstatus(obj: Object) -> str:
    """Status as kstatus computes it for a custom resource: Terminating, InProgress, Failed or Current.

    Rules of sigs.k8s.io/cli-utils pkg/kstatus/status/generic.go and pkg/kstatus/status/core.go (checkReadyCondition).
    """
    metadata: dict[str, Any] = obj["metadata"]
    found = conditions(obj)
    if metadata.get("deletionTimestamp"):
        return "Terminating"
    observed = (obj.get("status") or {}).get("observedGeneration")
    if observed is not None and observed != metadata["generation"]:
        return "InProgress"
    if found.get("Reconciling", {}).get("status") == "True":
        return "InProgress"
    if found.get("Stalled", {}).get("status") == "True":
        return "Failed"
    return "Current" if found.get("Ready", {}).get("status", "True") == "True" else "InProgress"
