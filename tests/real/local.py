"""Real engines as processes of this machine, on loopback ports: a P and a D, each with an LMCache server of its own.

For tests that need no cluster. Needs root: each engine gets a mount namespace with an empty /sys/devices/system/node, because
vLLM's CPU worker pins itself to the last core of each NUMA node it finds there, and all engines would share one core.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from real.runtime import Runtime

MODEL_NAME = "tiny"
CHUNK = 64
BLOCK = 32
START_WAIT_S = 600.0
STOP_WAIT_S = 30.0
HOST = "127.0.0.1"
BROKEN = Path(__file__).parent / "broken"
# Seconds. Decode sends a heartbeat every sixth of it, and one that finds no agent of prefill starts a handshake. With the default
# of 30 that is 5 s, which is how long a handshake waits for an answer: by chance a handshake that failed is tried and counted again
# (vLLM 0.32.0, nixl/base_worker.py), and the idle engine shows that with the next request. At 9 s nothing falls together.
LEASE_S = 54

# The smallest settings that serve: 256 MiB of KV cache, eager, one OpenMP thread. float32, because with bfloat16 vLLM takes its AMX
# kernels where the CPU has AMX and leaves it to oneDNN to ask the kernel for the permission: a decode engine whose first step is
# one token after a handoff has not asked, and dies of SIGILL (seen with vLLM 0.32.0).
ENGINE_ARGS = (
    *("--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK), "--max-model-len", "2048"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "2048", "--kv-cache-memory-bytes", "268435456"),
)
ENGINE_ENV = {
    "PYTHONHASHSEED": "0",  # vLLM's block hashes must agree between engines
    "LMCACHE_TRACK_USAGE": "false",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "NIXL_PTHR_DELAY_US": "1000",  # see the patch in runtime.py
    "UCX_TLS": "tcp",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",  # without a C++ compiler one request with logprobs would end the engine
}


@dataclass(frozen=True)
class Engine:
    """One engine and its LMCache server."""

    role: str
    http: str
    lmcache: str


@dataclass
class Stack:
    """The processes of one P/D pair and where they listen."""

    prefill: Engine
    decode: Engine
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)


def free_port() -> int:
    """A TCP port of loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def kv_transfer_config(role: str, lmcache_port: int, module: str = "") -> str:
    """The JSON of --kv-transfer-config: NIXL between the engines, LMCache's server beside each.

    `module` has another MultiConnector.
    """
    kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
    nixl = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S, "backends": ["UCX"]},
    }
    lmcache = {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{HOST}",
            "lmcache.mp.port": lmcache_port,
            "lmcache.mp.mq_timeout": 10,
            "lmcache.mp.heartbeat_interval": 2,
        },
    }
    both = {
        "kv_connector": "MultiConnector",
        "kv_role": kv_role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [nixl, lmcache]},
        **({"kv_connector_module_path": module} if module else {}),
    }
    return json.dumps(both)


def engine_args(model: str, role: str, port: int, lmcache_port: int, module: str = "") -> list[str]:
    """The arguments after `vllm`, the same for a real engine and a stand-in."""
    head = ["serve", model, "--served-model-name", MODEL_NAME, "--host", HOST, "--port", str(port), "--shutdown-timeout", "5"]
    return [*head, "--kv-transfer-config", kv_transfer_config(role, lmcache_port, module), *ENGINE_ARGS]


def lmcache_args(instance: str, port: int, http_port: int) -> list[str]:
    """The arguments after `lmcache`, the same for a real server and a stand-in."""
    return [
        *("server", "--host", HOST, "--port", str(port), "--http-host", HOST, "--http-port", str(http_port)),
        *("--l1-size-gb", "0.25", "--l1-init-size-gb", "1", "--eviction-policy", "LRU", "--chunk-size", str(CHUNK)),
        *("--supported-transfer-mode", "auto", "--instance-id", instance),
    ]


