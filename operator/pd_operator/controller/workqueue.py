"""A queue of keys with the semantics of client-go's workqueue (k8s.io/client-go/util/workqueue).

* A key that is waiting is there once, however often it is added: a thousand events are one reconcile.
* A key is never given to two workers at once. Added while it is worked on, it comes again afterwards, once.
* `add_after` waits in a heap; a key waits once, for the earliest time asked for, and no longer once it is worked on.
* `retry` waits base * 2^n (jittered, capped) per key, and a token bucket bounds the retries of all keys together.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)

BASE_DELAY = 0.005  # seconds; client-go DefaultTypedControllerRateLimiter: 5 ms * 2^n
MAX_DELAY = 60.0  # seconds (client-go: 1000 s, too long for somebody who waits for a mended cluster)
RETRY_RATE = 10.0  # retries per second of all keys, as client-go
RETRY_BURST = 100.0


class ShutDown(Exception):
    """The queue gives out no more keys."""


class QueueHooks(Protocol):
    """What a queue tells to metrics."""

    def added(self) -> None:
        """A key became ready."""

    def retried(self) -> None:
        """A key failed and waits."""

    def waited(self, seconds: float) -> None:
        """A worker took a key that had been ready for `seconds`."""


class TokenBucket:
    """`rate` per second with a burst; `reserve` says how long to wait for a token and takes it."""

    def __init__(self, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._tokens = burst
        self._at = now

    def reserve(self, now: float) -> float:
        """Take one token; seconds until it is there (0 = now)."""
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._rate)
        self._at = now
        self._tokens -= 1
        return max(0.0, -self._tokens / self._rate)


def backoff(failures: int, base: float = BASE_DELAY, cap: float = MAX_DELAY, jitter: Callable[[], float] = random.random) -> float:
    """Seconds to wait after the n-th failure in a row (n from 1): base * 2^(n-1), capped, times 0.5 to 1."""
    return min(cap, base * 2.0 ** min(failures - 1, 32)) * (0.5 + 0.5 * jitter())


class WorkQueue(Generic[K]):
    """Keys to reconcile. Everything runs in one event loop; nothing here is thread-safe."""

    def __init__(
        self,
        *,
        base_delay: float = BASE_DELAY,
        max_delay: float = MAX_DELAY,
        rate: float = RETRY_RATE,
        burst: float = RETRY_BURST,
        hooks: QueueHooks | None = None,
    ) -> None:
        """Delays in seconds; `rate` and `burst` bound retries only. Needs a running event loop."""
        self._loop = asyncio.get_running_loop()
        self._base = base_delay
        self._cap = max_delay
        self._hooks = hooks
        self._bucket = TokenBucket(rate, burst, self._loop.time())
        self._ready: deque[K] = deque()
        self._dirty: dict[K, float] = {}  # must be worked on -> since when
        self._processing: dict[K, float] = {}  # being worked on -> since when
        self._failures: dict[K, int] = {}
        self._heap: list[tuple[float, int, K]] = []
        self._due: dict[K, float] = {}  # the heap's valid entry of a key
        self._sequence = 0
        self._timer: asyncio.TimerHandle | None = None
        self._getters: deque[asyncio.Future[None]] = deque()
        self._closed = False

    def __len__(self) -> int:
        """Keys that are ready and wait for a worker."""
        return len(self._ready)

    def add(self, key: K) -> None:
        """Have `key` worked on as soon as possible."""
        if self._closed or key in self._dirty:
            return
        self._dirty[key] = self._loop.time()
        if self._hooks:
            self._hooks.added()
        if key not in self._processing:
            self._push(key)

    def add_after(self, key: K, seconds: float) -> None:
        """Add `key` in `seconds`, unless it is due earlier anyway."""
        if self._closed:
            return
        if seconds <= 0:
            self.add(key)
            return
        due = self._loop.time() + seconds
        if self._due.get(key, due + 1) <= due:
            return
        self._due[key] = due
        self._sequence += 1
        heapq.heappush(self._heap, (due, self._sequence, key))
        self._arm()

    async def get(self) -> K:
        """Wait for a key; call `done` with it afterwards.

        Raises:
            ShutDown: `shutdown` was called.
        """
        while True:
            if self._closed:
                raise ShutDown
            if self._ready:
                break
            getter = self._loop.create_future()
            self._getters.append(getter)
            try:
                await getter
            except asyncio.CancelledError:
                # A wake-up given to a cancelled getter must not get lost.
                if getter.done() and not getter.cancelled() and self._ready:
                    self._wake()
                raise
            finally:
                if getter in self._getters:
                    self._getters.remove(getter)
        key = self._ready.popleft()
        now = self._loop.time()
        since = self._dirty.pop(key)
        self._due.pop(key, None)  # what was to be looked at later is looked at now; `add_after` from here on counts
        self._processing[key] = now
        if self._hooks:
            self._hooks.waited(now - since)
        return key

    def done(self, key: K) -> None:
        """The worker is through with `key`; if it was added meanwhile, it is ready again."""
        self._processing.pop(key, None)
        if key in self._dirty and not self._closed:
            self._push(key)

    def retry(self, key: K, at_least: float = 0.0) -> float:
        """After a failure: add `key` later, each time later. Returns the seconds it waits."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        if self._hooks:
            self._hooks.retried()
        wait = max(backoff(failures, self._base, self._cap), self._bucket.reserve(self._loop.time()), at_least)
        self.add_after(key, wait)
        return wait

    def forget(self, key: K) -> None:
        """After success: the next failure waits the base delay again."""
        self._failures.pop(key, None)

    def failures(self, key: K) -> int:
        """Failures in a row."""
        return self._failures.get(key, 0)

    def oldest_age(self) -> float:
        """Seconds that the longest waiting ready key has waited; delayed keys do not count. 0 when none waits."""
        return self._loop.time() - min(self._dirty.values()) if self._dirty else 0.0

    def longest_running(self) -> float:
        """Seconds that the longest running work takes already; 0 when none runs."""
        return self._loop.time() - min(self._processing.values()) if self._processing else 0.0

    def delayed(self) -> int:
        """Keys that wait for their time."""
        return len(self._due)

    def shutdown(self) -> None:
        """Give out no more keys: every `get` raises ShutDown, keys added from now on are dropped."""
        self._closed = True
        if self._timer:
            self._timer.cancel()
        for getter in self._getters:
            if not getter.done():
                getter.set_result(None)

    def _push(self, key: K) -> None:
        self._ready.append(key)
        self._wake()

    def _wake(self) -> None:
        while self._getters:
            getter = self._getters.popleft()
            if not getter.done():
                getter.set_result(None)
                return

    def _arm(self) -> None:
        if self._timer:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._heap[0][0], self._fire) if self._heap else None

    def _fire(self) -> None:
        now = self._loop.time() + 1e-3  # the loop's clock may call a little early
        while self._heap and self._heap[0][0] <= now:
            due, _, key = heapq.heappop(self._heap)
            if self._due.get(key) == due:  # else an earlier time was asked for later
                del self._due[key]
                self.add(key)
        self._arm()
