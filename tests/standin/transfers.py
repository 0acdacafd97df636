"""The engine's KV connectors: NIXL (handoff from P to D) and LMCacheMP (the cache server beside the engine).

Who loads is decided as in vLLM's MultiConnector: both are asked, the handoff wins, both are told what was computed.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from standin.args import EngineArgs
from standin.cache_client import CacheClient, CacheError
from standin.engine_metrics import EngineMetrics
from standin.kv import BlockPool
from standin.pull import Puller, Remote, TransferError
from standin.sequence import Sequence
from standin.settings import Faults
from standin.sidechannel import SideChannel

LAZY_COUNT = 10  # requests that are stored at once with lazy offload (lmcache.mp.lazy_offload_select_count)
NOBODY = 9  # a port at which nobody listens
KEEP_REASONS = ("length", "stop")  # only a prompt that ended so is kept for D


class Connectors:
    """All connectors of one engine; any of them may be absent."""

    def __init__(
        self, args: EngineArgs, pool: BlockPool, metrics: EngineMetrics, faults: Faults, *, wake: Callable[[], None]
    ) -> None:
        self._args = args
        self._pool = pool
        self._metrics = metrics
        self._faults = faults
        self._wake = wake
        self.puller: Puller | None = None
        self.side: SideChannel | None = None
        self.cache: CacheClient | None = None
        self._waiting_for_peer: dict[str, Remote] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._pending: dict[str, list[tuple[bytes, bytes]]] = {}  # request -> chunks that are not stored yet, with lazy offload
        self._ended: deque[str] = deque()  # of them, those that have ended

    def _start(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def heartbeats(self) -> None:
        """Renews the leases of what this engine is going to read, every sixth of a lease."""
        assert self._args.kv.nixl
        while True:
            await asyncio.sleep(self._args.kv.nixl.lease_duration / 6)
            by_peer: dict[tuple[str, int], list[str]] = {}
            for remote in self._waiting_for_peer.values():
                by_peer.setdefault((remote.host, remote.port), []).append(remote.request_id)
            for (host, port), request_ids in by_peer.items():
                assert self.puller
                self._start(self.puller.heartbeat(host, port, request_ids))

    def on_arrival(self, sequence: Sequence) -> None:
        """A request has come: if its KV is on another engine, that engine must not free it meanwhile."""
        if self.puller is None or self._faults.no_transfer:
            return
        sequence.remote = Remote.from_params(sequence.params)
        if sequence.remote:
            self._waiting_for_peer[sequence.request_id] = sequence.remote
        elif sequence.params.get("do_remote_prefill"):
            print(f"WARNING Got invalid KVTransferParams of {sequence.request_id}: it will not utilize KVTransfer", flush=True)

    def looked_up(self, sequence: Sequence) -> bool:
        """True when it is known what the cache server holds of the prompt; starts the lookup at the first call."""
        if self.cache is None:
            return True
        if sequence.lookup is None:
            keys = self._chunk_keys(sequence, len(sequence.prompt) // self.cache.chunk_size)
            sequence.lookup = asyncio.ensure_future(self.cache.lookup(sequence.request_id, keys))
            sequence.lookup.add_done_callback(lambda _: self._wake())
        if not sequence.lookup.done():
            return False
        sequence.cache_hit = sequence.lookup.result()
        sequence.stored_tokens = max(sequence.stored_tokens, sequence.cache_hit)
        return True

    def _chunk_keys(self, sequence: Sequence, chunks: int) -> list[bytes]:
        assert self.cache
        stride = self.cache.chunk_size // self._pool.block_size
        return sequence.full_keys(chunks * stride)[stride - 1 :: stride]

    def external_tokens(self, sequence: Sequence, local: int) -> int:
        """Tokens that a connector will load beyond the `local` ones of the prefix cache."""
        if sequence.remote is not None and not sequence.remote_used:
            return len(sequence.prompt) - local
        return max(0, min(sequence.cache_hit, len(sequence.prompt)) - local)

    def start_fetch(self, sequence: Sequence, done: Callable[[bool], None]) -> None:
        """Loads the KV; calls `done` with True when it is in the blocks, with False when it could not be had."""
        if sequence.remote is not None and not sequence.remote_used:
            sequence.remote_used = True
            self._start(self._fetch_remote(sequence, sequence.remote, done))
        else:
            self._start(self._fetch_cached(sequence, done))

    async def _fetch_remote(self, sequence: Sequence, remote: Remote, done: Callable[[bool], None]) -> None:
        assert self.puller
        keys = sequence.prompt_keys()
        first = sequence.local_hit // self._pool.block_size
        blocks = sequence.blocks[first : len(keys)]
        size = len(blocks) * self._pool.block_bytes
        started = time.monotonic()
        try:
            data = await self.puller.pull(remote, len(blocks), size)
        except TransferError as error:
            print(f"ERROR NIXL transfer failure of {sequence.request_id}: {error}", flush=True)
            self._metrics.counter["nixl_num_failed_transfers"].inc()
            sequence.lookup = None  # it is scheduled anew, and LMCache asked again (vLLM 0.32.0)
            done(False)
            return
        finally:
            self._waiting_for_peer.pop(sequence.request_id, None)
        self._receive(sequence, first, len(keys), data)
        self._metrics.count_transfer(time.monotonic() - started, size, len(blocks))
        done(True)

    async def _fetch_cached(self, sequence: Sequence, done: Callable[[bool], None]) -> None:
        assert self.cache
        chunk = self.cache.chunk_size
        start = sequence.local_hit // chunk
        keys = self._chunk_keys(sequence, sequence.cache_hit // chunk)[start:]
        try:
            data = await self.cache.retrieve(keys)
        except CacheError as error:
            print(f"WARNING LMCache retrieve of {sequence.request_id} failed: {error}", flush=True)
            done(False)
            return
        first = sequence.local_hit // self._pool.block_size
        skip = first - start * chunk // self._pool.block_size
        end = sequence.cache_hit // self._pool.block_size
        self._receive(sequence, first, end, data[skip * self._pool.block_bytes :])
        done(True)

    def _receive(self, sequence: Sequence, first: int, end: int, data: bytes) -> None:
        size = self._pool.block_bytes
        keys = sequence.prompt_keys()
        for place, index in enumerate(range(first, end)):
            self._pool.receive(sequence.blocks[index], keys[index], data[place * size : (place + 1) * size])

    def after_step(self, sequence: Sequence) -> None:
        """Stores the chunks that are complete now.

        The count of tokens that may be stored is LMCache's: those scheduled here plus those found in a cache. On a
        decode engine the tokens that came by handoff do not count, so it stores nothing until it has decoded a chunk.
        """
        if self.cache is None or self._faults.no_store:
            return
        chunk = self.cache.chunk_size
        known = sequence.scheduled_tokens + max(sequence.local_hit, sequence.cache_hit)
        available = min(sequence.computed, len(sequence.blocks) * self._pool.block_size, known)
        first, end = sequence.stored_tokens // chunk, available // chunk
        if end <= first:
            return
        stride = chunk // self._pool.block_size
        chunks = []
        for index, key in enumerate(self._chunk_keys(sequence, end)[first:], start=first):
            blocks = sequence.blocks[index * stride : (index + 1) * stride]
            chunks.append((key, b"".join(self._pool.contents(block) for block in blocks)))
        sequence.stored_tokens = end * chunk
        if self._lazy:
            self._pending.setdefault(sequence.request_id, []).extend(chunks)
        else:
            self._start(self.cache.store(chunks))

    @property
    def _lazy(self) -> int:
        lmcache = self._args.kv.lmcache
        return self._faults.lazy_offload or (lmcache.lazy_threshold if lmcache else 0)

    def _store_oldest(self, request_id: str) -> None:
        """With lazy offload: a request has ended; the oldest that did are stored once they are as many as the threshold."""
        if request_id in self._pending:
            self._ended.append(request_id)
        for _ in range(LAZY_COUNT if len(self._ended) >= self._lazy else 0):
            if self.cache and self._ended:
                self._start(self.cache.store(self._pending.pop(self._ended.popleft())))

    def finished(self, sequence: Sequence, reason: str) -> tuple[bool, dict[str, Any] | None]:
        """(True if the blocks stay for a reader, what the answer says in kv_transfer_params)."""
        self._waiting_for_peer.pop(sequence.request_id, None)
        if self._pending or self._lazy:
            self._store_oldest(sequence.request_id)
        if sequence.remote is not None and not sequence.remote_used:
            self.release(sequence.remote)  # ended before its KV was fetched: P must not wait for the lease
        if self.side is None or not sequence.for_decode or reason not in KEEP_REASONS or self._faults.no_transfer:
            return False, None
        self.side.leases.duration = 0.0 if self._faults.expire_leases else self._lease
        self.side.leases.hold(sequence.request_id, sequence.blocks, asyncio.get_running_loop().time())
        return True, self._answer(sequence)

    @property
    def _lease(self) -> float:
        assert self._args.kv.nixl
        return self._args.kv.nixl.lease_duration

    def _answer(self, sequence: Sequence) -> dict[str, Any]:
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[block.identity for block in sequence.blocks]],
            "remote_engine_id": self._args.kv.engine_id,
            "remote_request_id": sequence.request_id,
            "remote_host": self._args.side_host,
            "remote_port": NOBODY if self._faults.wrong_address else self._args.side_port,
            "tp_size": self._args.tensor_parallel_size,
            "dcp_size": 1,
            "pp_size": self._args.pipeline_parallel_size,
            "remote_num_tokens": len(sequence.prompt),
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": sequence.local_hit + sequence.external_hit,
        }

    def release(self, remote: Remote) -> None:
        """Tells P that nobody will read."""
        if self.puller:
            self._start(self.puller.release(remote))
