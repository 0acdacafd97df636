"""The command lines of `lmcache server` and `lmcache coordinator`, with the flags, defaults and refusals of LMCache 0.5.5."""

import argparse
import json
import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

# Accepted as LMCache accepts them, and not used here: name -> type, or a tuple of choices, or None for a switch.
_UNUSED_SERVER: dict[str, object] = {
    "--transport": ("zmq", "grpc"),
    "--hash-algorithm": str,
    "--max-workers": int,
    "--max-gpu-workers": int,
    "--max-cpu-workers": int,
    "--engine-type": ("default", "blend"),
    "--supported-transfer-mode": ("lmcache_driven", "engine_driven", "auto"),
    "--shm-name": str,
    "--runtime-plugin-config": str,
    "--worker-reap-timeout-seconds": float,
    "--worker-registration-grace-seconds": float,
    "--l1-init-size-gb": int,
    "--l1-devdax-path": str,
    "--gds-l1-path": str,
    "--l1-write-ttl-seconds": int,
    "--l1-read-ttl-seconds": int,
    "--l2-adapter": str,
    "--l2-store-policy": str,
    "--l2-prefetch-policy": str,
    "--l2-prefetch-max-in-flight": int,
    "--prometheus-port": int,
    "--metrics-sample-rate": float,
    "--event-bus-queue-size": int,
    "--otlp-endpoint": str,
    "--coordinator-event-flush-interval": float,
    "--disable-observability": None,
    "--disable-metrics": None,
    "--disable-logging": None,
    "--enable-tracing": None,
    "--enable-extra-logging": None,
    "--coordinator-event-reporting": None,
    "--enable-segmented-prefix": None,
}
_UNUSED_COORDINATOR: dict[str, object] = {
    "--eviction-check-interval": float,
    "--eviction-ratio": float,
    "--trigger-watermark": float,
    "--chunk-size": int,
    "--hash-algorithm": str,
    "--enable-blend-lookup": None,
    "--blend-probe-stride": int,
    "--checkpoint-path": str,
    "--checkpoint-interval": float,
    "--metadata-path": str,
    "--extra-config": str,
    "--disable-metrics": None,
    "--otlp-endpoint": str,
}


@dataclass
class CacheServerArgs:
    """What the cache server stand-in uses of its command line."""

    host: str
    port: int
    http_host: str
    http_port: int
    l1_bytes: int
    align_bytes: int
    chunk_size: int
    eviction_policy: str
    watermark: float
    eviction_ratio: float
    instance_id: str
    coordinator_url: str
    advertise_ip: str
    heartbeat_interval: float
    p2p_advertise_url: str
    p2p_lookup_timeout: float
    p2p_load_timeout: float
    all: dict[str, object]
    faults: dict[str, bool]  # STANDIN_CACHE_FAULTS, JSON: `unregistered` (the coordinator is never asked)


@dataclass
class CoordinatorArgs:
    """What the coordinator stand-in uses of its command line."""

    host: str
    port: int
    instance_timeout: float
    health_check_interval: float
    keep_alive: float


def _accept(parser: argparse.ArgumentParser, unused: dict[str, object]) -> None:
    for name, kind in unused.items():
        if kind is None:
            parser.add_argument(name, action="store_true", default=None)
        elif isinstance(kind, tuple):
            parser.add_argument(name, choices=kind)
        else:
            parser.add_argument(name, type=kind)  # type: ignore[arg-type]


