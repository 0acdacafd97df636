"""Events of events.k8s.io/v1 on condition transitions.

An event repeated with the same note within TTL becomes a series on the first one. An object may get BURST events and one
more every REFILL seconds, as client-go's spam filter (tools/events, record.NewEventCorrelator). Nothing raises: an event
that cannot be written must not stop a reconcile.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

import aiohttp

from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError

TTL = 600.0  # seconds an event can grow into a series
BURST = 25  # events per object
REFILL = 300.0  # seconds per further event
CACHE = 4096  # (object, reason) pairs and objects remembered
MAX_NOTE = 1024  # characters, limit of the API
CONTROLLER = "pdserve.dev/pd-operator"

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Posted:
    name: str
    note: str
    count: int
    at: float


@dataclass(slots=True)
class _Budget:
    tokens: float
    at: float


class EventRecorder:
    """Writes events about our objects."""

    def __init__(self, client: KubeClient, instance: str) -> None:
        """`instance`: the name of this process (the pod), shown as reportingInstance."""
        self._client = client
        self._instance = instance[:128]
        self._posted: OrderedDict[tuple[str, str], _Posted] = OrderedDict()
        self._budgets: OrderedDict[str, _Budget] = OrderedDict()

    async def event(
        self,
        regarding: Mapping[str, Any],
        type_: Literal["Normal", "Warning"],
        reason: str,
        note: str,
        *,
        action: str = "Reconcile",
    ) -> None:
        """Record one transition of `regarding` (an object as read from the API, or its apiVersion, kind and metadata)."""
        try:
            await self._event(regarding, type_, reason, note[:MAX_NOTE], action)
        except (ApiError, aiohttp.ClientError, TimeoutError, OSError) as exc:
            logger.warning("cannot record event %s: %s", reason, exc)

    async def _event(self, regarding: Mapping[str, Any], type_: str, reason: str, note: str, action: str) -> None:
        meta, now = regarding["metadata"], time.monotonic()
        key = (str(meta["uid"]), reason)
        known = self._posted.get(key)
        if not self._allowed(key[0], now):
            logger.info("event %s of %s/%s is over its budget and was not recorded", reason, meta["namespace"], meta["name"])
            return
        if known is not None and known.note == note and now - known.at < TTL:
            known.count += 1
            known.at = now
            series = {"series": {"count": known.count, "lastObservedTime": _now()}}
            try:
                await self._client.merge("Event", meta["namespace"], known.name, series)
                return
            except ApiError as exc:
                if exc.status != 404:  # it expired on the server: record a new one
                    raise
        name = f"{meta['name']}.{uuid.uuid4().hex[:16]}"
        await self._client.create(
            {
                "apiVersion": "events.k8s.io/v1",
                "kind": "Event",
                "metadata": {"namespace": meta["namespace"], "name": name},
                "eventTime": _now(),
                "type": type_,
                "reason": reason,
                "note": note,
                "action": action,
                "reportingController": CONTROLLER,
                "reportingInstance": self._instance,
                "regarding": {
                    "apiVersion": regarding["apiVersion"],
                    "kind": regarding["kind"],
                    "namespace": meta["namespace"],
                    "name": meta["name"],
                    "uid": meta["uid"],
                    "resourceVersion": meta.get("resourceVersion", ""),
                },
            }
        )
        self._posted[key] = _Posted(name, note, 1, now)
        self._posted.move_to_end(key)
        while len(self._posted) > CACHE:
            self._posted.popitem(last=False)

    def _allowed(self, uid: str, now: float) -> bool:
        budget = self._budgets.setdefault(uid, _Budget(BURST, now))
        self._budgets.move_to_end(uid)
        while len(self._budgets) > CACHE:
            self._budgets.popitem(last=False)
        budget.tokens = min(BURST, budget.tokens + (now - budget.at) / REFILL)
        budget.at = now
        if budget.tokens < 1:
            return False
        budget.tokens -= 1
        return True


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
