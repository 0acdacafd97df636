"""Somebody else's pods: they come, ask the scheduler for accelerators, stay a while and go. All of it from one seed."""

from __future__ import annotations

import heapq
import itertools
import random
import threading
import time
from types import TracebackType

import requests

from opsrunner.api import Api, Refused
from opsrunner.domains import GPU

THREADS = 4


class Guests:
    """A context; they come while it is open, and as many as there are on average are there when it opens.

    What is bound stays where it is, what still waits is deleted at the end.

    Args:
        rate: new ones a second; a busy machine takes fewer.
        stay: mean of their time in seconds.
    """

    def __init__(self, api: Api, namespace: str, *, rate: float, stay: float, sizes: tuple[int, ...], seed: int) -> None:
        self._api, self._namespace = api, namespace
        self._rate, self._stay, self._sizes = rate, stay, sizes
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(n, seed), daemon=True, name=f"guests {n}") for n in range(THREADS)
        ]
        self.came = 0
        self.went = 0
        self.failed = ""

    def __enter__(self) -> Guests:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)
        for pod in self._api.list("Pod", self._namespace, "guest=true"):
            if not pod["spec"].get("nodeName"):
                self._api.delete("Pod", self._namespace, pod["metadata"]["name"])
        assert not self.failed, self.failed

    def _run(self, number: int, seed: int) -> None:
        rng, leave = random.Random(f"{seed} {number}"), list[tuple[float, str]]()
        names = (f"guest-{number}-{n:05d}" for n in itertools.count())
        mine, due = self._rate / THREADS, time.monotonic()
        first = round(mine * self._stay)
        try:
            for count, name in enumerate(names):
                self._come(name, rng)
                heapq.heappush(leave, (time.monotonic() + rng.expovariate(1 / self._stay), name))
                while leave and leave[0][0] < time.monotonic():
                    self._api.delete("Pod", self._namespace, heapq.heappop(leave)[1])
                    self.went += 1
                if count >= first:
                    due = max(due, time.monotonic() - self._stay) + rng.expovariate(mine)  # who is late catches up
                if self._stop.wait(max(0.0, due - time.monotonic())):
                    return
        except (requests.RequestException, Refused) as error:
            self.failed = f"guests: {error}"

    def _come(self, name: str, rng: random.Random) -> None:
        container = {"name": "c", "image": "example.org/x", "resources": {"limits": {GPU: rng.choice(self._sizes)}}}
        metadata = {"name": name, "namespace": self._namespace, "labels": {"guest": "true"}}
        spec = {"containers": [container], "terminationGracePeriodSeconds": 1}
        self._api.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
        self.came += 1