def _server_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="lmcache server", usage="lmcache server [options]")
    parser.add_argument("--l1-size-gb", type=float, required=True)
    parser.add_argument("--eviction-policy", choices=["LRU", "IsolatedLRU", "noop"], required=True)
    parser.add_argument("--host", default="localhost")
    parser.add_argument("--port", type=int, default=5555)
    parser.add_argument("--http-host", default="0.0.0.0")
    parser.add_argument("--http-port", type=int, default=8080)
    parser.add_argument("--chunk-size", type=int, default=256)
    parser.add_argument("--instance-id")
    parser.add_argument("--l1-align-bytes", type=int, default=4096)
    parser.add_argument("--eviction-trigger-watermark", type=float, default=0.8)
    parser.add_argument("--eviction-ratio", type=float, default=0.2)
    parser.add_argument("--coordinator-url")
    parser.add_argument("--coordinator-advertise-ip")
    parser.add_argument("--coordinator-heartbeat-interval", type=float)
    parser.add_argument("--p2p-advertise-url", default="")
    parser.add_argument("--p2p-listen-url", default="")
    parser.add_argument("--p2p-lookup-timeout", type=float, default=30.0)
    parser.add_argument("--p2p-load-timeout", type=float, default=30.0)
    parser.add_argument("--p2p-transfer-engine", default="nixl")
    parser.add_argument("--isolated-ipc", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--l1-use-lazy", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--separate-object-groups", action=argparse.BooleanOptionalAction, default=False)
    _accept(parser, _UNUSED_SERVER)
    return parser


def parse_server(argv: Sequence[str]) -> CacheServerArgs:
    """Arguments after `server`. Ends the process with status 2 for what LMCache refuses."""
    parser = _server_parser()
    given = parser.parse_args(list(argv))
    url = given.coordinator_url or os.environ.get("LMCACHE_COORDINATOR_URL", "")
    if given.p2p_advertise_url and not url:
        parser.error("--p2p-advertise-url requires --coordinator-url")
    if given.l1_size_gb <= 0 or given.chunk_size <= 0:
        parser.error("--l1-size-gb and --chunk-size must be positive")
    interval = given.coordinator_heartbeat_interval
    interval = float(os.environ.get("LMCACHE_COORDINATOR_HEARTBEAT_INTERVAL", "5")) if interval is None else interval
    if interval <= 0:
        parser.error("coordinator heartbeat interval must be a finite number > 0")
    return CacheServerArgs(
        host=given.host,
        port=given.port,
        http_host=given.http_host,
        http_port=given.http_port,
        l1_bytes=int(given.l1_size_gb * 2**30),
        align_bytes=given.l1_align_bytes,
        chunk_size=given.chunk_size,
        eviction_policy=given.eviction_policy,
        watermark=given.eviction_trigger_watermark,
        eviction_ratio=given.eviction_ratio,
        instance_id=given.instance_id or str(uuid.uuid4()),
        coordinator_url=url.rstrip("/"),
        advertise_ip=given.coordinator_advertise_ip or os.environ.get("LMCACHE_COORDINATOR_ADVERTISE_IP", "127.0.0.1"),
        heartbeat_interval=interval,
        p2p_advertise_url=given.p2p_advertise_url,
        p2p_lookup_timeout=given.p2p_lookup_timeout,
        p2p_load_timeout=given.p2p_load_timeout,
        all=vars(given),
        faults=json.loads(os.environ.get("STANDIN_CACHE_FAULTS", "{}")),
    )


def parse_coordinator(argv: Sequence[str]) -> CoordinatorArgs:
    """Arguments after `coordinator`. Ends the process with status 2 for what LMCache refuses."""
    parser = argparse.ArgumentParser(prog="lmcache coordinator", usage="lmcache coordinator [options]")
    parser.add_argument("--host", default="0.0.0.0")
    parser.add_argument("--port", type=int, default=9300)
    parser.add_argument("--instance-timeout", type=float, default=30.0)
    parser.add_argument("--health-check-interval", type=float, default=10.0)
    parser.add_argument("--timeout-keep-alive", type=int, default=10)
    _accept(parser, _UNUSED_COORDINATOR)
    given = parser.parse_args(list(argv))
    if given.instance_timeout <= 0 or given.health_check_interval < 0 or given.timeout_keep_alive <= 0:
        parser.error("--instance-timeout and --timeout-keep-alive must be positive, --health-check-interval not negative")
    return CoordinatorArgs(
        given.host, given.port, given.instance_timeout, given.health_check_interval, float(given.timeout_keep_alive)
    )
