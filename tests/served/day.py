"""A deployment whose load changes through a day: who sends to it, what the operator decided for it, and what it says of it."""

from __future__ import annotations

import asyncio
import re
import time
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from cluster import images
from demo import stack
from demo.chat import total
from loadgen import Generator, Sent, Summary
from opsrunner.api import Api
from pd_operator.core.scaling.record import Record, parse
from served.fixtures import decisions
from served.served import Served

LIMIT = 180.0  # seconds that anything may take on a machine with much other work
METRICS = 8081  # the operator's port (chart: httpPort)
HELD_S = 600  # at most; then the init container fails and says so
HELD = f"""
import os, sys, time
end = time.monotonic() + {HELD_S}
while not os.path.exists("/tmp/go"):
    if time.monotonic() > end:
        sys.exit("no /tmp/go after {HELD_S} s")
    time.sleep(0.2)
"""
HOLD: dict[str, Any] = {  # an init container: a decode engine starts when the test says so
    "name": "hold",
    "image": images.BASE,
    "imagePullPolicy": "IfNotPresent",
    "command": ["python3", "-c", HELD],
    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}


@dataclass
class Day:
    """The deployment, who sends to it, and what the operator decided for it."""

    served: Served
    generator: Generator
    api: Api

    def lines(self) -> list[str]:
        """The decision log of the operator's pod."""
        return decisions(self.served.cluster)

    def ticks(self) -> list[Record]:
        """The decisions for this deployment, in order."""
        name = f"{self.served.namespace}/{self.served.name}"
        return [record for record in map(parse, self.lines()) if record.name == name]

    def send(self, trace: Sequence[Sent]) -> Summary:
        """Send a trace to the front Service, and wait for its end."""
        found = self.generator.run(self.served.load().url, self.served.name, trace)
        first = ", ".join(f"p{p} {found.number('time_to_first_token', f'p{p}') / 1e3:.1f} s" for p in (50, 90))
        print(f"\n{len(trace)} requests, {len(found.failed)} failed; TTFT {first}")
        assert not found.failed, found.failed[:5]
        return found

    def pool(self, role: str) -> dict[str, Any]:
        """The PDPool of a role."""
        return self.api.get("PDPool", self.served.namespace, f"{self.served.name}-{role}") or {}

    def pods(self, role: str) -> list[dict[str, Any]]:
        """Pods of a role, those that are being deleted as well."""
        selector = f"pdserve.dev/deployment={self.served.name},pdserve.dev/role={role}"
        found: list[dict[str, Any]] = self.api.page("Pod", self.served.namespace, selector)["items"]
        return found

    def bound(self, **most: int) -> None:
        """Set maxReplicas of roles."""
        body = yaml.safe_dump({"spec": {"scaling": {role: {"maxReplicas": count} for role, count in most.items()}}})
        self.served.cluster.kubectl(
            "patch", "pdd", self.served.name, "-n", self.served.namespace, "--type=merge", f"--patch={body}"
        )

    def held(self) -> list[str]:
        """Decode pods that wait for `release`."""
        found = []
        for pod in self.pods("decode"):
            started = {one["name"]: one["state"] for one in pod["status"].get("initContainerStatuses", [])}
            if "running" in started.get(HOLD["name"], {}):
                found.append(str(pod["metadata"]["name"]))
        return found

    def release(self) -> None:
        """Let the decode engine that is held start; waits until there is one."""
        pods = self.served.until("a decode pod that is held", self.held, LIMIT)
        for pod in pods:
            self.served.cluster.kubectl("exec", pod, "-n", self.served.namespace, "-c", HOLD["name"], "--", "touch", "/tmp/go")

    def counted(self, role: str, metric: str) -> float:
        """A metric's sum over the ready engines of a role now."""
        found = 0.0
        for pod in self.pods(role):
            if ("Ready", "True") in [(c["type"], c["status"]) for c in pod["status"].get("conditions", [])]:
                with urllib.request.urlopen(f"http://{pod['status']['podIP']}:8000/metrics", timeout=5) as page:
                    found += total(page.read().decode(), metric)
        return found

    def status(self) -> dict[str, Any]:
        """What the operator says of the deployment."""
        found: dict[str, Any] = self.served.object().get("status", {})
        return found

    def own(self, metric: str, **labels: str) -> float:
        """A number of the operator's own metrics about this deployment; 0 where it is absent."""
        program = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{METRICS}/metrics').read().decode())"
        read = ["exec", "deploy/pd-operator", "-n", stack.INSTALL_NAMESPACE, "--", "python3", "-c", program]
        wanted = {"namespace": self.served.namespace, "name": self.served.name, **labels}
        for line in self.served.cluster.kubectl(*read).splitlines():
            name, _, rest = line.partition("{")
            if name == f"pd_operator_{metric}" and set(re.findall(r'(\w+)="([^"]*)"', rest)) == set(wanted.items()):
                return float(rest.split()[-1])
        return 0.0

    def waiting(self, role: str) -> float:
        """Requests that wait on the ready engines of a role now."""
        return self.counted(role, "vllm:num_requests_waiting")

    async def recorded(self, what: str, test: Callable[[Record], bool], since: float) -> None:
        """Wait until a decision after `since` (seconds since 1970) is one of which `test` is true."""

        def found() -> bool:
            time.sleep(1.0)  # the log is read with kubectl exec
            return any(test(record) for record in self.ticks() if record.now > since)

        await self.until(what, found)

    async def until(self, what: str, test: Callable[[], Any], limit: float = LIMIT) -> Any:
        """Poll until `test` gives something true."""
        return await asyncio.to_thread(self.served.until, what, test, limit)
