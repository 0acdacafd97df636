"""Weights of slices behind one gateway: percent by capacity, and rewritten only when it matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

TOTAL: Final = 100  # points that all weights add up to
BAND: Final = 5  # points that a weight may be off before any is rewritten


def capacity(prefill: int, decode: int, pool: tuple[int, int]) -> int:
    """What a slice can serve, in units of one P*D-th of the pool: ready decode replicas, less what its prefill cannot feed.

    Args:
        pool: (P, D) replicas of both pools; their ratio says how much prefill a decode replica needs.
    """
    return min(prefill * pool[1], decode * pool[0])


def shares(capacities: Mapping[str, int]) -> dict[str, int]:
    """Points by largest remainder, TOTAL in all. What has capacity gets at least one point, what has none gets none.

    Where nothing has any, everything gets the same: then no slice is better than another. Empty for nothing.
    """
    if not any(capacities.values()):
        capacities = dict.fromkeys(capacities, 1)
    names, total = sorted(capacities), sum(capacities.values())
    points = {name: TOTAL * capacities[name] // total for name in names}
    rest = {name: TOTAL * capacities[name] % total for name in names}
    for name in sorted(names, key=lambda n: (-rest[n], n))[: TOTAL - sum(points.values())]:
        points[name] += 1
    for name in (n for n in names if capacities[n] and not points[n]):
        most = max(names, key=lambda n: (points[n], n))
        if points[most] > 1:
            points[most], points[name] = points[most] - 1, 1
    return points


def weights(capacities: Mapping[str, int], before: Mapping[str, int]) -> dict[str, int]:
    """The weights that should stand now.

    Those that stand (`before`) stay while they are of the same slices, none is more than BAND points off, and no slice has
    traffic without capacity or capacity without traffic. So the number of rewrites is bounded by how far capacity moves.
    """
    wanted = shares(capacities)
    if set(before) != set(wanted) or sum(before.values()) != TOTAL:
        return wanted
    if not any(capacities.values()):  # nothing is known to be better
        return dict(before)
    stays = all(abs(wanted[n] - before[n]) <= BAND and bool(wanted[n]) == bool(before[n]) for n in wanted)
    return dict(before) if stays else wanted


def fitting(capacities: Mapping[str, int], serving: Iterable[str]) -> list[str]:
    """Slices that may serve behind a plain Service, where every slice gets the same: those that serve, and then, largest first,
    each that does not lower what all together can serve (their number times the smallest).
    """
    chosen = [name for name in serving if name in capacities]
    for name in sorted((n for n in capacities if n not in chosen), key=lambda n: (-capacities[n], n)):
        with_it = [capacities[n] for n in (*chosen, name)]
        without = with_it[:-1]
        if not without or len(with_it) * min(with_it) >= len(without) * min(without):
            chosen.append(name)
    return chosen
