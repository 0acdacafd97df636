"""What the environment says to the engine stand-in: the step-time law, the KV cache, the transfer, the version, the faults."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepLaw:
    """Seconds that one engine step takes.

    step = [prefill_base + prefill_per_token * prompt tokens in the step, if any]
         + [decode_base + decode_per_request * decodes + decode_per_context_token * their context, if any]

    The linear form is the one that published step-time measurements of batched inference fit well; the defaults are small
    so that tests are fast (a 500-token prefill takes 7 ms, a decode step of 8 requests about 6 ms).
    """

    prefill_base: float = 0.002
    prefill_per_token: float = 0.00001
    decode_base: float = 0.005
    decode_per_request: float = 0.0001
    decode_per_context_token: float = 1e-8
    jitter: float = 0.0

    def seconds(self, prefill_tokens: int, decodes: int, context_tokens: int, dice: random.Random) -> float:
        """Duration of a step; `dice` makes the jitter (a fraction of the step, plus or minus) reproducible."""
        total = 0.0
        if prefill_tokens:
            total += self.prefill_base + self.prefill_per_token * prefill_tokens
        if decodes:
            total += self.decode_base + self.decode_per_request * decodes + self.decode_per_context_token * context_tokens
        return total * (1.0 + self.jitter * dice.uniform(-1.0, 1.0)) if self.jitter else total


@dataclass
class Faults:
    """What is broken on purpose; tests set it by STANDIN_FAULTS (JSON) or POST /standin/fault."""

    error_status: int = 0  # every generation request gets this HTTP status
    slow: float = 1.0  # every step takes this many times as long
    stall: bool = False  # requests queue and nothing runs
    unhealthy: bool = False  # /health answers 503; everything else works
    dead: bool = False  # the engine core has died: /health 503, requests 500, as vLLM's EngineDeadError
    refuse_transfer: bool = False  # P refuses every read of D
    no_transfer: bool = False  # P answers 200 without kv_transfer_params, D ignores them: nothing moves, nothing fails
    no_store: bool = False  # the cache server is asked and never told: lookups grow, stores do not
    lazy_offload: int = 0  # stores wait until this many requests have ended, as with lmcache.mp.lazy_offload_threshold
    cache_port: int = 0  # the cache server is looked for at this port
    wrong_address: bool = False  # P names a port for its side channel at which nobody listens
    stale_peers: bool = False  # D keeps what it knew of an address: another engine that comes up there is read no more
    die_in_transfer: bool = False  # P ends when D begins to read
    wrong_blob: bool = False  # P sends other bytes than it computed
    expire_leases: bool = False  # P's leases last 0 s
    transfer_delay: float = 0.0  # seconds that each transfer takes longer
    crash: bool = False  # the process exits at once with status 1
    crash_after: int = 0  # the process exits with status 1 when it has taken this many requests more

    def update(self, values: Mapping[str, Any]) -> None:
        """Sets fields. Raises ValueError for a name or a value that does not exist."""
        for name, value in values.items():
            if name not in self.__dataclass_fields__:
                raise ValueError(f"unknown fault {name!r}; known: {', '.join(self.__dataclass_fields__)}")
            kind = type(getattr(Faults(), name))
            if kind is float and isinstance(value, int) and not isinstance(value, bool):
                value = float(value)  # noqa: PLW2901
            if type(value) is not kind:
                raise ValueError(f"fault {name} takes a {kind.__name__}, not {value!r}")
            setattr(self, name, value)


@dataclass
class Settings:
    """Everything that is not on the command line."""

    version: str = "0.32.0"
    law: StepLaw = field(default_factory=StepLaw)
    seed: int = 0
    kv_bytes_per_token: int = 512
    kv_blocks: int = 0  # 0: 65536 tokens' worth, or what max_model_len needs if that is more
    max_model_len: int = 8192
    eos_tokens: int = 0  # > 0: every answer ends with finish reason stop after this many tokens
    transfer_base: float = 0.0
    transfer_bytes_per_second: float = 0.0  # 0: as fast as the socket
    handshake_timeout: float = 5.0  # vLLM's receive timeout on the side channel
    start_delay: float = 0.0  # nothing answers before this many seconds
    exit_at_start: int = -1  # >= 0: exit at once with this status
    faults: Faults = field(default_factory=Faults)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Reads STANDIN_*. Raises ValueError for a value that does not parse or a name that does not exist."""
        known = {name: environment[name] for name in environment if name.startswith("STANDIN_") and "_CACHE_" not in name}

        def number(name: str, default: float) -> float:
            return float(known.pop(f"STANDIN_{name}", default))

        law = StepLaw(
            prefill_base=number("PREFILL_BASE_S", StepLaw.prefill_base),
            prefill_per_token=number("PREFILL_PER_TOKEN_S", StepLaw.prefill_per_token),
            decode_base=number("DECODE_BASE_S", StepLaw.decode_base),
            decode_per_request=number("DECODE_PER_REQUEST_S", StepLaw.decode_per_request),
            decode_per_context_token=number("DECODE_PER_CONTEXT_TOKEN_S", StepLaw.decode_per_context_token),
            jitter=number("JITTER", 0.0),
        )
        faults = Faults()
        faults.update(json.loads(known.pop("STANDIN_FAULTS", "{}")))
        settings = cls(
            version=known.pop("STANDIN_VERSION", cls.version),
            law=law,
            seed=int(number("SEED", 0)),
            kv_bytes_per_token=int(number("KV_BYTES_PER_TOKEN", cls.kv_bytes_per_token)),
            kv_blocks=int(number("KV_BLOCKS", 0)),
            max_model_len=int(number("MAX_MODEL_LEN", cls.max_model_len)),
            eos_tokens=int(number("EOS_TOKENS", 0)),
            transfer_base=number("TRANSFER_BASE_S", 0.0),
            transfer_bytes_per_second=number("TRANSFER_BYTES_PER_S", 0.0),
            handshake_timeout=number("HANDSHAKE_TIMEOUT_S", cls.handshake_timeout),
            start_delay=number("START_DELAY_S", 0.0),
            exit_at_start=int(number("EXIT_AT_START", -1)),
            faults=faults,
        )
        if known:
            raise ValueError(f"unknown environment variables: {', '.join(sorted(known))}")
        return settings

    @property
    def minor(self) -> tuple[int, int]:
        """(major, minor) of the version that this stand-in plays."""
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)
