"""Names in a namespace that somebody else uses: one list per kind for all that ask within a second, in place of a request a name.

A new PDDeployment has sixteen names to look for, and two hundred made at once three thousand.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from pd_operator.core.names import MANAGED_BY, MANAGER
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import NotFound

FRESH = 1.0  # seconds that the answer of a list is good for; a create that meets a newer object is refused by the server
CROWDED = 60.0  # seconds until a namespace with more than a page of strangers of a kind is counted again
SELECTOR = f"{MANAGED_BY}!={MANAGER}"

Metadata = Mapping[str, Any]
Answer = Mapping[str, Metadata] | None  # name -> metadata; None = more than a page of them


class Strangers:
    """Objects that do not carry our label, by kind and namespace. Those that carry it are what our watches show."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._asked: dict[tuple[str, str], tuple[float, asyncio.Task[Answer]]] = {}

    async def of(self, kind: str, namespace: str) -> Answer:
        """What is there, as of at most FRESH seconds ago; None when it is too much to list.

        Raises:
            kube.errors.ApiError, aiohttp.ClientError, TimeoutError: as the list did.
        """
        key, now = (kind, namespace), time.monotonic()
        self._asked = {k: (at, task) for k, (at, task) in self._asked.items() if now - at < _good_for(task)}
        if key not in self._asked:
            self._asked[key] = now, asyncio.create_task(self._list(kind, namespace), name=f"strangers of {kind}/{namespace}")
        return await asyncio.shield(self._asked[key][1])  # one that asks and is cancelled takes the answer from nobody

    async def _list(self, kind: str, namespace: str) -> Answer:
        try:
            found = await self._client.first_page(kind, namespace, SELECTOR)
        except NotFound:  # the kind itself is not there
            return {}
        return None if found is None else {item["name"]: item for item in found}


def _good_for(task: asyncio.Task[Answer]) -> float:
    """Seconds for which an answer may be used; a failure is nobody's answer but those who waited for it."""
    if not task.done():
        return FRESH
    if task.cancelled() or task.exception() is not None:
        return 0.0
    return CROWDED if task.result() is None else FRESH
