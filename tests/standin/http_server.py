"""A small HTTP/1.1 server on asyncio streams.

The stand-ins need little of HTTP, but they need it exactly: a client that disconnects must cancel its request at once
(vLLM aborts such a request), a draining server must stop keeping connections alive, and an HTTP/2 preface (which some
routers send to learn what they talk to) must get a 400.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
QUIET_PATHS = frozenset({"/health", "/metrics", "/healthcheck", "/healthz", "/ping"})


@dataclass
class HttpRequest:
    """One parsed request; header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    peer: str
    keep_alive: bool
    http11: bool


@dataclass
class HttpResponse:
    """A complete answer."""

    status: int = 200
    body: bytes = b""
    content_type: str | None = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class EventStream:
    """A streamed answer (server-sent events): each item of `events` is sent as soon as it exists."""

    events: AsyncIterator[bytes]
    content_type: str = "text/event-stream; charset=utf-8"


Handler = Callable[[HttpRequest], Awaitable[HttpResponse | EventStream]]


def json_response(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> HttpResponse:
    """`content` as compact JSON."""
    body = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    return HttpResponse(status=status, body=body, headers=headers or {})


class BadRequestError(Exception):
    """The bytes on the connection are no HTTP/1 request that this server takes."""


class _WatchedReader(asyncio.StreamReader):
    """A stream reader that tells at once when the peer has gone, also while nobody reads."""

    on_gone: Callable[[], None] | None = None

    def feed_eof(self) -> None:
        super().feed_eof()
        if self.on_gone:
            self.on_gone()

    def set_exception(self, exc: Any) -> None:
        super().set_exception(exc)
        if self.on_gone:
            self.on_gone()


class HttpServer:
    """Serves `handler` on one TCP port."""

    def __init__(self, handler: Handler, *, keep_alive_s: float = 5.0, server_name: str = "uvicorn", log: bool = True) -> None:
        self._handler = handler
        self._keep_alive_s = keep_alive_s
        self._server_name = server_name
        self._log = log
        self._server: asyncio.AbstractServer | None = None
        self._connections: dict[asyncio.StreamWriter, asyncio.Task[Any] | None] = {}
        self._closing = False

    async def start(self, host: str, port: int) -> int:
        """Listens and returns the port. Raises OSError if the port is taken."""
        loop = asyncio.get_running_loop()

        def protocol() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(_WatchedReader(limit=MAX_HEAD_BYTES, loop=loop), self._connection, loop=loop)

        self._server = await loop.create_server(protocol, host, port, backlog=1024, reuse_address=True)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, timeout_s: float = 2.0) -> None:
        """Stops listening, lets running requests end for `timeout_s` seconds, then closes every connection."""
        self._closing = True
        if self._server:
            self._server.close()
        for writer, task in list(self._connections.items()):
            if task is None:
                writer.close()
        end = asyncio.get_running_loop().time() + timeout_s
        while self._connections and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.02)
        for writer, task in list(self._connections.items()):
            if task:
                task.cancel()
            writer.transport.abort()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert isinstance(reader, _WatchedReader)
        address = writer.get_extra_info("peername")
        peer = f"{address[0]}:{address[1]}" if address else "?"
        self._connections[writer] = None

        def gone() -> None:
            task = self._connections.get(writer)
            if task:
                task.cancel()

        reader.on_gone = gone
        try:
            while not self._closing:
                try:
                    request = await asyncio.wait_for(_read_request(reader, writer, peer), self._keep_alive_s)
                except BadRequestError as error:
                    await self._answer(writer, None, HttpResponse(400, str(error).encode(), "text/plain; charset=utf-8"))
                    return
                if request is None or reader.at_eof():
                    return
                task = asyncio.ensure_future(self._run(writer, request))
                self._connections[writer] = task
                await asyncio.wait({task})
                self._connections[writer] = None
                if task.cancelled() or task.exception() or not task.result():
                    return
        except (TimeoutError, OSError, asyncio.IncompleteReadError):
            return
        finally:
            self._connections.pop(writer, None)
            writer.close()

    async def _run(self, writer: asyncio.StreamWriter, request: HttpRequest) -> bool:
        """Answers one request; True if the connection may be used again."""
        try:
            response = await self._handler(request)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # the answer to a bug is a 500 and a line in the log, as in every web server
            print(f"ERROR handler of {request.path}: {error!r}", file=sys.stderr, flush=True)
            response = json_response({"error": repr(error)}, 500)
        status = response.status if isinstance(response, HttpResponse) else 200
        if self._log and request.path not in QUIET_PATHS:
            print(f'INFO: {request.peer} - "{request.method} {request.path} HTTP/1.1" {status}', flush=True)
        if isinstance(response, HttpResponse):
            await self._answer(writer, request, response)
            return request.keep_alive and not self._closing
        return await self._stream(writer, request, response)

    async def _answer(self, writer: asyncio.StreamWriter, request: HttpRequest | None, response: HttpResponse) -> None:
        headers = {"content-length": str(len(response.body)), **response.headers}
        if response.content_type:
            headers["content-type"] = response.content_type
        keep = request is not None and request.keep_alive and not self._closing
        head = self._head(response.status, headers, keep=keep)
        body = b"" if request is not None and request.method == "HEAD" else response.body
        writer.write(head + body)
        await writer.drain()

    async def _stream(self, writer: asyncio.StreamWriter, request: HttpRequest, stream: EventStream) -> bool:
        keep = request.keep_alive and request.http11 and not self._closing
        headers = {"content-type": stream.content_type}
        if request.http11:
            headers["transfer-encoding"] = "chunked"
        writer.write(self._head(200, headers, keep=keep))
        try:
            async for event in stream.events:
                writer.write(b"%x\r\n%b\r\n" % (len(event), event) if request.http11 else event)
                await writer.drain()
        finally:
            # Closing the generator here, not at garbage collection, is what aborts the request of a client that left.
            await stream.events.aclose()  # type: ignore[attr-defined]
        if request.http11:
            writer.write(b"0\r\n\r\n")
        await writer.drain()
        return keep

    def _head(self, status: int, headers: dict[str, str], *, keep: bool) -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", f"server: {self._server_name}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not keep:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str) -> HttpRequest | None:
    """The next request of a connection; None when the peer closed it between two requests."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise BadRequestError("Invalid HTTP request received.") from None
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or parts[2] not in ("HTTP/1.1", "HTTP/1.0") or not parts[1].startswith(("/", "http")):
        raise BadRequestError("Invalid HTTP request received.")
    headers: dict[str, str] = {}
    for line in lines[1:]:
        if line:
            name, colon, value = line.partition(":")
            if not colon:
                raise BadRequestError("Invalid HTTP request received.")
            headers[name.strip().lower()] = value.strip()
    if headers.get("expect", "").lower() == "100-continue":
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    body = await _read_body(reader, headers)
    url = urlsplit(parts[1])
    http11 = parts[2] == "HTTP/1.1"
    connection = headers.get("connection", "").lower()
    keep_alive = connection != "close" if http11 else connection == "keep-alive"
    return HttpRequest(parts[0], unquote(url.path) or "/", url.query, headers, body, peer, keep_alive, http11)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        body = bytearray()
        while True:
            try:
                size = int((await reader.readuntil(b"\r\n")).split(b";")[0], 16)
            except ValueError:
                raise BadRequestError("Invalid HTTP request received.") from None
            if len(body) + size > MAX_BODY_BYTES:
                raise BadRequestError("request body too large")
            chunk = await reader.readexactly(size + 2)
            if size == 0:
                return bytes(body)
            body += chunk[:-2]
    try:
        length = int(headers.get("content-length", "0"))
    except ValueError:
        raise BadRequestError("Invalid HTTP request received.") from None
    if not 0 <= length <= MAX_BODY_BYTES:
        raise BadRequestError("request body too large")
    return await reader.readexactly(length) if length else b""
