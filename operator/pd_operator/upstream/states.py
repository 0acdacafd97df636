"""What of a request's state reaches decode, by engine and version, with NIXL: facts as rows.

For each engine, version and state exactly one row holds. LOST ends at the newest release whose sources were read; behind it
a state is UNKNOWN. Sources as in pairs.py; a wheel that was not read counts with the older one that was.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from packaging.version import InvalidVersion, Version

from pd_operator.core.capabilities import Carriage, Carries, State
from pd_operator.upstream.pairs import within

CARRIED, REBUILT, LOST, UNKNOWN = Carriage.CARRIED, Carriage.REBUILT, Carriage.LOST, Carriage.UNKNOWN
MATRIX: Final = "Matrix (docs/features/nixl_connector_compatibility.md)"
CONV: Final = "vLLM all, kv_connector/v1/ssm_conv_transfer_utils.py derive_mamba_conv_split"
SGLANG: Final = "sgl-project/sglang 0.5.23, srt/disaggregation/base/conn.py StateType"


@dataclass(frozen=True, slots=True)
class Row:
    """One fact about one or several states."""

    engine: str
    states: tuple[State, ...]
    carriage: Carriage
    how: str
    source: str
    since: str = ""
    until: str = ""
    accepted: str = ""


def carries(engine: str, version: str) -> tuple[Carries, ...]:
    """What becomes of each state; none for a version that cannot be read, which is refused elsewhere."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return ()
    rows = [r for r in ROWS if r.engine == engine and within(r.since, r.until, parsed)]
    return tuple(Carries(state, row.carriage, row.how, row.accepted, row.source) for row in rows for state in row.states)


