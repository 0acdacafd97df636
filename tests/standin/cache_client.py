"""The engine's side of the connection to its cache server, with LMCache's manners when the server is gone.

A dead server is not noticed by a lookup that waits (its transport reconnects silently); the lookup ends when the heartbeat
finds the server unhealthy, or after `lmcache.mp.mq_timeout`. While the server is unhealthy nothing is looked up and
nothing is stored. When it is back, the engine registers again.
"""

import asyncio
import itertools
import uuid
from collections.abc import Sequence

from standin import wire
from standin.kvconfig import LMCacheSettings

RECONNECT_INTERVAL = 0.2  # seconds


class CacheError(Exception):
    """The cache server did not do what was asked."""


class CacheClient:
    """One connection to a cache server."""

    def __init__(self, settings: LMCacheSettings, model: str, block_size: int) -> None:
        self._settings = settings
        self._model = model
        self._block_size = block_size
        self._instance = uuid.uuid4().int >> 65
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[tuple[wire.Header, bytes]]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._connected = asyncio.Event()
        self._unhealthy = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.chunk_size = 0  # tokens; known after start()

    async def start(self) -> None:
        """Connects and registers.

        Raises CacheError if there is no server within mq_timeout, or if its chunks are no multiple of the block size.
        """
        self._tasks.append(asyncio.create_task(self._keep_connected()))
        try:
            await self._register(self._settings.mq_timeout)
        except CacheError:
            raise CacheError(
                f"LMCache server {self._settings.host}:{self._settings.port} not reachable in {self._settings.mq_timeout:g} s"
            ) from None
        if self.chunk_size % self._block_size:
            raise CacheError(f"LMCache chunk size {self.chunk_size} must be a multiple of tokens_per_block {self._block_size}")
        self._tasks.append(asyncio.create_task(self._heartbeats()))

    async def stop(self) -> None:
        """Closes the connection."""
        for task in self._tasks:
            task.cancel()
        if self._writer:
            self._writer.close()

    async def lookup(self, request_id: str, keys: Sequence[bytes]) -> int:
        """Tokens of the longest stored prefix. 0 when the server is unhealthy or does not answer in time."""
        if self._unhealthy.is_set():
            return 0
        header = {"op": "lookup", "request_id": request_id, "model": self._model, "keys": [key.hex() for key in keys]}
        question = asyncio.create_task(self._ask(header, b"", self._settings.mq_timeout))
        gone = asyncio.create_task(self._unhealthy.wait())
        await asyncio.wait({question, gone}, return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not question.done():
            question.cancel()
            return 0
        try:
            answer, _ = question.result()
            return int(answer["hits"]) * self.chunk_size
        except CacheError as error:
            print(f"WARNING LOOKUP timed out: {error}. Marking server as unhealthy.", flush=True)
            self._unhealthy.set()
            return 0

    async def retrieve(self, keys: Sequence[bytes]) -> bytes:
        """The contents of stored chunks. Raises CacheError if one is missing or the server does not answer."""
        header = {"op": "retrieve", "model": self._model, "keys": [key.hex() for key in keys]}
        answer, payload = await self._ask(header, b"", self._settings.mq_timeout)
        if not answer.get("ok"):
            raise CacheError(str(answer.get("error")))
        return payload

    async def store(self, chunks: Sequence[tuple[bytes, bytes]]) -> None:
        """Stores chunks; drops them when the server is unhealthy."""
        if self._unhealthy.is_set():
            return
        sizes = [len(data) for _, data in chunks]
        header = {"op": "store", "model": self._model, "keys": [key.hex() for key, _ in chunks], "sizes": sizes}
        try:
            await self._ask(header, b"".join(data for _, data in chunks), self._settings.mq_timeout)
        except CacheError as error:
            print(f"WARNING LMCache store failed: {error}", flush=True)

    async def _register(self, timeout: float) -> None:
        answer, _ = await self._ask(self._registration(), b"", timeout)
        self.chunk_size = int(answer["chunk_size"])

    def _registration(self) -> wire.Header:
        return {"op": "register", "instance": self._instance, "model": self._model, "block_size": self._block_size}

    async def _ask(self, header: wire.Header, payload: bytes, timeout: float) -> tuple[wire.Header, bytes]:
        number = next(self._numbers)
        future: asyncio.Future[tuple[wire.Header, bytes]] = asyncio.get_running_loop().create_future()
        self._answers[number] = future

        async def exchange() -> tuple[wire.Header, bytes]:
            await self._connected.wait()
            assert self._writer
            wire.send(self._writer, {**header, "number": number}, payload)
            return await future

        try:
            return await asyncio.wait_for(exchange(), timeout)
        except TimeoutError:
            raise CacheError(f"{header['op']}: no answer in {timeout:g} s") from None
        finally:
            self._answers.pop(number, None)

    async def _keep_connected(self) -> None:
        while True:
            try:
                reader, self._writer = await asyncio.open_connection(self._settings.host, self._settings.port)
                self._connected.set()
                if self.chunk_size:  # a server that was restarted does not know this engine
                    wire.send(self._writer, {**self._registration(), "number": 0})
                while True:
                    answer, payload = await wire.receive(reader)
                    future = self._answers.get(int(answer.get("number", 0)))
                    if future and not future.done():
                        future.set_result((answer, payload))
            except (OSError, wire.WireError):
                self._connected.clear()
            await asyncio.sleep(RECONNECT_INTERVAL)

    async def _heartbeats(self) -> None:
        interval = self._settings.heartbeat_interval
        while True:
            await asyncio.sleep(interval)
            try:
                await self._ask({"op": "ping", "instance": self._instance}, b"", interval)
                if self._unhealthy.is_set():
                    await self._register(interval)
                    self._unhealthy.clear()
                    print("INFO LMCache server is healthy again, resuming normal operation", flush=True)
            except CacheError:
                if not self._unhealthy.is_set():
                    print("WARNING LMCache server is unhealthy, entering degraded mode", flush=True)
                self._unhealthy.set()
