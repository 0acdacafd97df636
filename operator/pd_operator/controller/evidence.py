"""The look at the evidence: counters of all pods at once -> look() for each PDDeployment (pure), every tick.

Nothing is written here: what a look found reaches the status through the next reconcile, which it asks for when a person would
want to see the difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from pd_operator.api.scalars import seconds
from pd_operator.controller.cadence import while_leading
from pd_operator.controller.loop import Key
from pd_operator.controller.roster import Entry, Roster
from pd_operator.core.evidence import told
from pd_operator.core.evidence.attainment import Objectives
from pd_operator.core.evidence.counters import Counters
from pd_operator.core.evidence.watch import Evidence, Record, Site, look, restore
from pd_operator.core.names import COMPONENT, COORDINATOR, ROLE, ROLES, SLICE, Role
from pd_operator.core.observed import PodFact
from pd_operator.core.scaled import Starts
from pd_operator.kube.client import KubeClient
from pd_operator.kube.store import Stores
from pd_operator.signals.source import Pages

TICK: Final = 15.0  # seconds; of a Prometheus, which answers by pod, four times that
READ_LIMIT: Final = 12.0  # seconds for one batch of pages

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Known:
    """What the loop knows of one PDDeployment from look to look; `uid` is the object's."""

    uid: str
    record: Record
    told: dict[str, Any]  # handoff and attainment as status would tell them
    gist: tuple[object, ...] = ()
    starts: Starts = field(default_factory=Starts)


class EvidenceLoop:
    """Looks while this replica leads."""

    def __init__(
        self,
        client: KubeClient,
        stores: Stores,
        roster: Roster,
        source: Pages,
        *,
        is_leader: Callable[[], bool],
        enqueue: Callable[[Key], None],
        tick: float = TICK,
        clock: Callable[[], float] = time.time,
        read_limit: float = READ_LIMIT,
    ) -> None:
        self._client = client
        self._stores = stores
        self._roster = roster
        self._source = source
        self._is_leader = is_leader
        self._enqueue = enqueue
        self._tick = tick
        self._clock = clock
        self._read_limit = read_limit
        self._known: dict[Key, _Known] = {}

    async def run(self) -> None:
        """A look every `tick` seconds until cancelled."""
        failed = "a look at the evidence failed; what was told stands"
        await while_leading(self.once, self._forget, self._is_leader, tick=self._tick, logger=logger, failed=failed)

    def _forget(self) -> None:
        """Another one looks now; what it told is read when this replica leads again."""
        self._known.clear()

    async def once(self) -> None:
        """One look at everything."""
        entries = self._roster.watched()
        self._known = {e.key: self._known[e.key] for e in entries if e.key in self._known}
        if not entries:
            return
        now = self._clock()
        pages = await self._read(now)
        for entry in entries:
            if entry.key not in pages:
                continue  # nothing is known of it, which is no news
            try:
                await self._one(entry, pages[entry.key], now)
            except Exception:
                logger.exception("no look at %s/%s; what was told of it stands", *entry.key)

    async def _read(self, now: float) -> Mapping[Key, tuple[Counters, ...]]:
        """All pages. A source that fails gives none: what is not known accuses nobody."""
        try:
            async with asyncio.timeout(self._read_limit):
                return await self._source.counters(now)
        except TimeoutError:
            logger.warning("counters were not read within %g s; what was told stands", self._read_limit)
        except Exception:
            logger.exception("counters cannot be read; what was told stands")
        return {}

    async def _one(self, entry: Entry, pages: tuple[Counters, ...], now: float) -> None:
        known = await self._recall(entry)
        known.record, evidence = look(known.record, pages, self._site(entry, known), now)
        known.told = {"handoff": told.handoff(evidence, known.told), "attainment": told.attainment(evidence, known.told)}
        self._roster.saw(entry, evidence)
        gist = told.gist(known.told, evidence)
        if gist != known.gist:
            known.gist = gist
            _log(entry.key, evidence)
            self._enqueue(entry.key)

    async def _recall(self, entry: Entry) -> _Known:
        """What is known of it: in memory, else in its status (after a start, or a change of leader)."""
        known = self._known.get(entry.key)
        if known is None or known.uid != entry.uid:
            live = await self._client.get("PDDeployment", *entry.key)
            status = (live or {}).get("status") or {}
            known = self._known[entry.key] = _Known(entry.uid, restore(status), dict(status))
        return known

    def _site(self, entry: Entry, known: _Known) -> Site:
        """Ready replicas of each serving slice, and how long new ones take; a role without any keeps its last lead time."""
        pods = self._stores.pods.by_owner(*entry.key)
        ready = {
            name: {role: sum(_counts(p.labels, name, role) and p.ready and not p.deleting for p in pods) for role in ROLES}
            for name in sorted(entry.serving)
        }
        known.starts.see(pods)
        lease, lead = seconds(entry.spec.handoff.lease_duration), dict(known.starts.lead)
        return Site(ready, lease, lead, _objectives(entry), _coordinators(entry, pods))


def _objectives(entry: Entry) -> Objectives:
    slo = entry.spec.slo
    if slo is None:
        return Objectives()
    return Objectives(
        seconds(slo.ttft) if slo.ttft else None,
        seconds(slo.ttft_per_thousand_tokens) if slo.ttft_per_thousand_tokens else 0.0,
        seconds(slo.itl) if slo.itl else None,
        slo.percentile,
    )


def _coordinators(entry: Entry, pods: Sequence[PodFact]) -> dict[str, bool]:
    """Serving slice -> whether its LMCache coordinator has a ready pod; nothing without P2P."""
    if entry.spec.lmcache is None or not entry.spec.lmcache.p2p.enabled:
        return {}
    ready = {p.labels.get(SLICE) for p in pods if p.labels.get(COMPONENT) == COORDINATOR and p.ready and not p.deleting}
    return {name: name in ready for name in sorted(entry.serving)}


def _counts(labels: Mapping[str, str], slice_: str, role: Role) -> bool:
    return labels.get(SLICE) == slice_ and labels.get(ROLE) == role


def _log(key: Key, evidence: Evidence) -> None:
    for finding in evidence.findings:
        logger.warning("%s/%s %s: %s", *key, finding.reason.value, finding.sentence)
