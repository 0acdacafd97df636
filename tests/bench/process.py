"""The operator as a process of its own, with its memory, CPU and metrics."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from cluster.handle import Cluster
from cluster.ports import free_ports

IMAGES = '{"vllm": "localhost/vllm:{version}", "smg": "localhost/smg:{version}"}'
START_LIMIT_S = 300.0  # tens of thousands of pods are listed first


@dataclass(frozen=True)
class Usage:
    """Memory in MiB, CPU in seconds."""

    rss: float
    peak: float
    cpu: float


class OperatorProcess:
    """`pd-operator run` on a cluster, as a context."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        (self._port,) = free_ports(1)
        self._log = Path(tempfile.gettempdir()) / f"pd-operator-bench-{os.getpid()}.log"

    def __enter__(self) -> OperatorProcess:
        environment = {
            **os.environ,
            "KUBECONFIG": str(self._cluster.kubeconfig),
            "PD_HTTP_PORT": str(self._port),
            "PD_IMAGES": IMAGES,
        }
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pd_operator.cli", "run"], env=environment, stdout=log, stderr=log
            )
        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self._get("readyz")
                return self
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"the operator is not ready after {START_LIMIT_S:.0f} s:\n{self._log.read_text()[-2000:]}"
                    ) from None
                time.sleep(0.2)

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def metric(self, name: str) -> float:
        """Sum over the series of a metric."""
        page = self._get(
            f"metrics?name[]={name}"
        )  # all of them take longer the more objects there are, which is not what is measured
        found = re.findall(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", page, flags=re.M)
        return sum(map(float, found))

    def writes(self) -> float:
        """Requests that change something, those on the Lease apart."""
        page = self._get("metrics?name[]=pd_operator_api_requests_total")
        lines = re.findall(r"^pd_operator_api_requests_total\{([^}]*)\} (\S+)$", page, flags=re.M)
        return sum(float(n) for labels, n in lines if not re.search(r'verb="(get|list|watch)"|kind="Lease"', labels))

    def usage(self) -> Usage:
        """Memory and CPU now."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = os.sysconf("SC_CLK_TCK")
        mib = {key: int(value) / 1024 for key, value in re.findall(r"^(VmRSS|VmHWM):\s+(\d+) kB", status, flags=re.M)}
        return Usage(mib["VmRSS"], mib["VmHWM"], (int(fields[11]) + int(fields[12])) / ticks)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/{path}", timeout=5) as response:
            return str(response.read().decode())
