"""Everything that happened in a namespace, in the order in which the API server stored it.

Polling sees states and misses what lies between them; a claim such as "at no time" needs every event. resourceVersions of
one server come from one etcd, so they order events of different kinds.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType

import requests

from opsrunner.api import Api, Object, Refused
from opsrunner.waits import until
from pd_operator.core.names import DEPLOYMENT

MAX_SECONDS = 280  # of one recording, unless it is told another number


@dataclass(frozen=True)
class Event:
    """One change: INITIAL (there when the recording began), ADDED, MODIFIED or DELETED."""

    version: int
    type: str
    kind: str
    object: Object

    @property
    def name(self) -> str:
        return str(self.object["metadata"]["name"])

    @property
    def labels(self) -> dict[str, str]:
        return dict(self.object["metadata"].get("labels") or {})


class Recording:
    """A context: watches some kinds of a namespace while it is open, for so many seconds at most."""

    def __init__(self, api: Api, namespace: str, *kinds: str, seconds: int = MAX_SECONDS) -> None:
        self._seconds = seconds
        self._api = api
        self._namespace = namespace
        self._kinds = kinds
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed = ""

    def __enter__(self) -> Recording:
        for kind in self._kinds:
            page = self._api.page(kind, self._namespace)
            version = page["metadata"]["resourceVersion"]
            for item in page["items"]:
                self._add(Event(int(item["metadata"]["resourceVersion"]), "INITIAL", kind, item))
            threading.Thread(target=self._follow, args=(kind, version), daemon=True, name=f"recording of {kind}").start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None:
            until("the recording to catch up", lambda: not self._behind(), timeout=20, show=lambda: self._failed or self._behind())
        self._stop.set()

    def events(self, kind: str = "", name: str = "") -> list[Event]:
        """Events in order, of one kind and of one PDDeployment where asked."""
        with self._lock:
            found = [e for e in self._events if not kind or e.kind == kind]
        if name:
            found = [e for e in found if e.labels.get(DEPLOYMENT) == name or (e.kind == "PDDeployment" and e.name == name)]
        return sorted(found, key=lambda e: e.version)

    def states(self, *kinds: str, name: str = "") -> Iterator[tuple[Event, dict[tuple[str, str], Object]]]:
        """After each event, all objects of these kinds that exist then, by (kind, name)."""
        world: dict[tuple[str, str], Object] = {}
        for event in self.events(name=name):
            if event.kind not in kinds:
                continue
            key = (event.kind, event.name)
            if event.type == "DELETED":
                world.pop(key, None)
            else:
                world[key] = event.object
            if event.type != "INITIAL":
                yield event, world

    def _add(self, event: Event) -> None:
        with self._lock:
            self._events.append(event)

    def _behind(self) -> str:
        """What the server shows and no watch has shown yet."""
        if self._failed:
            raise RuntimeError(self._failed)
        for kind in self._kinds:
            now = {
                item["metadata"]["name"]: int(item["metadata"]["resourceVersion"]) for item in self._api.list(kind, self._namespace)
            }
            known: dict[str, int] = {}
            for event in self.events(kind):
                known[event.name] = event.version
                if event.type == "DELETED":
                    del known[event.name]
            late = sorted({name for name in known if name not in now} | {name for name in now if known.get(name, 0) < now[name]})
            if late:
                return f"{kind}: {', '.join(late)}"
        return ""

    def _follow(self, kind: str, version: str) -> None:
        try:
            for raw in self._api.watch(kind, self._namespace, version, seconds=self._seconds):
                if self._stop.is_set():
                    return
                if raw["type"] == "ERROR":
                    self._failed = f"the recording of {kind} broke: {raw['object']}"
                    return
                self._add(Event(int(raw["object"]["metadata"]["resourceVersion"]), raw["type"], kind, raw["object"]))
            self._failed = f"the recording of {kind} ended after {self._seconds} s"
        except (requests.RequestException, Refused, ValueError) as error:
            self._failed = f"the recording of {kind} broke: {error}"
