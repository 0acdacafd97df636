"""What a miniature of a cluster's part does again and again beside a test."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

import requests

from opsrunner.api import Refused

INTERVAL = 0.3  # seconds between two looks


class Repeating:
    """A context in which `look` is called every INTERVAL; what the API server refused fails the test at the end."""

    def __enter__(self) -> Self:
        self._failed = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name=type(self).__name__)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=30)
        assert not self._failed, self._failed

    def look(self) -> None:
        """One look at the cluster, and what follows from it."""
        raise NotImplementedError

    def pause(self, seconds: float = INTERVAL) -> bool:
        """Wait, less when the test ends; whether it does."""
        return self._stop.wait(seconds)

    def _run(self) -> None:
        try:
            while not self.pause():
                self.look()
        except (requests.RequestException, Refused) as error:
            self._failed = f"{type(self).__name__}: {error}"
