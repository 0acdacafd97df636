"""The scaling tick: signals of all pools at once -> decide() for each PDDeployment (pure) -> /scale of its PDPools (DESIGN §4).

Nothing else is written here: what a tick found reaches the status through the next reconcile, which it asks for when a person
would want to see the difference.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import aiohttp

from pd_operator.controller.budgets import Asked, shares
from pd_operator.controller.cadence import while_leading
from pd_operator.controller.loop import Key
from pd_operator.controller.roster import Entry, Roster, bounds
from pd_operator.core.names import ROLE, ROLES, Role, pool
from pd_operator.core.pool_record import Needs, needs_of
from pd_operator.core.pool_status import digest, sentence
from pd_operator.core.scaled import LeadTime, Scaled, Starts, lead_text, read_lead, replicas_of, restore
from pd_operator.core.scaling.bounds import Bounds
from pd_operator.core.scaling.decision import Decision, Reason
from pd_operator.core.scaling.law import DEFAULT, with_headroom
from pd_operator.core.scaling.learned import Learned
from pd_operator.core.scaling.record import make
from pd_operator.core.scaling.shared import Budget, Share
from pd_operator.core.traffic import Traffic, look
from pd_operator.kube.client import KubeClient
from pd_operator.kube.errors import ApiError, NotLeading
from pd_operator.kube.events import EventRecorder
from pd_operator.kube.store import Stores
from pd_operator.signals.load import Load, nothing
from pd_operator.signals.source import Source

TICK = 15.0  # seconds, as the HPA's sync period
READ_LIMIT = 12.0  # seconds for one batch of signals
WRITES = 8  # /scale calls at once
UNWRITTEN = (ApiError, NotLeading, aiohttp.ClientError, TimeoutError)
Log = Callable[[str], None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Ticked:
    """One PDDeployment's part of a tick."""

    entry: Entry
    scaled: Scaled


@dataclass(frozen=True, slots=True)
class _Draft:
    """What one PDDeployment decides before the budgets that it shares."""

    asked: Asked
    known: _Known
    pools: Mapping[Role, int]  # numbers of its PDPools
    unknown: str


