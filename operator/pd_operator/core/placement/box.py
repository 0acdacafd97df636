"""Which numbers of pods a row of nodes can take: a set of vectors kept as the bits of one integer.

The vectors are those from zero to what is needed, in mixed radix. The set is closed downwards (who takes more takes less), so
adding a node's choices is a shift for each of its maximal choices, cut at what is needed, and a closure; both work on all
vectors at once.
"""

from __future__ import annotations

from collections.abc import Iterable

Counts = tuple[int, ...]  # pods by kind

NOTHING = 1  # the set that holds the zero vector alone


class Box:
    """All vectors from zero to `needed`."""

    def __init__(self, needed: Counts) -> None:
        self.needed = needed
        self._strides: list[int] = []
        self.size = 1
        for count in needed:
            self._strides.append(self.size)
            self.size *= count + 1
        self.top = 1 << (self.size - 1)  # the bit of `needed` itself
        self._all = (1 << self.size) - 1
        self._closure = [
            (self._all ^ self._at_most(axis, step - 1), step * stride)
            for axis, (count, stride) in enumerate(zip(needed, self._strides, strict=True))
            for step in _doubling(count)
        ]
        self._shifts: dict[Counts, tuple[int, int]] = {}

    def add(self, taken: int, choices: Iterable[Counts]) -> int:
        """What a row of nodes takes when one that offers these choices joins those that take `taken`."""
        after = taken
        for choice in choices:
            inside, shift = self._shifts.get(choice) or self._shift(choice)
            after |= (taken & inside) << shift
        if after == taken:
            return taken
        for inside, shift in self._closure:
            after |= (after & inside) >> shift
        return after

    def holds(self, taken: int, counts: Counts) -> bool:
        """Whether the set has a vector."""
        return bool(taken >> sum(c * s for c, s in zip(counts, self._strides, strict=True)) & 1)

    def _shift(self, choice: Counts) -> tuple[int, int]:
        cut = [min(c, n) for c, n in zip(choice, self.needed, strict=True)]
        inside = self._all
        for axis, count in enumerate(cut):
            inside &= self._at_most(axis, self.needed[axis] - count)
        found = self._shifts[choice] = inside, sum(c * s for c, s in zip(cut, self._strides, strict=True))
        return found

    def _at_most(self, axis: int, limit: int) -> int:
        """The vectors with at most `limit` on an axis: a block of bits, repeated."""
        stride = self._strides[axis]
        period = stride * (self.needed[axis] + 1)
        return ((1 << stride * (limit + 1)) - 1) * (self._all // ((1 << period) - 1))


def _doubling(count: int) -> list[int]:
    """1, 2, 4, ... so that their sums reach every distance up to `count`."""
    return [1 << power for power in range(count.bit_length())]
