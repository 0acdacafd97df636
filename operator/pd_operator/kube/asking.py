"""Asking a PDDeployment's canaries to run again: their Jobs are the record of the last run, and deleting one is the request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.core.names import COMPONENT, DEPLOYMENT, MANAGED_SELECTOR
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import Forbidden
from pd_operator.kube.read import Unreadable, connected, context_namespace

LOOK: Final = 1.0  # seconds between two looks at the status


@dataclass(frozen=True, slots=True)
class Asked:
    """What came of it, slice by slice."""

    namespace: str
    name: str
    found: Mapping[str, Mapping[str, Any]]  # slice -> status.slices[].canary of the new run
    waiting: tuple[str, ...] = ()  # slices whose new canary did not end in time
    waited: float = 0.0  # seconds
    off: bool = False  # no canary ever runs: spec.verification is Disabled


async def ask_again(kubeconfig: str | None, namespace: str | None, name: str, limit: float) -> Asked:
    """Delete the canary Jobs of an object and wait until each slice of its newest revision has a new verdict.

    Raises:
        Unreadable: no cluster, no such object, or no right; the message names the right.
    """
    space = namespace or context_namespace(kubeconfig)
    async with connected(kubeconfig, f"PDDeployment {space}/{name}") as client:
        before = await _status(client, space, name)
        if before is None:
            return Asked(space, name, {}, off=True)
        numbers = {s: _number(c) for s, c in before.items()}
        try:
            for job in await client.list("Job", space, f"{MANAGED_SELECTOR},{DEPLOYMENT}={name},{COMPONENT}=canary"):
                await client.delete("Job", space, job["metadata"]["name"], uid=job["metadata"]["uid"])
        except Forbidden as exc:
            right = f"list and delete jobs.batch in namespace {space}"
            raise Unreadable(
                f"the right to {right} is missing: docs/examples/rbac/kubectl-pdd.yaml has it ({exc.message})"
            ) from exc
        begin = time.monotonic()
        while True:
            now = await _status(client, space, name) or {}
            found = {s: c for s, c in now.items() if _number(c) > numbers.get(s, 0)}
            waiting = tuple(sorted(now.keys() - found.keys()))
            waited = time.monotonic() - begin
            if (found and not waiting) or waited > limit:
                return Asked(space, name, found, waiting, waited)
            await asyncio.sleep(LOOK)


async def _status(client: KubeClient, space: str, name: str) -> dict[str, Mapping[str, Any]] | None:
    """Slice of the newest revision -> what status says of its canary; None where none runs."""
    found = await client.get("PDDeployment", space, name)
    if found is None:
        raise Unreadable(f"{space}/{name}: there is no such PDDeployment")
    if found["spec"].get("verification") == "Disabled":
        return None
    status = found.get("status") or {}
    mine = [s for s in status.get("slices", ()) if s.get("revision") == status.get("updatedRevision")]
    return {s["name"]: s.get("canary") or {} for s in mine}


def _number(canary: Mapping[str, Any]) -> int:
    return int(canary.get("number", 0))
