"""Budgets: what each PDDeployment of a budget holds and asks for in a tick, and what it may use (core/scaling/shared.py)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from pd_operator.controller.loop import Key
from pd_operator.controller.roster import Entry, Roster
from pd_operator.core.names import ROLE, ROLES, Role
from pd_operator.core.pools import gpus_of
from pd_operator.core.scaling.decision import Reason, RoleDecision
from pd_operator.core.scaling.learned import Memory
from pd_operator.core.scaling.record import Record
from pd_operator.core.scaling.shared import Budget, Member, Pair, Share, allocate
from pd_operator.kube.store import Stores
from pd_operator.settings import Settings


@dataclass(frozen=True, slots=True)
class Asked:
    """What one PDDeployment decided in this tick without the budget. `record` holds what it was made from."""

    entry: Entry
    record: Record


def budgets_of(settings: Settings) -> tuple[Budget, ...]:
    """The budgets of the install. One without a name is called by its place in the list."""
    return tuple(
        Budget(b.name or f"budgets[{n}]", b.max_gpus, None if b.namespaces == "all" else frozenset(b.namespaces))
        for n, b in enumerate(settings.budgets)
    )


def shares(budgets: Iterable[Budget], asked: Sequence[Asked], roster: Roster, stores: Stores, now: float) -> dict[Key, Share]:
    """The share of every PDDeployment that some budget may limit; the others have none."""
    found: dict[Key, Share] = {}
    roster.budgets = {}
    for budget in budgets:
        mine = [a for a in asked if budget.covers(a.entry.key[0])]
        members = [_member(a) for a in mine]
        known = {a.entry.key for a in mine}
        given, unseen = _others(budget, known, roster, stores, now)
        members += given
        names = {_name(key): key for key in known}
        found |= {names[name]: share for name, share in allocate(budget, members, unseen).items()}
        roster.budgets[budget.name] = (budget.max_gpus, sum(m.held for m in members))
    return found


def _name(key: Key) -> str:
    return f"{key[0]}/{key[1]}"


def _member(asked: Asked) -> Member:
    """One that has decided. Under another mode than Auto nobody may limit it."""
    entry, record = asked.entry, asked.record
    pair = {role: (record.readings.prefill if role == "prefill" else record.readings.decode) for role in ROLES}
    there = _pair({role: max(r.ready + r.starting + r.blocked, r.desired) for role, r in pair.items()})
    draining = _pair({role: r.draining for role, r in pair.items()})
    gpus = _pair({role: gpus_of(entry.spec, role) for role in ROLES})
    scaling = entry.spec.scaling
    priority = scaling.priority if scaling else 0
    if entry.mode != "Auto" or scaling is None or entry.yields:
        return Member(_name(entry.key), gpus, there, draining, priority, given="an HPA" if entry.yields else entry.mode)
    decision, learned = record.decision, record.learned
    return Member(
        _name(entry.key),
        gpus,
        there,
        draining,
        priority,
        current=_pair({role: r.desired for role, r in pair.items()}),
        wanted=(decision.prefill.desired, decision.decode.desired),
        least=(scaling.prefill.min_replicas, scaling.decode.min_replicas),
        give=(_give(decision.prefill, learned.prefill.memory, record), _give(decision.decode, learned.decode.memory, record)),
    )


def _give(answer: RoleDecision, memory: Memory, record: Record) -> int:
    """Replicas that a role may give in this tick: one a minute, none on unknown or unread signals or in a rollout (I4)."""
    if record.readings.rollout or record.readings.unread or any(limit.reason is Reason.SIGNALS_UNKNOWN for limit in answer.limits):
        return 0
    last, law = memory.stepped_down, record.law
    return int(last is None or not 0 <= record.now - last < law.down_interval)


def _others(budget: Budget, known: set[Key], roster: Roster, stores: Stores, now: float) -> tuple[list[Member], list[str]]:
    """Those that did not decide: Static, suspended, refused; and those that hold pods and that no reconcile has shown yet."""
    at = datetime.fromtimestamp(now, UTC)
    members, unseen = [], []
    holders = {h.key: h for h in roster.holders() if budget.covers(h.key[0])}
    for key in sorted((holders.keys() | {o for o in stores.pods.owners() if budget.covers(o[0])}) - known):
        engines = [p for p in stores.pods.by_owner(*key) if p.labels.get(ROLE) in ROLES and not p.lost(at)]
        pods = [p for p in engines if p.phase not in ("Succeeded", "Failed")]
        holder = holders.get(key)
        if holder is None:
            unseen += [_name(key)] if pods else []
            continue
        # One pod a replica: of a group that spans nodes only the leader has the role.
        live = {role: sum(p.labels.get(ROLE) == role and not p.deleting for p in pods) for role in ROLES}
        ends = {role: sum(p.labels.get(ROLE) == role and p.deleting for p in pods) for role in ROLES}
        there = _pair({role: max(live[role], holder.counts[role]) for role in ROLES})
        members.append(Member(_name(key), _pair(holder.gpus), there, _pair(ends), given=holder.mode))
    return members, unseen


def _pair(values: Mapping[Role, int]) -> Pair:
    return values["prefill"], values["decode"]
