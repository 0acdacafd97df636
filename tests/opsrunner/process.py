"""`pd-operator run` as a real process (opsrunner/program.py): its settings, its log, its probes and metrics."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from cluster.ports import free_ports
from opsrunner.waits import until

# No image is ever pulled by a fake node; {version} shows that the table is used.
IMAGES = {
    "vllm": "example.org/vllm:{version}",
    "smg": "example.org/smg:{version}",
    "vllm-router": "example.org/vllm-router:{version}",
    "canary": "example.org/pd-operator:{version}",
}
ROOT = Path(__file__).parents[2]
START = 90.0  # seconds for the first lists and the Lease
STOP = 20.0  # seconds after SIGTERM; the operator's own bound is 10 s


class Operator:
    """One operator process; a context that starts and stops it.

    Args:
        kubeconfig: who it is.
        namespaces: what it watches; none = what the settings file says, else the whole cluster.
        home: PD_NAMESPACE, where its Lease is; must exist.
        folder: for the log.
        settings: more settings by their environment names without PD_ (LOG_LEVEL, INSTALL, ...).
    """

    def __init__(
        self, kubeconfig: Path, namespaces: Sequence[str], *, home: str, folder: Path, settings: Mapping[str, str] | None = None
    ) -> None:
        self.kubeconfig = kubeconfig
        self.namespaces = tuple(namespaces)
        self.home = home
        self.settings = dict(settings or {})
        folder.mkdir(parents=True, exist_ok=True)
        self.log_file = folder / f"operator-{self.settings.get('INSTALL', 'default')}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> Operator:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        code = self.stop()
        if error is None:
            assert code == 0, f"the operator ended with {code}:\n{self.tail()}"
            assert not self.tracebacks(), f"tracebacks in {self.log_file}:\n{self.tracebacks()[0]}"

    @property
    def address(self) -> str:
        """Host and port of its probes and metrics; another one after each start."""
        return f"127.0.0.1:{self._port}"

    def start(self, *, leading: bool = True) -> None:
        """Start it and wait until it is ready, and leads when `leading`.

        Raises:
            TimeoutError, RuntimeError: it is not ready in time, or has ended; both with the end of the log.
        """
        assert self._process is None, "it runs"
        (self._port,) = free_ports(1)
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PD_")},
            "PYTHONPATH": f"{ROOT / 'operator'}:{ROOT / 'tests'}",
            "KUBECONFIG": str(self.kubeconfig),
            "PD_HTTP_HOST": "127.0.0.1",
            "PD_HTTP_PORT": str(self._port),
            "PD_NAMESPACE": self.home,
            "PD_IMAGES": json.dumps(IMAGES),
            "PD_LOG_LEVEL": "DEBUG",
            **({"PD_WATCH_NAMESPACES": ",".join(self.namespaces)} if self.namespaces else {}),
            **{f"PD_{key}": value for key, value in self.settings.items()},
        }
        argv = [sys.executable, "-m", "opsrunner.program"]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                argv, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        until("the operator to be ready", self._ready, timeout=START, show=self.tail)
        if leading:
            until("the operator to lead", lambda: self.metric("pd_operator_leader") == 1, timeout=START, show=self.tail)

    def stop(self) -> int:
        """SIGTERM; the exit code. Kills it after STOP seconds, which is a failure (-9)."""
        return self._end(signal.SIGTERM)

    def kill(self) -> int:
        """SIGKILL: no drain, the Lease stays, for as long as opsrunner/program.py says."""
        return self._end(signal.SIGKILL)

    def tail(self, lines: int = 15) -> str:
        """The end of the log."""
        return "\n".join(line[:600] for line in self.log_file.read_text(errors="replace").splitlines()[-lines:])

    def records(self) -> list[dict[str, Any]]:
        """The log lines."""
        return [json.loads(line) for line in self.log_file.read_text().splitlines() if line.startswith("{")]

    def tracebacks(self) -> list[str]:
        """What the log holds of unexpected exceptions."""
        return [f"{r['msg']}\n{r['error']}" for r in self.records() if r.get("error") and r["level"] in {"ERROR", "CRITICAL"}]

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric that carry these labels; 0 when there are none or the process does not answer."""
        return sum(value for found, value in self._samples(name) if all(found.get(k) == v for k, v in labels.items()))

    def calls(self) -> dict[tuple[str, str, str], int]:
        """Requests to the API server so far, by (verb, kind, code), kopf's own not among them."""
        return {(f["verb"], f["kind"], f["code"]): int(value) for f, value in self._samples("pd_operator_api_requests_total")}

    def _samples(self, name: str) -> list[tuple[dict[str, str], float]]:
        found = []
        for line in self._get("/metrics")[1].splitlines():
            match = re.fullmatch(r"([a-z_]+)(?:\{(.*)\})? (\S+)", line)
            if match and match[1] == name:
                found.append((dict(re.findall(r'([a-z_]+)="([^"]*)"', match[2] or "")), float(match[3])))
        return found

    def _ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self._process.returncode}:\n{self.tail()}")
        return self._get("/readyz")[0] == 200

    def _get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self.address}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError:
            return 0, ""

    def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        self._process.send_signal(number)
        try:
            code = self._process.wait(timeout=STOP)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait(timeout=10)
        self._process = None
        return code
