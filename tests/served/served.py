"""Handle of one PDDeployment: apply, wait with what stands in the way, counters of its engines."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cluster.handle import Cluster
from demo import chat as chat_counters
from demo import ready
from opsrunner.waits import conditions
from pd_operator.render.template import merge
from traffic import Load

READY_LIMIT_S = 240.0
ROUTED_S = 30.0  # that kube-proxy may be behind the endpoints of a router that is ready


def chat(name: str = "chat", **spec: Any) -> dict[str, Any]:
    """The minimal object with one GPU for each role; `spec` is merged over it.

    Without a canary, unless `spec` says otherwise: tests that count requests want their own and no others.
    """
    # A share of CPU: an engine without any gets none while others are busy, and misses its router's checks.
    role = {"resources": {"limits": {"nvidia.com/gpu": 1}, "requests": {"cpu": "50m"}}}
    minimal = {
        "model": {"uri": "hf://meta-llama/Llama-3.1-8B-Instruct"},
        "engine": {"type": "vllm", "version": "0.32.0"},
        "prefill": role,
        "decode": role,
        "verification": "Disabled",
    }
    return {
        "apiVersion": "pdserve.dev/v1alpha1",
        "kind": "PDDeployment",
        "metadata": {"name": name},
        "spec": merge(minimal, spec),
    }


@dataclass(frozen=True)
class Served:
    """One object called `name` in a namespace of its own."""

    cluster: Cluster
    namespace: str
    name: str = "chat"

    def apply(self, **spec: Any) -> None:
        """Apply the minimal object with `spec` merged over it."""
        self.cluster.apply(chat(self.name, **spec), namespace=self.namespace)

    def ready(self, limit: float = READY_LIMIT_S) -> dict[str, Any]:
        """Wait until it is Ready for its current generation."""
        return ready.wait(self.cluster, self.namespace, self.name, limit)

    def object(self) -> dict[str, Any]:
        """The object now."""
        found: dict[str, Any] = self.cluster.json("get", "pdd", self.name, "-n", self.namespace)
        return found

    def condition(self, type_: str) -> dict[str, Any]:
        """One condition; {} while it does not exist."""
        conditions = self.object().get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == type_), {})

    def until(self, what: str, test: Callable[[], Any], limit: float = 120.0) -> Any:
        """Poll until `test` gives something true. Raises TimeoutError with the conditions and pods of that moment."""
        deadline = time.monotonic() + limit
        while True:
            found = test()
            if found:
                return found
            if time.monotonic() > deadline:
                shown = "\n".join(ready.describe(c) for c in self.object().get("status", {}).get("conditions", []))
                pods = self.cluster.kubectl("get", "pods", "-n", self.namespace, "-o", "wide", check=False)
                raise TimeoutError(f"waited {limit:.0f} s for {what}\n{shown}\n{pods}")
            time.sleep(0.5)

    def load(self, tokens: int = 16) -> Load:
        """Load on the front Service, once its address leads to a router: Ready does not wait for kube-proxy."""
        found = self.cluster.kubectl("get", "service", self.name, "-n", self.namespace, "-o", "jsonpath={.spec.clusterIP}")
        address = found.strip()
        self.until(f"a connection to the front Service at {address}", lambda: _connects(address), ROUTED_S)
        return Load(f"http://{address}", self.name, tokens)

    def ready_pods(self, role: str) -> list[dict[str, Any]]:
        """Those of a role that are Ready."""
        return [pod for pod in self.pods(role) if conditions(pod).get("Ready", {}).get("status") == "True"]

    def pods(self, role: str = "") -> list[dict[str, Any]]:
        """Pods that are not being deleted, of one role (prefill, decode, router) or all."""
        labels = {"": "", "router": ",app.kubernetes.io/component=router"}.get(role, f",pdserve.dev/role={role}")
        selector = f"pdserve.dev/deployment={self.name}{labels}"
        items = self.cluster.json("get", "pods", "-n", self.namespace, "-l", selector)["items"]
        return [pod for pod in items if "deletionTimestamp" not in pod["metadata"]]

    def metrics(self, pod: Mapping[str, Any], port: int = 8000, path: str = "metrics") -> str:
        """A pod's HTTP answer, through the API server."""
        return self.cluster.kubectl(
            "get", "--raw", f"/api/v1/namespaces/{self.namespace}/pods/{pod['metadata']['name']}:{port}/proxy/{path}"
        )

    def total(self, role: str, metric: str) -> float:
        """Sum of a counter over the pods of a role; `name{label="value"}` selects series."""
        return sum(chat_counters.total(self.metrics(pod), metric) for pod in self.pods(role))

    def objects(self, role: str) -> int:
        """Objects on the LMCache servers of a role."""
        statuses = [json.loads(self.metrics(pod, 8080, "status")) for pod in self.pods(role)]
        return sum(int(s["storage_manager"]["l1_manager"]["total_object_count"]) for s in statuses)


def _connects(address: str) -> bool:
    try:
        socket.create_connection((address, 80), timeout=5).close()
    except OSError:
        return False
    return True
