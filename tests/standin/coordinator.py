"""`lmcache coordinator` as a stand-in: the registry of cache servers."""

import asyncio
import json
import time
import uuid
from typing import Any

from standin import metrics
from standin.cache_args import CoordinatorArgs
from standin.http_server import HttpRequest, HttpResponse, json_response


class Coordinator:
    """Keeps the list of instances; whoever sends no heartbeat for `instance_timeout` seconds is dropped."""

    def __init__(self, args: CoordinatorArgs) -> None:
        self._args = args
        self._instances: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, float] = {}
        self._metrics = metrics.Registry()

    async def expire(self) -> None:
        """Drops dead instances; runs for ever."""
        if not self._args.health_check_interval:
            return
        while True:
            await asyncio.sleep(self._args.health_check_interval)
            now = time.monotonic()
            for name in [name for name, seen in self._seen.items() if now - seen > self._args.instance_timeout]:
                print(f"INFO Evicted stale instance {name}", flush=True)
                del self._instances[name], self._seen[name]

    async def handle(self, request: HttpRequest) -> HttpResponse:
        """Answers one request."""
        parts = [part for part in request.path.split("/") if part]
        if parts[:1] == ["instances"]:
            return self._instance_route(request, parts[1:])
        if request.path == "/healthz" and request.method == "GET":
            return json_response({"status": "healthy"})
        if request.path == "/metrics" and request.method == "GET":
            return HttpResponse(200, self._metrics.render(), metrics.CONTENT_TYPE)
        return json_response({"detail": "Not Found"}, 404)

    def _instance_route(self, request: HttpRequest, parts: list[str]) -> HttpResponse:
        if not parts and request.method == "GET":
            return json_response({"instances": list(self._instances.values())})
        if not parts and request.method == "POST":
            return self._register(request)
        if len(parts) == 2 and parts[1] == "heartbeat" and request.method == "PUT":
            if parts[0] not in self._instances:
                return json_response({"error": f"unknown instance {parts[0]}; re-register"}, 404)
            self._seen[parts[0]] = time.monotonic()
            return json_response({"instance_id": parts[0]})
        if len(parts) == 1 and request.method == "DELETE":
            self._instances.pop(parts[0], None)
            self._seen.pop(parts[0], None)
            return HttpResponse(204, content_type=None)
        return json_response({"detail": "Not Found"}, 404)

    def _register(self, request: HttpRequest) -> HttpResponse:
        try:
            body = json.loads(request.body)
            ip, port = str(body["ip"]).strip(), int(body["http_port"])
            mq_port = int(body.get("mq_port", 0))
        except (ValueError, KeyError, TypeError):
            ip, port, body, mq_port = "", 0, {}, 0
        if not ip or not 1 <= port <= 65535:
            return json_response({"detail": [{"type": "missing", "loc": ["body"], "msg": "ip and http_port are required"}]}, 422)
        name = str(body.get("instance_id") or "").strip() or f"mp-{uuid.uuid4().hex}"
        known = name in self._instances
        self._instances[name] = {
            "instance_id": name,
            "ip": ip,
            "http_port": port,
            "registration_time": time.time(),
            "metadata": body.get("metadata") or {},
            "p2p_advertised_url": body.get("p2p_advertised_url") or "",
            "mq_port": mq_port,
        }
        self._seen[name] = time.monotonic()
        return json_response({"instance_id": name, "re_registered": known})
