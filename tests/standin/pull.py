"""The decode side of a handoff: reads a prompt's KV from the prefill engine that computed it."""

import asyncio
from dataclasses import dataclass, replace
from typing import Any

from standin import wire
from standin.settings import Faults, Settings

REMOTE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
CONNECT_RETRY = 0.2  # seconds; a ZMQ socket keeps trying in the same way until the receive timeout


class TransferError(Exception):
    """The KV did not arrive; the message says why."""


@dataclass(frozen=True)
class Remote:
    """Where a prompt's KV is, from kv_transfer_params."""

    engine_id: str
    request_id: str
    host: str
    port: int
    block_ids: tuple[int, ...]

    @classmethod
    def from_params(cls, params: dict[str, Any] | None) -> "Remote | None":
        """None if the parameters ask for no remote prefill, or lack what is needed for it."""
        if not params or not params.get("do_remote_prefill"):
            return None
        groups = params.get("remote_block_ids")
        if not groups or any(params.get(name) is None for name in REMOTE_FIELDS):
            return None
        try:
            blocks = tuple(int(identity) for identity in groups[0])
            return cls(
                engine_id=str(params["remote_engine_id"]),
                request_id=str(params["remote_request_id"]),
                host=str(params["remote_host"]),
                port=int(params["remote_port"]),
                block_ids=blocks,
            )
        except (TypeError, ValueError, IndexError):
            return None


class Puller:
    """Reads KV from prefill engines."""

    def __init__(self, metadata: wire.Header, settings: Settings, *, enforce: bool) -> None:
        self._own = metadata
        self._settings = settings
        self._enforce = enforce
        self._agents: dict[tuple[str, int], str] = {}  # address -> the engine that was first read there
        # Engine -> where a handshake with it worked: NIXL asks no side channel again, whatever address a request names.
        self._known: dict[str, tuple[str, int]] = {}

    @property
    def _faults(self) -> Faults:
        return self._settings.faults

    async def pull(self, remote: Remote, blocks: int, size: int) -> bytes:
        """The last `blocks` blocks of the prompt, `size` bytes in all.

        Raises TransferError when P cannot be reached within the handshake timeout, is not compatible, has been restarted,
        refuses, or sends the wrong amount.
        """
        host, port = self._known.get(remote.engine_id, (remote.host, remote.port))
        remote = replace(remote, host=host, port=port)
        reader, writer = await self._connect(remote)
        try:
            await self._handshake(remote, reader, writer)
            self._known[remote.engine_id] = (host, port)
            wanted = remote.block_ids[len(remote.block_ids) - blocks :] if blocks <= len(remote.block_ids) else ()
            if len(wanted) != blocks:
                raise TransferError(f"P holds {len(remote.block_ids)} blocks, {blocks} are needed")
            message = {"op": "read", "request_id": remote.request_id, "block_ids": list(wanted)}
            answer, payload = await wire.ask(reader, writer, message)
            if not answer.get("ok") or len(payload) != size:
                raise TransferError(f"read failed: {answer.get('error') or f'{len(payload)} bytes instead of {size}'}")
            await self._take_time(size)
            await wire.ask(reader, writer, {"op": "done", "request_id": remote.request_id})
            return payload
        except wire.WireError as error:
            raise TransferError(str(error)) from None
        finally:
            writer.close()

    async def _take_time(self, size: int) -> None:
        seconds = self._settings.transfer_base + self._faults.transfer_delay
        if self._settings.transfer_bytes_per_second:
            seconds += size / self._settings.transfer_bytes_per_second
        if seconds:
            await asyncio.sleep(seconds)

    async def _connect(self, remote: Remote) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._settings.handshake_timeout
        while True:
            left = end - loop.time()
            if left <= 0:
                raise TransferError(f"no handshake with {remote.host}:{remote.port} in {self._settings.handshake_timeout:g} s")
            try:
                return await asyncio.wait_for(asyncio.open_connection(remote.host, remote.port), left)
            except (OSError, TimeoutError):
                await asyncio.sleep(min(CONNECT_RETRY, max(0.0, end - loop.time())))

    async def _handshake(self, remote: Remote, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            peer, _ = await asyncio.wait_for(wire.ask(reader, writer, {"op": "meta"}), self._settings.handshake_timeout)
        except TimeoutError:
            raise TransferError(f"no handshake with {remote.host}:{remote.port}") from None
        if self._enforce and peer.get("compatibility_hash") != self._own["compatibility_hash"]:
            raise TransferError(
                f"NIXL compatibility hash mismatch: local vLLM {self._own['version']}, remote vLLM {peer.get('version')}"
            )
        known = self._agents.setdefault((remote.host, remote.port), remote.engine_id)
        if self._faults.stale_peers and known != remote.engine_id:
            raise TransferError(f"the agent known at {remote.host}:{remote.port} is that of engine {known}: invalid metadata")
        if peer.get("engine_id") != remote.engine_id:
            raise TransferError(f"engine {remote.engine_id} is gone from {remote.host}:{remote.port}")
        for name in ("block_size", "bytes_per_token"):
            if peer.get(name) != self._own[name]:
                raise TransferError(f"{name} differs: {self._own[name]} here, {peer.get(name)} there")

    async def release(self, remote: Remote) -> None:
        """Tells P that nobody will read, so that it frees the blocks now. Best effort."""
        await self._tell(remote.host, remote.port, {"op": "done", "request_id": remote.request_id})

    async def heartbeat(self, host: str, port: int, request_ids: list[str]) -> None:
        """Extends leases. Best effort."""
        await self._tell(host, port, {"op": "heartbeat", "request_ids": request_ids})

    async def _tell(self, host: str, port: int, message: wire.Header) -> None:
        try:
            await wire.ask_once(host, port, message, self._settings.handshake_timeout)
        except wire.WireError as error:
            print(f"WARNING {message['op']} to {host}:{port}: {error}", flush=True)
