"""What the programs that we run can do, as values: `upstream/` fills them, `core/` reads them and imports no upstream."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pd_operator.api.conditions import Reason
from pd_operator.core.backpressure import Contract


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a spec is not accepted. Invariant I8: field, value and what would be accepted."""

    reason: Reason
    field: str  # spec.engine.version
    value: str
    accepted: str  # a sentence: "0.26.0 or later with lmcache"
    outside: bool = False  # the cause lies in another object, so it is looked at again although the spec stays

    @property
    def message(self) -> str:
        """One line for the user."""
        shown = f"{self.field}={self.value}" if self.value else self.field
        return f"{shown}: {self.accepted}"


@dataclass(frozen=True, slots=True)
class Unproven:
    """What no table and no test of ours knows to work: accepted, and verification has to prove it."""

    field: str
    value: str
    why: str

    @property
    def message(self) -> str:
        """One line for the user."""
        return f"{self.field}={self.value}: {self.why}" if self.value else f"{self.field}: {self.why}"


class State(StrEnum):
    """What of a request has to be on decode before it can go on; the value is the name that a user reads."""

    PAGED = "paged KV cache"
    COMPRESSED = "compressed KV cache (MLA)"
    INDEX = "indexer keys (sparse attention)"
    GROUPS = "compressed KV groups"
    RING = "open compression group"
    WINDOW = "sliding-window cache"
    REPLAY = "bounded sliding-window replay"
    MAMBA1 = "Mamba 1 state"
    MAMBA2 = "Mamba 2 state"
    DELTA = "delta-net state (GDN or KDA)"
    LINEAR = "linear-attention state"
    SHORT_CONV = "short-convolution state"
    PLE_CONV = "short-convolution state of the n-gram layers"
    NGRAM = "Engram token history"
    CROSS = "encoder cross-attention cache"
    OTHER = "recurrent state of a kind that no table knows"


# States that a rank keeps whole and rewrites at each token, in contrast to pages of tokens.
RECURRENT = frozenset({State.MAMBA1, State.MAMBA2, State.DELTA, State.LINEAR, State.SHORT_CONV, State.PLE_CONV, State.OTHER})
# States that need vLLM's hybrid KV cache manager: their layers keep something else than pages of all tokens.
HYBRID = RECURRENT | {State.WINDOW, State.REPLAY, State.GROUPS, State.RING}


class Carriage(StrEnum):
    """What becomes of a state at handoff."""

    CARRIED = "carried"
    REBUILT = "rebuilt on decode"
    LOST = "not carried"
    UNKNOWN = "not known"


@dataclass(frozen=True, slots=True)
class Carries:
    """What becomes of one state with one engine and connector at one version."""

    state: State
    carriage: Carriage
    how: str  # one clause for the user
    accepted: str  # what would be accepted, as a clause; "" with CARRIED
    source: str


class Check(StrEnum):
    """What can be wrong between prefill, decode, router and cache. Each has one predicate in core, and rows in upstream."""

    TENSOR_DIVIDES = "tensor-divides"
    TENSOR_HEADS = "tensor-heads"
    TENSOR_RECURRENT = "tensor-recurrent"
    TENSOR_RING = "tensor-ring"
    TENSOR_UNSEEN = "tensor-unseen"
    HEADS_DIVIDE = "heads-divide"
    EXPERTS = "experts"
    PIPELINE = "pipeline"
    CONTEXT_PREFILL_ONLY = "context-prefill-only"
    CONTEXT_DIVIDES = "context-divides"
    CONTEXT_RECURRENT = "context-recurrent"
    CONTEXT_UNSEEN = "context-unseen"
    BLOCK_MULTIPLE = "block-multiple"
    BLOCK_TENSOR = "block-tensor"
    BLOCK_HYBRID = "block-hybrid"
    BLOCK_UNSAID = "block-unsaid"
    SAME_OPTION = "same-option"
    SIMILAR_OPTION = "similar-option"
    SAME_WEIGHTS = "same-weights"
    SAME_SPECULATION = "same-speculation"
    SAME_LAYOUT = "same-layout"
    LAYOUT_TENSOR = "layout-tensor"
    CONV_LAYOUT = "conv-layout"
    HYBRID_MANAGER = "hybrid-manager"
    DYNAMIC_SCALES = "dynamic-scales"
    EXPANDABLE_MEMORY = "expandable-memory"
    OLD_LEASE = "old-lease"
    CHUNK_BLOCK = "chunk-block"
    CHUNK_RECURRENT = "chunk-recurrent"
    PREFIX_RECURRENT = "prefix-recurrent"
    CONTEXT_CACHE = "context-cache"
    SERVER_MEMORY = "server-memory"
    FAIL_UNSEEN = "fail-unseen"
    CACHE_IMAGE = "cache-image"
    IMAGE_TAG = "image-tag"
    ROUTER_PROTOCOL = "router-protocol"
    MODALITIES = "modalities"
    MODEL_TYPE = "model-type"


@dataclass(frozen=True, slots=True)
class Rule:
    """One row that holds for the versions of a spec. Without a reason it is not refused but unproven."""

    check: Check
    reason: Reason | None
    why: str  # one clause for the user: what happens otherwise
    source: str
    names: tuple[str, ...] = ()  # flags, variables or repositories that the check is about


@dataclass(frozen=True, slots=True)
class Program:
    """An engine, a router or a cache server at the version that the spec names."""

    name: str
    version: str
    proven: bool  # this version went through our real tests
    owned_flags: frozenset[str] = frozenset()
    owned_env: frozenset[str] = frozenset()
    forbidden_flags: tuple[tuple[str, str], ...] = ()  # (flag, what to use instead)


@dataclass(frozen=True, slots=True)
class Upstream:
    """The programs of one PDDeployment, and the rules that need several of them at once."""

    engine: Program
    router: Program
    lmcache: Program | None
    refusals: tuple[Refusal, ...] = ()  # version rules already judged by upstream/
    rules: tuple[Rule, ...] = ()  # rows that hold for these versions
    carries: tuple[Carries, ...] = ()  # one for each state
    unproven: tuple[Unproven, ...] = ()  # versions that our tests did not run
    backpressure: Contract | None = None  # what they do with more than they can take
