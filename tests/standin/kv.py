"""The paged KV cache: blocks with real contents, prefix caching, reference counts, least-recently-used reuse.

The content of a block is a function of all tokens up to its end: a hash chain gives each block a key, and the key is
expanded to the block's bytes. Blocks that this engine computed keep only the key (the bytes are made again when someone
reads them); blocks that came over the network and differ from what the key gives keep the bytes that came.
"""

import struct
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b, shake_128


def chain(previous: bytes, tokens: Sequence[int]) -> bytes:
    """Key of a block, from the key of the block before it and its own tokens."""
    return blake2b(previous + struct.pack(f">{len(tokens)}I", *tokens), digest_size=24).digest()


def prompt_keys(root: bytes, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """Keys of all blocks of a prompt; the last one may be partly filled."""
    keys = []
    key = root
    for start in range(0, len(tokens), block_size):
        key = chain(key, tokens[start : start + block_size])
        keys.append(key)
    return keys


def expand(key: bytes, size: int) -> bytes:
    """The bytes that belong to a key."""
    return shake_128(key).digest(size)


class Block:
    """One page of the cache."""

    __slots__ = ("cached_as", "identity", "raw", "references", "seed")

    def __init__(self, identity: int) -> None:
        self.identity = identity
        self.references = 0
        self.seed: bytes | None = None  # contents = expand(seed)
        self.raw: bytes | None = None  # contents, if they are not what a key gives
        self.cached_as: bytes | None = None  # the key under which the prefix cache finds this block

    def clear(self) -> None:
        """Forgets the contents."""
        self.seed = self.raw = self.cached_as = None


class BlockPool:
    """All blocks of one engine."""

    def __init__(self, blocks: int, block_size: int, bytes_per_token: int, *, caching: bool) -> None:
        self.total = blocks
        self.block_size = block_size
        self.block_bytes = block_size * bytes_per_token
        self._caching = caching
        self._blocks: list[Block] = []  # made when first needed; block 0 of vLLM is a null block, so identities start at 1
        self._free: OrderedDict[int, Block] = OrderedDict()  # oldest first
        self._cache: dict[bytes, Block] = {}

    @property
    def free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free) + self.total - len(self._blocks)

    @property
    def usage(self) -> float:
        """Share of blocks in use, 0 to 1; cached blocks that nobody uses count as free."""
        return 1.0 - self.free / self.total

    def lookup(self, keys: Sequence[bytes]) -> list[Block]:
        """The cached blocks of the longest prefix of `keys`; they are not yet held."""
        found = []
        for key in keys:
            block = self._cache.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[Block]) -> None:
        """Takes one reference to each block."""
        for block in blocks:
            if block.references == 0:
                del self._free[block.identity]
            block.references += 1

    def can_allocate(self, count: int, reused: Sequence[Block] = ()) -> bool:
        """True if `count` new blocks can be had beside `reused` ones (of which unused ones come from the free list)."""
        return count + sum(block.references == 0 for block in reused) <= self.free

    def allocate(self, count: int) -> list[Block]:
        """`count` empty blocks, each with one reference. Raises MemoryError if there are not that many."""
        if count > self.free:
            raise MemoryError(f"{count} blocks asked for, {self.free} free")
        taken = []
        for _ in range(count):
            if len(self._blocks) < self.total:
                block = Block(len(self._blocks) + 1)
                self._blocks.append(block)
            else:
                _, block = self._free.popitem(last=False)
                if block.cached_as is not None and self._cache.get(block.cached_as) is block:
                    del self._cache[block.cached_as]
            block.clear()
            block.references = 1
            taken.append(block)
        return taken

    def release(self, blocks: Sequence[Block]) -> None:
        """Gives one reference back; the last blocks of a sequence are reused before its first ones."""
        for block in reversed(blocks):
            block.references -= 1
            if block.references == 0:
                self._free[block.identity] = block

    def fill(self, block: Block, key: bytes) -> None:
        """Computes a block: its contents become what `key` gives."""
        block.seed, block.raw = key, None

    def receive(self, block: Block, key: bytes, contents: bytes) -> None:
        """Stores contents that came from elsewhere; `key` is what the block should hold."""
        right = contents == expand(key, self.block_bytes)
        block.seed, block.raw = (key, None) if right else (None, contents)

    def cache(self, block: Block, key: bytes) -> None:
        """Makes a full block findable by its key."""
        if self._caching and key not in self._cache:
            self._cache[key] = block
            block.cached_as = key

    def reset(self) -> bool:
        """Forgets what the prefix cache finds; False while any block is held, as vLLM's /reset_prefix_cache."""
        if any(block.references for block in self._blocks):
            return False
        for block in self._cache.values():
            block.clear()
        self._cache.clear()
        return True

    def contents(self, block: Block) -> bytes:
        """The bytes that the block holds now."""
        if block.raw is not None:
            return block.raw
        return expand(block.seed, self.block_bytes) if block.seed is not None else bytes(self.block_bytes)

    def digest(self, block: Block) -> bytes:
        """A short hash of the contents."""
        return blake2b(self.contents(block), digest_size=16).digest()

    def by_identity(self, identity: int) -> Block | None:
        """The block with that number, whoever uses it now."""
        return self._blocks[identity - 1] if 0 < identity <= len(self._blocks) else None