@contextlib.contextmanager
def stack(
    vllm: list[str], lmcache: list[str], model: str, env: dict[str, str], logs: Path, *, module: str = "", cache_port: int = 0
) -> Iterator[Stack]:
    """Start a pair with these commands, wait until all four answer, and stop all of it at the end.

    `logs` gets one file per process and is HOME of all; `module` has another MultiConnector; `cache_port` is where prefill looks
    for its LMCache server, if not where it is. Raises TimeoutError after START_WAIT_S seconds, or RuntimeError when a
    process ends before, each with the end of the log.
    """
    logs.mkdir(parents=True, exist_ok=True)
    ports = {role: [free_port() for _ in range(4)] for role in ("prefill", "decode")}
    engines = [Engine(role, f"http://{HOST}:{p[0]}", f"http://{HOST}:{p[3]}") for role, p in ports.items()]
    made = Stack(engines[0], engines[1])
    base = {**os.environ, **env, "HOME": str(logs)}
    base.pop("PYTHONPATH", None)  # the runtime's interpreter must not see the packages of the tests
    base.update({name: value for name, value in env.items() if name == "PYTHONPATH"})
    try:
        for role, (_, _, data, http) in ports.items():
            _start(made, f"lmcache-{role}", [*lmcache, *lmcache_args(role, data, http)], base, logs)
        for engine in engines:
            _wait(made, f"lmcache-{engine.role}", f"{engine.lmcache}/healthcheck", logs)
        for role, (port, side, data, _) in ports.items():
            looked = cache_port if cache_port and role == "prefill" else data
            side_env = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side), "VLLM_HOST_IP": HOST}
            _start(made, role, [*vllm, *engine_args(model, role, port, looked, module)], {**base, **side_env}, logs)
        for engine in engines:
            _wait(made, engine.role, f"{engine.http}/health", logs)
        yield made
    finally:
        _stop(made)


def real_stack(runtime: Runtime, logs: Path, *, module: str = "", cache_port: int = 0) -> contextlib.AbstractContextManager[Stack]:
    """A pair of real engines; about 60 s and 5.5 GiB of memory. `module` is one of broken/, `cache_port` as in `stack`."""
    no_pinning = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /sys/devices/system/node && exec "$@"', "sh"]
    env = {**ENGINE_ENV, "LD_LIBRARY_PATH": str(runtime.native), **({"PYTHONPATH": str(BROKEN)} if module else {})}
    bin_ = runtime.venv / "bin"
    commands = [*no_pinning, str(bin_ / "vllm")], [str(bin_ / "lmcache")]
    return stack(*commands, str(runtime.model), env, logs, module=module, cache_port=cache_port)


def _start(made: Stack, name: str, command: list[str], env: dict[str, str], logs: Path) -> None:
    with (logs / f"{name}.log").open("wb") as log:
        # A session of its own: the engine's workers are in it and can be ended together.
        made.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=logs, start_new_session=True)


def _wait(made: Stack, name: str, url: str, logs: Path) -> None:
    deadline = time.monotonic() + START_WAIT_S
    while True:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=3) as answer:
            if answer.status == 200:
                return
        tail = (logs / f"{name}.log").read_text(errors="replace")[-3000:]
        if made.processes[name].poll() is not None:
            raise RuntimeError(f"{name} ended with status {made.processes[name].returncode} before {url} answered:\n{tail}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name}: {url} gave no 200 in {START_WAIT_S:.0f} s:\n{tail}")
        time.sleep(0.3)


def _stop(made: Stack) -> None:
    """Ask all to end, engines first (they talk to their LMCache server while they end), and kill what is left."""
    names = sorted(made.processes, key=lambda name: name.startswith("lmcache"))
    deadline = time.monotonic() + STOP_WAIT_S
    for name in names:
        made.processes[name].terminate()
    for name in names:
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.processes[name].wait(max(0.1, deadline - time.monotonic()))
    for name in names:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(made.processes[name].pid, signal.SIGKILL)
        made.processes[name].wait(STOP_WAIT_S)
