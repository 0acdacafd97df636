"""Harm that is done to live pods from the machine that they run on: ports that nobody reaches, programs that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

PROGRAM_WAIT_S = 120.0


@contextmanager
def closed(pod: str, *ports: str) -> Iterator[None]:
    """A pod that no other reaches at these ports (words of iptables): a rule in its network, found by one of its programs."""
    rule = ["INPUT", "!", "-i", "lo", "-p", "tcp", "-m", "multiport", *ports, "-j", "DROP"]
    deadline = time.monotonic() + PROGRAM_WAIT_S
    while not (found := _programs(pod)):
        assert time.monotonic() < deadline, f"pod {pod} had no program with POD_NAME in {PROGRAM_WAIT_S:.0f} s"
        time.sleep(0.5)
    with Path(f"/proc/{found[0]}/ns/net").open() as inside:  # stays when that program ends
        enter = ["nsenter", f"--net=/proc/self/fd/{inside.fileno()}", "iptables", "-w"]
        subprocess.run([*enter, "-A", *rule], check=True, capture_output=True, timeout=20, pass_fds=[inside.fileno()])
        try:
            yield
        finally:
            subprocess.run([*enter, "-D", *rule], check=True, capture_output=True, timeout=20, pass_fds=[inside.fileno()])


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


def _programs(pod: str, word: str = "") -> list[int]:
    """Processes of a pod's containers, by the variable that the operator sets, whose program or first arguments hold a word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (path / "cmdline").read_bytes().split(b"\0")[:3]
            mine = f"POD_NAME={pod}".encode() in (path / "environ").read_bytes().split(b"\0")
            if mine and any(word.encode() in part.rpartition(b"/")[2] for part in command):
                found.append(int(path.name))
    return found
