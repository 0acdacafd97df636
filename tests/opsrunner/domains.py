"""A pool of fake nodes in transfer domains for one test, PDDeployments that use only them, and where their pods are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import manifests
from cluster.handle import Cluster
from cluster.kwok import DOMAIN_LABEL, FakeNodes
from opsrunner import state, waits
from opsrunner.api import Api, Object
from pd_operator.core.names import DEPLOYMENT, ROLE, SLICE, WORKER

POOL = "test.pdserve.dev/pool"
GPU = "nvidia.com/gpu"


class Pool:
    """Nodes of one test: `PREFIX-0`, ... in domains `PREFIX-d0`, ...; pods reach them by node selector only."""

    def __init__(self, cluster: Cluster, api: Api, namespace: str, name: str) -> None:
        self.cluster = cluster
        self.api = api
        self.namespace = namespace
        self.name = name
        self._nodes: dict[str, str] = {}  # node -> domain

    def add(self, prefix: str, count: int, *, per_domain: int, gpus: int) -> None:
        """More nodes; the prefix starts with the pool's name, so that nothing meets."""
        group = FakeNodes(count, prefix=f"{self.name}-{prefix}", gpus=gpus, per_domain=per_domain, labels={POOL: self.name})
        self.cluster.apply(*group.manifests(), namespace=None)
        for node in group.manifests():
            self.known(node)
        waits.until(f"{count} nodes to be ready", lambda: self.ready_nodes() >= set(group.names))

    def known(self, node: Object) -> str:
        """Count a node among those of the pool; its name."""
        name = str(node["metadata"]["name"])
        self._nodes[name] = node["metadata"]["labels"][DOMAIN_LABEL]
        return name

    def domain(self, node: str) -> str:
        """Domain of a node; "" for none of the pool's."""
        return self._nodes.get(node, "")

    def ready_nodes(self) -> set[str]:
        """Names of those that are ready and not tainted."""
        nodes = self.api.list("Node", None, f"{POOL}={self.name}")
        ready = {"type": "Ready", "status": "True"}.items()
        usable = [n for n in nodes if not n["spec"].get("taints")]  # not-ready goes a moment after the condition turned
        return {n["metadata"]["name"] for n in usable if any(ready <= c.items() for c in n["status"].get("conditions", []))}

    def node(self, name: str) -> str:
        """Full name of a node, `a-0` -> `POOL-a-0`."""
        return f"{self.name}-{name}"

    def pdd(
        self,
        name: str,
        prefill: int = 1,
        decode: int = 1,
        *,
        gpus: tuple[int, int] = (1, 1),
        pod: Mapping[str, Any] | None = None,
        **placement: Any,
    ) -> Object:
        """A PDDeployment on these nodes, created; `pod` is merged into the spec of its engine pods, `spec` is a merge patch."""
        patch = placement.pop("spec", {})
        template = {"spec": {"nodeSelector": {POOL: self.name}, **(pod or {})}}
        roles = {
            role: {"replicas": count, "template": template, "resources": {"limits": {GPU: each}}}
            for role, count, each in (("prefill", prefill, gpus[0]), ("decode", decode, gpus[1]))
        }
        domain = {"topologyKey": DOMAIN_LABEL, **placement.pop("domain", {})}
        spec = {**roles, "router": {"replicas": 1}, "placement": {"transferDomain": domain, **placement}}
        return self.api.create(state.pdd(self.namespace, name, **manifests.merge(spec, patch)))

    def foreign(self, name: str, node: str, gpus: int) -> None:
        """Somebody else's pod, straight onto a node."""
        container = {"name": "c", "image": "example.org/x", "resources": {"limits": {GPU: gpus}}}
        spec = {"nodeName": self.node(node), "containers": [container], "tolerations": [{"operator": "Exists"}]}
        self.api.create({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": self.namespace}, "spec": spec})

    def engines(self, name: str) -> list[Object]:
        """Engine pods that are not ending."""
        return state.pods(self.api, self.namespace, name, component="engine")

    def places(self, name: str) -> dict[str, list[tuple[str, str]]]:
        """Slice -> (role, domain) of its bound engine pods, sorted."""
        found: dict[str, list[tuple[str, str]]] = {}
        for pod in self.engines(name):
            if node := pod["spec"].get("nodeName"):
                labels = pod["metadata"]["labels"]
                part = labels.get(ROLE) or f"{labels[WORKER]} worker"
                found.setdefault(labels[SLICE], []).append((part, self._nodes[node]))
        return {slice_: sorted(places) for slice_, places in sorted(found.items())}

    def crossings(self, pods: list[Object]) -> dict[str, set[str]]:
        """Slices of which pods were ever bound in more than one domain, from the events of a watch."""
        seen: dict[str, set[str]] = {}
        for pod in pods:
            labels, node = pod["metadata"].get("labels", {}), pod["spec"].get("nodeName")
            if node in self._nodes and (ROLE in labels or WORKER in labels) and DEPLOYMENT in labels:
                seen.setdefault(labels[SLICE], set()).add(self._nodes[node])
        return {slice_: domains for slice_, domains in seen.items() if len(domains) > 1}

    def placed(self, name: str, status: str, reason: str, *, timeout: float = 30.0) -> str:
        """Wait for the condition Placed; its message."""
        found = waits.condition(self.api, self.namespace, name, "Placed", status, reason, timeout=timeout)
        return str(waits.conditions(found)["Placed"]["message"])

    def ready(self, name: str, *, timeout: float = 40.0) -> Object:
        """Wait until it is Ready and up to date."""
        return waits.ready(self.api, self.namespace, name, timeout=timeout)

    def remove(self) -> None:
        """Objects first, so that nothing is placed anew on what is left."""
        for obj in self.api.list("PDDeployment", self.namespace):
            if obj["spec"]["prefill"].get("template", {}).get("spec", {}).get("nodeSelector", {}).get(POOL) == self.name:
                self.api.delete("PDDeployment", self.namespace, obj["metadata"]["name"])
        self.cluster.kubectl("delete", "nodes", "-l", f"{POOL}={self.name}", "--ignore-not-found", "--wait=false")


@contextmanager
def pool(cluster: Cluster, api: Api, namespace: str, name: str) -> Iterator[Pool]:
    """A pool that is removed at the end."""
    made = Pool(cluster, api, namespace, name)
    try:
        yield made
    finally:
        made.remove()
