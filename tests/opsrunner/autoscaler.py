"""A cluster autoscaler in miniature: node groups, one per transfer domain, that grow for pods which find no node.

As Kubernetes' own one does, it asks the scheduler's rules where the pods would go on nodes of each group (node affinity, taints
apart; required pod affinity; accelerators), takes the group that helps most pods, and makes nodes which are there, not ready,
for a while before they are.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from cluster.kwok import DOMAIN_LABEL, FakeNodes
from opsrunner.api import Api, Object
from opsrunner.domains import GPU, POOL, Pool
from opsrunner.repeating import Repeating
from opsrunner.state import selects
from pd_operator.core.placement.capacity import HOSTNAME, NodeCapacity
from pd_operator.core.placement.requests import pod_shape

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
SCHEDULER = 30.0  # seconds in which it uses the new nodes
BOOT = 1.0  # seconds from the decision to the Node object


@dataclass
class Group:
    """Nodes PREFIX-0, ... of one domain; `per_step` of them at most are made at once."""

    prefix: str
    gpus: int
    most: int
    per_step: int = 64
    made: int = 0

    def template(self, pool: str) -> Object:
        """The next node."""
        one = FakeNodes(self.made + 1, prefix=self.prefix, gpus=self.gpus, per_domain=self.most, labels={POOL: pool})
        return one.manifests()[-1]


@dataclass
class Autoscaler(Repeating):
    """A context that serves the pods of one pool of nodes.

    Args:
        not_ready: seconds for which a new node is there and not ready.
    """

    api: Api
    pool: Pool
    groups: Sequence[Group]
    not_ready: float
    made: list[str] = field(default_factory=list)

    def look(self) -> None:
        """Grow the group that helps most pods."""
        pods = self.api.list("Pod", self.pool.namespace)
        waiting = [p for p in pods if self._unschedulable(p)]
        options = [(*self._helped(group, waiting, pods), group) for group in self.groups]
        helped, nodes, group = max(options, key=lambda o: (o[0], -o[1]), default=(0, 0, None))
        if group is not None and helped:
            self._grow(group, min(nodes, group.per_step))

    def _unschedulable(self, pod: Object) -> bool:
        mine = (pod["spec"].get("nodeSelector") or {}).get(POOL) == self.pool.name
        said = [c for c in pod["status"].get("conditions") or [] if c["type"] == "PodScheduled"]
        stuck = any(c["status"] == "False" and c["reason"] == "Unschedulable" for c in said)
        return mine and stuck and not pod["metadata"].get("deletionTimestamp") and not pod["spec"].get("nodeName")

    def _helped(self, group: Group, waiting: Sequence[Object], pods: Sequence[Object]) -> tuple[int, int]:
        """(pods that would run, nodes they take) if the group grew as far as it may."""
        new = [_capacity(replace(group, made=group.made + n).template(self.pool.name)) for n in range(group.most - group.made)]
        if not new:
            return 0, 0
        domain = new[0].labels[DOMAIN_LABEL]
        there = [(p, d) for p in pods if (d := self.pool.domain(p["spec"].get("nodeName", "")))]
        left, taken = {n.name: group.gpus for n in new}, set()
        rest, progress = list(waiting), True
        while progress:  # a pod that follows another can go where that one went
            progress = False
            for pod in list(rest):
                shape = pod_shape(pod["spec"])
                need = shape.requests.get(GPU, 0)
                fits = [n for n in new if left[n.name] >= need and shape.admits(n)]
                if fits and _follows(pod, domain, there):
                    left[fits[0].name] -= need
                    taken.add(fits[0].name)
                    there.append((pod, domain))
                    rest.remove(pod)
                    progress = True
        return len(waiting) - len(rest), len(taken)

    def _grow(self, group: Group, count: int) -> None:
        """Make nodes, and wait until they are ready.

        KWOK makes a node ready when it first sees it, so before that there is one that nobody looks after in its place.
        """
        self.pause(BOOT)
        nodes = []
        for _ in range(count):
            nodes.append(group.template(self.pool.name))
            group.made += 1
        for node in nodes:
            self.api.create(_booting(node))
        self.pause(self.not_ready)
        names = {self.pool.known(self.api.create(node)) for node in nodes}
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not self.pool.ready_nodes() >= names and not self.pause():
            pass
        for node in nodes:
            self.api.delete("Node", None, _booting(node)["metadata"]["name"])
        self.made += sorted(names)
        # On a busy machine the scheduler takes its time, and what waits for it alone needs no further node.
        deadline = time.monotonic() + SCHEDULER
        while time.monotonic() < deadline and not names <= self._used() and not self.pause():
            pass

    def _used(self) -> set[str]:
        """Nodes that have a pod of ours."""
        return {pod["spec"].get("nodeName", "") for pod in self.api.list("Pod", self.pool.namespace)}


def _booting(node: Object) -> Object:
    """The node before its kubelet says that it is ready. Without the condition the node controller takes the taint away."""
    name = f"{node['metadata']['name']}-boots"
    labels = {**node["metadata"]["labels"], HOSTNAME: name}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    condition = {"type": "Ready", "status": "False", "reason": "KubeletNotReady", **times}
    return {**node, "metadata": {"name": name, "labels": labels}, "status": {**node["status"], "conditions": [condition]}}


def _capacity(node: Object) -> NodeCapacity:
    labels: Mapping[str, str] = node["metadata"]["labels"]
    return NodeCapacity(node["metadata"]["name"], {**labels, HOSTNAME: node["metadata"]["name"]}, {})


def _follows(pod: Object, domain: str, there: Sequence[tuple[Object, str]]) -> bool:
    """Required pod affinity on the domain label, with the scheduler's exception for the first pod of a series."""
    terms: Sequence[Any] = ((pod["spec"].get("affinity") or {}).get("podAffinity") or {}).get(REQUIRED) or []
    for term in terms:
        wanted = term["labelSelector"]["matchLabels"]
        homes = {home for other, home in there if selects(wanted, other["metadata"].get("labels") or {})}
        if domain not in homes and (homes or not selects(wanted, pod["metadata"]["labels"])):
            return False
    return True
