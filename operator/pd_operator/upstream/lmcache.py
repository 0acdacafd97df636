"""LMCache in multi-process mode: the server beside each engine, the P2P coordinator, and the engine's connector.

Sources: LMCache/LMCache at 0.5.5 (docs/source/mp, lmcache/v1/multiprocess/config.py); "measured" means seen in pods.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from pd_operator.api.conditions import Reason
from pd_operator.api.scalars import format_bytes, quantity
from pd_operator.api.types import LMCacheSpec
from pd_operator.core.capabilities import Program, Refusal

TESTED: Final = "0.5.5"
MINIMUM: Final = Version("0.5.5")
DATA_PORT: Final = 5555
HTTP_PORT: Final = 8080
P2P_PORT: Final = 5700
COORDINATOR_PORT: Final = 9300
COMMAND: Final = ["lmcache"]
GIB: Final = Decimal(1024) ** 3
# LMCache's own operator: request = L1 + 5 GiB, limit = 1.5 x request (operator/internal/resources at 0.5.5)
OVERHEAD: Final = 5 * GIB
# The HTTP port opens only after L1 is pinned; 1.2 TB crash-looped under a fixed window (issue 4576: budget 1 GB/s).
STARTUP_BASE: Final = 180  # seconds
OWNED_ENV: Final = frozenset({"POD_IP", "POD_NAME", "PYTHONHASHSEED"})


def program(version: str) -> Program:
    """LMCache at a version."""
    return Program("lmcache", version, version == TESTED, frozenset(), OWNED_ENV)


def refusals(lmcache: LMCacheSpec) -> list[Refusal]:
    """Rules that depend on the version."""
    field = "spec.lmcache.version"
    try:
        if Version(lmcache.version) >= MINIMUM:
            return []
    except InvalidVersion:
        return [Refusal(Reason.UNSUPPORTED_VERSION, field, lmcache.version, "not a version; give one such as 0.5.5")]
    accepted = f"LMCache {MINIMUM} or later is needed (the connector's guard against empty loads); tested: {TESTED}"
    return [Refusal(Reason.UNSUPPORTED_VERSION, field, lmcache.version, accepted)]


def load_only_child(version: str) -> bool:
    """Whether a nested `kv_consumer` stops the child from storing, so that a failed handoff is survivable under `fail`.

    0.5.5 ignores kv_role (issue 4665); 0.5.6 derives `_can_store` from it.
    """
    try:
        return Version(version) >= Version("0.5.6")
    except InvalidVersion:
        return False


def connector(lmcache: LMCacheSpec, load_only: bool, servers: Sequence[str] = ()) -> dict[str, Any]:
    """The LMCache child of vLLM's MultiConnector; `servers` are those of an engine whose ranks are on several nodes, by node.

    The module path is always LMCache's own: vLLM's built-in class lacked the guard for zero external tokens until 0.32
    (vllm-project/vllm issue 47505). mq_timeout defaults to 300 s, for which a request hangs when the server dies (measured).
    """
    where = (
        {"lmcache.mp.server_urls": ",".join(servers)}
        if servers
        else {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": DATA_PORT}
    )
    extra: dict[str, Any] = {
        **where,
        "lmcache.mp.mq_timeout": 10,
        "lmcache.mp.heartbeat_interval": 2,
        "lmcache.mp.mp_transfer_mode": "engine_driven" if lmcache.transfer == "Engine" else "lmcache_driven",
    }
    if lmcache.transfer == "Server":
        extra["lmcache.mp.isolated_ipc"] = True  # no hostIPC, no shared /dev/shm; both sides must agree
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_consumer" if load_only else "kv_both",
        "kv_connector_extra_config": extra,
    }


def gib(size: Decimal) -> str:
    """A size for --l1-size-gb: "0.25", "20"."""
    return format((size / GIB).normalize(), "f")


def server_arguments(lmcache: LMCacheSpec, coordinator_url: str, shared: bool = False) -> list[str]:
    """Arguments of `lmcache server`; the data port leaves loopback only for those who dial it from another pod.

    These are the peers with P2P, and, where an engine spans nodes (`shared`), its scheduler.
    """
    size = quantity(lmcache.l1_size)
    args = ["server", "--host", "0.0.0.0" if lmcache.p2p.enabled or shared else "127.0.0.1", "--port", str(DATA_PORT)]
    args += ["--http-host", "0.0.0.0", "--http-port", str(HTTP_PORT)]
    initial = max(1, int(min(size, 20 * GIB) / GIB))  # an integer, unlike the size itself ("invalid int value: '0.25'", measured)
    args += ["--l1-size-gb", gib(size), "--l1-init-size-gb", str(initial), "--eviction-policy", "LRU"]
    args += ["--chunk-size", str(lmcache.chunk_size), "--instance-id", "$(POD_NAME)"]
    if lmcache.transfer == "Engine":
        args += ["--supported-transfer-mode", "auto"]  # measured: CPU engines need auto on the server
    else:
        args += ["--supported-transfer-mode", "lmcache_driven", "--isolated-ipc"]
    if lmcache.p2p.enabled:
        # Short time-outs: with the defaults each request paid 3 s for a dead peer until it expired after 30 s (measured).
        args += [
            "--coordinator-url",
            coordinator_url,
            "--coordinator-advertise-ip",
            "$(POD_IP)",
            "--coordinator-heartbeat-interval",
            "2",
        ]
        args += ["--p2p-advertise-url", f"$(POD_IP):{P2P_PORT}", "--p2p-listen-url", f"0.0.0.0:{P2P_PORT}"]
        args += [
            "--p2p-lookup-timeout",
            "5",
            "--p2p-load-timeout",
            "10",
            "--p2p-transfer-engine",
            "nixl",
            "--l1-align-bytes",
            "65536",
        ]
    return args


def coordinator_arguments(lmcache: LMCacheSpec) -> list[str]:
    """Arguments of `lmcache coordinator`; chunk size and hash must equal the servers'."""
    args = ["coordinator", "--host", "0.0.0.0", "--port", str(COORDINATOR_PORT)]
    return [*args, "--instance-timeout", "10", "--health-check-interval", "2", "--chunk-size", str(lmcache.chunk_size)]


