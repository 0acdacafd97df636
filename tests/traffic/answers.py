"""One chat request. It counts as answered only if its finish reason and its number of tokens are what was asked.

A cut stream can end with status 200, an error event and [DONE] (smg), so neither the status nor [DONE] proves anything.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

LIMIT_S = 120.0  # one request


@dataclass(frozen=True)
class Answer:
    """What came back. `problem` is "" only for a complete answer."""

    problem: str
    text: str = ""
    tokens: int = 0
    seconds: float = 0.0
    worker: str = ""  # decode's URL, as smg tells it
    prompt_tokens: int = 0

    @property
    def complete(self) -> bool:
        """Whether it is what was asked for."""
        return not self.problem


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    model: str,
    prompt: str,
    *,
    tokens: int,
    stream: bool,
    limit: float = LIMIT_S,
    key: str = "",
) -> Answer:
    """Send one chat request of exactly `tokens` output tokens. Never raises: what went wrong stands in `problem`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    begin = time.monotonic()
    try:
        async with session.post(
            f"{url}/v1/chat/completions",
            json=body,
            headers=headers,
            timeout=aiohttp.ClientTimeout(total=limit, sock_connect=10),
        ) as response:
            worker = response.headers.get("x-smg-routed-worker-id", "")
            if response.status != 200:
                return Answer(f"status {response.status}: {(await response.text())[:300]}", seconds=time.monotonic() - begin)
            read = _streamed if stream else _whole
            text, reason, usage, problem = await read(response)
    except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError, OSError, ValueError, KeyError) as error:
        return Answer(f"{type(error).__name__}: {error}", seconds=time.monotonic() - begin)
    count = int(usage.get("completion_tokens", 0))
    if not problem and (reason != "length" or count != tokens):
        problem = f"finish_reason {reason!r} with {count} tokens, asked for {tokens}"
    return Answer(problem, text, count, time.monotonic() - begin, worker, int(usage.get("prompt_tokens", 0)))


async def _whole(response: aiohttp.ClientResponse) -> tuple[str, str, dict[str, Any], str]:
    answer = await response.json()
    choice = answer["choices"][0]
    return choice["message"]["content"] or "", choice["finish_reason"] or "", answer["usage"], ""


async def _streamed(response: aiohttp.ClientResponse) -> tuple[str, str, dict[str, Any], str]:
    text, reason, usage, done = "", "", {}, False
    async for line in response.content:
        if not line.startswith(b"data: "):
            continue
        data = line[6:].strip()
        if data == b"[DONE]":
            done = True
            continue
        event = json.loads(data)
        if "error" in event:
            return text, reason, usage, f"error event: {event['error']}"
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            text += choice.get("delta", {}).get("content") or ""
            reason = choice.get("finish_reason") or reason
    return text, reason, usage, "" if done else "the stream ended without [DONE]"
