"""Harm that is done to live pods from the machine that they run on."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path


@asynccontextmanager
async def killed(pod: str, word: str) -> AsyncIterator[None]:
    """A program of a pod, by a word of its command line, killed whenever it runs; from outside, since it is its own process 1."""

    async def kill() -> None:
        while True:
            for program in await asyncio.to_thread(_programs, pod, word):
                with suppress(ProcessLookupError):
                    os.kill(program, signal.SIGKILL)
            await asyncio.sleep(0.5)

    killing = asyncio.create_task(kill())
    try:
        yield
    finally:
        killing.cancel()


def _programs(pod: str, word: str) -> list[int]:
    """Processes of a pod's containers, by the variable that the operator sets, whose program or first arguments hold a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (path / "cmdline").read_bytes().split(b"\0")[:3]
            mine = f"POD_NAME={pod}".encode() in (path / "environ").read_bytes().split(b"\0")
            if mine and any(word.encode() in part.rpartition(b"/")[2] for part in command):
                found.append(int(path.name))
    return found
