"""Which options of which domains: dynamic programming over the domains with bounds, exact within a bounded number of steps.

Costs add up over domains and are compared level by level (`Objective`), so they are kept as one integer. A state is what was
given out so far: (prefill, decode, domains used); of two ways to the same state the cheaper one is kept. A state goes when
the best that it could still become is no better than the best complete answer. When a layer would cost more than its part of
STEPS, only the states with the best bounds go on, and the answer is no longer proven best.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

STEPS: Final = 60_000  # options tried in one search; about a microsecond each

# One level must outweigh all below it: fewer than 2**24 replicas, and 2**60 units of room.
_UNPLACED: Final = 1 << 60
DISRUPTION_BITS: Final = 88
_DISRUPTION: Final = 1 << DISRUPTION_BITS
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
    """One domain: its options, the best effective capacity among them, the replicas that run there."""

    name: str
    options: tuple[Option, ...]  # without (0, 0), which is always possible
    best: int  # effective capacity, in units of one P*D-th of the pool
    running: int = 0


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


def search(candidates: Sequence[Candidate], prefill: int, decode: int, limit: int, price: int, steps: int = STEPS) -> Found:
    """The cheapest way to give out at most (prefill, decode) replicas to at most `limit` domains.

    `price` is what one domain used costs in disruption: an emptied domain costs the replicas that run there, at least it or that.
    Candidates are taken in the given order; those with most effective capacity first give good bounds.
    """
    best = Found(cost(0, sum(c.running for c in candidates), 0, 0), (), True)
    layer = [_State(0, 0, 0, 0, 0, ())]
    exact, left = True, steps
    for index, candidate in enumerate(candidates):
        suffix = _Suffix(candidates[index + 1 :], prefill, decode, limit, price)
        share = max(1, left // max(1, len(candidates) - index) // (len(candidate.options) + 1))
        if len(layer) > share:
            exact = False
            layer = sorted(layer)[:share]
        left -= len(layer) * (len(candidate.options) + 1)
        after: dict[tuple[int, int, int], _State] = {}
        for state in layer:
            for reached in _reach(state, index, candidate, prefill, decode, limit):
                done = reached.cost + suffix.emptied
                if done < best.cost:
                    best = Found(done, _unwind(reached.trail), True)
                bound = suffix.bound(reached)
                if bound < best.cost:
                    at = (reached.prefill, reached.decode, reached.used)
                    known = after.get(at)
                    if known is None or reached.cost < known.cost:
                        after[at] = reached._replace(bound=bound)
        layer = [state for state in after.values() if state.bound < best.cost]
        if not layer:
            break
    return Found(best.cost, best.choices, exact)


class _Suffix:
    """What the domains that are still to come can do at best."""

    def __init__(self, rest: Sequence[Candidate], prefill: int, decode: int, limit: int, price: int) -> None:
        self._prefill, self._decode = prefill, decode
        self.emptied = sum(c.running for c in rest) * _DISRUPTION
        self._disruption = sum(min(c.running, price) for c in rest)
        self._sums = [0]
        for value in sorted((c.best for c in rest), reverse=True)[:limit]:
            self._sums.append(self._sums[-1] + value)
        self._limit = limit

    def bound(self, state: _State) -> int:
        """No completion of the state costs less."""
        p, d = self._prefill - state.prefill, self._decode - state.decode
        more = min(p * self._decode, d * self._prefill, self._sums[min(self._limit - state.used, len(self._sums) - 1)])
        if not more:  # a domain that is used has a pair, so no more is used
            return state.cost + self.emptied
        return state.cost + cost(more, self._disruption, p + d, 0)


def _reach(state: _State, index: int, candidate: Candidate, prefill: int, decode: int, limit: int) -> list[_State]:
    """The state with each option of one domain more, nothing first."""
    _, p, d, used, so_far, trail = state
    found = [_State(0, p, d, used, so_far + candidate.running * _DISRUPTION, trail)]
    if used < limit:
        for option in candidate.options:
            np, nd = p + option.prefill, d + option.decode
            if np <= prefill and nd <= decode:
                choice = Choice(index, option.prefill, option.decode)
                found.append(_State(0, np, nd, used + 1, so_far + option.cost, (trail, choice)))
    return found


def _unwind(trail: tuple[object, ...]) -> tuple[Choice, ...]:
    found: list[Choice] = []
    while trail:
        before, choice = trail
        assert isinstance(before, tuple) and isinstance(choice, Choice)
        found.append(choice)
        trail = before
    return tuple(reversed(found))
