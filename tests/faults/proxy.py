"""An HTTP proxy in front of a real API server that breaks chosen requests.

Everything that no fault matches is passed on unchanged, the caller's own Authorization header included, so RBAC applies as
it does without the proxy. Watches are passed on line by line and can be frozen and expired while they are open.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web
from yarl import URL

from pd_operator.kube.auth import load_configuration, new_api_client

_HOP = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"}
FOREVER = 10**9


@dataclass
class Fault:
    """What to do with matching requests. The first fault that matches and is not used up decides.

    Attributes:
        method: exact HTTP method, "" = any.
        path: regular expression searched in path and query.
        times: how many requests it breaks.
        skip: how many matching requests pass before.
        status: answer this status instead of asking the server; 0 = ask it.
        headers: headers of that answer, e.g. Retry-After.
        delay: seconds to wait before anything else.
        gate: an event to wait for before anything else.
        cut_after: of a watch, close the connection without notice after so many lines.
        error_after: of a watch, send an ERROR event with `error_code` after so many lines, then end.
        silent_after: of a watch, send nothing more after so many lines.
        end_after: of a watch, end it in good order after so many lines.
        drop: close the connection without an answer.
    """

    method: str = ""
    path: str = ""
    times: int = 1
    skip: int = 0
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    gate: asyncio.Event | None = None
    cut_after: int | None = None
    error_after: int | None = None
    error_code: int = 410
    silent_after: int | None = None
    end_after: int | None = None
    drop: bool = False
    used: int = 0

    def take(self, method: str, path: str) -> bool:
        """Whether it applies to this request; counts it."""
        if self.used >= self.times or (self.method and method != self.method) or not re.search(self.path, path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.used += 1
        return True


@dataclass
class Seen:
    """One request that came to the proxy."""

    method: str
    path: str  # with the query
    status: int  # 0 = no answer
    headers: dict[str, str]
    body: bytes


@dataclass(eq=False)
class _Watch:
    path: str
    request: web.Request
    response: web.StreamResponse
    frozen: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def _status(code: int) -> dict[str, Any]:
    reasons = {410: "Expired", 429: "TooManyRequests", 409: "Conflict", 403: "Forbidden", 401: "Unauthorized"}
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "code": code,
        "reason": reasons.get(code, "InternalError"),
        "message": f"injected {code}",
    }


class FaultProxy:
    """`async with FaultProxy(kubeconfig, folder) as proxy:` then give `proxy.kubeconfig` to the client under test."""

    def __init__(self, upstream: Path, folder: Path) -> None:
        self.faults: list[Fault] = []
        self.seen: list[Seen] = []
        self.kubeconfig = folder / "proxy.kubeconfig"
        self._upstream = upstream
        self._watches: set[_Watch] = set()
        self._freezes: list[str] = []

    async def __aenter__(self) -> FaultProxy:
        configuration = await load_configuration(str(self._upstream))
        self._api = new_api_client(configuration)
        self._server = URL(configuration.host)
        connector = aiohttp.TCPConnector(limit=0, ssl=self._api.rest_client.ssl_context)
        self._session = aiohttp.ClientSession(connector=connector, auto_decompress=False)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        document = yaml.safe_load(self._upstream.read_text())
        document["clusters"] = [{**document["clusters"][0], "cluster": {"server": self.url}}]
        self.kubeconfig.write_text(yaml.safe_dump(document))
        return self

    async def __aexit__(self, *_: object) -> None:
        for watch in self._watches:
            watch.ended.set()
        await self._runner.cleanup()
        await self._session.close()
        await self._api.close()

    def add(self, fault: Fault) -> Fault:
        """Break matching requests from now on; returns the fault, whose `used` counts."""
        self.faults.append(fault)
        return fault

    def count(self, method: str, path: str) -> int:
        """How many requests matched so far."""
        return sum(1 for seen in self.seen if seen.method == method and re.search(path, seen.path))

    def open_watches(self, path: str = "") -> int:
        """How many watches are open now."""
        return sum(1 for watch in self._watches if re.search(path, watch.path))

    def freeze(self, path: str) -> None:
        """Swallow all events of matching watches, open ones and later ones: the gap in which things happen unseen."""
        self._freezes.append(path)
        for watch in self._watches:
            watch.frozen = watch.frozen or bool(re.search(path, watch.path))

    async def expire(self, path: str) -> None:
        """Thaw, and end matching open watches with a 410, as a server does that has compacted its history."""
        self._freezes = [frozen for frozen in self._freezes if frozen != path]
        line = json.dumps({"type": "ERROR", "object": _status(410)}).encode() + b"\n"
        for watch in [w for w in self._watches if re.search(path, w.path)]:
            await watch.response.write(line)
            watch.ended.set()

    async def cut_watches(self, path: str = "") -> None:
        """Close the connections of matching watches without notice."""
        for watch in [w for w in self._watches if re.search(path, w.path)]:
            self._abort(watch.request)
            watch.ended.set()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path_qs
        body = await request.read()
        seen = Seen(request.method, path, 0, dict(request.headers), body)
        self.seen.append(seen)
        fault = next((fault for fault in self.faults if fault.take(request.method, path)), None)
        if fault is not None:
            await asyncio.sleep(fault.delay)
            if fault.gate is not None:
                await fault.gate.wait()
            if fault.drop:
                self._abort(request)
                return web.Response()
            if fault.status:
                seen.status = fault.status
                return web.json_response(_status(fault.status), status=fault.status, headers=fault.headers)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP}
        url = self._server.join(URL(request.raw_path, encoded=True))
        timeout = aiohttp.ClientTimeout(total=None)
        skip = ("Content-Type", "Accept-Encoding", "User-Agent")
        async with self._session.request(
            request.method, url, headers=headers, data=body or None, timeout=timeout, skip_auto_headers=skip
        ) as answer:
            seen.status = answer.status
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP}
            response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
            await response.prepare(request)
            if "watch=" in path and answer.status == 200:
                await self._pass_watch(request, response, answer, fault or Fault())
            else:
                await response.write(await answer.read())
        return response

    async def _pass_watch(
        self, request: web.Request, response: web.StreamResponse, answer: aiohttp.ClientResponse, fault: Fault
    ) -> None:
        watch = _Watch(request.path_qs, request, response)
        watch.frozen = any(re.search(path, watch.path) for path in self._freezes)
        self._watches.add(watch)
        reader = asyncio.create_task(self._pass_lines(request, watch, answer.content, fault))
        ended = asyncio.create_task(watch.ended.wait())
        try:
            await asyncio.wait([reader, ended], return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._watches.discard(watch)
            for task in (reader, ended):
                task.cancel()
            await asyncio.gather(reader, ended, return_exceptions=True)

    async def _pass_lines(self, request: web.Request, watch: _Watch, content: aiohttp.StreamReader, fault: Fault) -> None:
        """Until the server or the fault ends it."""
        lines = 0
        while True:
            if fault.cut_after == lines:
                self._abort(request)
                return
            if fault.error_after == lines:
                error = {"type": "ERROR", "object": _status(fault.error_code)}
                await watch.response.write(json.dumps(error).encode() + b"\n")
                return
            if fault.end_after == lines:
                return
            line = await _line(content)
            if not line:
                return
            lines += 1
            if not watch.frozen and (fault.silent_after is None or lines <= fault.silent_after):
                await watch.response.write(line)

    @staticmethod
    def _abort(request: web.Request) -> None:
        if request.transport is not None:
            request.transport.abort()


async def _line(stream: aiohttp.StreamReader) -> bytes:
    """One line with its end; objects may be longer than the stream's own limit allows."""
    parts: list[bytes] = []
    while True:
        try:
            parts.append(await stream.readuntil(b"\n"))
            return b"".join(parts)
        except ValueError:  # longer than the buffer: take what is there
            parts.append(stream.read_nowait())
