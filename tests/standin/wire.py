"""Framed messages over TCP, for the handoff (engine to engine) and the cache (engine to cache server).

One frame: length of the JSON header and length of the payload (two unsigned 32-bit numbers, big endian), header, payload.
"""

import asyncio
import json
import struct
from typing import Any

MAX_HEADER_BYTES = 4 * 1024 * 1024
MAX_PAYLOAD_BYTES = 512 * 1024 * 1024
_LENGTHS = struct.Struct(">II")

Header = dict[str, Any]


class WireError(Exception):
    """The peer closed the connection or sent something that is no frame."""


def send(writer: asyncio.StreamWriter, header: Header, payload: bytes = b"") -> None:
    """Queues one frame; await `writer.drain()` for flow control."""
    head = json.dumps(header, separators=(",", ":")).encode()
    writer.write(_LENGTHS.pack(len(head), len(payload)) + head)
    if payload:
        writer.write(payload)


async def receive(reader: asyncio.StreamReader) -> tuple[Header, bytes]:
    """The next frame. Raises WireError when the peer has gone or talks another language."""
    try:
        head_length, payload_length = _LENGTHS.unpack(await reader.readexactly(_LENGTHS.size))
        if head_length > MAX_HEADER_BYTES or payload_length > MAX_PAYLOAD_BYTES:
            raise WireError(f"frame too large: {head_length} + {payload_length} bytes")
        header = json.loads(await reader.readexactly(head_length))
        payload = await reader.readexactly(payload_length) if payload_length else b""
    except (asyncio.IncompleteReadError, OSError) as error:
        raise WireError(f"connection lost: {error!r}") from None
    except ValueError as error:
        raise WireError(f"not a frame: {error}") from None
    if not isinstance(header, dict):
        raise WireError("frame header is not an object")
    return header, payload


async def ask(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, header: Header, payload: bytes = b""
) -> tuple[Header, bytes]:
    """Sends one frame and reads one. Raises WireError."""
    try:
        send(writer, header, payload)
        await writer.drain()
    except OSError as error:
        raise WireError(f"connection lost: {error!r}") from None
    return await receive(reader)


async def ask_once(host: str, port: int, header: Header, timeout_s: float) -> tuple[Header, bytes]:
    """Connects, asks, closes. Raises WireError, also when there is no answer within `timeout_s` seconds."""

    async def talk() -> tuple[Header, bytes]:
        reader, writer = await asyncio.open_connection(host, port)
        try:
            return await ask(reader, writer, header)
        finally:
            writer.close()

    try:
        return await asyncio.wait_for(talk(), timeout_s)
    except TimeoutError:
        raise WireError(f"no answer from {host}:{port} in {timeout_s:g} s") from None
    except OSError as error:
        raise WireError(f"cannot reach {host}:{port}: {error}") from None
