"""The engine's HTTP interface: vLLM's routes, and /standin/fault for tests."""

import asyncio
import json
import os
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from standin import answers, metrics, model, protocol
from standin.core import Engine
from standin.http_server import EventStream, HttpRequest, HttpResponse, json_response
from standin.protocol import Answer, ApiError, Generation
from standin.sequence import Output, Sequence

UNCOUNTED = frozenset({"/metrics", "/health", "/load", "/ping", "/version", "/server_info"})
BUSY = "The engine is currently busy and cannot accept new requests. Please try again later or on a different instance."
BACKLOG = "The engine has reached its prefill token backlog limit. Please try again later or on a different instance."
Route = Callable[[HttpRequest], Awaitable[HttpResponse | EventStream]]


class HttpApi:
    """Routes requests to the engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._faults = engine.settings.faults
        self._started = int(time.time())
        self._in_flight = 0
        self._routes: dict[str, dict[str, Route]] = {
            "/health": {"GET": self._health},
            "/ping": {"GET": self._health, "POST": self._health},
            "/load": {"GET": self._load},
            "/version": {"GET": self._version},
            "/v1/models": {"GET": self._models},
            "/metrics": {"GET": self._metrics},
            "/tokenize": {"POST": self._tokenize},
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._completion},
            "/standin/fault": {"GET": self._show_faults, "POST": self._set_faults},
        }
        if engine.args.dev_mode:
            self._routes["/reset_prefix_cache"] = {"POST": self._reset}

    async def handle(self, request: HttpRequest) -> HttpResponse | EventStream:
        """Answers one request and counts it."""
        methods = self._routes.get(request.path)
        if methods is None:
            return json_response({"detail": "Not Found"}, 404)
        route = methods.get(request.method)
        if route is None:
            return json_response({"detail": "Method Not Allowed"}, 405, {"allow": ", ".join(methods)})
        if self._engine.args.api_keys and request.path.startswith("/v1"):
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or token not in self._engine.args.api_keys:
                return json_response({"error": "Unauthorized"}, 401)
        started = time.monotonic()
        response = await route(request)
        if request.path in UNCOUNTED:
            return response
        if isinstance(response, EventStream):
            return EventStream(self._counted(request, response.events, started), response.content_type)
        self._count(request, response.status, started, len(response.body))
        return response

    def _count(self, request: HttpRequest, status: int, started: float, size: int) -> None:
        seconds = time.monotonic() - started
        self._engine.metrics.http.observe(request.path, request.method, status, seconds, len(request.body), size)

    async def _counted(self, request: HttpRequest, events: AsyncIterator[bytes], started: float) -> AsyncIterator[bytes]:
        size = 0
        try:
            async for item in events:
                size += len(item)
                yield item
        finally:
            await events.aclose()  # type: ignore[attr-defined]
            self._count(request, 200, started, size)

    async def _health(self, _: HttpRequest) -> HttpResponse:
        bad = self._faults.unhealthy or self._faults.dead or self._engine.dead
        return HttpResponse(503 if bad else 200, content_type=None)

    async def _load(self, _: HttpRequest) -> HttpResponse:
        return json_response({"server_load": self._in_flight})

    async def _version(self, _: HttpRequest) -> HttpResponse:
        return json_response({"version": self._engine.settings.version})

    async def _metrics(self, _: HttpRequest) -> HttpResponse:
        return HttpResponse(200, self._engine.metrics.registry.render(), metrics.CONTENT_TYPE)

    async def _models(self, _: HttpRequest) -> HttpResponse:
        permission = {
            "id": f"modelperm-{uuid.uuid4().hex[:16]}",
            "object": "model_permission",
            "created": self._started,
            "allow_create_engine": False,
            "allow_sampling": True,
            "allow_logprobs": True,
            "allow_search_indices": False,
            "allow_view": True,
            "allow_fine_tuning": False,
            "organization": "*",
            "group": None,
            "is_blocking": False,
        }
        args = self._engine.args
        common = {"object": "model", "created": self._started, "owned_by": "vllm", "root": args.model, "parent": None}
        cards = [
            {"id": name, **common, "max_model_len": args.max_model_len, "permission": [permission]} for name in args.served_names
        ]
        return json_response({"object": "list", "data": cards})

    async def _tokenize(self, request: HttpRequest) -> HttpResponse:
        body = json.loads(request.body or b"{}")
        text = model.chat_prompt(body["messages"]) if body.get("messages") else str(body.get("prompt", ""))
        tokens = model.encode(text)
        content = {"count": len(tokens), "max_model_len": self._engine.args.max_model_len, "tokens": tokens, "token_strs": None}
        return json_response(content)

    async def _reset(self, _: HttpRequest) -> HttpResponse:
        return json_response({"success": self._engine.pool.reset()})

    async def _show_faults(self, _: HttpRequest) -> HttpResponse:
        return json_response(vars(self._faults))

    async def _set_faults(self, request: HttpRequest) -> HttpResponse:
        try:
            self._faults.update(json.loads(request.body))
        except (ValueError, AttributeError) as error:
            return json_response({"error": str(error)}, 400)
        if self._faults.crash:
            os._exit(1)
        self._engine.scheduler.wake()
        return json_response(vars(self._faults))

    async def _chat(self, request: HttpRequest) -> HttpResponse | EventStream:
        return await self._generate("chat", request)

    async def _completion(self, request: HttpRequest) -> HttpResponse | EventStream:
        return await self._generate("completion", request)

    async def _generate(self, kind: str, request: HttpRequest) -> HttpResponse | EventStream:
        if self._faults.crash_after:
            self._faults.crash_after -= 1
            if not self._faults.crash_after:
                os._exit(1)
        body: Any = None
        try:
            body = self._decode(request)
            generation = protocol.parse(kind, body, request.headers.get("x-request-id"))
            self._admit(generation)
            sequences = self._engine.submit(generation)
        except ApiError as error:
            if isinstance(body, dict) and isinstance(body.get("kv_transfer_params"), dict):
                self._engine.reject(body["kv_transfer_params"])
            return json_response(error.body(), error.status)
        self._in_flight += 1
        if generation.stream:
            stream = answers.Stream(generation, self._engine.model_name, self._engine.fingerprint)
            return EventStream(stream.events(self._outputs(sequences)))
        return await self._whole(generation, sequences)

    def _decode(self, request: HttpRequest) -> Any:
        media = request.headers.get("content-type", "").lower().split(";")[0]
        if media != "application/json":
            raise ApiError(400, "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed", "Bad Request")
        try:
            return json.loads(request.body)
        except ValueError as error:
            position = getattr(error, "pos", 0)
            raise protocol.invalid(
                f"{{'type': 'json_invalid', 'loc': 'body.{position}', 'msg': 'JSON decode error'}}", f"body.{position}"
            ) from None

    def _admit(self, generation: Generation) -> None:
        """Everything that can refuse a request before it is queued, in vLLM's order."""
        engine = self._engine
        if generation.model_name and generation.model_name not in engine.args.served_names:
            raise ApiError(404, f"The model `{generation.model_name}` does not exist.", "NotFoundError", "model")
        if engine.dead or self._faults.dead:
            raise ApiError(
                500, "EngineCore encountered an issue. See stack trace (above) for the root cause.", "InternalServerError"
            )
        if self._faults.error_status:
            raise ApiError(self._faults.error_status, "Internal server error (fault)", "InternalServerError")
        self._check_queue(generation.n)
        if engine.draining:
            raise ApiError(500, "cannot schedule new futures after shutdown", "InternalServerError")
        protocol.check_lengths(generation, engine.args.max_model_len)

    def _check_queue(self, n: int) -> None:
        args, scheduler = self._engine.args, self._engine.scheduler
        rejections = self._engine.metrics.counter["admission_rejections"]
        if args.max_num_queued_reqs is not None and scheduler.unfinished + n > args.max_num_queued_reqs:
            rejections.inc(reason="max_num_queued_reqs")
            raise ApiError(503, BUSY, "Service Unavailable")
        if args.max_num_queued_tokens is not None and scheduler.queued_tokens >= args.max_num_queued_tokens:
            rejections.inc(reason="max_num_queued_tokens")
            raise ApiError(503, BACKLOG, "Service Unavailable")

    async def _outputs(self, sequences: list[Sequence]) -> AsyncIterator[tuple[int, Output]]:
        """The outputs of all sequences as they come; a consumer that stops early aborts what still runs."""
        merged: asyncio.Queue[tuple[int, Output]] = asyncio.Queue()

        async def forward(index: int, sequence: Sequence) -> None:
            while True:
                output = await sequence.outputs.get()
                merged.put_nowait((index, output))
                if output.finish_reason:
                    return

        tasks = [asyncio.create_task(forward(index, sequence)) for index, sequence in enumerate(sequences)]
        try:
            left = len(sequences)
            while left:
                index, output = await merged.get()
                left -= output.finish_reason is not None
                yield index, output
        finally:
            self._in_flight -= 1
            for task in tasks:
                task.cancel()
            for sequence in sequences:
                self._engine.scheduler.abort(sequence)

    async def _whole(self, generation: Generation, sequences: list[Sequence]) -> HttpResponse:
        finished = [Answer() for _ in sequences]
        outputs = self._outputs(sequences)
        try:
            async for index, output in outputs:
                finished[index].add(output)
        finally:
            await outputs.aclose()  # type: ignore[attr-defined]
        if any(answer.finish_reason == "error" for answer in finished):
            return json_response(ApiError(500, "Internal server error", "InternalServerError").body(), 500)
        return json_response(answers.whole(generation, finished, self._engine.model_name, self._engine.fingerprint))
