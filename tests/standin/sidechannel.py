"""The prefill side of a handoff: leases on finished prompts, and the TCP port from which decode engines read them.

vLLM's NIXL connector has a ZMQ port for the handshake and moves the data by UCX or RDMA; here both go over the port of
the handshake. What D and P say to each other is the same: D asks for the metadata with the compatibility hash, reads the
blocks, and notifies P, which then frees them. Until then P holds them under a lease, which D's heartbeats extend.
"""

import asyncio
import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field

from standin import wire
from standin.kv import Block, BlockPool, expand
from standin.settings import Faults

NIXL_CONNECTOR_VERSIONS = {(0, 26): 5, (0, 27): 5, (0, 29): 9, (0, 31): 13, (0, 32): 14, (0, 33): 15}
REAP_INTERVAL = 0.05  # seconds between two looks for expired leases


def compatibility_hash(version: str, model: str, dtype: str, cache_dtype: str) -> str:
    """What must be equal on both sides of a handoff (vllm/.../nixl/metadata.py, compute_nixl_compatibility_hash)."""
    minor = tuple(int(part) for part in version.split(".")[:2])
    factors = {
        "vllm_version": version,
        "nixl_connector_version": NIXL_CONNECTOR_VERSIONS.get((minor[0], minor[1]), 0),
        "model": model,
        "dtype": dtype,
        "cache_dtype": cache_dtype,
        "transfer_mode": "pull",
    }
    return hashlib.sha256(json.dumps(factors, sort_keys=True).encode()).hexdigest()


@dataclass
class Lease:
    """Blocks of one finished prompt that wait for their reader."""

    blocks: list[Block]
    expires: float  # loop time


@dataclass
class LeaseTable:
    """All leases of one engine. Expired ones are freed by `reap`."""

    release: Callable[[list[Block]], None]
    on_expired: Callable[[], None]
    duration: float
    leases: dict[str, Lease] = field(default_factory=dict)

    def hold(self, request_id: str, blocks: list[Block], now: float) -> None:
        """Keeps `blocks` for `duration` seconds."""
        self.leases[request_id] = Lease(blocks, now + self.duration)

    def extend(self, request_id: str, now: float) -> None:
        """A heartbeat: the lease lasts at least two thirds of the duration from now on."""
        lease = self.leases.get(request_id)
        if lease:
            lease.expires = max(lease.expires, now + self.duration * 2 / 3)

    def end(self, request_id: str) -> bool:
        """The reader is done. False if the lease is not there any more."""
        lease = self.leases.pop(request_id, None)
        if lease is None:
            return False
        self.release(lease.blocks)
        return True

    def reap(self, now: float) -> None:
        """Frees what nobody fetched in time."""
        for request_id in [name for name, lease in self.leases.items() if lease.expires <= now]:
            self.end(request_id)
            self.on_expired()


class SideChannel:
    """The listener on VLLM_NIXL_SIDE_CHANNEL_HOST:PORT."""

    def __init__(self, pool: BlockPool, leases: LeaseTable, metadata: wire.Header, faults: Faults) -> None:
        self._pool = pool
        self.leases = leases
        self._metadata = metadata
        self._faults = faults
        self.on_late_notification: Callable[[], None] = lambda: None
        self._server: asyncio.AbstractServer | None = None
        self._reaper: asyncio.Task[None] | None = None

    async def start(self, host: str, port: int) -> None:
        """Listens. Raises OSError if the address cannot be had."""
        self._server = await asyncio.start_server(self._connection, host, port)
        self._reaper = asyncio.create_task(self._reap())

    async def stop(self) -> None:
        """Closes the port."""
        if self._reaper:
            self._reaper.cancel()
        if self._server:
            self._server.close()

    async def _reap(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            self.leases.reap(loop.time())

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                message, _ = await wire.receive(reader)
                header, payload = self._answer(message)
                wire.send(writer, header, payload)
                await writer.drain()
        except (wire.WireError, OSError):
            return
        finally:
            writer.close()

    def _answer(self, message: wire.Header) -> tuple[wire.Header, bytes]:
        operation = message.get("op")
        now = asyncio.get_running_loop().time()
        if operation == "meta":
            return self._metadata, b""
        if operation == "heartbeat":
            for request_id in message.get("request_ids", []):
                self.leases.extend(request_id, now)
            return {"ok": True}, b""
        if operation == "done":
            if not self.leases.end(str(message.get("request_id"))):
                self.on_late_notification()
            return {"ok": True}, b""
        if operation == "read":
            return self._read(message)
        return {"ok": False, "error": f"unknown operation {operation!r}"}, b""

    def _read(self, message: wire.Header) -> tuple[wire.Header, bytes]:
        """The contents of the blocks asked for, whoever owns them now: like RDMA, a read after the lease does not fail."""
        if self._faults.die_in_transfer:
            os._exit(1)
        if self._faults.refuse_transfer:
            return {"ok": False, "error": "transfer refused (fault)"}, b""
        contents = []
        for identity in message.get("block_ids", []):
            block = self._pool.by_identity(int(identity))
            if block is None:
                return {"ok": False, "error": f"no block {identity}"}, b""
            data = self._pool.contents(block)
            contents.append(expand(b"wrong" + data[:16], len(data)) if self._faults.wrong_blob else data)
        return {"ok": True}, b"".join(contents)
