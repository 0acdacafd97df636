"""python -m bench.scale [--steps 100:1000:10000,...]: memory and CPU of the operator in clusters of growing size.

A step is PDDeployments : nodes : pods. Nodes and pods of others are objects in the API server that no kubelet looks after, and
nothing but the operator reads; the PDDeployments' own pods run on fake nodes. After each step the operator is started anew: what
it used from its start until every object was looked at and the queue is empty, and what it does when nothing happens.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import re
import sys
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from bench.process import OperatorProcess, Usage
from cluster import paths, session
from cluster.handle import Cluster
from cluster.kwok import DOMAIN_LABEL, FakeNodes
from cluster.progress import say
from pd_operator.core.ledger import Ledger
from pd_operator.core.observed import NodeFact, UsageFact
from pd_operator.kube.capacity import NodeDecoder, UsageDecoder
from pd_operator.kube.client import PAGE, KubeClient
from pd_operator.kube.store import Store
from served import chat

STEPS = "100:1000:10000,250:1000:10000,500:5000:50000,1000:5000:50000"
LIMIT_S = 3600.0
QUIET_S = 3.0  # the queue is empty for so long
IDLE_S = 30.0
PER_DOMAIN = 10
NAMESPACES = 20
AT_ONCE = 32
GOAL = Usage(300.0, 300.0, 10.0)


def main() -> int:
    """Run it all; prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.scale", description=__doc__)
    parser.add_argument("--steps", default=STEPS, help=f"PDDeployments:nodes:pods, growing (default {STEPS})")
    _view(5000, 50_000)
    steps = [tuple(map(int, step.split(":"))) for step in parser.parse_args().steps.split(",")]
    fake = FakeNodes(40, prefix="ours", gpus=256, cpus=1024, per_domain=2)
    rows = []
    with session.control_plane(fake, node_grace=10 * LIMIT_S) as cluster:
        for crd in sorted((paths.CHECKOUT / "crds").glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", "-f", str(crd))
        for namespace in ("pd-operator", "many", *(f"others-{n}" for n in range(NAMESPACES))):
            cluster.kubectl("create", "namespace", namespace)
        have = (0, 0, 0)
        for objects, nodes, pods in steps:
            say(f"{objects} PDDeployments, {nodes} nodes, {pods} pods")
            asyncio.run(_others(cluster, range(have[1], nodes), range(have[2], pods), nodes))
            with OperatorProcess(cluster) as operator:
                took = _objects(cluster, range(have[0], objects))
                _quiet(operator, 0)
            rows.append((objects, nodes, pods, took, *_cold(cluster, objects)))
            _print(rows)
            have = objects, nodes, pods
    return 0


def _view(nodes: int, pods: int) -> None:
    """What the capacity view alone costs: pages of JSON as the server sends them, decoded, stored and counted, without a server."""
    ledger, node_decoder, pod_decoder = Ledger(), NodeDecoder(), UsageDecoder()
    kept: tuple[Store[NodeFact], Store[UsageFact]] = Store(lambda fact: None), Store(lambda fact: None)
    gc.collect()
    before, cpu, size = _resident(), 0.0, 0
    for kind, count in (("nodes", nodes), ("pods", pods)):
        for at in range(0, count, PAGE):
            documents = [_node(n) if kind == "nodes" else _listed(n, nodes) for n in range(at, min(count, at + PAGE))]
            raw = json.dumps({"metadata": {"resourceVersion": "1"}, "items": documents}).encode()
            del documents
            begin = time.process_time()
            if kind == "nodes":
                for _, node in kept[0].replace(at, dict(node_decoder.page(raw).items)):
                    ledger.node(node.capacity.name if node else "", node)
            else:
                for old, pod in kept[1].replace(at, dict(pod_decoder.page(raw).items)):
                    ledger.pod(old, pod)
            cpu, size = cpu + time.process_time() - begin, size + len(raw)
    gc.collect()
    used = _resident() - before
    say(f"capacity view alone, {nodes} nodes and {pods} pods, {size / 2**20:.0f} MiB of JSON: {cpu:.1f} CPU s, {used:.0f} MiB")


def _listed(number: int, nodes: int) -> dict[str, Any]:
    """With what the server adds."""
    pod = _pod(number, nodes)
    return {**pod, "metadata": {**pod["metadata"], "uid": f"{number:036d}", "managedFields": [{"manager": "x" * 900}]}}


def _resident() -> float:
    """MiB of this process."""
    (pages,) = re.findall(r"^VmRSS:\s+(\d+) kB", Path("/proc/self/status").read_text(), flags=re.M)
    return int(pages) / 1024


def _cold(cluster: Cluster, objects: int) -> tuple[Usage, float, int, float]:
    """(use of a cold start, its seconds, its writes, writes of an idle minute) of a fresh process."""
    begin = time.monotonic()
    with OperatorProcess(cluster) as operator:
        _quiet(operator, objects)
        took, usage, writes = time.monotonic() - begin - QUIET_S, operator.usage(), operator.writes()
        time.sleep(IDLE_S)
        return usage, took, int(writes), (operator.writes() - writes) * 60 / IDLE_S


def _quiet(operator: OperatorProcess, objects: int) -> None:
    """Wait until every object was looked at and nothing waits."""
    deadline, since = time.monotonic() + LIMIT_S, time.monotonic()
    passes = -1.0
    while time.monotonic() - since < QUIET_S:
        now = operator.metric("pd_operator_reconcile_total")
        if now < objects or operator.metric("pd_operator_workqueue_depth") or now != passes:
            passes, since = now, time.monotonic()
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {LIMIT_S:.0f} s for {objects} objects to be looked at, {now:.0f} are")
        time.sleep(0.5)


def _objects(cluster: Cluster, numbers: Iterable[int]) -> float:
    """Make PDDeployments; seconds until all are Ready."""
    begin, documents = time.monotonic(), []
    template = {"spec": {"nodeSelector": {"type": "kwok"}}}
    roles = {role: {"template": template} for role in ("prefill", "decode")}
    for number in numbers:
        placement = {"transferDomain": {"topologyKey": DOMAIN_LABEL}}
        documents.append(
            chat(f"many-{number:04d}", lmcache={"l1Size": "1Gi"}, placement=placement, verification="Disabled", **roles)
        )
    for at in range(0, len(documents), 100):
        text = yaml.safe_dump_all(documents[at : at + 100])
        cluster.kubectl("apply", "--server-side", "-n", "many", "-f", "-", stdin=text, timeout=300)
    last = documents[-1]["metadata"]["name"] if documents else ""
    say(f"made up to {last}; waiting until all are Ready")
    path = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{" "}{end}'
    while time.monotonic() - begin < LIMIT_S:
        states = cluster.kubectl("get", "pdd", "-n", "many", "-o", f"jsonpath={path}", timeout=120).split()
        wanted = int(last.rpartition("-")[2]) + 1 if last else 0
        if states.count("True") >= wanted:
            return time.monotonic() - begin
        time.sleep(3)
    raise TimeoutError(f"waited {LIMIT_S:.0f} s for {wanted} objects to be Ready, {states.count('True')} are")


async def _others(cluster: Cluster, nodes: Iterable[int], pods: Iterable[int], of: int) -> None:
    """Somebody else's nodes and pods, made straight in the API server."""
    client = await KubeClient.connect(str(cluster.kubeconfig), request_timeout=120)
    try:
        await _all(client.create, (_node(n) for n in nodes))
        await _all(client.create, (_pod(n, of) for n in pods))
    finally:
        await client.close()


async def _all(create: Callable[[Any], Coroutine[Any, Any, Any]], documents: Iterable[dict[str, Any]]) -> None:
    rest = iter(documents)

    async def work() -> None:
        for document in rest:
            await create(document)

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


def _node(number: int) -> dict[str, Any]:
    (node,) = FakeNodes(1, prefix=f"other-{number}", gpus=8, cpus=128, memory="2Ti").manifests()
    node["metadata"]["annotations"] = {}
    node["metadata"]["labels"] |= {"type": "other", DOMAIN_LABEL: f"rack-{number // PER_DOMAIN}"}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    types = ("Ready", "MemoryPressure", "DiskPressure", "PIDPressure")
    node["status"]["conditions"] = [{"type": t, "status": str(t == "Ready"), "reason": "Kubelet", **times} for t in types]
    node["spec"]["taints"] = [{"key": "example.org/theirs", "effect": "NoSchedule"}]  # nothing of ours would start there
    node["status"]["images"] = [{"names": [f"example.org/image-{n}@sha256:{n:064x}"], "sizeBytes": n} for n in range(10)]
    return node


def _pod(number: int, nodes: int) -> dict[str, Any]:
    """About 4 KiB as the server stores it."""
    container = {
        "name": "app",
        "image": f"example.org/app-{number % 300}:1",
        "env": [{"name": f"SETTING_{n}", "value": f"value-{number}-{n}"} for n in range(20)],
        "resources": {"requests": {"cpu": f"{100 + number % 8 * 100}m", "memory": f"{256 << number % 4}Mi"}},
    }
    metadata = {
        "name": f"app-{number:06d}",
        "namespace": f"others-{number % NAMESPACES}",
        "labels": {"app": f"app-{number % 300}", "team": f"team-{number % 40}"},
        "annotations": {"example.org/note": "x" * 600},
    }
    spec = {"nodeName": f"other-{number % nodes}-0", "containers": [container], "tolerations": [{"operator": "Exists"}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _print(rows: list[tuple[int, int, int, float, Usage, float, int, float]]) -> None:
    print(f"\n{'objects':>8} {'nodes':>6} {'pods':>6}   {'all Ready':>9}   cold start: {'CPU':>8} {'took':>7} {'writes':>6}"
          f"   {'RSS':>8} {'peak':>8}   writes a minute, idle")  # fmt: skip
    for objects, nodes, pods, ready, usage, took, writes, idle in rows:
        print(
            f"{objects:8} {nodes:6} {pods:6}   {ready:7.0f} s   {'':11} {usage.cpu:6.1f} s {took:5.0f} s {writes:6}"
            f"   {usage.rss:4.0f} MiB {usage.peak:4.0f} MiB   {idle:.0f}"
        )
    print(f"aim: {GOAL.cpu:.0f} s, {GOAL.rss:.0f} MiB, 0 writes", flush=True)


if __name__ == "__main__":
    sys.exit(main())
