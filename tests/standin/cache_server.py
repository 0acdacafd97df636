"""`lmcache server` as a stand-in: the socket that engines connect to, and the peers of a P2P group."""

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from standin import wire
from standin.cache_args import CacheServerArgs
from standin.cache_store import CacheMetrics, ChunkStore
from standin.http_client import HttpClientError, request_json

REAP_TIMEOUT = 120.0  # seconds after which an engine that sends no heartbeat is forgotten


@dataclass(frozen=True)
class Peer:
    """Another cache server of the group."""

    instance_id: str
    ip: str
    port: int


class CacheServer:
    """Stores chunks of engines and reads chunks of peers."""

    def __init__(self, args: CacheServerArgs) -> None:
        self.args = args
        self.metrics = CacheMetrics()
        evicts = args.eviction_policy != "noop"
        self.store = ChunkStore(args.l1_bytes, args.align_bytes, args.watermark, args.eviction_ratio, self.metrics, evicts=evicts)
        self.engines: dict[int, float] = {}  # instance -> when it was last heard of
        self.models: dict[int, dict[str, Any]] = {}
        self.sessions = 0
        self.p2p_state = "unregistered"
        self.peers: dict[str, Peer] = {}
        self._assigned: str | None = None
        self._server: asyncio.AbstractServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.metrics.registry.before_scrape.append(self._set_gauges)

    async def start(self) -> None:
        """Listens on the data port; registers with the coordinator if there is one. Raises OSError."""
        self._server = await asyncio.start_server(self._connection, self.args.host, self.args.port)
        self._tasks.append(asyncio.create_task(self._reap()))
        if self.args.coordinator_url and not self.args.faults.get("unregistered"):
            self._tasks.append(asyncio.create_task(self._keep_registered()))

    async def stop(self) -> None:
        """Leaves the group and closes the port."""
        for task in self._tasks:
            task.cancel()
        if self._server:
            self._server.close()
        if self._assigned:
            try:
                await request_json("DELETE", f"{self.args.coordinator_url}/instances/{self._assigned}", timeout_s=1.0)
            except HttpClientError as error:
                print(f"WARNING deregistration failed: {error}", flush=True)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_TIMEOUT / 4)
            now = time.monotonic()
            self.engines = {name: seen for name, seen in self.engines.items() if now - seen < REAP_TIMEOUT}

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        registered: set[int] = set()
        try:
            while True:
                message, payload = await wire.receive(reader)
                header, data = await self._answer(message, payload, registered)
                wire.send(writer, {**header, "number": message.get("number", 0)}, data)
                await writer.drain()
        except (wire.WireError, OSError):
            return
        finally:
            writer.close()

    async def _answer(self, message: wire.Header, payload: bytes, registered: set[int]) -> tuple[wire.Header, bytes]:
        operation = message.get("op")
        keys = [f"{message.get('model')}@{key}" for key in message.get("keys", [])]
        if operation in ("register", "ping"):
            self._heard_of(int(message.get("instance", 0)), message, registered)
            return {"ok": True, "chunk_size": self.args.chunk_size}, b""
        if operation == "lookup":
            return {"ok": True, "hits": await self._lookup(str(message.get("model")), keys, registered)}, b""
        if operation == "store":
            return self._write(keys, message.get("sizes", []), payload, registered)
        if operation == "peer_lookup":
            return {"ok": True, "hits": self.store.prefix(message.get("names", []))}, b""
        if operation in ("retrieve", "peer_read"):
            return self._read(keys or message.get("names", []))
        return {"ok": False, "error": f"unknown operation {operation!r}"}, b""

    def _heard_of(self, instance: int, message: wire.Header, registered: set[int]) -> None:
        if message.get("op") == "register":
            registered.add(instance)
            model = {"model_name": message.get("model"), "world_size": 1, "block_size": message.get("block_size"), "use_mla": False}
            self.models[instance] = model
        if instance in registered:
            self.engines[instance] = time.monotonic()

    async def _lookup(self, model: str, keys: list[str], registered: set[int]) -> int:
        labels = {"model_name": model, "cache_salt": ""}
        self.metrics.lookups.inc(**labels)
        if not registered or not keys:
            self.metrics.early_exit.inc(reason="empty_chunk_hashes" if registered else "no_gpu_context", **labels)
            return 0
        self.sessions += 1
        try:
            local = self.store.prefix(keys)
            total = local + await self._from_peers(keys[local:])
        finally:
            self.sessions -= 1
        if total:  # a lookup locks what it finds and counts as a read when the locks are given back
            self.metrics.l1_read.inc(total)
        chunk = self.args.chunk_size
        self.metrics.requested.inc(len(keys) * chunk, **labels)
        self.metrics.hit.inc(total * chunk, **labels)
        self.metrics.hit_l1.inc(local * chunk, **labels)
        self.metrics.hit_l2.inc((total - local) * chunk, **labels)
        return total

    def _read(self, keys: list[str]) -> tuple[wire.Header, bytes]:
        data = [self.store.get(key) for key in keys]
        present = [chunk for chunk in data if chunk is not None]
        if len(present) != len(keys):
            return {"ok": False, "error": f"{len(keys) - len(present)} of {len(keys)} chunks are not stored"}, b""
        return {"ok": True, "sizes": [len(chunk) for chunk in present]}, b"".join(present)

    def _write(self, keys: list[str], sizes: list[int], payload: bytes, registered: set[int]) -> tuple[wire.Header, bytes]:
        if not registered or sum(sizes) != len(payload) or len(sizes) != len(keys):
            return {"ok": False, "error": "not registered, or sizes that do not fit the payload"}, b""
        start = 0
        for key, size in zip(keys, sizes, strict=True):
            self.store.put(key, payload[start : start + size])
            start += size
        return {"ok": True}, b""

    async def _from_peers(self, keys: list[str]) -> int:
        """Copies the chunks that follow from the peer that has most of them; returns how many."""
        best: Peer | None = None
        count = 0
        for peer in list(self.peers.values()) if keys else []:
            try:
                message = {"op": "peer_lookup", "names": keys}
                answer, _ = await wire.ask_once(peer.ip, peer.port, message, self.args.p2p_lookup_timeout)
            except wire.WireError as error:
                print(f"WARNING P2P lookup at {peer.instance_id}: {error}", flush=True)
                continue
            if answer.get("hits", 0) > count:
                best, count = peer, int(answer["hits"])
        if best is None:
            return 0
        try:
            message = {"op": "peer_read", "names": keys[:count]}
            answer, payload = await wire.ask_once(best.ip, best.port, message, self.args.p2p_load_timeout)
        except wire.WireError as error:
            print(f"WARNING P2P load from {best.instance_id}: {error}", flush=True)
            return 0
        if not answer.get("ok"):
            return 0
        start = 0
        for key, size in zip(keys[:count], answer["sizes"], strict=True):
            self.store.put(key, payload[start : start + size])
            start += size
        self.metrics.l2_loaded.inc(l2_name="p2p")
        self.metrics.l2_prefetched.inc(count)
        return count

    async def _keep_registered(self) -> None:
        """Registers, sends heartbeats, and reads the list of peers, all in the coordinator's interval."""
        while True:
            try:
                await self._beat()
                await self._poll()
            except HttpClientError as error:
                print(f"WARNING Coordinator registration/heartbeat failed: {error}", flush=True)
                self.p2p_state, self.peers = "disconnected" if error.timed_out else "unregistered", {}
            await asyncio.sleep(self.args.heartbeat_interval)

    async def _beat(self) -> None:
        url, args = self.args.coordinator_url, self.args
        if self._assigned is None:
            body = {
                "instance_id": args.instance_id,
                "ip": args.advertise_ip,
                "http_port": args.http_port,
                "metadata": {},
                "p2p_advertised_url": args.p2p_advertise_url,
                "mq_port": args.port if args.p2p_advertise_url else 0,
            }
            status, answer = await request_json("POST", f"{url}/instances", body)
            if status != 200:
                raise HttpClientError(f"registration answered {status}")
            self._assigned = str(answer["instance_id"])
            return
        status, _ = await request_json("PUT", f"{url}/instances/{self._assigned}/heartbeat")
        if status == 404:
            self._assigned = None  # the coordinator has forgotten this server: register again at the next beat

    async def _poll(self) -> None:
        status, answer = await request_json("GET", f"{self.args.coordinator_url}/instances")
        if status != 200 or not isinstance(answer, dict):
            raise HttpClientError(f"/instances answered {status}")
        instances = answer.get("instances", [])
        own = [one for one in instances if one.get("instance_id") == self._assigned]
        if not own or own[0].get("p2p_advertised_url") != self.args.p2p_advertise_url or not self.args.p2p_advertise_url:
            self.p2p_state, self.peers = "unregistered", {}
            return
        self.p2p_state = "registered"
        self.peers = {
            one["instance_id"]: Peer(one["instance_id"], one["ip"], int(one["mq_port"]))
            for one in instances
            if one.get("instance_id") != self._assigned and one.get("p2p_advertised_url") and one.get("mq_port")
        }

    def _set_gauges(self) -> None:
        self.metrics.ticks.inc()
        self.metrics.memory.set(self.store.used)
        self.metrics.ratio.set(self.store.used / self.args.l1_bytes)