ROWS: Final[tuple[Row, ...]] = (
    Row("vllm", (State.PAGED,), CARRIED, "blocks are pulled from prefill", f"{MATRIX}, rows Dense and MoE; measured"),
    Row("vllm", (State.COMPRESSED,), CARRIED, "blocks are pulled from one rank, which holds all", f"{MATRIX}, row MLA"),
    Row("vllm", (State.INDEX,), CARRIED, "indexer keys are paged as the cache is", f"{MATRIX}, row Sparse MLA"),
    Row("vllm", (State.WINDOW,), CARRIED, "the blocks inside the window are pulled", f"{MATRIX}, column SWA"),
    Row(
        "vllm", (State.GROUPS,), UNKNOWN, "pages of compressed groups have their own transfer since 0.30.0",
        "vLLM, NIXL metadata.py, connector version 10; read in 0.29.0 (9) and 0.30.0 (11)", "", "0.30.0", "vLLM 0.30.0 or later",
    ),
    Row(
        "vllm", (State.GROUPS,), CARRIED, "compressed groups are pulled as virtual pages",
        "vLLM, NIXL metadata.py, connector version 10", "0.30.0", "",
    ),
    Row(
        "vllm", (State.RING,), UNKNOWN, "NIXL knows ring buffers since 0.29.0",
        "vLLM 0.26.0 and 0.29.0, NIXL base_worker.py (CircularBufferSpec)", "", "0.29.0", "vLLM 0.30.0 or later",
    ),
    Row(
        "vllm", (State.RING,), CARRIED, "the ring buffer is pulled with the request",
        "vLLM 0.29.0 to 0.32.0, NIXL base_worker.py (CircularBufferSpec)", "0.29.0", "",
    ),
    Row(
        "vllm", (State.REPLAY,), CARRIED, "there is no replay yet: the whole window is kept and pulled",
        "vLLM 0.30.0, config/cache.py (no swa_bounded_replay)", "", "0.31.0",
    ),
    Row(
        "vllm", (State.REPLAY,), LOST,
        "decode does not replay the window after a handoff, and prefill does not lay it out for that",
        "vLLM 0.31.0, NIXL base_scheduler.py (no _bounded_replay) and config/cache.py", "0.31.0", "0.32.0",
        "vLLM 0.32.0 or later, or --no-swa-bounded-replay in spec.engine.args",
    ),
    Row(
        "vllm", (State.REPLAY,), CARRIED, "prefill stops one token short and lays the window out for decode",
        "vLLM 0.32.0, NIXL base_scheduler.py _prefill_backoff", "0.32.0", "",
    ),
    Row("vllm", (State.MAMBA2, State.DELTA), CARRIED, "state is read piece by piece in layout DS", CONV),
    Row(
        "vllm", (State.MAMBA1,), LOST, "the engine does not start: NotImplementedError",
        f"{CONV} in 0.22.1; PR 45019", "", "0.25.1",
        "vLLM 0.25.1 or later",
    ),
    Row("vllm", (State.MAMBA1,), CARRIED, "state is read in layout DS", f"{CONV} from 0.25.1", "0.25.1", ""),
    Row(
        "vllm", (State.LINEAR, State.SHORT_CONV), LOST, "the engine does not start with NIXL: NotImplementedError",
        CONV, "", "0.33.0",
        "a model without such layers",
    ),
    Row(
        "vllm", (State.LINEAR, State.SHORT_CONV), UNKNOWN, "no release up to 0.32.0 carries it, and later ones were not read", CONV,
        "0.33.0", "", "a model without such layers",
    ),
    Row(
        "vllm", (State.PLE_CONV,), LOST, "this vLLM does not know such layers", "vLLM 0.26.0 (no models/qwen4_exp)", "", "0.29.0",
        "vLLM 0.32.0 or later",
    ),
    Row(
        "vllm", (State.PLE_CONV,), CARRIED, "its page is pulled with the recurrent state",
        "vLLM 0.29.0 to 0.32.0, NIXL base_worker.py (_ple_group_index); its length is checked since 0.32.0 (PR 59997)",
        "0.29.0", "",
    ),
    Row(
        "vllm", (State.NGRAM,), LOST,
        "the static tables load on each worker, the request's n-gram history does not travel by itself, and this vLLM does not "
        "read it again from the prompt",
        "vLLM 0.29.0 (no models/deepseek_v41)", "", "0.30.0", "a model without n-gram layers",
    ),
    Row(
        "vllm", (State.NGRAM,), REBUILT,
        "the static tables load on each worker, the request's n-gram history does not travel by itself; decode reads it again from "
        "the prompt's token ids, which no test of ours has seen to be right",
        "vLLM 0.30.0 to 0.32.0, models/deepseek_v41/common/engram.py (lookback_token_ids), models/qwen4_exp (ngram_context)",
        "0.30.0", "", "a model without n-gram layers",
    ),
    Row(
        "vllm", (State.CROSS,), LOST, "NIXL does not support encoder-decoder models", f"{MATRIX}, row Encoder-Decoder", "", "",
        "a decoder-only model",
    ),
    Row(
        "vllm", (State.OTHER,), UNKNOWN, "whether NIXL carries it depends on its kind, which no table knows", CONV, "", "",
        "a model whose type is in docs/reference/compatibility.md",
    ),
    Row(
        "sglang", (State.PAGED, State.COMPRESSED, State.INDEX, State.GROUPS, State.RING, State.WINDOW, State.REPLAY), CARRIED,
        "the state is among those that its NIXL transfer names", SGLANG,
    ),
    Row(
        "sglang", (State.NGRAM,), REBUILT,
        "the static tables load on each worker, the request's n-gram history does not travel by itself; decode makes it again from "
        "the ids of prompt and output, which no test of ours has seen to be right",
        "sgl-project/sglang 0.5.23, model_runner_components/ngram_embedding_manager.py", "", "", "a model without n-gram layers",
    ),
    Row(
        "sglang",
        (*(State.MAMBA1, State.MAMBA2, State.DELTA, State.LINEAR, State.SHORT_CONV, State.PLE_CONV), State.CROSS, State.OTHER),
        UNKNOWN, "its transfer was not read for this state", SGLANG, "", "", "an attention model",
    ),
    Row(
        "trtllm", (State.PAGED, State.COMPRESSED), CARRIED, "the cache transceiver sends homogeneous KV",
        "NVIDIA/TensorRT-LLM docs/source/features/disagg-serving.md",
    ),
    Row(
        "trtllm",
        (
            *(State.INDEX, State.GROUPS, State.RING, State.WINDOW, State.REPLAY, State.NGRAM, State.OTHER),
            *(State.MAMBA1, State.MAMBA2, State.DELTA, State.LINEAR, State.SHORT_CONV, State.PLE_CONV),
        ),
        UNKNOWN, "its documents promise homogeneous KV only", "NVIDIA/TensorRT-LLM docs/source/features/disagg-serving.md", "", "",
        "a model with the same attention in all layers",
    ),
    Row(
        "trtllm", (State.CROSS,), LOST, "it serves decoder-only models", "NVIDIA/TensorRT-LLM docs, disagg-serving FAQ", "", "",
        "a decoder-only model",
    ),
)  # fmt: skip
