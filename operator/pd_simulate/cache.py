"""PrefixCache: blocks of prompts seen before, least recently used ones dropped."""

from __future__ import annotations

from collections import OrderedDict

from pd_simulate.request import Request


class PrefixCache:
    """LRU set of block hash ids. A hit covers the leading blocks that are all present."""

    __slots__ = ("_blocks", "capacity", "size")

    def __init__(self, capacity: int, size: int) -> None:
        self.capacity = capacity
        self.size = size  # tokens of a block
        # Not a dict: finding its oldest key takes time linear in what was deleted before it.
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def hit(self, request: Request) -> int:
        """Prompt tokens covered; at least one token is always computed."""
        count = 0
        for block in request.prefix or ():
            if block not in self._blocks:
                break
            count += 1
        return min(count * self.size, request.prompt - 1)

    def add(self, request: Request) -> None:
        """Its blocks are the most recently used now."""
        blocks = self._blocks
        for block in request.prefix or ():
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)
