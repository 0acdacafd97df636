"""One request inside the engine: its tokens, its blocks, how far it has come, and when."""

import asyncio
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from standin import kv, model
from standin.kv import Block
from standin.pull import Remote


class State(Enum):
    """Where a request stands."""

    WAITING = "waiting"  # for room: run slots or blocks
    LOOKING_UP = "looking up"  # the cache server has been asked what it holds
    FETCHING = "fetching"  # KV is on its way, from P or from the cache server
    FETCHED = "fetched"  # KV is here, not yet scheduled
    RUNNING = "running"
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """When an answer ends."""

    max_tokens: int
    natural_end: bool = False  # the client gave no limit: the model ends by itself
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    eos_tokens: int = 0  # > 0: the model ends after this many tokens


@dataclass(frozen=True)
class Output:
    """What one step gave to one request; the last one has a finish reason."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None = None
    stop_reason: str | None = None
    kv_transfer_params: dict[str, Any] | None = None


@dataclass(eq=False)
class Sequence:
    """A request as the scheduler sees it."""

    request_id: str
    prompt: list[int]
    limits: Limits
    root: bytes  # start of the hash chain of block keys
    block_size: int
    params: dict[str, Any] = field(default_factory=dict)
    choice: int = 0
    arrival: float = 0.0
    state: State = State.WAITING
    output: list[int] = field(default_factory=list)
    text: str = ""
    blocks: list[Block] = field(default_factory=list)
    computed: int = 0  # tokens whose KV is in `blocks`
    committed: int = 0  # full blocks whose contents are final
    local_hit: int = 0
    external_hit: int = 0
    remote: Remote | None = None
    remote_used: bool = False  # a transfer was started: never a second one
    recompute: bool = False  # the load failed: no connector any more
    lookup: asyncio.Task[int] | None = None
    cache_hit: int = 0  # tokens that the cache server holds
    scheduled_tokens: int = 0
    stored_tokens: int = 0
    generation_state: bytes | None = None
    first_scheduled: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    preemptions: int = 0
    finish_reason: str | None = None
    outputs: "asyncio.Queue[Output]" = field(default_factory=asyncio.Queue)
    _keys: list[bytes] = field(default_factory=list)
    _prompt_keys: list[bytes] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Prompt and answer so far."""
        return len(self.prompt) + len(self.output)

    @property
    def for_decode(self) -> bool:
        """True for the prefill leg of a handoff."""
        return bool(self.params.get("do_remote_decode"))

    @property
    def waiting_reason(self) -> str:
        """vLLM's two reasons for waiting."""
        return "deferred" if self.state in (State.LOOKING_UP, State.FETCHING) else "capacity"

    def prompt_keys(self) -> list[bytes]:
        """Keys of the blocks of the prompt, the partly filled last one included."""
        if not self._prompt_keys:
            self._prompt_keys = kv.prompt_keys(self.root, self.prompt, self.block_size)
        return self._prompt_keys

    def full_keys(self, count: int) -> list[bytes]:
        """Keys of the first `count` blocks, which must be full."""
        if not self._keys:
            self._keys = self.prompt_keys()[: len(self.prompt) // self.block_size]
        tokens = None
        while len(self._keys) < count:
            tokens = tokens or [*self.prompt, *self.output]
            start = len(self._keys) * self.block_size
            previous = self._keys[-1] if self._keys else self.root
            self._keys.append(kv.chain(previous, tokens[start : start + self.block_size]))
        return self._keys[:count]

    def blocks_for(self, tokens: int) -> int:
        """Blocks that `tokens` tokens need."""
        return -(-tokens // self.block_size)

    def next_output(self) -> tuple[int, str | None, str | None, str]:
        """Draws the next token: (token, finish reason, stop reason, text to show for it)."""
        assert self.generation_state is not None
        token = model.next_token(self.generation_state, len(self.output), self.choice)
        self.output.append(token)
        shown = model.word(token)
        before = len(self.text)
        self.text += shown
        limits = self.limits
        enough = len(self.output) >= limits.min_tokens
        for stop in limits.stop:
            at = self.text.find(stop, max(0, before - len(stop)))
            if at >= 0 and enough:
                self.text = self.text[:at]
                return token, "stop", stop, self.text[before:]
        if enough and not limits.ignore_eos and self._ends_here():
            return token, "stop", None, shown
        if len(self.output) >= limits.max_tokens:
            return token, "length", None, shown
        return token, None, None, shown

    def _ends_here(self) -> bool:
        if self.limits.eos_tokens:
            return len(self.output) >= self.limits.eos_tokens
        assert self.generation_state is not None
        return self.limits.natural_end and len(self.output) >= model.natural_length(self.generation_state)
