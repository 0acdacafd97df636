"""Sentences about one domain: what fits there, and what is missing, in amounts that a user can look up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Final

from pd_operator.api.scalars import format_bytes
from pd_operator.core.names import ROLES, Role
from pd_operator.core.placement.capacity import CPU, PODS, NodeCapacity, ReplicaShape
from pd_operator.core.placement.fit import Kind, Packer, kinds_of, most

_BYTES: Final = ("memory", "ephemeral-storage", "hugepages-")


def counted(prefill: int, decode: int) -> str:
    """ "2 prefill and 6 decode" """
    return f"{prefill} prefill and {decode} decode"


def replicas(number: int, role: Role) -> str:
    """ "1 decode replica", "3 decode replicas" """
    return f"{number} {role} replica{'' if number == 1 else 's'}"


def one_role(fits: tuple[int, int], nodes: Sequence[NodeCapacity], shapes: tuple[ReplicaShape, ReplicaShape]) -> str:
    """Why no pair fits: "3 decode replicas fit, 0 prefill: nodes with nvidia.com/gpu=8 free: 0 of 4; largest free is 4"."""
    lacking = [lack(nodes, shapes[at]) for at in (0, 1) if not fits[at]]
    if not fits[0] and not fits[1]:
        if lacking[0] == lacking[1]:
            return f"neither role fits: {lacking[0]}"
        return f"neither role fits: prefill: {lacking[0]}; decode: {lacking[1]}"
    has = 0 if fits[0] else 1
    verb = "fits" if fits[has] == 1 else "fit"
    return f"{replicas(fits[has], ROLES[has])} {verb}, 0 {ROLES[1 - has]}: {lacking[0]}"


def beside(packer: Packer, nodes: Sequence[NodeCapacity]) -> str:
    """What keeps a decode replica out once a prefill replica has its room."""
    taken = {pod.node: pod.needs for pod in packer.pack(nodes, 1, 0) or ()}

    def left_of(node: NodeCapacity) -> NodeCapacity:
        needs = taken.get(node.name, {})
        return replace(node, free={name: free - needs.get(name, 0) for name, free in node.free.items()})

    left = [left_of(node) for node in nodes]
    return f"beside a prefill replica, {lack(left, packer.shapes[1])}"


def lack(nodes: Sequence[NodeCapacity], shape: ReplicaShape) -> str:
    """What keeps one replica more of a shape out of these nodes.

    The pod of the replica that is furthest from fitting speaks for all; of its resources the one that the fewest nodes have.
    """
    if not nodes:
        return "no nodes"
    kind = min(kinds_of(0, shape), key=lambda k: sum(bool(most(n.free, k.needs, 1)) and _admits(k, n) for n in nodes) - k.each)
    usable = [node for node in nodes if _admits(kind, node)]
    several = f"; a replica needs {kind.each} nodes" if kind.each > 1 else ""
    if len(usable) < kind.each:
        return f"nodes that its pods may use: {len(usable)} of {len(nodes)} ({_turned_away(nodes, kind)}){several}"
    aside = f" ({_turned_away(nodes, kind)})" if len(usable) < len(nodes) else ""
    needs = kind.needs
    having = {name: sum(node.free.get(name, 0) >= least for node in usable) for name, least in needs.items()}
    name = min(needs, key=lambda n: (having[n], "/" not in n, n == PODS, n))
    if having[name] >= kind.each:
        together = " and ".join(f"{n}={amount(n, least)}" for n, least in sorted(needs.items()) if n != PODS or len(needs) == 1)
        fit = sum(most(node.free, needs, 1) for node in usable)
        return f"nodes with {together} free: {fit} of {len(usable)}{several}{aside}"
    largest = max(0, *(node.free.get(name, 0) for node in usable))
    most_free = "" if having[name] else f"; largest free is {amount(name, largest)}"
    return f"nodes with {name}={amount(name, needs[name])} free: {having[name]} of {len(usable)}{most_free}{several}{aside}"


def amount(name: str, value: int) -> str:
    """An amount in integer units as a quantity: 1500 of cpu is 1500m, 2147483648 of memory is 2Gi."""
    if name == CPU:
        return f"{value // 1000}" if value % 1000 == 0 else f"{value}m"
    if name.startswith(_BYTES):
        return format_bytes(Decimal(value))
    return str(value)


def _admits(kind: Kind, node: NodeCapacity) -> bool:
    return all(shape.admits(node) for shape in kind.shapes)


def _turned_away(nodes: Sequence[NodeCapacity], kind: Kind) -> str:
    """ "2 nodes: untolerated taint a:NoSchedule, 1 node: node is cordoned", the most frequent first."""
    causes = Counter(next((cause for s in kind.shapes if (cause := s.rejection(node))), "") for node in nodes)
    causes.pop("", None)
    order = sorted(causes.items(), key=lambda item: (-item[1], item[0]))[:3]
    return ", ".join(f"{number} node{'' if number == 1 else 's'}: {cause}" for cause, number in order)
