"""What the planner answers: counts per domain, why, and what a person reads about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple


class Outcome(StrEnum):
    """How a placement came out; the words are those of the condition Placed."""

    PLACED = "Placed"  # everything that is wanted
    PARTLY_PLACED = "PartlyPlaced"  # at least one pair, less than what is wanted
    NO_CAPACITY = "NoCapacity"  # no domain holds a pair
    NO_DOMAIN_LABEL = "NoDomainLabel"  # no node has the topology label
    SUSPENDED = "Suspended"  # nothing is wanted


class Share(NamedTuple):
    """The part of the pools that one slice gets."""

    domain: str  # CROSSING ("") where the slice crosses domains or there is no topology key
    prefill: int
    decode: int
    crossing: bool = False  # mode Preferred: its pods may be in any domain


@dataclass(frozen=True, slots=True)
class Explanation:
    """One domain: what fits, what was chosen, and why not more or why not this one."""

    domain: str
    fits_prefill: int  # replicas of the role that fit if it were alone, those that run there included; at most what is wanted
    fits_decode: int
    chosen: tuple[int, int]
    text: str  # "rack-b: 3 decode replicas fit, 0 prefill: nodes with nvidia.com/gpu=8 free: 0 of 4; largest free is 4"


class Objective(NamedTuple):
    """The value of a plan, level by level; smaller is better (`planner` states the formula)."""

    lost: int  # P*D - effective capacity, in units of one P*D-th of the pool
    disruption: int  # replicas that end though they might stay, plus CONSOLIDATION for each domain used
    unplaced: int  # replicas wanted and not placed
    room: int  # accelerators free in the domains used, before the plan: best fit is least


NO_OBJECTIVE: Final = Objective(0, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the replicas of one PDDeployment go.

    `floating`: nothing fits in any domain now, so a slice without node affinity may wait for room; it must keep out of the
    domains in `avoid`, which hold one role and not the other: the scheduler would bind half a slice there.
    """

    domains: tuple[Share, ...]  # by domain name; each has both roles
    floating: bool
    reason: Outcome
    message: str  # one or two sentences
    short: tuple[int, int] = (0, 0)  # (prefill, decode) wanted and not placed
    moved: tuple[int, int] = (0, 0)  # (prefill, decode) running that end at one place and start at another
    anchor: str = ""  # of a crossing slice: the domain that holds most of it, to be preferred by the scheduler
    avoid: tuple[str, ...] = ()
    explanations: tuple[Explanation, ...] = ()  # domains used first, then those that came closest
    unexplained: int = 0  # further domains, all without room for a pair or not needed
    exact: bool = True  # proven best; False where the search was cut short
    objective: Objective = NO_OBJECTIVE

    @property
    def total(self) -> tuple[int, int]:
        """(prefill, decode) placed."""
        return sum(s.prefill for s in self.domains), sum(s.decode for s in self.domains)

    @property
    def crossing(self) -> bool:
        """Whether a slice crosses domains."""
        return any(s.crossing for s in self.domains)

    def of(self, domain: str) -> tuple[int, int]:
        """(prefill, decode) of a domain; (0, 0) when it is not used."""
        return next(((s.prefill, s.decode) for s in self.domains if s.domain == domain), (0, 0))
