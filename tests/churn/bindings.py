"""Every binding of an engine pod, from a watch that misses no event: where it went, and whether its slice was elsewhere then."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

import requests

from opsrunner.api import Api, Object, Refused
from pd_operator.core.names import MANAGED_BY, MANAGER, ROLE, SLICE

STREAM_S = 60  # of one watch; the next one goes on from the last event


@dataclass(frozen=True)
class Binding:
    """An engine pod got a node."""

    pod: str
    slice: str  # namespace/name
    role: str
    domain: str


class Bindings:
    """A context. A pod counts from its binding until its deletion, the time in which it ends included.

    Args:
        domains: node -> transfer domain; a binding to any other node is a failure.
    """

    def __init__(self, api: Api, domains: Mapping[str, str]) -> None:
        self._api = api
        self._domains = domains
        self._alive: dict[str, Binding] = {}  # by uid
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True, name="bindings")
        self._version = ""
        self._reached = 0
        self.count = 0
        self.crossings: list[str] = []
        self.failed = ""

    def __enter__(self) -> Bindings:
        page = self._api.page("Pod", None)
        for pod in page["items"]:
            self._take("ADDED", pod)
        self._version = page["metadata"]["resourceVersion"]
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()

    def behind(self, pods: list[Object]) -> bool:
        """Whether the watch has not yet shown the newest of these pods."""
        return self._reached < max((int(p["metadata"]["resourceVersion"]) for p in pods), default=0)

    def _follow(self) -> None:
        try:
            while not self._stop.is_set():
                for event in self._api.watch("Pod", None, self._version, seconds=STREAM_S):
                    if self._stop.is_set():
                        return
                    if event["type"] == "ERROR":
                        self.failed = f"events were missed: {event['object']}"
                        return
                    self._version = event["object"]["metadata"]["resourceVersion"]
                    self._take(event["type"], event["object"])
                    self._reached = int(self._version)
        except (requests.RequestException, Refused, ValueError) as error:
            self.failed = f"the watch broke: {error}"

    def _take(self, type_: str, pod: Object) -> None:
        labels, node = pod["metadata"].get("labels") or {}, pod["spec"].get("nodeName")
        uid = pod["metadata"]["uid"]
        if type_ == "DELETED":
            self._alive.pop(uid, None)
            return
        if not node or uid in self._alive or labels.get(MANAGED_BY) != MANAGER or ROLE not in labels:
            return
        slice_ = f"{pod['metadata']['namespace']}/{labels[SLICE]}"
        domain = self._domains.get(node, f"no domain of node {node}")
        others = {b.domain for b in self._alive.values() if b.slice == slice_} - {domain}
        if others:
            self.crossings.append(f"{pod['metadata']['name']} was bound in {domain}, its slice is in {sorted(others)}")
        self._alive[uid] = Binding(pod["metadata"]["name"], slice_, labels[ROLE], domain)
        self.count += 1
