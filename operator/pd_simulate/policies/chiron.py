"""Chiron's global loop: interactive backpressure IBP = busy instances / all; one more above the threshold, one less below.

Evidence: re-implementation read (kjain1810/SageServe arbiter.py, ChironArbiter), paper arXiv:2501.08090 as a digest. Its local loop
(batch size by ITL) and its batch class have no counterpart: engines here size their own batches and all requests are interactive.
"""

from __future__ import annotations

from dataclasses import dataclass

from pd_simulate.policies.signals import bounded, desired, pool
from pd_simulate.view import Role, Targets, View


def backpressure(busy: int, total: int) -> float:
    """IBP, 0..1; 0 without instances."""
    return busy / total if total else 0.0


@dataclass(slots=True)
class Chiron:
    """The rule for each pool. A pool with a replica starting or draining waits, as the source does for its overheads."""

    threshold: float = 0.6
    tick: float = 15.0
    name: str = "chiron"

    def decide(self, view: View) -> Targets:
        """One step of each pool at most."""
        prefill, p = self._one(view, "prefill")
        decode, d = self._one(view, "decode")
        return Targets(prefill, decode, f"IBP P {p:.2f} D {d:.2f}")

    def _one(self, view: View, role: Role) -> tuple[int, float]:
        group = pool(view, role)
        current = desired(view, role)
        known = group.known
        value = backpressure(sum(1 for r in known if r.running or r.waiting), len(known))
        if group.starting or group.draining or not known:
            return current, value
        return bounded(view, role, current + (1 if value > self.threshold else -1)), value
