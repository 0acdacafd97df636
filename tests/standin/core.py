"""One engine: KV cache, scheduler, connectors and metrics put together, and how it starts, drains and dies."""

import asyncio
import hashlib
import uuid
from dataclasses import replace
from typing import Any

from standin.args import EngineArgs
from standin.cache_client import CacheClient
from standin.engine_metrics import EngineMetrics
from standin.kv import BlockPool
from standin.protocol import Generation
from standin.pull import Puller, Remote
from standin.scheduler import Scheduler
from standin.sequence import Sequence
from standin.settings import Settings
from standin.sidechannel import LeaseTable, SideChannel, compatibility_hash
from standin.transfers import Connectors

DEFAULT_KV_TOKENS = 65536
DRAIN_LOOK = 0.05  # seconds


class StartError(Exception):
    """The engine cannot serve with this configuration."""


def count_blocks(args: EngineArgs, settings: Settings) -> int:
    """Blocks of the KV cache. Raises StartError if one request of the longest length would not fit, as vLLM does."""
    needed = -(-args.max_model_len // args.block_size)
    if args.num_gpu_blocks_override:
        blocks = args.num_gpu_blocks_override
    elif args.kv_cache_memory_bytes:
        blocks = args.kv_cache_memory_bytes // (args.block_size * settings.kv_bytes_per_token)
    else:
        blocks = settings.kv_blocks or max(needed, DEFAULT_KV_TOKENS // args.block_size)
    if blocks < needed:
        raise StartError(
            f"To serve at least one request with the models's max seq len ({args.max_model_len}), {needed} KV cache blocks "
            f"are needed, which is larger than the available {blocks}. Try increasing the KV cache or decreasing `max_model_len`."
        )
    return blocks


class Engine:
    """The engine behind the HTTP server."""

    def __init__(self, args: EngineArgs, settings: Settings) -> None:
        self.args = args
        self.settings = settings
        self.dead = False
        self.draining = False
        self.model_name = args.served_names[0]
        nixl = args.kv.nixl
        self.metrics = EngineMetrics(
            self.model_name, args.max_model_len, consumer=args.kv.consumer, nixl=nixl is not None, version=settings.minor
        )
        blocks = count_blocks(args, settings)
        self.pool = BlockPool(blocks, args.block_size, settings.kv_bytes_per_token, caching=args.prefix_caching)
        self.connectors = Connectors(args, self.pool, self.metrics, settings.faults, wake=self._wake)
        self.scheduler = Scheduler(args, settings, self.pool, self.metrics, self.connectors)
        self.scheduler.on_fatal = self.die
        self._root = hashlib.blake2b(f"{args.model}|{args.dtype}|{args.kv_cache_dtype}".encode(), digest_size=24).digest()
        self._tasks: list[asyncio.Task[Any]] = []
        self._describe_cache(blocks)
        if nixl:
            self._add_nixl(nixl.enforce_handshake_compat)
        if args.kv.lmcache:
            port = settings.faults.cache_port or args.kv.lmcache.port
            self.connectors.cache = CacheClient(replace(args.kv.lmcache, port=port), args.model, args.block_size)

    @property
    def fingerprint(self) -> str:
        """vLLM's system_fingerprint."""
        parallel = [f"tp{self.args.tensor_parallel_size}"] if self.args.tensor_parallel_size > 1 else []
        return "-".join([f"vllm-{self.settings.version}", *parallel, self._root.hex()[:8]])

    def _wake(self) -> None:
        self.scheduler.wake()

    def _add_nixl(self, enforce: bool) -> None:
        args, settings = self.args, self.settings
        metadata: dict[str, Any] = {
            "ok": True,
            "engine_id": args.kv.engine_id,
            "version": settings.version,
            "compatibility_hash": compatibility_hash(settings.version, args.model, args.dtype, args.kv_cache_dtype),
            "block_size": args.block_size,
            "bytes_per_token": settings.kv_bytes_per_token,
        }
        assert args.kv.nixl
        leases = LeaseTable(self._release, self.metrics.counter["nixl_num_kv_expired_reqs"].inc, args.kv.nixl.lease_duration)
        self.connectors.side = SideChannel(self.pool, leases, metadata, settings.faults)
        late = self.metrics.counter.get("nixl_num_notifications_after_expiry")
        if late:
            self.connectors.side.on_late_notification = late.inc
        self.connectors.puller = Puller(metadata, settings, enforce=enforce)

    def _release(self, blocks: Any) -> None:
        self.pool.release(blocks)
        self.scheduler.wake()

    async def start(self) -> None:
        """Connects to the cache server, opens the side channel and starts the steps.

        Raises CacheError or OSError if that is not possible.
        """
        if self.connectors.cache:
            await self.connectors.cache.start()
        if self.connectors.side:
            await self.connectors.side.start(self.args.side_host, self.args.side_port)
            self._tasks.append(asyncio.create_task(self.connectors.heartbeats()))
        self._tasks.append(asyncio.create_task(self.scheduler.run()))

    async def stop(self) -> None:
        """Closes what start() opened."""
        for task in self._tasks:
            task.cancel()
        if self.connectors.side:
            await self.connectors.side.stop()
        if self.connectors.cache:
            await self.connectors.cache.stop()

    def submit(self, generation: Generation) -> list[Sequence]:
        """Queues one sequence for every prompt and choice."""
        sequences = []
        for number, prompt in enumerate(generation.prompts):
            for choice in range(generation.n):
                sequence = Sequence(
                    request_id=f"{generation.response_id}-{number}-{choice}-{uuid.uuid4().hex[:8]}",
                    prompt=prompt,
                    limits=generation.limits(len(prompt), self.args.max_model_len, self.settings.eos_tokens),
                    root=self._root,
                    block_size=self.args.block_size,
                    params=dict(generation.params),
                    choice=choice,
                )
                self.scheduler.submit(sequence)
                sequences.append(sequence)
        return sequences

    def reject(self, params: dict[str, Any]) -> None:
        """A request that was to read from P was refused before it was queued: P must not keep the blocks for it."""
        remote = Remote.from_params(params)
        if remote and self.connectors.puller:
            self.connectors.release(remote)

    def die(self, reason: str) -> None:
        """The engine core has crashed; the HTTP server lives on for a moment and says so."""
        print(f"ERROR EngineCore encountered a fatal error: {reason}", flush=True)
        self.dead = True
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(sequence, "error")

    @property
    def leases(self) -> int:
        """Finished prompts that wait for their reader."""
        return len(self.connectors.side.leases.leases) if self.connectors.side else 0

    async def drain(self, timeout: float) -> None:
        """Takes no new requests; waits up to `timeout` seconds for running ones and for leases; 0 aborts at once."""
        self.draining = True
        end = asyncio.get_running_loop().time() + timeout
        if timeout == 0:
            for sequence in (*self.scheduler.running, *self.scheduler.waiting):
                self.scheduler.abort(sequence)
            return
        while (self.scheduler.unfinished or self.leases) and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_LOOK)
        for sequence in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.abort(sequence, "error")

    def _describe_cache(self, blocks: int) -> None:
        """vLLM exports every field of its CacheConfig as a label."""
        args = self.args
        unset = ("prefix_match_unit", "sliding_window", "mamba_page_size_padded", "skip_page_size_padded", "mamba_block_size")
        values: dict[str, Any] = dict.fromkeys((*unset, "num_cpu_blocks", "kv_offloading_size"))
        values |= {
            "block_size": args.block_size,
            "user_specified_block_size": True,
            "kv_cache_layout": None,
            "gpu_memory_utilization": 0.92,
            "cache_dtype": args.kv_cache_dtype,
            "is_attention_free": False,
            "num_gpu_blocks_override": args.num_gpu_blocks_override,
            "enable_prefix_caching": args.prefix_caching,
            "prefix_caching_hash_algo": "sha256",
            "prefix_cache_retention_interval": 0,
            "kv_cache_dtype_skip_layers": [],
            "mamba_cache_dtype": "auto",
            "mamba_ssm_cache_dtype": "auto",
            "mamba_cache_mode": "none",
            "enable_mamba_shared_prefix_checkpoint": False,
            "replayssm_buffer_len": 16,
            "use_replayssm": False,
            "use_kda_recoverssm": False,
            "num_gpu_blocks": blocks,
            "effective_attention_block_size": args.block_size,
            "kv_cache_size_tokens": blocks * args.block_size,
            "kv_cache_max_concurrency": blocks * args.block_size / args.max_model_len,
            "hash_block_size": args.block_size,
            "cache_hit_alignment_tokens": args.block_size,
            "kv_sharing_fast_prefill": False,
            "swa_bounded_replay": True,
            "kv_cache_memory_bytes": args.kv_cache_memory_bytes,
            "kv_offloading_backend": "native",
            "_block_size_resolved": True,
        }
        self.metrics.cache_config({name: str(value) for name, value in values.items()})
