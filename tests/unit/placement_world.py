"""Random clusters and demands for the placement tests. All of it from one seed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from pd_operator.core.placement.capacity import HOSTNAME, NodeCapacity, PodShape, ReplicaShape, Taint, Toleration
from pd_operator.core.placement.demand import Demand
from pd_operator.core.placement.index import CapacityIndex, CapacityView
from pd_operator.core.placement.result import Share

GPU = "nvidia.com/gpu"
NIC = "rdma/hca"
RACK = "example.org/rack"
GIB = 2**30


@dataclass(frozen=True)
class World:
    """A cluster and what is wanted of it."""

    nodes: tuple[NodeCapacity, ...]
    demand: Demand

    @property
    def index(self) -> CapacityIndex:
        """The capacity view of the nodes."""
        return CapacityIndex.of(self.nodes)

    @property
    def view(self) -> CapacityView:
        """A fork of it."""
        return self.index.fork()


def node(
    name: str,
    rack: str = "rack-a",
    gpu: int = 8,
    *,
    cpu: int = 64,
    gib: int = 512,
    taken: Mapping[str, int] | None = None,
    **more: object,
) -> NodeCapacity:
    """A node of a rack with so many accelerators, cores and GiB, less what is taken (integer units)."""
    allocatable = {GPU: gpu, "cpu": cpu * 1000, "memory": gib * GIB, "pods": 110}
    labels = {HOSTNAME: name} | ({RACK: rack} if rack else {})
    free = {key: value - (taken or {}).get(key, 0) for key, value in allocatable.items()}
    return NodeCapacity(name, labels | dict(more.pop("labels", {})), allocatable, free, **more)  # type: ignore[arg-type, call-overload]


def pod(gpu: int = 1, cpu: int = 4, gib: int = 16, **more: object) -> PodShape:
    """A pod that asks for so many accelerators, cores and GiB."""
    return PodShape({GPU: gpu, "cpu": cpu * 1000, "memory": gib * GIB}, **more)  # type: ignore[arg-type]


def replica(role: str, *pods: PodShape) -> ReplicaShape:
    """A replica of these pods."""
    return ReplicaShape(role, pods, sum(p.requests.get(GPU, 0) for p in pods))  # type: ignore[arg-type]


def demand(prefill: int, decode: int, p: PodShape | ReplicaShape, d: PodShape | ReplicaShape, **more: object) -> Demand:
    """A demand of single-pod replicas, or of the replicas given."""
    first = p if isinstance(p, ReplicaShape) else replica("prefill", p)
    second = d if isinstance(d, ReplicaShape) else replica("decode", d)
    return Demand("default/chat", prefill, decode, first, second, **({"topology_key": RACK} | more))  # type: ignore[arg-type]


def random_world(seed: int, *, most_nodes: int = 64, most_domains: int = 12, most: int = 12) -> World:
    """1-12 domains, 1-64 nodes, replicas of 1-16 accelerators on 1-4 nodes, four resources, taints, selectors, some running."""
    rng = random.Random(seed)
    domains = [f"rack-{n:02d}" for n in range(rng.randint(1, most_domains))]
    nodes = []
    full = rng.choice((0.2, 0.5, 0.8))
    for n in range(rng.randint(1, most_nodes)):
        gpus = rng.choice((4, 8, 8, 8))
        taken = {
            GPU: 0 if rng.random() > full else rng.randint(0, gpus),
            "cpu": rng.randint(0, 70) * 1000,
            "memory": rng.randint(0, 300) * GIB,
            "pods": rng.choice((0, 20, 109)) if rng.random() < 0.1 else 12,
        }
        kind = rng.choice(("h100", "h100", "l40"))
        nodes.append(
            node(
                f"n{n:02d}",
                "" if rng.random() < 0.03 else rng.choice(domains),
                gpus,
                taken=taken,
                labels={"gpu": kind},
                taints=(Taint("dedicated", "serving"),) if rng.random() < 0.15 else (),
                unschedulable=rng.random() < 0.04,
                ready=rng.random() > 0.04,
            )
        )
    shapes = {role: _shape(rng, role) for role in ("prefill", "decode")}
    wanted = rng.randint(1, most), rng.randint(1, most)
    world = World(tuple(nodes), demand(*wanted, shapes["prefill"], shapes["decode"], max_domains=rng.choice((1, 1, 2, 3, 12))))
    return _running(world, rng, domains) if rng.random() < 0.5 else world


def _shape(rng: random.Random, role: str) -> ReplicaShape:
    tolerations = (Toleration("dedicated", "Exists"),) if rng.random() < 0.5 else ()
    selector = {"gpu": rng.choice(("h100", "l40"))} if rng.random() < 0.3 else {}
    nodes = rng.choice((1, 1, 1, 1, 2, 4))
    worker = pod(rng.choice((1, 2, 3, 4, 8)) if nodes < 4 else 4, rng.randint(1, 16), rng.randint(1, 120))
    worker = PodShape(worker.requests, selector, None, tolerations)
    leader = PodShape({**worker.requests, "memory": worker.requests["memory"] + 40 * GIB}, selector, None, tolerations)
    unlike = nodes > 1 and rng.random() < 0.5
    return replica(role, leader if unlike else worker, *([worker] * (nodes - 1)))


def _running(world: World, rng: random.Random, domains: list[str]) -> World:
    """Replicas run already, in domains of which one may have no node any more."""
    running = {}
    for domain in rng.sample([*domains, "rack-gone"], k=min(len(domains), rng.randint(1, 3))):
        running[domain] = (rng.randint(0, 3), rng.randint(0, 4))
    d = world.demand
    excluded = {rng.choice(domains): "it wedged"} if rng.random() < 0.1 else {}
    return World(
        world.nodes,
        demand(d.prefill, d.decode, d.prefill_shape, d.decode_shape, max_domains=d.max_domains, running=running, excluded=excluded),
    )


def commits(world: World, shares: tuple[Share, ...]) -> dict[str, tuple[int, int]]:
    """Domain -> replicas of the shares."""
    return {share.domain: (share.prefill, share.decode) for share in shares}
