"""When replicas of each role were ready, from a watch of the pods."""

from __future__ import annotations

import contextlib
import threading
import time
from types import TracebackType
from typing import Any

import requests

from opsrunner.api import Api
from pd_operator.core.names import ROLE, ROLES, Role


class Lives:
    """As a context. Counts a pod from its Ready condition to its deletion, by the clock of this machine."""

    def __init__(self, api: Api, namespace: str, seconds: int) -> None:
        self._api = api
        self._namespace = namespace
        self._seconds = seconds
        self._ready: dict[Role, set[str]] = {role: set() for role in ROLES}
        self.counts: dict[Role, list[tuple[float, int]]] = {role: [] for role in ROLES}

    def __enter__(self) -> Lives:
        page = self._api.page("Pod", self._namespace)
        for pod in page["items"]:
            self._take(pod, gone=False)
        argv = (page["metadata"]["resourceVersion"],)
        threading.Thread(target=self._follow, args=argv, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pass  # the watch ends with its time, or with the server

    def _follow(self, version: str) -> None:
        with contextlib.suppress(requests.RequestException):
            for event in self._api.watch("Pod", self._namespace, version, seconds=self._seconds):
                self._take(event["object"], gone=event["type"] == "DELETED")

    def _take(self, pod: dict[str, Any], *, gone: bool) -> None:
        role = pod["metadata"].get("labels", {}).get(ROLE)
        if role not in ROLES:
            return
        conditions = pod.get("status", {}).get("conditions", [])
        ready = any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)
        counts = ready and not gone and "deletionTimestamp" not in pod["metadata"]
        names = self._ready[role]
        (names.add if counts else names.discard)(pod["metadata"]["name"])
        if not self.counts[role] or self.counts[role][-1][1] != len(names):
            self.counts[role].append((time.time(), len(names)))
