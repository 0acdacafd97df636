"""The HTTP interface of the cache server stand-in: LMCache's probes, status, versions and metrics."""

import os
from collections.abc import Callable
from typing import Any

from standin import metrics
from standin.cache_server import REAP_TIMEOUT, CacheServer
from standin.http_server import HttpRequest, HttpResponse, json_response

COMMIT = "standin"


def version() -> str:
    """The LMCache version that is played (STANDIN_CACHE_VERSION, default 0.5.5)."""
    return os.environ.get("STANDIN_CACHE_VERSION", "0.5.5")


class CacheHttp:
    """Routes of one cache server."""

    def __init__(self, server: CacheServer) -> None:
        self._server = server

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answers one request."""
        if request.method == "POST" and request.path == "/cache/clear":
            self._server.store.clear()
            return json_response({"status": "success"})
        if request.method != "GET":
            return json_response({"detail": "Method Not Allowed"}, 405)
        answers: dict[str, Callable[[], Any]] = {
            "/": lambda: {"status": "ok", "service": "LMCache HTTP API"},
            "/healthcheck": lambda: {"status": "healthy"},
            "/status": self._status,
            "/version": lambda: f"{version()}-{COMMIT}",
            "/lmc_version": version,
            "/commit_id": lambda: COMMIT,
            "/config": self._config,
            "/config/adapters": lambda: {"adapters": []},
        }
        if request.path == "/metrics":
            page = self._server.metrics.registry.render() + self._target_info()
            return HttpResponse(200, page, metrics.CONTENT_TYPE)
        answer = answers.get(request.path)
        return json_response(answer()) if answer else json_response({"detail": "Not Found"}, 404)

    def _target_info(self) -> bytes:
        labels = f'service_instance_id="{self._server.args.instance_id}",service_name="unknown_service"'
        labels += ',telemetry_sdk_language="python",telemetry_sdk_name="opentelemetry",telemetry_sdk_version="0"'
        return f"# HELP target_info Target metadata\n# TYPE target_info gauge\ntarget_info{{{labels}}} 1.0\n".encode()

    def _config(self) -> dict[str, Any]:
        args = self._server.args
        parts = {"mp": args.all, "http": {"http_host": args.http_host, "http_port": args.http_port}}
        storage = {"l1_size_bytes": args.l1_bytes}
        return {**parts, "storage_manager": storage, "observability": {}, "coordinator": {"url": args.coordinator_url}}

    def _status(self) -> dict[str, Any]:
        server = self._server
        thread = {"is_healthy": True, "thread_alive": True}
        adapters = {"num_l2_adapters": 0, "num_active_adapters": 0, "num_draining_adapters": 0}
        eviction = {
            **thread,
            "eviction_policy": server.args.eviction_policy,
            "trigger_watermark": server.args.watermark,
            "eviction_ratio": server.args.eviction_ratio,
        }
        queues = ("submission_queue_size", "pending_queue_size", "in_flight_request_count")
        prefetch = dict.fromkeys((*queues, "lookup_phase_count", "load_phase_count", "completed_results_count"), 0)
        return {
            "is_healthy": True,
            "engine_type": "MPCacheServer",
            "chunk_size": server.args.chunk_size,
            "hash_algorithm": str(server.args.all.get("hash_algorithm") or "blake3"),
            "active_sessions": server.sessions,
            "storage_manager": {
                "is_healthy": True,
                "l1_manager": self._l1(),
                "store_controller": {**thread, "pending_keys_count": 0, "in_flight_task_count": 0, **adapters},
                "prefetch_controller": {**thread, "max_in_flight": 8, **prefetch, **adapters},
                "l1_eviction_controller": eviction,
                "l2_eviction_controller": {**thread, "adapters": []},
                "l2_adapters": [],
                "num_l2_adapters": 0,
            },
            "active_prefetch_jobs": 0,
            "active_p2p_lookup_jobs": 0,
            "p2p_enabled": bool(server.args.p2p_advertise_url),
            "p2p_state": server.p2p_state,
            "p2p_peer_count": len(server.peers),
            "p2p_peers": sorted(server.peers),
            "worker_liveness": {
                "enabled": True,
                "reap_timeout_seconds": REAP_TIMEOUT,
                "registration_grace_seconds": 3600.0,
                "tracked_instances": len(server.engines),
            },
            "registered_gpu_ids": [],
            "cache_context_meta": {},
            "registered_non_cuda_instance_ids": sorted(server.engines),
            "non_cuda_context_meta": {str(name): server.models[name] for name in server.engines},
        }

    def _l1(self) -> dict[str, Any]:
        store, total = self._server.store, self._server.args.l1_bytes
        return {
            "is_healthy": True,
            "total_object_count": len(store),
            "write_locked_count": 0,
            "read_locked_count": 0,
            "temporary_count": 0,
            "memory_used_bytes": store.used,
            "memory_total_bytes": total,
            "memory_configured_bytes": total,
            "memory_usage_ratio": store.used / total,
            "write_ttl_seconds": 600,
            "read_ttl_seconds": 300,
        }
