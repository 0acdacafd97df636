"""Progress with the time left, on standard error: one line that renews itself on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

TERMINAL_EVERY = 0.2  # seconds between renewals of the line
LOG_EVERY = 30.0  # seconds between lines in a file


def duration(seconds: float) -> str:
    """Seconds as a person writes them: 45s, 2m05s, 3h12m."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


class Progress:
    """Counts what is done of `total` and says how long the rest takes, from the pace since the start."""

    def __init__(
        self,
        total: float,
        what: str,
        *,
        stream: TextIO | None = None,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._what, self._quiet, self._clock = total, what, quiet, clock
        self._stream = stream if stream is not None else sys.stderr
        self._terminal = self._stream.isatty()
        self._start = clock()
        self._shown = -float("inf") if self._terminal else self._start
        self._width = 0

    def show(self, done: float, note: str = "", left: float | None = None) -> None:
        """Report that `done` of the total is done; prints at most every TERMINAL_EVERY or LOG_EVERY seconds."""
        now = self._clock()
        if self._quiet or now - self._shown < (TERMINAL_EVERY if self._terminal else LOG_EVERY):
            return
        self._shown = now
        self._print(self.line(done, note, left))

    def say(self, text: str) -> None:
        """A line without counts, for work whose end is not known; as seldom as `show`."""
        now = self._clock()
        if self._quiet or now - self._shown < (TERMINAL_EVERY if self._terminal else LOG_EVERY):
            return
        self._shown = now
        self._print(f"{self._what}: {text}, {duration(now - self._start)} gone")

    def line(self, done: float, note: str = "", left: float | None = None) -> str:
        """The progress line: share, counts, time gone, seconds left (by the pace so far when the caller does not know better)."""
        gone = self._clock() - self._start
        if left is None and done > 0:
            left = gone * (self._total - done) / done
        rest = "unknown" if left is None else duration(left)
        share = 100 * done / self._total if self._total else 100.0
        text = f"{self._what} {share:3.0f}%  {done:.0f}/{self._total:.0f}  {duration(gone)} gone, {rest} left"
        return f"{text}  {note}" if note else text

    def end(self, text: str = "") -> None:
        """Clear the renewed line and print a last one."""
        if self._quiet:
            return
        if self._terminal and self._width:
            self._stream.write("\r" + " " * self._width + "\r")
        if text:
            self._stream.write(text + "\n")
        self._stream.flush()

    def _print(self, text: str) -> None:
        if self._terminal:
            self._stream.write("\r" + text.ljust(self._width))
            self._width = len(text)
        else:
            self._stream.write(text + "\n")
        self._stream.flush()
