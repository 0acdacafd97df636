"""Whether each slice gets the share of the requests that it should: Degraded/UnevenTraffic, from what the routers count. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from pd_operator.api.conditions import Reason, Type
from pd_operator.core.scaling.readings import Signal
from pd_operator.core.snapshot import Snapshot
from pd_operator.core.weights import BAND, TOTAL

# Points. Of 120 requests (LEAST for the 60 s of a rate) a slice that should get half gets 50 +- 4.6: this is three times that.
BOUND: Final = 15
TICKS: Final = 8  # in a row before it is said, and before it is taken back: two minutes of 15 s
LEAST: Final = 2.0  # requests per second over all slices; below, chance decides who gets them


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the ticks so far say."""

    uneven: str = ""  # for status; "" = nothing to say
    streak: int = 0  # ticks in a row that say the opposite of `uneven`
    should: Mapping[str, int] = field(default_factory=dict)  # slice -> points that it should have got at the last tick


def look(
    before: Traffic, rates: Mapping[str, Signal], should: Mapping[str, int], weighted: bool, *, moving: bool = False
) -> Traffic:
    """One tick.

    Args:
        rates: requests per second that came to the routers of each slice. One that is not known leaves things as they were.
        should: points of TOTAL that each serving slice should get.
        weighted: those are the weights of a route; else shares of the capacity, behind a plain Service.
        moving: a rollout is under way, and rates are of another world.
    """
    if len(should) < 2:
        return Traffic()
    if before.should and set(before.should) != set(should):
        return Traffic(should=dict(should))
    moved = any(abs(points - before.should.get(name, points)) > BAND for name, points in should.items())
    now = replace(before, should=dict(should), streak=0 if moving or moved else before.streak)
    if moving or moved or any(not rates[name].known if name in rates else True for name in should):
        return now
    worst, share = _worst({name: rates[name].value for name in should}, should)
    off = bool(worst)
    if off == bool(now.uneven):
        return replace(now, streak=0)
    if now.streak + 1 < TICKS:
        return replace(now, streak=now.streak + 1)
    return replace(now, streak=0, uneven=_text(worst, share, should[worst], weighted) if off else "")


def _worst(rates: Mapping[str, float], should: Mapping[str, int]) -> tuple[str, int]:
    """The slice that is furthest off and its points; "" when none is off by more than BOUND, or too little came to tell."""
    total = sum(rates.values())
    if total < LEAST:
        return "", 0
    got = {name: TOTAL * rate / total for name, rate in rates.items()}
    worst = max(sorted(got), key=lambda name: abs(got[name] - should[name]))
    return (worst, round(got[worst])) if abs(got[worst] - should[worst]) > BOUND else ("", 0)


def _text(name: str, got: int, should: int, weighted: bool) -> str:
    if weighted:
        return f"{name} got {got} % of the requests, and its weight is {should}: does the gateway honour weights?"
    return (
        f"{name} got {got} % of the requests, and has {should} % of the capacity: a plain Service gives every slice the same, and "
        "shares out connections, not requests; spec.gateway weights slices"
    )


def told(snapshot: Snapshot) -> str:
    """What status says of it now."""
    found = (c for c in snapshot.status.get("conditions", ()) if c.get("type") == Type.DEGRADED)
    return next((str(c.get("message", "")) for c in found if c.get("reason") == Reason.UNEVEN_TRAFFIC), "")


def uneven(snapshot: Snapshot) -> str:
    """What status should say: what the last tick found, and what stood there before where this process has not looked yet."""
    if snapshot.spec.scaling is None or snapshot.spec.suspend:
        return ""  # nobody reads signals of it
    return told(snapshot) if snapshot.scaled is None else snapshot.scaled.uneven
