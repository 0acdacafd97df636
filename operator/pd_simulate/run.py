"""Run: decode steps with an unchanged batch, as a closed form."""

from __future__ import annotations

from math import sqrt


class Run:
    """The first step takes `base` seconds, each further one `grow` more; `steps` are planned from `start` on (0: nothing is)."""

    __slots__ = ("base", "grow", "start", "steps")

    def __init__(self) -> None:
        self.start = 0.0
        self.steps = 0
        self.base = 0.0
        self.grow = 0.0

    def seconds(self, steps: int) -> float:
        """From its start to the end of so many steps."""
        return steps * self.base + self.grow * (steps * (steps - 1)) / 2

    def completed(self, now: float) -> int:
        """Whole steps of the current run that have ended by `now`: the root of k base + grow k(k-1)/2 = elapsed."""
        elapsed = now - self.start
        grow = self.grow
        linear = self.base - grow / 2
        steps = int((sqrt(linear * linear + 2 * grow * elapsed) - linear) / grow) if grow > 1e-15 else int(elapsed / self.base)
        steps = max(0, min(steps, self.steps - 1))
        while steps > 0 and self.seconds(steps) > elapsed:
            steps -= 1
        while steps < self.steps - 1 and self.seconds(steps + 1) <= elapsed:
            steps += 1
        return steps
