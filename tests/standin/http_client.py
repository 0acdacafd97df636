"""One HTTP request over asyncio: what the cache server stand-in needs to talk to the coordinator."""

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

MAX_ANSWER_BYTES = 8 * 1024 * 1024


class HttpClientError(Exception):
    """No usable answer: refused, timed out, or not HTTP."""

    timed_out = False


async def request_json(method: str, url: str, body: Any = None, timeout_s: float = 5.0) -> tuple[int, Any]:
    """(status, decoded JSON or None) of one request.

    Raises HttpClientError when there is no answer within `timeout_s` seconds.
    """
    try:
        return await asyncio.wait_for(_request(method, url, body), timeout_s)
    except TimeoutError:
        failure = HttpClientError(f"{method} {url}: no answer in {timeout_s:g} s")
        failure.timed_out = True
        raise failure from None
    except (OSError, ValueError, IndexError, asyncio.IncompleteReadError) as error:
        raise HttpClientError(f"{method} {url}: {error!r}") from None


async def _request(method: str, url: str, body: Any) -> tuple[int, Any]:
    parts = urlsplit(url)
    content = b"" if body is None else json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        head = f"{method} {parts.path or '/'} HTTP/1.1\r\nhost: {parts.netloc}\r\nconnection: close\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        answer = await reader.readuntil(b"\r\n\r\n")
        status = int(answer.split(b" ", 2)[1])
        payload = await reader.read(MAX_ANSWER_BYTES)
    finally:
        writer.close()
    return status, json.loads(payload) if payload.strip() else None
