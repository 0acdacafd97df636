"""Static policies: a fixed split, and the search for the best one on a training half."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pd_simulate.policies.signals import bounded
from pd_simulate.view import Targets, View


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run callback answers: share of offered requests that were good, good requests per second, GPU-seconds paid."""

    attainment: float
    goodput: float
    gpu_seconds: float


Run = Callable[[int, int], Outcome]  # (prefill, decode) replicas, fixed for the whole training half


@dataclass(slots=True)
class Static:
    """The same counts always."""

    prefill: int
    decode: int
    name: str = "static"
    tick: float = 60.0

    def decide(self, view: View) -> Targets:
        """The fixed split inside the bounds."""
        return Targets(bounded(view, "prefill", self.prefill), bounded(view, "decode", self.decode), "fixed")


def splits(budget: int, gpus_prefill: int, gpus_decode: int) -> Iterable[tuple[int, int]]:
    """All pairs with at least one of each and at most `budget` GPUs."""
    for p in range(1, (budget - gpus_decode) // gpus_prefill + 1):
        for d in range(1, (budget - p * gpus_prefill) // gpus_decode + 1):
            yield p, d


def best_split(run: Run, budget: int, floor: float, gpus_prefill: int = 1, gpus_decode: int = 1) -> tuple[int, int, Outcome]:
    """The split with the fewest GPU-seconds whose attainment reaches `floor`; without one, the best attainment in the budget.

    Few runs instead of all pairs: for each P the least D that reaches the floor by bisection (attainment grows with D at fixed P),
    and a P whose least possible cost cannot beat the best found is skipped. Ties: fewer GPUs, then fewer P.
    """
    known: dict[tuple[int, int], Outcome] = {}

    def ask(p: int, d: int) -> Outcome:
        if (p, d) not in known:
            known[p, d] = run(p, d)
        return known[p, d]

    best: tuple[float, int, int] | None = None
    for p in range(1, (budget - gpus_decode) // gpus_prefill + 1):
        most = (budget - p * gpus_prefill) // gpus_decode
        if best is not None:
            most = min(most, (int(best[0]) - p * gpus_prefill) // gpus_decode)
        if most < 1 or ask(p, most).attainment < floor:
            continue
        low, high = 1, most
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if ask(p, middle).attainment >= floor else (middle + 1, high)
        cost = float(p * gpus_prefill + low * gpus_decode)
        if best is None or cost < best[0]:
            best = cost, p, low
    if best is not None:
        return best[1], best[2], ask(best[1], best[2])
    p, d = max(known, key=lambda pair: (known[pair].attainment, -pair[0] * gpus_prefill - pair[1] * gpus_decode, -pair[0]))
    return p, d, known[p, d]
