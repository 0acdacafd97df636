"""Where the harness keeps things: one cache root outside the checkout, and file locks inside it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parent.parent


def cache_root() -> Path:
    """The cache root: environment variable PDD_CACHE, else ~/.cache/pd-operator."""
    return Path(os.environ.get("PDD_CACHE") or Path.home() / ".cache" / "pd-operator").expanduser().resolve()


def clusters_root() -> Path:
    """The folder that holds one state folder a cluster."""
    return cache_root() / "clusters"


@contextmanager
def lock(path: Path, *, timeout: float, what: str) -> Iterator[None]:
    """Hold an exclusive lock on `path`; waits at most `timeout` seconds.

    The kernel drops the lock when the holder dies, so a crash leaves nothing to clean up.
    Raises TimeoutError that names `what` is locked and the file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + timeout
    with path.open("a") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"waited {timeout:.0f} s for {what}: another process holds {path}") from None
                time.sleep(0.2)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
