"""The scaling tick: signals of all pools at once -> decide() for each PDDeployment (pure) -> /scale of its PDPools (DESIGN §4).

Nothing else is written here: what a tick found reaches the status through the next reconcile, which it asks for when a person
would want to see the difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

import aiohttp

from pd_operator.controller.loop import Key
from pd_operator.controller.roster import Entry, Roster, bounds
from pd_operator.core.names import ROLE, ROLES, SLICE, Role, pool
from pd_operator.core.pool_status import digest, sentence
from pd_operator.core.scaled import LeadTime, Scaled, lead_time, replicas_of, restore
from pd_operator.core.scaling.decision import Decision
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.readings import Replicas
from pd_operator.core.scaling.record import make
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.store import Stores
from pd_operator.signals.load import Load
from pd_operator.signals.source import Source

TICK = 15.0  # seconds, as the HPA's sync period
READ_LIMIT = 12.0  # seconds for one batch of signals
WRITES = 8  # /scale calls at once
Log = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ticked:
    """One PDDeployment's part of a tick."""

    entry: Entry
    scaled: Scaled
    pools: Mapping[Role, int | None]  # spec.replicas of each PDPool when it was decided


class ScalingLoop:
    """Runs the tick while this replica leads."""

    def __init__(
        self,
        client: KubeClient,
        stores: Stores,
        roster: Roster,
        source: Source,
        recorder: EventRecorder,
        *,
        is_leader: Callable[[], bool],
        enqueue: Callable[[Key], None],
        log: Log = lambda line: None,
        tick: float = TICK,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`log` gets one line of JSON for each decision (core/scaling/record.py); `tick` seconds."""
        self._client = client
        self._stores = stores
        self._roster = roster
        self._source = source
        self._recorder = recorder
        self._is_leader = is_leader
        self._enqueue = enqueue
        self._log = log
        self._tick = tick
        self._clock = clock
        self._learned: dict[Key, tuple[str, Learned]] = {}  # (uid of the PDDeployment, ...)
        self._limit = asyncio.Semaphore(WRITES)
        self.ticks = 0
        self.seconds = 0.0  # that the last tick took

    async def run(self) -> None:
        """A tick every `tick` seconds until cancelled; one that is late is not made up for."""
        due = time.monotonic()
        while True:
            due = max(due + self._tick, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            if not self._is_leader():
                self._learned.clear()  # another one learns now; what it wrote is read when we lead again
                continue
            begin = time.monotonic()
            try:
                await self.once()
            except Exception:
                logger.exception("a scaling tick failed; every pool keeps its number")
            self.seconds = time.monotonic() - begin

    async def once(self) -> None:
        """One tick."""
        entries = self._roster.entries()
        self._learned = {e.key: self._learned[e.key] for e in entries if e.key in self._learned}
        self.ticks += 1
        if not entries:
            return
        now = self._clock()
        try:
            async with asyncio.timeout(READ_LIMIT):
                loads = await self._source.read(now)
        except TimeoutError:
            logger.warning("signals were not read within %.0f s; every pool keeps its number", READ_LIMIT)
            loads = {}
        found = await asyncio.gather(*(self._one(entry, loads.get(entry.key), now) for entry in entries))
        for ticked in found:
            if ticked is not None:
                self._tell(ticked)

    async def _one(self, entry: Entry, load: Load | None, now: float) -> _Ticked | None:
        """Decide for one PDDeployment, and write what changes. A failure of one leaves the others alone."""
        pools: dict[Role, int | None] = {}
        for role in ROLES:
            fact = self._stores.children.get("PDPool", entry.key[0], pool(entry.key[1], role))
            if fact is None or fact.replicas is None:
                return None  # the reconcile that makes it is under way
            pools[role] = fact.replicas
        try:
            scaled = await self._decide(entry, load or Load(), pools, now)
            if entry.mode == "Auto" and scaled.decision is not None:
                await self._scale(entry, scaled.decision, pools)
        except (ApiError, aiohttp.ClientError, TimeoutError, ValueError) as exc:
            logger.warning("%s/%s is not scaled in this tick: %s", *entry.key, exc or type(exc).__name__)
            return None
        return _Ticked(entry, scaled, pools)

    async def _decide(self, entry: Entry, load: Load, pools: Mapping[Role, int | None], now: float) -> Scaled:
        learned = await self._known(entry, now)
        at = datetime.fromtimestamp(now, UTC)
        replicas: dict[Role, Replicas] = {}
        lead: dict[Role, LeadTime] = {}
        namespace, name = entry.key
        pods = list(self._stores.pods.by_owner(namespace, name))
        for role in ROLES:
            mine = [p for p in pods if p.labels.get(ROLE) == role]
            counted = replicas_of(mine, entry.serving, SLICE, pools[role] or 0, at)
            replicas[role] = _with_short(counted, entry.short.get(role, 0))
            if (measured := lead_time(mine)) is not None:
                lead[role] = measured
        readings = load.readings(replicas["prefill"], replicas["decode"], entry.rollout)
        record = make(f"{namespace}/{name}", readings, learned, bounds(entry, lead, self._tick), now)
        self._log(record.line())
        self._learned[entry.key] = (entry.uid, record.decision.learned)
        unknown = "; ".join(f"{k}: {s.source or 'unknown'}" for k, s in load.signals().items() if not s.known)
        return Scaled(now, record.decision, unknown[:800], lead=lead)

    async def _known(self, entry: Entry, now: float) -> Learned:
        """What is learned of it: in memory, else in the status of its PDPools (after a start, or a change of leader)."""
        uid, learned = self._learned.get(entry.key, ("", None))
        if learned is not None and uid == entry.uid:
            return learned
        statuses: dict[Role, Mapping[str, object]] = {}
        for role in ROLES:
            live = await self._client.get("PDPool", entry.key[0], pool(entry.key[1], role))
            statuses[role] = (live or {}).get("status", {})
        return restore(statuses, now)

    async def _scale(self, entry: Entry, decision: Decision, pools: Mapping[Role, int | None]) -> None:
        for role in ROLES:
            answer = decision.of(role)
            if answer.desired == pools[role] or not self._is_leader():
                continue
            async with self._limit:
                await self._client.scale("PDPool", entry.key[0], pool(entry.key[1], role), answer.desired)
            note = f"{role}: {sentence(answer)}"
            logger.info("scaled %s/%s %s", *entry.key, note)
            await self._recorder.event(entry.reference(), "Normal", f"Scaled{role.capitalize()}", note)

    def _tell(self, ticked: _Ticked) -> None:
        """Keep the result; ask for a reconcile when status would say something else."""
        before = self._roster.scaled(ticked.entry.key, ticked.entry.uid)
        self._roster.tell(ticked.entry, ticked.scaled)
        if _gist(before) != _gist(ticked.scaled):
            self._enqueue(ticked.entry.key)


def _with_short(counted: Replicas, short: int) -> Replicas:
    """Replicas that no transfer domain has room for have no pod; to the law they are as blocked as an unschedulable one."""
    return Replicas(
        counted.desired,
        counted.ready,
        counted.starting,
        counted.blocked + short,
        counted.draining,
        counted.oldest_starting,
    )


def _gist(scaled: Scaled | None) -> object:
    """What of a tick's result status tells."""
    if scaled is None:
        return None
    decision = scaled.decision
    if decision is None:
        return scaled.why_not
    told: list[object] = [decision.bottleneck, bool(scaled.unknown)]
    for role in ROLES:
        answer = decision.of(role)
        limit = answer.limits[-1].reason if answer.limits else None
        found = scaled.lead.get(role)
        told += [answer.desired, answer.reason, limit, digest(decision.learned, role, answer)]
        told.append(f"{found.p50:.2g},{found.p90:.2g}" if found else "")
    return told
