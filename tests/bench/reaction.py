"""python -m bench.reaction [--objects 12]: from a backlog in the pods' pages to the creation of new pods.

The operator as a process with its defaults (podScrape every 5 s, a tick every 15 s), a real control plane, fake nodes. Their pods
have addresses that nothing serves, so all of it runs in a network namespace of its own where that whole range is local, and one
server answers for every pod. Each object's backlog begins at a moment of its own. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

from bench.process import OperatorProcess
from cluster import audit, paths, session
from cluster.handle import Cluster
from cluster.kwok import FakeNodes
from cluster.progress import say
from monitor.pods import Pod
from opsrunner.api import Api
from pd_operator.upstream import smg, vllm
from served import chat

INSIDE = "PDD_BENCH_INSIDE"
PODS = "10.250.0.0/16"  # of kwok (cluster/kwok.py)
SCRAPE_S, TICK_S = 5.0, 15.0
SETTLE_S = 50.0  # three ticks with a steady load, so that rates are known
SPREAD_S = 30.0  # the backlogs begin within two ticks
LIMIT_S = 60.0
SPACE = "reaction"


def main() -> int:
    """Run it; prints a table."""
    parser = argparse.ArgumentParser(prog="python -m bench.reaction", description=__doc__)
    parser.add_argument("--objects", type=int, default=12, help="PDDeployments, each one measurement (default 12)")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        script = f'ip link set lo up && ip route add local {PODS} dev lo && exec "$@"'
        argv = [
            "unshare",
            "-n",
            "sh",
            "-c",
            script,
            "sh",
            sys.executable,
            "-m",
            "bench.reaction",
            "--objects",
            str(options.objects),
        ]
        return subprocess.run(argv, env={**os.environ, INSIDE: "1"}).returncode
    with session.control_plane(FakeNodes(8, gpus=64)) as cluster:
        for crd in sorted((paths.CHECKOUT / "crds").glob("*.yaml")):
            cluster.kubectl("apply", "--server-side", "-f", str(crd))
        for namespace in ("pd-operator", SPACE):
            cluster.kubectl("create", "namespace", namespace)
        with OperatorProcess(cluster):
            _run(cluster, options.objects)
    return 0


class Fleet:
    """What each pod's page says: a steady load, and from an object's moment on a backlog of handoffs."""

    def __init__(self) -> None:
        self.sides: dict[str, tuple[str, str]] = {}  # address -> (object, side)
        self.begun: dict[str, float] = {}  # object -> when its backlog began
        self._start = time.time()
        for port in (vllm.PORT, smg.METRICS_PORT):
            threading.Thread(target=self._server(port).serve_forever, daemon=True).start()

    def look(self, cluster: Cluster) -> None:
        """Learn the addresses of the pods that there are."""
        for pod in cluster.json("get", "pods", "-n", SPACE)["items"]:
            labels, address = pod["metadata"]["labels"], pod["status"].get("podIP")
            if address:
                self.sides[address] = (labels["pdserve.dev/deployment"], labels.get("pdserve.dev/role", "router"))

    def page(self, address: str) -> bytes:
        """The page of a pod. A pod that is not known yet has just started and runs nothing."""
        name, side = self.sides.get(address, ("", "decode"))
        n = time.time() - self._start if name else 0.0
        if side == "router":
            return Pod("router", offered=5 * n, queued=0).page()
        if side == "prefill":
            first = {"first_tokens": {0.5: 5 * n}, "first_token_seconds": 1.0 * n}
            return Pod("prefill", computed=2500 * n, prefills=5 * n, prefill_seconds=0.5 * n, **first).page()
        late = name in self.begun
        running, waiting = (170, 300) if late else (50, 0)
        work = {"gaps": 1500 * n, "gap_seconds": 45.0 * n, "outputs": 5 * n, "output_tokens": 1500 * n}
        busy = Pod("decode", running=running, usage=0.5, blocks=20000, fetching={"waiting_to_start": waiting}, **work)
        return busy.but(first_tokens={0.1: 5 * n}, first_token_seconds=0.25 * n).page()

    def _server(self, port: int) -> ThreadingHTTPServer:
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                body = fleet.page(self.connection.getsockname()[0])
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)

            def log_message(self, *_: object) -> None:
                pass

        server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
        server.daemon_threads = True
        return server


def _run(cluster: Cluster, objects: int) -> None:
    names = [f"o{number}" for number in range(objects)]
    scaling = {"mode": "Auto", "prefill": {"maxReplicas": 4}, "decode": {"maxReplicas": 4}}
    cluster.apply(*(chat(name, scaling=scaling, router={"replicas": 1}) for name in names), namespace=SPACE)
    path = '{range .items[*]}{.status.conditions[?(@.type=="Ready")].status}{" "}{end}'
    fleet = Fleet()
    deadline = time.monotonic() + LIMIT_S
    while cluster.kubectl("get", "pdd", "-n", SPACE, "-o", f"jsonpath={path}").split().count("True") < objects:
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {LIMIT_S:.0f} s for {objects} objects to be Ready")
        time.sleep(0.5)
    fleet.look(cluster)
    say(f"{objects} objects are Ready; {SETTLE_S:.0f} s of a steady load")
    time.sleep(SETTLE_S)
    creations = Creations(cluster)
    chance = random.Random(7)
    begin = time.time()
    for name, at in sorted(((name, begin + chance.uniform(0, SPREAD_S)) for name in names), key=lambda pair: pair[1]):
        time.sleep(max(0.0, at - time.time()))
        fleet.begun[name] = time.time()
    time.sleep(TICK_S + SCRAPE_S + 5)
    early = [name for name, times in creations.times.items() if min(times) < fleet.begun[name]]
    assert not early, f"pods of {early} were made before their backlog"
    seconds = sorted(min(times) - fleet.begun[name] for name, times in creations.times.items())
    scaled = _scaled(cluster)
    wrote = sorted(at - fleet.begun[name] for name, at in scaled.items() if at > fleet.begun.get(name, math.inf))
    bound = SCRAPE_S + TICK_S
    print()
    print(f"{'objects whose backlog made new pods':62} {len(seconds)} of {objects}")
    print(f"{'backlog in the page -> new pod created: min, p50, max':62} {_three(seconds)}")
    print(f"{'of that, until the pool has its number: min, p50, max':62} {_three(wrote)}")
    print(f"{'one scrape and one tick':62} {bound:.0f} s; within it {sum(s <= bound for s in seconds)} of {len(seconds)}")


def _three(seconds: list[float]) -> str:
    return f"{seconds[0]:.1f} s, {statistics.median(seconds):.1f} s, {seconds[-1]:.1f} s"


class Creations:
    """When pods of each object were created, as a watch shows it."""

    def __init__(self, cluster: Cluster) -> None:
        self.times: dict[str, list[float]] = {}
        api = Api(cluster.kubeconfig)
        version = api.page("Pod", SPACE)["metadata"]["resourceVersion"]
        threading.Thread(target=self._follow, args=(api, version), daemon=True).start()

    def _follow(self, api: Api, version: str) -> None:
        with contextlib.suppress(requests.RequestException):  # the server ends before the watch does
            for event in api.watch("Pod", SPACE, version, seconds=int(SETTLE_S + SPREAD_S + 2 * LIMIT_S)):
                if event["type"] == "ADDED":
                    name = event["object"]["metadata"]["labels"]["pdserve.dev/deployment"]
                    self.times.setdefault(name, []).append(time.time())


def _scaled(cluster: Cluster) -> dict[str, float]:
    """When the number of each decode pool was first written, from the audit log."""
    assert cluster.audit_log is not None
    found: dict[str, float] = {}
    for event in audit.events(cluster.audit_log, verbs=("patch",)):
        reference = event.get("objectRef", {})
        if (
            reference.get("namespace") == SPACE
            and reference.get("subresource") == "scale"
            and reference["name"].endswith("-decode")
        ):
            found.setdefault(reference["name"].split("-")[0], datetime.fromisoformat(event["stageTimestamp"]).timestamp())
    return found


if __name__ == "__main__":
    sys.exit(main())
