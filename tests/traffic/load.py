"""Load for as long as something is being done to the cluster: bounded in count and in time."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp

from traffic.answers import Answer, ask

MAX_REQUESTS = 5000


def prompt(number: int, words: int = 60) -> str:
    """A prompt that no cache has seen."""
    chosen = random.Random(number).choices(("prefill", "decode", "token", "cache", "router", "block", "lease", "pool"), k=words)
    return f"{number}: {' '.join(chosen)}"


@dataclass
class Load:
    """What was sent and what came back."""

    url: str
    model: str
    tokens: int
    answers: list[Answer] = field(default_factory=list)
    key: str = ""  # of the engines, as the client sends it
    numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(random.randrange(10**9)))

    @property
    def failed(self) -> list[Answer]:
        """Answers that are not complete."""
        return [answer for answer in self.answers if not answer.complete]

    def summary(self) -> str:
        """Counts, and each kind of problem once."""
        kinds = Counter(answer.problem[:120] for answer in self.failed)
        listed = "".join(f"\n  {count} x {problem}" for problem, count in kinds.most_common(8))
        return f"{len(self.answers)} requests, {len(self.failed)} failed{listed}"

    async def one(self, session: aiohttp.ClientSession, *, stream: bool, tokens: int | None = None) -> Answer:
        """One request, recorded."""
        text = prompt(next(self.numbers))
        answer = await ask(session, self.url, self.model, text, tokens=tokens or self.tokens, stream=stream, key=self.key)
        self.answers.append(answer)
        return answer

    async def burst(self, count: int, *, concurrency: int, stream: bool | None = None) -> None:
        """`count` requests, every second one streamed unless `stream` says otherwise."""
        limit = asyncio.Semaphore(concurrency)

        async def bounded(session: aiohttp.ClientSession, number: int) -> None:
            async with limit:
                await self.one(session, stream=number % 2 == 0 if stream is None else stream)

        async with connections() as session:
            await asyncio.gather(*(bounded(session, number) for number in range(count)))


def connections() -> aiohttp.ClientSession:
    """A session that opens a connection for each request, so that the Service chooses a router each time."""
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True), trust_env=False)


@asynccontextmanager
async def steady(load: Load, *, streams: int, stream_tokens: int, workers: int = 4, pause: float = 0.1) -> AsyncIterator[Load]:
    """`streams` long streams at once, and new short requests until the body of the context ends; then all of it is awaited."""
    stop = asyncio.Event()

    async def keep_asking(session: aiohttp.ClientSession, first: int) -> None:
        for number in itertools.count(first):
            if stop.is_set() or len(load.answers) > MAX_REQUESTS:
                return
            await load.one(session, stream=number % 2 == 0)
            await asyncio.sleep(pause)

    async with connections() as session:
        long = [asyncio.create_task(load.one(session, stream=True, tokens=stream_tokens)) for _ in range(streams)]
        short = [asyncio.create_task(keep_asking(session, worker)) for worker in range(workers)]
        try:
            yield load
        finally:
            stop.set()
            await asyncio.gather(*long, *short)
