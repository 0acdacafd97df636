"""Objects whose evidence a test watches: faults of their engines, what Degraded says, and load that goes on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from cluster.handle import Cluster
from demo import stack
from served.served import Served
from traffic import Load
from traffic.load import connections

TICK = 5  # seconds, of the operator's looks
NAMED = 240.0  # seconds until a cause has its name, on a machine with much other work


@pytest.fixture(scope="module")
def fast(install: Cluster) -> Iterator[Cluster]:
    """The operator with a tick of 5 s; the other tests get it back as it was."""
    _upgrade(install, f"signals.tickSeconds={TICK}")
    yield install
    _upgrade(install, "signals.tickSeconds=15")


def _upgrade(cluster: Cluster, setting: str) -> None:
    arguments = ["upgrade", "pd-operator", str(stack.CHART), "--namespace", stack.INSTALL_NAMESPACE, "--reuse-values"]
    done = stack.helm(cluster, *arguments, "--set", setting, "--wait", "--timeout", "120s")
    assert done.returncode == 0, done.stderr


class Object(Served):
    """One object of the test."""

    def fault(self, role: str, **fault: Any) -> None:
        """Set a fault of the stand-in on every pod of a role."""
        for pod in self.pods(role):
            url = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}:8000/proxy/standin/fault"
            self.cluster.kubectl("create", "--raw", url, "-f", "-", stdin=json.dumps(fault))

    def crash(self, role: str) -> None:
        """End every engine of a role; its container starts again in the same pod, at the same address."""
        for pod in self.pods(role):
            url = f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}:8000/proxy/standin/fault"
            self.cluster.kubectl("create", "--raw", url, "-f", "-", stdin='{"crash": true}', check=False)  # no answer comes

    async def keep_down(self, pod: str, container: str, stop: asyncio.Event, word: str = "server") -> None:
        """End the program of a container whenever it runs: every process there that has `word` as an argument."""
        program = (
            "import os, glob\n"
            "for path in glob.glob('/proc/[0-9]*/cmdline'):\n"
            "    pid = int(path.split('/')[2])\n"
            f"    if pid != os.getpid() and {word!r} in open(path).read().split('\\0')[:5]: os.kill(pid, 15)\n"
        )
        command = ("exec", pod, "-n", self.namespace, "-c", container, "--", "python3", "-c", program)
        while not stop.is_set():
            await asyncio.to_thread(self.cluster.kubectl, *command, check=False)
            await asyncio.sleep(0.5)

    def degraded(self) -> tuple[str, str, str]:
        """Status, reason and message."""
        found = self.condition("Degraded")
        return found.get("status", ""), found.get("reason", ""), found.get("message", "")

    def named(self, reason: str, limit: float = NAMED) -> str:
        """Wait for Degraded with this reason; its message."""
        self.until(f"{self.name}: Degraded {reason}", lambda: self.degraded()[1] == reason, limit)
        return self.degraded()[2]

    def verified(self) -> list[int]:
        """verifiedReplicas of both roles."""
        return [role["verifiedReplicas"] for role in self.object()["status"]["roles"]]

    def accusations(self) -> list[str]:
        """Events that say Degraded=True."""
        events = self.cluster.json("get", "events.events.k8s.io", "-n", self.namespace)["items"]
        mine = (e for e in events if e.get("regarding", {}).get("name") == self.name)
        return [e["note"] for e in mine if "Degraded=True" in e.get("note", "")]


@asynccontextmanager
async def asking(loads: dict[str, Load]) -> AsyncIterator[None]:
    """Two requests a second to each object until the body ends."""
    stop = asyncio.Event()

    async def ask(load: Load) -> None:
        async with connections() as session:
            while not stop.is_set():
                await asyncio.gather(load.one(session, stream=True), asyncio.sleep(0.5))

    tasks = [asyncio.create_task(ask(load)) for load in loads.values()]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*tasks)
