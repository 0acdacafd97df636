"""GPU budget of the Dynamo planner: proportional clamp and its guard.

Source read: ai-dynamo 1.6.1 dynamo/planner/core/budget.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_simulate.policies.signals import desired
from pd_simulate.view import View


@dataclass(frozen=True, slots=True)
class Budget:
    """GPUs in all (negative: none), GPUs of one replica and least replicas of each role."""

    total: int
    gpus_prefill: int = 1
    gpus_decode: int = 1
    minimum_prefill: int = 1
    minimum_decode: int = 1

    @classmethod
    def of(cls, view: View) -> Budget:
        """The view's budget."""
        return cls(view.budget, view.gpus["prefill"], view.gpus["decode"], view.minimum["prefill"], view.minimum["decode"])

    def used(self, prefill: int, decode: int) -> int:
        """GPUs of that pair."""
        return prefill * self.gpus_prefill + decode * self.gpus_decode

    def clamp(self, prefill: int, decode: int) -> tuple[int, int]:
        """N_P <- floor(N_P B / total) inside its bounds, D gets the rest; (0, 0) when the minima do not fit.

        The source's floor (`min_gpu_budget`) is off by default and not built.
        """
        used = self.used(prefill, decode)
        if self.total < 0 or used <= self.total:
            return prefill, decode
        if self.total < self.used(self.minimum_prefill, self.minimum_decode):
            return 0, 0
        most = (self.total - self.minimum_decode * self.gpus_decode) // self.gpus_prefill
        p = max(self.minimum_prefill, min(most, prefill * self.total // used))
        d = max(self.minimum_decode, (self.total - p * self.gpus_prefill) // self.gpus_decode)
        return p, d

    def guard(self, current: tuple[int, int], proposed: tuple[int, int]) -> tuple[int, int, str]:
        """Holds instead of turning a proposal round: at a full budget a rise needs an opposing fall that pays for it."""
        if self.total >= 0 and self.used(*current) > self.total:
            return *self.clamp(*current), "gpu_budget_reconcile"
        changes = (proposed[0] - current[0], proposed[1] - current[1])
        if self.total >= 0 and self.used(*current) >= self.total and max(changes) > 0:
            fitted = self._swap(current, proposed) if changes[0] * changes[1] < 0 else current
            return *fitted, "gpu_budget_guard_hold" if fitted == current else ""
        new = self.clamp(*proposed)
        if all(min(c, p) <= n <= max(c, p) for c, p, n in zip(current, proposed, new, strict=True)):
            return *new, ""
        return *current, "gpu_budget_guard_hold"

    def _swap(self, current: tuple[int, int], proposed: tuple[int, int]) -> tuple[int, int]:
        """The pair nearest to an opposing proposal that fits; both legs move or neither (fit_directional_budget_pair)."""
        if self.used(*proposed) <= self.total:
            return proposed
        asked_p, asked_d = (abs(p - c) for p, c in zip(proposed, current, strict=True))
        best = None
        for p in range(max(self.minimum_prefill, min(current[0], proposed[0])), max(current[0], proposed[0]) + 1):
            for d in range(max(self.minimum_decode, min(current[1], proposed[1])), max(current[1], proposed[1]) + 1):
                if self.used(p, d) > self.total or (p == current[0]) != (d == current[1]):
                    continue
                moved_p, moved_d = abs(p - current[0]), abs(d - current[1])
                skew = abs(moved_p * asked_d - moved_d * asked_p)
                score = (abs(proposed[0] - p) + abs(proposed[1] - d), skew, -(moved_p + moved_d), p, d)
                best = score if best is None else min(best, score)
        return current if best is None else (best[3], best[4])


def asked(view: View) -> tuple[int, int]:
    """The pair asked for last."""
    return desired(view, "prefill"), desired(view, "decode")
