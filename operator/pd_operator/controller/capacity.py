"""Nodes and bound pods of the whole cluster into the ledger, and who is looked at again when they change.

A node or a pod concerns only those that wait for room, and those that have pods on the node; they are enqueued together once a
second and spread when they are many, so that one busy node does not make every PDDeployment reconcile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from pd_operator.core.ledger import Ledger
from pd_operator.core.observed import NodeFact, UsageFact
from pd_operator.kube.capacity import BOUND_PODS, NodeDecoder, UsageDecoder
from pd_operator.kube.client import KubeClient
from pd_operator.kube.reflector import Reflector, Timing
from pd_operator.kube.store import Owner, Store

DEBOUNCE = 1.0  # seconds, as Karpenter's batcher
RATE = 50  # keys a second, of those that wait

EnqueueAfter = Callable[[Owner, float], None]


class CapacityFeed:
    """Keeps a ledger equal to the cluster.

    Attributes:
        reflectors: to be run; until all are synced the ledger is not complete.
    """

    def __init__(self, client: KubeClient, ledger: Ledger, enqueue: EnqueueAfter, timing: Timing | None = None) -> None:
        self._ledger = ledger
        self._enqueue = enqueue
        self._touched: set[Owner] = set()
        self._flush: asyncio.TimerHandle | None = None
        nodes: Reflector[NodeFact] = Reflector(
            client, "Node", None, "", NodeDecoder(), Store(lambda fact: None), self._node, name="Node (capacity)", timing=timing
        )
        pods: Reflector[UsageFact] = Reflector(
            client,
            "Pod",
            None,
            "",
            UsageDecoder(),
            Store(lambda fact: None),
            self._pod,
            fields=BOUND_PODS,
            name="Pod (capacity)",
            timing=timing,
        )
        self.reflectors: list[Reflector[Any]] = [nodes, pods]

    def _node(self, old: NodeFact | None, new: NodeFact | None) -> None:
        name = next(fact.capacity.name for fact in (new, old) if fact is not None)
        self._ledger.node(name, new)
        self._touch(self._ledger.holders(name))

    def _pod(self, old: UsageFact | None, new: UsageFact | None) -> None:
        self._ledger.pod(old, new)
        ours = {(fact.namespace, fact.deployment) for fact in (old, new) if fact is not None and fact.slice}
        self._touch(ours)

    def _touch(self, owners: set[Owner]) -> None:
        """Remember who is concerned; those that wait are asked for when the second is over."""
        self._touched |= owners
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(DEBOUNCE, self._enqueue_all)

    def _enqueue_all(self) -> None:
        self._flush = None
        owners = sorted(self._touched | self._ledger.waiting())
        self._touched.clear()
        for number, owner in enumerate(owners):
            self._enqueue(owner, number / RATE)
