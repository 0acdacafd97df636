"""Starts stand-ins as processes on free loopback ports, for tests and for trying things by hand."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from standin.conformance import Client

ROOT = Path(__file__).resolve().parent.parent
MODEL = "standin/tiny"
NAME = "tiny"


def until(condition: Callable[[], bool], what: str, seconds: float = 10.0) -> None:
    """Waits until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"{what} did not come within {seconds:g} s"
        time.sleep(0.05)


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Running:
    """One stand-in process."""

    process: "subprocess.Popen[bytes]"
    url: str
    log: IO[bytes]
    probe: str  # path that answers 200 when the process serves
    began: float  # monotonic time
    started_s: float = 0.0  # seconds from the start of the process to its first answer
    ports: dict[str, int] = field(default_factory=dict)

    def ready(self, wait_s: float = 20.0) -> "Running":
        """Waits until the process serves.

        Raises RuntimeError with the process's output if it ends or does not answer within `wait_s` seconds.
        """
        while not self.started_s:
            try:
                if self.client.call("GET", self.probe)[0] == 200:
                    self.started_s = time.monotonic() - self.began
                    break
            except OSError:
                pass
            if self.process.poll() is not None or time.monotonic() - self.began > wait_s:
                raise RuntimeError(f"{self.url}{self.probe} gave no 200 in {wait_s:g} s:\n{self.output()}")
            time.sleep(0.02)
        return self

    @property
    def client(self) -> Client:
        """HTTP client of this process; 20 s for an answer."""
        return Client(self.url, 20.0)

    def output(self) -> str:
        """What the process has printed."""
        self.log.seek(0)
        return self.log.read().decode("utf-8", "replace")

    def signal(self, number: int) -> None:
        """Sends a signal to the process."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float = 10.0) -> int:
        """The exit status. Raises TimeoutExpired if the process still runs after that time."""
        return self.process.wait(timeout_s)

    def fault(self, **values: Any) -> None:
        """Breaks something on purpose (see standin.settings.Faults)."""
        self.client.json("POST", "/standin/fault", values)

    def resident_bytes(self) -> int:
        """Memory of the process."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def processor_seconds(self) -> float:
        """Processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Local:
    """Starts processes and ends all of them at the end of the `with` block."""

    def __init__(self) -> None:
        self._running: list[Running] = []

    def __enter__(self) -> "Local":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for running in self._running:
            if running.process.poll() is None:
                running.process.send_signal(signal.SIGKILL)
            running.process.wait(10)
            running.log.close()

    def start(self, arguments: list[str], environment: dict[str, str], url: str, probe: str, *, wait: bool = True) -> Running:
        """Starts `python3 -m ARGUMENTS`; waits for a 200 at `probe` unless told not to (then call `ready` on what it returns).

        Raises RuntimeError if the process ends or does not answer.
        """
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by __exit__
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
        began = time.monotonic()
        # -S: without site-packages, because the stand-ins need none.
        process = subprocess.Popen([sys.executable, "-S", "-m", *arguments], env=variables, stdout=log, stderr=log, cwd="/")
        running = Running(process, url, log, probe, began)
        self._running.append(running)
        return running.ready() if wait else running

    def engine(
        self, role: str | None = None, *flags: str, kv: dict[str, Any] | None = None, wait: bool = True, **variables: str
    ) -> Running:
        """An engine; `role` is kv_producer, kv_consumer or None (no connector), `kv` updates --kv-transfer-config."""
        port, side = free_port(), free_port()
        arguments = ["standin.engine", "serve", MODEL, "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port)]
        arguments += ["--block-size", "32", "--max-model-len", "4096", *flags]
        if role:
            config = {"kv_connector": "NixlConnector", "kv_role": role, "kv_load_failure_policy": "recompute", **(kv or {})}
            arguments += ["--kv-transfer-config", json.dumps(config)]
        environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side), **variables}
        running = self.start(arguments, environment, f"http://127.0.0.1:{port}", "/health", wait=wait)
        running.ports = {"http": port, "side": side}
        return running

    def cache(self, *flags: str, data_port: int = 0, wait: bool = True) -> Running:
        """A cache server with chunks of 64 tokens."""
        port, data = free_port(), data_port or free_port()
        arguments = ["standin.cache", "server", "--host", "127.0.0.1", "--port", str(data), "--http-host", "127.0.0.1"]
        arguments += ["--http-port", str(port), "--l1-size-gb", "0.25", "--l1-init-size-gb", "1", "--eviction-policy", "LRU"]
        arguments += ["--chunk-size", "64", "--supported-transfer-mode", "auto", *flags]
        running = self.start(arguments, {}, f"http://127.0.0.1:{port}", "/healthcheck", wait=wait)
        running.ports = {"http": port, "data": data}
        return running

    def coordinator(self, *flags: str) -> Running:
        """A coordinator."""
        port = free_port()
        arguments = ["standin.cache", "coordinator", "--host", "127.0.0.1", "--port", str(port), *flags]
        return self.start(arguments, {}, f"http://127.0.0.1:{port}", "/healthz")

    def member(self, coordinator: Running, name: str) -> Running:
        """A cache server that finds others through a coordinator."""
        address = f"127.0.0.1:{free_port()}"
        flags = ["--instance-id", name, "--coordinator-url", coordinator.url, "--coordinator-advertise-ip", "127.0.0.1"]
        flags += ["--coordinator-heartbeat-interval", "0.2", "--p2p-advertise-url", address, "--p2p-listen-url", address]
        flags += ["--p2p-lookup-timeout", "5", "--p2p-load-timeout", "10", "--p2p-transfer-engine", "nixl"]
        return self.cache(*flags, "--l1-align-bytes", "65536")


def with_cache(role: str, data_port: int, *, mq_timeout: float = 10.0, heartbeat: float = 2.0) -> dict[str, Any]:
    """The --kv-transfer-config of an engine with NIXL and a cache server, as the operator renders it."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [
                {"kv_connector": "NixlConnector", "kv_role": role, "kv_connector_extra_config": {"kv_lease_duration": 30}},
                {
                    "kv_connector": "LMCacheMPConnector",
                    "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": "tcp://127.0.0.1",
                        "lmcache.mp.port": data_port,
                        "lmcache.mp.mq_timeout": mq_timeout,
                        "lmcache.mp.heartbeat_interval": heartbeat,
                    },
                },
            ]
        },
    }


def handoff(prefill: Running, decode: Running, path: str = "/v1/completions", **request: Any) -> tuple[dict[str, Any], Any]:
    """Both legs by hand: (kv_transfer_params of P, the decoded answer of D)."""
    first = {**request, "max_tokens": 1, "stream": False}
    first["kv_transfer_params"] = {"do_remote_decode": True, "do_remote_prefill": False}
    params = prefill.client.json("POST", path, first)["kv_transfer_params"]
    return params, decode.client.json("POST", path, {**request, "kv_transfer_params": params})
