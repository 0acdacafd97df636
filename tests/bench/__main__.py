"""python -m bench [--many 200]: reconcile latency at one object and at many at once, memory, CPU, API calls.

Latencies come from the API server's audit log, so no polling is in them: from the end of the request that created the
PDDeployment to the end of the request that created its last child. The baseline is the same number of writes of small
objects made by this process with the operator's own client and concurrency, once per object and with nothing decided.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from datetime import datetime
from typing import Any

import yaml

from bench.process import OperatorProcess
from cluster import audit, paths, session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from cluster.progress import say
from pd_operator.kube.client import KubeClient
from served import chat

ONE = 20  # objects, one after the other
LIMIT_S = 600.0
KINDS = {"serviceaccounts", "roles", "rolebindings", "services", "networkpolicies", "poddisruptionbudgets", "pdpools"}
KINDS |= {"deployments", "controllerrevisions"}


def main() -> int:
    """Run it all; prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--many", type=int, default=200, help="objects created at once (default 200)")
    options = parser.parse_args()
    with session.control_plane(FakeNodes(60, gpus=64)) as cluster:
        for crd in sorted((paths.CHECKOUT / "crds").glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", "-f", str(crd))
        for namespace in ("pd-operator", "one", "many", "baseline"):
            cluster.kubectl("create", "namespace", namespace)
        with OperatorProcess(cluster) as operator:
            _run(cluster, operator, options.many)
    return 0


def _run(cluster: Cluster, operator: OperatorProcess, many: int) -> None:
    assert cluster.audit_log is not None
    say(f"{ONE} objects, one after the other")
    for number in range(ONE):
        name = f"one-{number:03d}"
        cluster.apply(chat(name, lmcache={"l1Size": "1Gi"}), namespace="one")
        _until_ready(cluster, "one", number + 1)
    single = _latencies(cluster, "one")
    calls = operator.metric("pd_operator_api_requests_total")
    passes = operator.metric("pd_operator_reconcile_total")
    idle = operator.usage()
    say(
        f"one after the other: p50 / p99 {_quantiles(single)}, {calls / max(1, passes):.1f} calls per reconcile, {idle.rss:.0f} MiB"
    )
    say(f"{many} objects at once")
    documents = yaml.safe_dump_all([chat(f"many-{number:03d}", lmcache={"l1Size": "1Gi"}) for number in range(many)])
    begin = time.monotonic()
    cluster.kubectl("apply", "--server-side", "-n", "many", "-f", "-", stdin=documents, timeout=LIMIT_S)
    _until_ready(cluster, "many", many)
    took = time.monotonic() - begin
    burst = _latencies(cluster, "many")
    busy = operator.usage()
    base = asyncio.run(_baseline(cluster, ONE, max(single.values(), key=lambda s: s.children).children))
    p50 = statistics.median(s.seconds for s in single.values())
    rows = [
        ("children of one object", f"{max(s.children for s in single.values())}"),
        ("one: apply -> all children exist, p50 / p99", f"{_quantiles(single)}"),
        ("one: ratio to the same writes without the operator (p50)", f"{p50 / base:.2f} (baseline {base:.3f} s)"),
        (f"{many} at once: apply -> all children exist, p50 / p99", _quantiles(burst)),
        (f"{many} at once: first created -> last child exists", f"{_span(cluster, 'many'):.1f} s"),
        (f"{many} at once: all Ready", f"{took:.1f} s"),
        ("API calls per reconcile (one after the other)", f"{calls / max(1, passes):.1f}"),
        ("API calls per object, creation to Ready", f"{calls / ONE:.1f}"),
        ("operator RSS with 20 objects / with all / peak", f"{idle.rss:.0f} / {busy.rss:.0f} / {busy.peak:.0f} MiB"),
        (f"operator CPU for {many} objects", f"{busy.cpu - idle.cpu:.1f} s ({(busy.cpu - idle.cpu) / many * 1000:.0f} ms each)"),
    ]
    print()
    for what, value in rows:
        print(f"{what:62} {value}")


class Span:
    """Creation of one PDDeployment and of its children."""

    def __init__(self, created: float) -> None:
        self.created = created
        self.last = created
        self.children = 0

    @property
    def seconds(self) -> float:
        """From the object to its last child."""
        return self.last - self.created


def _latencies(cluster: Cluster, namespace: str) -> dict[str, Span]:
    """Spans by PDDeployment, from the audit log."""
    spans: dict[str, Span] = {}
    later: list[tuple[str, float]] = []
    assert cluster.audit_log is not None
    for event in audit.events(cluster.audit_log, verbs=("create", "patch")):
        reference = event.get("objectRef", {})
        if reference.get("namespace") != namespace or event.get("responseStatus", {}).get("code") != 201:
            continue
        at = datetime.fromisoformat(event["stageTimestamp"]).timestamp()
        if reference.get("resource") == "pddeployments":
            spans[reference["name"]] = Span(at)
        elif reference.get("resource") in KINDS and "pd-operator" in event.get("userAgent", "") + event["user"]["username"]:
            later.append((reference.get("name", ""), at))
    for name, at in later:
        span = spans.get("-".join(name.split("-")[:2]))
        if span is not None:
            span.last = max(span.last, at)
            span.children += 1
    return spans


def _span(cluster: Cluster, namespace: str) -> float:
    spans = _latencies(cluster, namespace).values()
    return max(s.last for s in spans) - min(s.created for s in spans)


def _quantiles(spans: dict[str, Span]) -> str:
    values = sorted(s.seconds for s in spans.values())
    return f"{statistics.median(values):.2f} s / {values[min(len(values) - 1, int(len(values) * 0.99))]:.2f} s"


def _until_ready(cluster: Cluster, namespace: str, count: int) -> None:
    path = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{" "}{end}'
    deadline = time.monotonic() + LIMIT_S
    ready = 0
    while time.monotonic() < deadline:
        ready = cluster.kubectl("get", "pdd", "-n", namespace, "-o", f"jsonpath={path}").split().count("True")
        if ready >= count:
            return
        time.sleep(0.2 if count < 50 else 1.0)
    raise TimeoutError(f"waited {LIMIT_S:.0f} s for {count} objects in {namespace} to be Ready, {ready} are")


async def _baseline(cluster: Cluster, objects: int, writes: int) -> float:
    """Median seconds of `writes` small applies at the operator's concurrency, without any decision."""
    client = await KubeClient.connect(str(cluster.kubeconfig))
    limit = asyncio.Semaphore(16)

    async def write(name: str) -> None:
        document: dict[str, Any] = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": "baseline"}}
        async with limit:
            await client.apply(document | {"data": {"a": "b"}})

    seconds = []
    try:
        for number in range(objects):
            begin = time.monotonic()
            await asyncio.gather(*(write(f"b-{number}-{n}") for n in range(writes)))
            seconds.append(time.monotonic() - begin)
    finally:
        await client.close()
    return statistics.median(seconds)


if __name__ == "__main__":
    sys.exit(main())
