"""python -m bench.cold [--steps 40:340:1160,...]: CPU and memory of a start with growing numbers of objects, without a server.

A step is PDDeployments : nodes : pods of others, measured in a process of its own. What a server would send is recorded once from
a real one (one PDDeployment with LMCache, Ready on fake nodes) and repeated under other names, with the hashes that these have.
Then as at a start: all pages are decoded, stored and counted, and each object is looked at once. It must write nothing.

Not in it: the network (one request an object, and the lists), kopf's watches, the metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import itertools
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

from bench.process import IMAGES, OperatorProcess
from bench.scale import _listed, _node, _objects, _quiet, _resident
from cluster import paths, session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from pd_operator.controller.reconcile import Reconciler
from pd_operator.controller.watch import CHILD_KINDS, CHILDREN
from pd_operator.core.ledger import Ledger
from pd_operator.core.names import APPLIED_HASH, DEPLOYMENT, MANAGED_SELECTOR, WORKLOADS
from pd_operator.core.observed import ChildFact, NodeFact, UsageFact
from pd_operator.kube.capacity import NodeDecoder, UsageDecoder
from pd_operator.kube.client import PAGE, KubeClient
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.facts import ChildDecoder, PodDecoder
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.owned import owned_hash
from pd_operator.kube.pages import Decoder
from pd_operator.kube.store import Key, Store, Stores
from pd_operator.settings import load

STEPS = "40:340:1160,150:1000:10000,500:2500:25000,1000:5000:50000"
NAME, HOME, NODES = "many-0000", "many", "ours-"
IMPORTS = time.process_time()  # the imports of this module are those of the operator, kopf and all, and few more
T = TypeVar("T")
World = dict[str, list[dict[str, Any]]]  # kind -> objects of one PDDeployment as the server lists them


def main() -> int:
    """Record a world, measure each step; prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.cold", description=__doc__)
    parser.add_argument("--steps", default=STEPS, help=f"PDDeployments:nodes:pods (default {STEPS})")
    parser.add_argument("--world", type=Path, help="a recorded world; recorded there if it does not exist")
    parser.add_argument("--step", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        return _measure(json.loads(options.world.read_text()), *map(int, options.step.split(":")))
    world = options.world or Path(tempfile.mkdtemp()) / "world.json"
    if not world.exists():
        world.write_text(json.dumps(_record()))
    print(" objects  nodes   pods   CPU s: import children   pods  nodes  looks in all   ms an object     MiB   writes", flush=True)
    for step in options.steps.split(","):
        command = [sys.executable, "-m", "bench.cold", "--world", str(world), "--step", step]
        subprocess.run(command, check=True)
    return 0


def _record() -> World:
    """One PDDeployment that is Ready, and everything of it."""
    with session.control_plane(FakeNodes(2, prefix=NODES.rstrip("-"), per_domain=2)) as cluster:
        for crd in sorted((paths.CHECKOUT / "crds").glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", "-f", str(crd))
        for namespace in ("pd-operator", HOME):
            cluster.kubectl("create", "namespace", namespace)
        with OperatorProcess(cluster) as operator:
            _objects(cluster, [0])
            _quiet(operator, 1)
        return asyncio.run(_read(cluster))


async def _read(cluster: Cluster) -> World:
    client = await KubeClient.connect(str(cluster.kubeconfig))
    try:
        found = {kind: await client.list(kind, HOME, MANAGED_SELECTOR) for kind in (*CHILD_KINDS, "Pod")}
        return {**found, "PDDeployment": await client.list("PDDeployment", HOME), "Node": await client.list("Node", None)}
    finally:
        await client.close()


def _copies(world: World, kind: str, count: int) -> Iterator[dict[str, Any]]:
    """The objects of a kind of the first `count` PDDeployments."""
    (owner,) = world["PDDeployment"]
    text = json.dumps(world[kind])
    for number in range(count):
        mine = text.replace(NAME, f"many-{number:04d}").replace(owner["metadata"]["uid"], _uid(0, number))
        mine = mine.replace(NODES, f"{NODES}{number:04d}-")  # each has nodes and a domain of its own
        for at, obj in enumerate(json.loads(mine)):
            if kind not in ("PDDeployment", "Node"):
                obj["metadata"]["uid"] = _uid(1 + at, number)
            annotations = obj["metadata"].get("annotations") or {}
            if APPLIED_HASH in annotations:
                annotations[APPLIED_HASH] = owned_hash(kind, KINDS[kind].api_version, obj)
            yield obj


def _uid(what: int, number: int) -> str:
    return f"{what:08d}-0000-4000-8000-{number:012d}"


def _pages(objects: Iterator[dict[str, Any]], limit: int) -> Iterator[bytes]:
    """As the server sends them."""
    items: list[dict[str, Any]] = []
    for obj in objects:
        items.append(obj)
        if len(items) == limit:
            yield json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()
            items = []
    if items:
        yield json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()


class _Server:
    """Answers the one request of a look at an object. Nothing else may be asked, and nothing be written."""

    def __init__(self, objects: Iterator[dict[str, Any]]) -> None:
        self.objects = {obj["metadata"]["name"]: json.dumps(obj) for obj in objects}
        self.writes: list[tuple[str, Any]] = []

    async def get(self, kind: str, namespace: str, name: str) -> Any:
        assert kind == "PDDeployment", f"{kind} {name} was read"
        return json.loads(self.objects[name])

    async def server_version(self) -> tuple[int, int]:
        return 1, 37

    async def first_page(self, kind: str, namespace: str, selector: str) -> list[Any]:
        return []

    async def apply(self, manifest: Any, **_: Any) -> Any:
        self.writes.append(("apply", (manifest["kind"], manifest["metadata"]["name"])))
        raise AssertionError(f"{manifest['kind']} {manifest['metadata']['name']} was written")

    async def apply_status(self, obj: Any) -> Any:
        self.writes.append(("status", (obj["kind"], obj["metadata"]["name"])))
        return obj


def _measure(world: World, objects: int, nodes: int, pods: int) -> int:
    """One step in this process."""
    server, stores, costs = _Server(_copies(world, "PDDeployment", objects)), Stores(), {"import": IMPORTS}
    stores.ledger = ledger = Ledger()
    stores.absent = {("LeaderWorkerSet", None): "not there", ("HTTPRoute", None): "not there"}
    gc.collect()
    before = _resident()

    def child(old: ChildFact | None, new: ChildFact | None) -> None:
        if new is not None and new.kind in WORKLOADS:
            ledger.child((new.namespace, new.labels[DEPLOYMENT]), old, new)

    costs["children"] = sum(_fed(ChildDecoder(k), _copies(world, k, objects), stores.children, child) for k in CHILD_KINDS)
    costs["pods"] = _fed(PodDecoder(), _copies(world, "Pod", objects), stores.pods, lambda old, new: None)
    others = range(len(world["Node"]) * objects, nodes)
    every = itertools.chain(_copies(world, "Node", objects), map(_node, others))
    seen: Store[NodeFact] = Store(lambda fact: None)
    costs["nodes"] = _fed(NodeDecoder(), every, seen, lambda old, new: ledger.node(new.capacity.name, new) if new else None)
    bound = itertools.chain(_copies(world, "Pod", objects), (_listed(n, others.start + len(others)) for n in range(pods)))
    used: Store[UsageFact] = Store(lambda fact: None)
    costs["pods"] += _fed(UsageDecoder(), bound, used, ledger.pod)
    costs["looks"] = asyncio.run(_looks(server, stores))
    gc.collect()
    each, columns = (costs["children"] + costs["looks"]) / objects * 1000, (6, 8, 6, 6, 6)
    told = " ".join(f"{cost:{width}.1f}" for cost, width in zip(costs.values(), columns, strict=True))
    grown, writes = _resident() - before, len(server.writes)
    print(
        f"{objects:8} {nodes:6} {pods:6}          {told} {sum(costs.values()):6.1f}   {each:12.1f}   {grown:5.0f}   {writes}",
        flush=True,
    )
    return 1 if writes else 0


def _fed(
    decoder: Decoder[T], objects: Iterator[dict[str, Any]], store: Store[T], changed: Callable[[T | None, T | None], None]
) -> float:
    """CPU seconds of decoding a list and telling what it shows; making the pages is not counted."""
    spent, found = 0.0, dict[Key, T]()
    for raw in _pages(objects, CHILDREN if isinstance(decoder, ChildDecoder) else PAGE):
        begin = time.process_time()
        found.update(decoder.page(raw).items)
        spent += time.process_time() - begin
    begin = time.process_time()
    for old, new in store.replace(decoder, found):
        changed(old, new)
    return spent + time.process_time() - begin


async def _looks(server: _Server, stores: Stores) -> float:
    """CPU seconds of the first look at each object."""
    settings = load({"PD_IMAGES": IMAGES}, None)
    reconciler = Reconciler(cast(KubeClient, server), stores, settings, cast(EventRecorder, None))
    begin = time.process_time()
    for name in server.objects:
        await reconciler.reconcile((HOME, name))
    return time.process_time() - begin


if __name__ == "__main__":
    sys.exit(main())
