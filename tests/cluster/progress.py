"""Progress lines on standard error, with the seconds since this process began to work, and bounded waits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

_BEGIN = time.monotonic()


def say(text: str) -> None:
    """Print one progress line to standard error."""
    print(f"[{time.monotonic() - _BEGIN:7.1f}s] {text}", file=sys.stderr, flush=True)


def wait_for(what: str, probe: Callable[[], object], *, timeout: float, interval: float = 0.1, every: float = 15.0) -> None:
    """Call `probe` until it returns something true; waits at most `timeout` seconds, polls each `interval` seconds.

    A string that starts with "wait:" counts as "not yet" and is shown in the error, so that the error says what is missing.
    Raises TimeoutError with `what` and the last answer. Exceptions of `probe` pass through.
    """
    start = time.monotonic()
    spoke = start
    while True:
        answer = probe()
        pending = isinstance(answer, str) and answer.startswith("wait:")
        if answer and not pending:
            return
        now = time.monotonic()
        if now - start > timeout:
            detail = f" ({answer[5:].strip()})" if pending and isinstance(answer, str) else ""
            raise TimeoutError(f"waited {timeout:.0f} s for {what}{detail}")
        if now - spoke > every:
            spoke = now
            say(f"still waiting for {what}, {now - start:.0f} s")
        time.sleep(interval)
