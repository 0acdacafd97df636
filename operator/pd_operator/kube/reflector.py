"""List and watch one kind into a store, for ever.

list (paged)  -> store.replace: what disappeared while nobody watched is seen as a deletion
watch         -> store.put / remove, from the list's resourceVersion on, with bookmarks
end of stream -> watch again from the last version seen
silence       -> list again: no byte for `INACTIVITY` although the server sends a bookmark about every minute. The stream
                 may be dead whatever TCP says, or the server sends none for a kind that it never saw an event of
                 (apiserver cacher.go, "Never send a bookmark event if we did not see an event here"); a list
                 answers both
failure       -> wait (exponential, jittered), watch again from the last version seen
410           -> the same, but list again
404 or 403 on an optional kind (a CRD that is not installed, or that we may not read) -> the scope is empty and counts as
                 listed; look again every `absent_recheck` seconds
failures only for `give_up_after` seconds -> ReflectorFailed, which ends the process: a cache that nobody feeds is
                 worse than a restart
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import aiohttp

from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError, Forbidden, Gone, NotFound, from_status
from pd_operator.kube.facts import error_of
from pd_operator.kube.kinds import KINDS
from pd_operator.kube.pages import Decoder
from pd_operator.kube.store import Key, Store

T = TypeVar("T")
OnChange = Callable[[T | None, T | None], None]  # old, new

SERVER_TIMEOUT = 290  # seconds after which the server ends a watch, below its own 5 to 10 minutes
INACTIVITY = 70.0  # seconds without a byte; the server sends bookmarks every 60 s (apiserver cacher, bookmarkFrequency)
GIVE_UP_AFTER = 300.0  # seconds of nothing but failures
BACKOFF_BASE = 0.5  # seconds; doubled per consecutive failure
BACKOFF_CAP = 30.0  # seconds
SHORT_WATCH = 1.0  # seconds; a stream that ends sooner without an event counts as a failure, or we would spin
MAX_LINE = 16 * 2**20  # bytes of one event; etcd refuses objects above 1.5 MiB by default
MAX_PAGES = 10_000
ABSENT_RECHECK = 15.0  # seconds between two looks for an optional kind

logger = logging.getLogger(__name__)
_DECODING = ThreadPoolExecutor(max_workers=1, thread_name_prefix="decode")


class ReflectorFailed(Exception):
    """A kind could not be observed for longer than allowed, or its bytes cannot be parsed."""


@dataclass(slots=True)
class Timing:
    """Bounds of one reflector, in seconds; tests shorten them."""

    server_timeout: int = SERVER_TIMEOUT
    inactivity: float = INACTIVITY
    give_up_after: float = GIVE_UP_AFTER
    backoff_base: float = BACKOFF_BASE
    backoff_cap: float = BACKOFF_CAP
    absent_recheck: float = ABSENT_RECHECK


class Reflector(Generic[T]):
    """Keeps one scope (kind, namespace) of a store equal to the API server.

    Args:
        namespace: None = all namespaces.
        on_change: called once per change, after the store has it, with (old, new); must not block or raise.
        fields: a field selector.
        name: what the stream is called; `Kind` or `Kind/namespace` by default.
        on_absent: called with why when an optional kind turns out to be absent, and with "" when it is there again.
        limit: objects in a page of a list; 0 = as many as any list has.

    Attributes:
        synced: set after the first complete list, or when an optional kind was found absent.
        relists: complete lists done.
    """

    def __init__(
        self,
        client: KubeClient,
        kind: str,
        namespace: str | None,
        label_selector: str,
        parse: Decoder[T],
        store: Store[T],
        on_change: OnChange[T],
        *,
        fields: str = "",
        name: str = "",
        timing: Timing | None = None,
        on_absent: Callable[[str], None] = lambda why: None,
        limit: int = 0,
    ) -> None:
        self.kind = kind
        self.namespace = namespace
        self.synced = asyncio.Event()
        self.relists = 0
        self._client = client
        self._known = KINDS[kind]
        self._selector = label_selector
        self._fields = fields
        self._name = name
        self._parse = parse
        self._store = store
        self._on_change = on_change
        self._timing = timing or Timing()
        self._on_absent = on_absent
        self._limit = limit
        self._absent = ""  # why an optional kind cannot be observed
        self._scope = (kind, namespace)
        self._version = ""  # of the last list, event or bookmark; "" = list first
        self._failures = 0
        self._failing_since: float | None = None  # no line of a watch came since
        self._heard_at = time.monotonic()  # last list or line

    @property
    def name(self) -> str:
        """For logs, health and metrics."""
        if self._name:
            return self._name
        return self.kind if self.namespace is None else f"{self.kind}/{self.namespace}"

    def stream_age(self) -> float:
        """Seconds since the server last said anything on this stream."""
        return time.monotonic() - self._heard_at

    async def run(self) -> None:
        """Observe until cancelled.

        Raises:
            ReflectorFailed: see the module's text.
        """
        while True:
            try:
                if not self._version:
                    await self._list()
                await self._watch()
            except aiohttp.SocketTimeoutError:
                logger.info("watch of %s was silent for %.0f s: listing again", self.name, self._timing.inactivity)
                self._version = ""
            except Gone as exc:
                self._version = ""  # list again
                await self._failed(exc)
            except (NotFound, Forbidden) as exc:
                await (self._not_there(exc) if self._known.optional else self._failed(exc))
            except (ValueError, KeyError) as exc:
                raise ReflectorFailed(f"{self.name}: the API server sent what cannot be parsed: {type(exc).__name__}") from exc
            except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
                await self._failed(exc)

    async def _list(self) -> None:
        items: dict[Key, T] = {}
        token = ""
        for _ in range(MAX_PAGES):
            raw = await self._client.list_page(
                self._known, self.namespace, self._selector, token, fields=self._fields, limit=self._limit
            )
            # In a thread: hundreds of children are hashed, and the lease must be renewed meanwhile. One page at a time, in one
            # thread: a page takes many times its facts' memory, and each thread keeps what it once had.
            page = await asyncio.get_running_loop().run_in_executor(_DECODING, self._parse.page, raw)
            items.update(page.items)
            token = page.token
            if not token:
                break
        else:
            raise ReflectorFailed(f"{self.name}: a list of more than {MAX_PAGES} pages")
        if not page.version:
            raise ValueError("a list without a resourceVersion")
        self._version = page.version
        self._heard_at = time.monotonic()
        self.relists += 1
        self._replace(items)
        self._tell_absent("")

    def _replace(self, items: dict[Key, T]) -> None:
        changes = self._store.replace(self._scope, items)
        self.synced.set()
        for old, new in changes:
            self._on_change(old, new)

    async def _not_there(self, exc: ApiError) -> None:
        """An optional kind is not there, or not for us: nothing of it exists, and we look again later."""
        known = self._known
        missing = f"the API server does not know {known.kind} of {known.api_version}"
        why = missing if isinstance(exc, NotFound) else f"this install may not read {known.kind} of {known.api_version}"
        self._version = ""
        self._heard_at = time.monotonic()
        self._recovered()
        self._replace({})
        self._tell_absent(why)
        await asyncio.sleep(self._timing.absent_recheck)

    def _tell_absent(self, why: str) -> None:
        if why != self._absent:
            logger.info("%s: %s", self.name, why or "is there now")
            self._absent = why
            self._on_absent(why)

    async def _watch(self) -> None:
        started, events = time.monotonic(), 0
        stream = self._client.watch(
            self._known,
            self.namespace,
            self._selector,
            self._version,
            server_timeout=self._timing.server_timeout,
            inactivity=self._timing.inactivity,
            fields=self._fields,
        )
        async with stream as content:
            async for line in _lines(content):
                self._take(line)
                events += 1
        if not events and time.monotonic() - started < SHORT_WATCH:
            raise aiohttp.ClientPayloadError(f"the watch ended after {time.monotonic() - started:.2f} s without an event")
        self._recovered()

    def _take(self, line: bytes) -> None:
        event = self._parse.event(line)
        if event.type == "ERROR":
            code, reason, message = error_of(line)
            raise from_status(code, reason, message.encode())
        self._heard_at = time.monotonic()
        self._recovered()
        if event.key is not None and event.item is not None:
            self._put(event.type, event.key, event.item)
        if event.version:
            self._version = event.version

    def _put(self, event_type: str, key: Key, item: T) -> None:
        if event_type == "DELETED":
            old = self._store.remove(self._scope, key)
            if old is not None:
                self._on_change(old, None)
        elif self._store.get(*key) != item:
            self._on_change(self._store.put(self._scope, key, item), item)

    def _recovered(self) -> None:
        self._failures = 0
        self._failing_since = None

    async def _failed(self, exc: Exception) -> None:
        """Wait before the next attempt, or give up."""
        now = time.monotonic()
        self._failures += 1
        if self._failing_since is None:
            self._failing_since = now
        failing = now - self._failing_since
        text = f"{type(exc).__name__}: {exc}"
        if failing > self._timing.give_up_after:
            raise ReflectorFailed(
                f"{self.name}: not observed for {failing:.0f} s (limit {self._timing.give_up_after:.0f} s),"
                f" {self._failures} failures in a row, last: {text}"
            ) from exc
        delay = min(self._timing.backoff_cap, self._timing.backoff_base * 2 ** min(self._failures - 1, 16))
        delay *= random.uniform(0.5, 1.0)
        if isinstance(exc, ApiError) and exc.retry_after:
            delay = max(delay, min(exc.retry_after, self._timing.backoff_cap))
        logger.warning("watch of %s failed (%d in a row), again in %.1f s: %s", self.name, self._failures, delay, text)
        await asyncio.sleep(delay)


async def _lines(stream: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Complete lines of a stream; a last line that was cut off is dropped (its event comes again)."""
    pending = b""
    async for chunk in stream.iter_any():
        *complete, pending = (pending + chunk).split(b"\n")
        if len(pending) > MAX_LINE:
            raise ValueError(f"an event of more than {MAX_LINE} bytes")
        for line in complete:
            if line:
                yield line
