"""Every version of the PDDeployments of a namespace that the API server had while a test's body ran: a watch, no poll."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from typing import Any

from cluster.handle import Cluster
from cluster.tools import tool

LINE = 2**24  # bytes, of one event
LATE_S = 60.0  # seconds that the watch may be behind on a busy machine
State = tuple[str, str]  # status and reason of a condition


@dataclass
class Versions:
    """Of each object, its versions in the order in which the API server made them."""

    seen: dict[str, list[Mapping[str, Any]]] = field(default_factory=dict)

    def add(self, found: Mapping[str, Any]) -> None:
        """A version; of what it holds, the number and the conditions are kept."""
        conditions = {c["type"]: c for c in found.get("status", {}).get("conditions", ())}
        self.seen.setdefault(found["metadata"]["name"], []).append(
            {"version": found["metadata"]["resourceVersion"], "conditions": conditions}
        )

    def last(self) -> dict[str, str]:
        """Object -> number of its newest version."""
        return {name: versions[-1]["version"] for name, versions in self.seen.items()}

    def states(self, name: str, type_: str) -> list[State]:
        """What a condition of an object said, one after the other, without repetitions."""
        found = [v["conditions"].get(type_, {}) for v in self.seen.get(name, ())]
        return [state for state, _ in groupby((c.get("status", ""), c.get("reason", "")) for c in found)]

    def falls(self, name: str, type_: str) -> list[State]:
        """What a condition said whenever it was not True any more, though it had been in the version before."""
        return [after for before, after in pairwise(self.states(name, type_)) if before[0] == "True" and after[0] != "True"]


@asynccontextmanager
async def watching(cluster: Cluster, namespace: str, seconds: float) -> AsyncIterator[Versions]:
    """All versions from now to the end of the body, which takes `seconds` at most.

    Raises AssertionError when the watch ends before the body does.
    """
    path = f"/apis/pdserve.dev/v1alpha1/namespaces/{namespace}/pddeployments"
    listed = json.loads(await asyncio.to_thread(cluster.kubectl, "get", "--raw", path))
    versions = Versions()
    for found in listed["items"]:
        versions.add(found)
    since = f"{path}?watch=1&resourceVersion={listed['metadata']['resourceVersion']}&timeoutSeconds={seconds:.0f}"
    command = [str(tool("kubectl")), "--kubeconfig", str(cluster.kubeconfig), "get", "--raw", since]
    watch = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, limit=LINE)
    reading = asyncio.create_task(_read(watch, versions))
    try:
        yield versions
        end = asyncio.get_running_loop().time() + LATE_S
        while True:
            items = json.loads(await asyncio.to_thread(cluster.kubectl, "get", "--raw", path))["items"]
            now = {found["metadata"]["name"]: found["metadata"]["resourceVersion"] for found in items}
            late = {name: version for name, version in now.items() if versions.last().get(name) != version}
            assert not reading.done(), f"the watch of {path} ended before the body, so that versions were missed: {reading}"
            if not late:
                return
            assert asyncio.get_running_loop().time() < end, f"waited {LATE_S:.0f} s for the watch of {path} to tell {late}"
            await asyncio.sleep(0.5)
    finally:
        if watch.returncode is None:
            watch.terminate()
        await watch.wait()
        reading.cancel()


async def _read(watch: asyncio.subprocess.Process, versions: Versions) -> None:
    """Keep what the watch tells. Raises AssertionError on an error event."""
    assert watch.stdout is not None
    async for line in watch.stdout:
        event = json.loads(line)
        assert event["type"] in ("ADDED", "MODIFIED", "DELETED"), event
        if event["type"] != "DELETED":
            versions.add(event["object"])
