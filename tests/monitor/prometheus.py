"""Prometheus as a process on loopback: scrapes what the configuration names, and holds what was filled in before it started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from cluster.tools import tool
from standin.local import free_port

START_LIMIT_S = 20.0


class Prometheus:
    """As a context. `past` is text in OpenMetrics format with time stamps (seconds); `configuration` is that of the next start.

    `host` is the address that it listens on: that of a node's bridge where pods are to reach it.
    """

    def __init__(
        self, configuration: Mapping[str, Any], past: str = "", arguments: Sequence[str] = (), host: str = "127.0.0.1"
    ) -> None:
        self.configuration = configuration
        self._past = past
        self._arguments = arguments
        self.url = f"http://{host}:{free_port()}"

    def __enter__(self) -> Prometheus:
        self._folder = tempfile.TemporaryDirectory()
        folder = Path(self._folder.name)
        data = folder / "data"
        if self._past:
            (folder / "past").write_text(self._past + "# EOF\n")
            argv = ["tsdb", "create-blocks-from", "openmetrics", str(folder / "past"), str(data)]
            done = subprocess.run([str(tool("promtool")), *argv], capture_output=True, text=True, timeout=400)
            assert done.returncode == 0, done.stderr
        self._log = (folder / "log").open("w+")
        return self.start()

    def configure(self, configuration: Mapping[str, Any]) -> None:
        """Take another configuration, as a reload does."""
        self.configuration = configuration
        (Path(self._folder.name) / "prometheus.yml").write_text(yaml.safe_dump(dict(configuration)))
        self._process.send_signal(signal.SIGHUP)

    def start(self) -> Prometheus:
        """Start the process; after `kill`, on the same port and data."""
        folder = Path(self._folder.name)
        (folder / "prometheus.yml").write_text(yaml.safe_dump(dict(self.configuration)))
        argv = [f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
        argv += [f"--web.listen-address={self.url.removeprefix('http://')}", *self._arguments]
        self._process = subprocess.Popen([str(tool("prometheus")), *argv], stdout=self._log, stderr=self._log, cwd=folder)
        deadline = time.monotonic() + START_LIMIT_S
        while not self._ready():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self._log.seek(0)
                raise RuntimeError(f"Prometheus is not ready after {START_LIMIT_S:g} s:\n{self._log.read()[-2000:]}")
            time.sleep(0.05)
        return self

    def kill(self) -> None:
        """SIGKILL, as a node that dies would."""
        self._process.kill()
        self._process.wait(timeout=10)

    def __exit__(self, *_: object) -> None:
        self.kill()
        self._log.close()
        self._folder.cleanup()

    def _ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=2) as answer:
                return bool(answer.status == 200)
        except (OSError, urllib.error.URLError):
            return False

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Rows of an instant query."""
        body = urllib.parse.urlencode({"query": expression}).encode()
        with urllib.request.urlopen(f"{self.url}/api/v1/query", data=body, timeout=10) as answer:
            return [(row["metric"], float(row["value"][1])) for row in json.load(answer)["data"]["result"]]

    def resident_mib(self) -> float:
        """Memory of the process."""
        pages = int(Path(f"/proc/{self._process.pid}/statm").read_text().split()[1])
        return pages * 4096 / 2**20

    def cpu_seconds(self) -> float:
        """Processor time of the process so far."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