def environment(lmcache: LMCacheSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(owned, defaults that the user may replace). Telemetry is on by default and calls out: off."""
    owned: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        {"name": "PYTHONHASHSEED", "value": "0"},
    ]
    defaults = {
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "NUMBA_CACHE_DIR": "/tmp/numba",
    }
    if lmcache.p2p.enabled:
        defaults["UCX_NET_DEVICES"] = "all"
    if lmcache.transfer == "Server":
        # The server opens the engine's memory by CUDA IPC, so it must see the same GPUs without claiming them.
        defaults |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "all"}
    return owned, [{"name": k, "value": v} for k, v in defaults.items()]


def probes(lmcache: LMCacheSpec) -> dict[str, Any]:
    """Probes of the server: start-up grows with L1, two seconds for each GiB."""
    http = {"path": "/healthcheck", "port": "lmc-http", "scheme": "HTTP"}
    budget = STARTUP_BASE + int(2 * quantity(lmcache.l1_size) / GIB)
    return {
        "startupProbe": {"httpGet": http, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": budget},
        "readinessProbe": {"httpGet": http, "periodSeconds": 5, "timeoutSeconds": 3, "failureThreshold": 3},
        "livenessProbe": {"httpGet": http, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def coordinator_probes() -> dict[str, Any]:
    """Probes of the coordinator."""
    http = {"path": "/healthz", "port": "http", "scheme": "HTTP"}
    return {
        "startupProbe": {"httpGet": http, "periodSeconds": 1, "timeoutSeconds": 3, "failureThreshold": 180},
        "readinessProbe": {"httpGet": http, "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 3},
        "livenessProbe": {"httpGet": http, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 6},
    }


def resources(lmcache: LMCacheSpec, shared_memory: Decimal) -> dict[str, Any]:
    """Requests and limits of the server: first tier, overhead, and the shared memory that both containers see."""
    request = quantity(lmcache.l1_size) + OVERHEAD + shared_memory
    return {
        "requests": {"cpu": "200m", "memory": format_bytes(request)},
        "limits": {"memory": format_bytes(request * Decimal("1.5"))},
    }
