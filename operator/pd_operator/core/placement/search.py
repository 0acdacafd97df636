"""Which options of which domains: dynamic programming over the domains with bounds, exact within a bounded number of steps.

Costs add up over domains and are compared level by level (`Objective`), so they are kept as one integer. A state is what was
given out so far: (prefill, decode, domains used); of two ways to the same state the cheaper one is kept. A state goes when
the best that it could still become is no better than the best complete answer. When a layer would cost more than its part of
STEPS, only the states with the best bounds go on, and the answer is no longer proven best.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, NamedTuple

STEPS: Final = 60_000  # options tried in one search; one or two microseconds each

# One level must outweigh all below it: fewer than 2**27 replicas, and 2**59 units of room.
_UNPLACED: Final = 1 << 60
_DISRUPTION: Final = 1 << 88
_LOST: Final = 1 << 116


class Option(NamedTuple):
    """What a domain could get."""

    prefill: int
    decode: int
    cost: int


class Choice(NamedTuple):
    """What a domain gets."""

    domain: int  # index into what was searched
    prefill: int
    decode: int


@dataclass(frozen=True, slots=True)
class Candidate:
    """One domain: its options, the best effective capacity among them, the replicas that run there, its free accelerators."""

    name: str
    options: tuple[Option, ...]  # without (0, 0), which is always possible
    best: int  # in units of one P*D-th of the pool
    running: int = 0
    room: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """The best answer that was found."""

    cost: int
    choices: tuple[Choice, ...]
    exact: bool


class _State(NamedTuple):
    bound: int
    prefill: int
    decode: int
    used: int
    cost: int
    trail: tuple[object, ...]  # (trail before, Choice), linked


def cost(effective: int, disruption: int, placed: int, room: int) -> int:
    """Levels as one integer; smaller is better."""
    return -effective * _LOST + disruption * _DISRUPTION - placed * _UNPLACED + room


def emptied(replicas: int) -> int:
    """The cost of ending what runs in domains that are not used."""
    return replicas * _DISRUPTION


class Search:
    """Finds the cheapest way to give out at most (prefill, decode) replicas to at most `limit` domains.

    `price` is what one domain used costs in disruption. Candidates are taken in the given order; those with most effective
    capacity first give good bounds. Without `fit`, the search ends once only the free room could be better.
    """

    def __init__(self, candidates: Sequence[Candidate], wanted: tuple[int, int], limit: int, price: int, fit: bool = True) -> None:
        self._candidates = candidates
        self._wanted = wanted
        self._limit = limit
        self._price = price
        self._fit = fit
        self._best = Found(emptied(sum(c.running for c in candidates)), (), True)

    def run(self, steps: int = STEPS) -> Found:
        """The best answer within so many steps."""
        start = _State(0, 0, 0, 0, 0, ())
        goal = _Rest(self._candidates, self._wanted, self._limit, self._price).bound(start) + (0 if self._fit else _UNPLACED - 1)
        layer, exact, left = [start], True, steps
        for index, candidate in enumerate(self._candidates):
            if not layer or self._best.cost <= goal:
                break
            share = max(1, left // (len(self._candidates) - index) // (len(candidate.options) + 1))
            if len(layer) > share:
                exact = False
                layer = sorted(layer, key=lambda s: s[:5])[:share]
            left -= len(layer) * (len(candidate.options) + 1)
            after = self._advance(layer, index)
            layer = [state for state in after.values() if state.bound < self._best.cost]
        return Found(self._best.cost, self._best.choices, exact and (self._fit or not layer or self._best.cost <= goal))

    def _advance(self, layer: list[_State], index: int) -> dict[tuple[int, int, int], _State]:
        """The states with one domain more, that may still beat the best answer."""
        candidate = self._candidates[index]
        rest = _Rest(self._candidates[index + 1 :], self._wanted, self._limit, self._price)
        wanted_p, wanted_d = self._wanted
        after: dict[tuple[int, int, int], _State] = {}
        unused = (Option(0, 0, emptied(candidate.running)),)
        for _, p, d, used, so_far, trail in layer:
            for option in candidate.options + unused if used < self._limit else unused:
                at = now_p, now_d, now_used = p + option.prefill, d + option.decode, used + (option.prefill > 0)
                value = so_far + option.cost
                known = after.get(at)
                if now_p > wanted_p or now_d > wanted_d or (known is not None and known.cost <= value):
                    continue
                steps = (trail, Choice(index, option.prefill, option.decode)) if option.prefill else trail
                if value + rest.emptied < self._best.cost:
                    self._best = Found(value + rest.emptied, _unwind(steps), True)
                state = _State(0, now_p, now_d, now_used, value, steps)
                bound = rest.bound(state)
                if bound < self._best.cost:
                    after[at] = state._replace(bound=bound)
        return after


class _Rest:
    """What the domains that are still to come can do at best."""

    def __init__(self, rest: Sequence[Candidate], wanted: tuple[int, int], limit: int, price: int) -> None:
        self._prefill, self._decode = wanted
        self.emptied = emptied(sum(c.running for c in rest))
        self._ended = sum(min(c.running, price) for c in rest)
        self._most = [0, *accumulate(sorted((c.best for c in rest), reverse=True)[:limit])]  # by number of domains
        self._least_room = [0, *accumulate(sorted(c.room for c in rest)[:limit])]
        self._limit = limit
        self._price = price

    def bound(self, state: _State) -> int:
        """No completion of the state costs less. The most effective capacity needs so many domains, and each costs its price."""
        p, d = self._prefill - state.prefill, self._decode - state.decode
        more = min(p * self._decode, d * self._prefill, self._most[min(self._limit - state.used, len(self._most) - 1)])
        if not more:  # a domain that is used has a pair, so no more is used
            return state.cost + self.emptied
        domains = bisect_left(self._most, more)
        return state.cost + cost(more, max(self._ended, self._price * domains), p + d, self._least_room[domains])


def _unwind(trail: tuple[object, ...]) -> tuple[Choice, ...]:
    found: list[Choice] = []
    while trail:
        before, choice = trail
        assert isinstance(before, tuple) and isinstance(choice, Choice)
        found.append(choice)
        trail = before
    return tuple(reversed(found))