@dataclass(slots=True)
class _Known:
    """What the loop knows of one PDDeployment from tick to tick; `uid` is the object's."""

    uid: str
    learned: Learned
    starts: Starts
    traffic: Traffic = field(default_factory=Traffic)
    since: dict[Role, float] = field(default_factory=dict)  # when what a role needs ceased to be known
    told: dict[str, object] = field(default_factory=dict)  # the gist that a reconcile was asked for
    bounded: tuple[Entry, dict[Role, LeadTime], Bounds] | None = None  # the last bounds, and what they were made of

    def bounds(self, entry: Entry, tick: float) -> Bounds:
        """Bounds of `decide`, read anew only where the entry or a lead time is another one."""
        if self.bounded is None or self.bounded[0] is not entry or self.bounded[1] != self.starts.lead:
            lead = dict(self.starts.lead)
            self.bounded = entry, lead, bounds(entry, lead, tick)
        return self.bounded[2]

    def miss(self, decision: Decision, now: float) -> dict[Role, float]:
        """Since when the signals of a role are not known."""
        unknown = [r for r in ROLES if any(limit.reason is Reason.SIGNALS_UNKNOWN for limit in decision.of(r).limits)]
        self.since = {role: self.since.get(role, now) for role in unknown}
        return dict(self.since)


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
        log: Log | None = None,
        tick: float = TICK,
        clock: Callable[[], float] = time.time,
        read_limit: float = READ_LIMIT,
        budgets: Sequence[Budget] = (),
    ) -> None:
        """`log` gets one line of JSON for each decision (core/scaling/record.py); `tick` and `read_limit` are seconds.

        `budgets` are GPUs that several PDDeployments share.
        """
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
        self._read_limit = read_limit
        self._budgets = tuple(budgets)
        self._known: dict[Key, _Known] = {}
        self._limit = asyncio.Semaphore(WRITES)

    async def run(self) -> None:
        """A tick every `tick` seconds until cancelled."""
        failed = "a scaling tick failed; every pool keeps its number"
        await while_leading(self.once, self._forget, self._is_leader, tick=self._tick, logger=logger, failed=failed)

    def _forget(self) -> None:
        """Another one learns now; what it wrote is read when this replica leads again."""
        self._known.clear()

    async def once(self) -> None:
        """One tick."""
        entries = self._roster.entries()
        self._known = {e.key: self._known[e.key] for e in entries if e.key in self._known}
        if not entries:
            return
        now = self._clock()
        loads, why = await self._read(now)
        made = await asyncio.gather(*(self._draft(entry, loads.get(entry.key) or nothing(why), now) for entry in entries))
        drafts = [draft for draft in made if draft is not None]
        limits = shares(self._budgets, [d.asked for d in drafts], self._roster, self._stores, now)
        found = await asyncio.gather(*(self._finish(d, limits.get(d.asked.entry.key, Share()), now) for d in drafts))
        for ticked in found:
            if ticked is not None:
                self._tell(ticked)

    async def _read(self, now: float) -> tuple[Mapping[Key, Load], str]:
        """One batch of signals, and why those that are not in it are not. A source that fails is a load that is not known."""
        try:
            async with asyncio.timeout(self._read_limit):
                return await self._source.read(now), "the source of signals did not answer for it"
        except TimeoutError:
            why = f"signals were not read within {self._read_limit:g} s"
        except Exception as exc:
            logger.exception("signals cannot be read")
            why = f"signals cannot be read: {type(exc).__name__}"
        logger.warning("%s; every pool keeps its number", why)
        return {}, why

    async def _draft(self, entry: Entry, load: Load, now: float) -> _Draft | None:
        """Decide for one PDDeployment. A failure of one leaves the others alone."""
        pools: dict[Role, int] = {}
        for role in ROLES:
            fact = self._stores.children.get("PDPool", entry.key[0], pool(entry.key[1], role))
            if fact is None or fact.replicas is None:
                return None  # the reconcile that makes it, or gives it a number, is under way
            pools[role] = fact.replicas
        try:
            return await self._decide(entry, load, pools, now)
        except (*UNWRITTEN, ValueError) as exc:
            logger.warning("%s/%s is not scaled in this tick: %s", *entry.key, exc or type(exc).__name__)
        except Exception:
            logger.exception("%s/%s is not scaled in this tick", *entry.key)
        return None

    async def _decide(self, entry: Entry, load: Load, pools: Mapping[Role, int], now: float) -> _Draft:
        known = await self._recall(entry, now)
        at = datetime.fromtimestamp(now, UTC)
        namespace, name = entry.key
        pods = self._stores.pods.by_owner(namespace, name)
        known.starts.see(pods)
        weighted = entry.spec.gateway is not None
        known.traffic = look(known.traffic, load.requests, entry.should, weighted, moving=entry.rollout)
        replicas = {
            role: replicas_of([p for p in pods if p.labels.get(ROLE) == role], entry.serving, pools[role], at, entry.missing[role])
            for role in ROLES
        }
        readings = load.readings(replicas["prefill"], replicas["decode"], entry.rollout)
        scaling = entry.spec.scaling
        law = with_headroom(DEFAULT, scaling.headroom_percent / 100) if scaling else DEFAULT
        record = make(f"{namespace}/{name}", readings, known.learned, known.bounds(entry, self._tick), now, law)
        unknown = "; ".join(f"{k}: {s.source or 'unknown'}" for k, s in load.signals().items() if not s.known)
        return _Draft(Asked(entry, record), known, pools, unknown[:800])

    async def _finish(self, draft: _Draft, share: Share, now: float) -> _Ticked | None:
        """Keep to the share, write what changes, and remember what was learned."""
        entry, record = draft.asked.entry, draft.asked.record
        try:
            own = record.bounds.max_gpus
            if share.gpus is not None and (own is None or share.gpus < own):
                tighter = replace(record.bounds, max_gpus=share.gpus, shared=share.detail)
                record = make(record.name, record.readings, record.learned, tighter, now, record.law)
            if self._log is not None:
                self._log(record.line())
            draft.known.learned = record.decision.learned
            if entry.mode == "Auto":
                await self._scale(entry, record.decision, draft.pools)
        except (*UNWRITTEN, ValueError) as exc:
            logger.warning("%s/%s is not scaled in this tick: %s", *entry.key, exc or type(exc).__name__)
            return None
        except Exception:
            logger.exception("%s/%s is not scaled in this tick", *entry.key)
            return None
        known, lead, since = draft.known, dict(draft.known.starts.lead), draft.known.miss(record.decision, now)
        uneven = known.traffic.uneven
        return _Ticked(entry, Scaled(now, record.decision, draft.unknown, lead, uneven, since, share.over, record))

    async def _recall(self, entry: Entry, now: float) -> _Known:
        """What is known of it: in memory, else in the status of its PDPools (after a start, or a change of leader)."""
        known = self._known.get(entry.key)
        if known is not None and known.uid == entry.uid:
            return known
        statuses: dict[Role, Mapping[str, Any]] = {}
        for role in ROLES:
            live = await self._client.get("PDPool", entry.key[0], pool(entry.key[1], role))
            statuses[role] = (live or {}).get("status") or {}
        told = {role: read_lead(str((status.get("learned") or {}).get("leadTime", ""))) for role, status in statuses.items()}
        lead = {role: found for role, found in told.items() if found is not None}
        known = self._known[entry.key] = _Known(entry.uid, restore(statuses, now), Starts(lead))
        known.traffic = Traffic(entry.uneven)
        return known

    async def _scale(self, entry: Entry, decision: Decision, pools: Mapping[Role, int]) -> None:
        """Write what changes. A role whose write is refused leaves the other alone; the next tick decides anew."""
        for role in ROLES:
            answer = decision.of(role)
            if answer.desired == pools[role] or role in entry.yields:
                continue
            try:
                async with self._limit:
                    if not self._is_leader():
                        return
                    await self._client.scale("PDPool", entry.key[0], pool(entry.key[1], role), answer.desired)
            except UNWRITTEN as exc:
                logger.warning("%s of %s/%s keeps its number in this tick: %s", role, *entry.key, exc or type(exc).__name__)
                continue
            note = f"{role}: {sentence(answer)}"
            logger.info("scaled %s/%s %s", *entry.key, note)
            await self._recorder.event(entry.reference(), "Normal", f"Scaled{role.capitalize()}", note)

    def _tell(self, ticked: _Ticked) -> None:
        """Keep the result; ask for a reconcile when status would say something else."""
        known = self._known.get(ticked.entry.key)
        self._roster.tell(ticked.entry, ticked.scaled)
        if known is not None and known.told != (gist := _gist(ticked.scaled, known.told)):
            known.told = gist
            self._enqueue(ticked.entry.key)


def _gist(scaled: Scaled, before: Mapping[str, object]) -> dict[str, object]:
    """What of a tick's result status tells; a learned number that moved little stands as it was told before."""
    decision = scaled.decision
    told: dict[str, object] = {
        "bottleneck": decision.bottleneck,
        "unknown": bool(scaled.unknown),
        "over": bool(scaled.over),
        "uneven": scaled.uneven,
    }
    for role in ROLES:
        answer = decision.of(role)
        found = scaled.lead.get(role)
        told[f"{role} digest"] = digest(decision.learned, role, answer, str(before.get(f"{role} digest", "")))
        told[role] = (answer.desired, answer.reason, answer.limits[-1].reason if answer.limits else None)
        told[f"{role} lead"] = lead_text(found) if found else ""
    needs, old = needs_of(scaled), before.get("needs")
    told["needs"] = needs if not isinstance(old, Needs) or old.stale(needs) else old
    return told
