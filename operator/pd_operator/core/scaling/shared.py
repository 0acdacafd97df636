"""Shared: one budget of GPUs, several PDDeployments. Who may use how many in this tick (DESIGN §3: scaling.priority; I4, I6).

What a budget cannot choose (Static, External and Advisory pools) and every minimum come first. What is left goes by priority, to
each priority as much as it asks for, and where that is too much, in equal parts. An answer is a number of GPUs for a
PDDeployment; `decide` makes counts of it as it does of maxGPUs, so the split, the drain and the cool-down are those of the law.

Slow downwards, like the law: a role gives one replica a minute, none while its signals are unknown or a rollout runs; and nobody
rises before what it needs is free. So for a while a budget that was lowered, or that a higher priority asks for, is held by
those who still give it back, and a pool with unknown signals keeps its replicas whoever asks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

Pair = tuple[int, int]  # replicas of prefill and decode
NAMED = 4  # holders that a message names


@dataclass(frozen=True, slots=True)
class Budget:
    """GPUs that the PDDeployments of some namespaces share."""

    name: str
    max_gpus: int
    namespaces: frozenset[str] | None = None  # None: all

    def covers(self, namespace: str) -> bool:
        """Whether a namespace is among them."""
        return self.namespaces is None or namespace in self.namespaces


@dataclass(frozen=True, slots=True)
class Member:
    """One PDDeployment. `there` is what holds GPUs: replicas that exist, or are asked for, but those that drain."""

    name: str  # namespace/name
    gpus: Pair  # of one replica
    there: Pair
    draining: Pair = (0, 0)
    priority: int = 0
    given: str = ""  # Static, External, ...: why it is counted and not limited; "" = limited, and what follows counts
    current: Pair = (0, 0)  # numbers of its pools
    wanted: Pair = (0, 0)  # what it decided without the budget, each at least its minimum
    least: Pair = (0, 0)  # minimums
    give: Pair = (0, 0)  # replicas that each role may give in this tick

    def size(self, counts: Pair) -> int:
        """GPUs of so many replicas."""
        return counts[0] * self.gpus[0] + counts[1] * self.gpus[1]

    @property
    def base(self) -> Pair:
        """What it holds or is due: a minimum is made by the reconcile, whoever holds the GPUs."""
        return self.there if self.given else (max(self.there[0], self.least[0]), max(self.there[1], self.least[1]))

    @property
    def held(self) -> int:
        """GPUs that it holds, those of replicas that drain included."""
        return self.size(self.base) + self.size(self.draining)


@dataclass(frozen=True, slots=True)
class Share:
    """What one PDDeployment may use in this tick. `gpus` is None where the budget does not limit what it decided."""

    gpus: int | None = None
    detail: str = ""  # which budget, and who holds it
    over: str = ""  # minimums and given pools alone exceed the budget


def allocate(budget: Budget, members: Sequence[Member], unseen: Sequence[str] = ()) -> dict[str, Share]:
    """The share of every member that is not given.

    Args:
        unseen: PDDeployments that hold GPUs of the budget, nobody knows how many (a start has not come to them yet, or their
            spec cannot be read): until they are seen nobody rises.
    """
    targets, over = _targets(budget, members)
    holders = _Holders(budget, members, unseen)
    free = 0 if unseen else max(0, budget.max_gpus - sum(m.held for m in members))
    shares: dict[str, Share] = {}
    for member in sorted((m for m in members if not m.given), key=_order):
        target = targets[member.name]
        asked = member.size(_above(member.wanted, member.base))
        if target != member.wanted and member.size(target) < member.size(member.current):
            gpus, limited = max(member.size(target), member.size(_kept(member))), True
        else:  # it may fall by itself while its other role rises; that one waits for what drains as well
            due = min(asked, max(0, member.size(target) - member.size(member.base)))
            granted, free = min(due, free), max(0, free - due)  # what it is due waits for it: nobody after it takes that
            gpus = member.held + granted
            limited = granted < asked
        detail = holders.told_to(member) if limited else ""
        shares[member.name] = Share(max(gpus, member.size(member.least)) if limited else None, detail, over)
    return shares


def _order(member: Member) -> tuple[int, int, str]:
    """Higher priority first; among equals who has less."""
    return -member.priority, member.size(member.base), member.name


def _above(counts: Pair, base: Pair) -> Pair:
    return max(0, counts[0] - base[0]), max(0, counts[1] - base[1])


def _kept(member: Member) -> Pair:
    """What it keeps at the end of this tick, at least; a role that is raised to its minimum has that."""
    p, d = (max(member.least[i], member.current[i] - member.give[i]) for i in (0, 1))
    return p, d


def _targets(budget: Budget, members: Sequence[Member]) -> tuple[dict[str, Pair], str]:
    """Counts that each should come to, and what is wrong when not even the minimums fit."""
    mine = [m for m in members if not m.given]
    given = sum(m.held for m in members if m.given)
    least = sum(m.size(m.least) for m in mine)
    targets = {m.name: m.least for m in mine}
    free = budget.max_gpus - given - least
    over = ""
    if free < 0:
        parts = f"the minReplicas of {len(mine)} PDDeployments need {least}, and pools that are not Auto hold {given}"
        over = f"budget {budget.name} has {budget.max_gpus} GPUs: {parts}"
    for priority in sorted({m.priority for m in mine}, reverse=True):
        free = _serve([m for m in mine if m.priority == priority], targets, free)
    return targets, over


def _serve(group: Sequence[Member], targets: dict[str, Pair], free: int) -> int:
    """Give one priority what it asks for, or equal parts; what is left."""
    asked = sum(m.size(m.wanted) - m.size(m.least) for m in group)
    if asked <= free:
        targets.update({m.name: m.wanted for m in group})
        return free - asked
    fair = {m.name: m.least for m in group}
    left = _fill(group, fair, free)
    present = {m.name: _present(m) for m in group}
    taken = sum(m.size(present[m.name]) - m.size(m.least) for m in group)
    near = all(abs(m.size(present[m.name]) - m.size(fair[m.name])) <= max(m.gpus) for m in group)
    if near and taken <= free:  # within one replica of equal parts: nobody moves for it
        left = _fill(group, present, free - taken)
        fair = present
    targets.update(fair)
    return left


def _present(member: Member) -> Pair:
    """Of what it has, what it asks for."""
    p, d = (max(member.least[i], min(member.current[i], member.wanted[i])) for i in (0, 1))
    return p, d


def _fill(group: Sequence[Member], counts: dict[str, Pair], free: int) -> int:
    """One replica at a time to who has the fewest GPUs, in place; what is left."""
    poorest = [(m.size(counts[m.name]), m.name, m) for m in group]
    heapq.heapify(poorest)
    while poorest and free > 0:
        _, name, member = heapq.heappop(poorest)
        role = _next_role(member, counts[name], free)
        if role is None:
            continue
        p, d = counts[name]
        counts[name] = (p + 1, d) if role == 0 else (p, d + 1)
        free -= member.gpus[role]
        heapq.heappush(poorest, (member.size(counts[name]), name, member))
    return free


def _next_role(member: Member, counts: Pair, free: int) -> int | None:
    """The role that is further from what it asks for, of those whose next replica fits; None when there is none."""
    fits = [i for i in (0, 1) if counts[i] < member.wanted[i] and member.gpus[i] <= free]
    return min(fits, key=lambda i: (counts[i] / member.wanted[i], i)) if fits else None


class _Holders:
    """Which budget, and who holds it: the higher priorities first. Sorted once for all messages of a tick."""

    def __init__(self, budget: Budget, members: Sequence[Member], unseen: Sequence[str]) -> None:
        self._text = f"budget {budget.name} has {budget.max_gpus} GPUs"
        self._unseen = ", ".join(sorted(unseen)[:NAMED])
        self._members = sorted((m for m in members if m.held), key=lambda m: (-m.priority, m.name))
        self._held = sum(m.held for m in self._members)

    def told_to(self, mine: Member) -> str:
        """The message for one of them."""
        if self._unseen:
            return f"{self._text}; {self._unseen} holds some, and nobody has read yet how many"
        others = [m for m in self._members[: NAMED + 1] if m.name != mine.name][:NAMED]
        told = [f"{m.name} ({m.given or f'priority {m.priority}'}) holds {m.held}" for m in others]
        count = len(self._members) - (mine.held > 0) - len(others)
        if count:
            told.append(f"{count} more hold {self._held - mine.held - sum(m.held for m in others)}")
        return f"{self._text}; {', '.join(told) or 'nobody else holds any'}"
