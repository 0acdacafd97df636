"""What prefill, decode, router and cache must have in common, by engine and version: facts as rows.

A row holds for the versions from `since` to below `until`. Core has one predicate for each `Check` and knows no
version. Rows that say "not supported yet" end at the newest release whose sources were read; behind it the combination is
unproven, never silently accepted.

Sources: vLLM is vllm-project/vllm, paths below vllm/, read in the wheels of 0.22.1, 0.25.1, 0.26.0, 0.29.0, 0.30.0, 0.31.0 and
0.32.0 ("all" means all of these); NIXL is distributed/kv_transfer/kv_connector/v1/nixl. "Matrix" is
docs/features/nixl_connector_compatibility.md of vLLM. LMCache is LMCache/LMCache 0.5.5, paths below lmcache/. "Measured" means
seen by us with vLLM 0.32.0 on CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from packaging.version import InvalidVersion, Version

from pd_operator.api.conditions import Reason
from pd_operator.core.capabilities import Check, Rule

PAIR: Final = Reason.INCOMPATIBLE_PAIR
STATE: Final = Reason.STATE_NOT_TRANSFERABLE
UNPROVEN: Final = None
DCP: Final = ("--decode-context-parallel-size", "-dcp")
HASHED: Final = "vLLM all, NIXL metadata.py compute_nixl_compatibility_hash"
PCP: Final = ("--prefill-context-parallel-size", "-pcp")


@dataclass(frozen=True, slots=True)
class Row:
    """One fact."""

    check: Check
    engine: str  # vllm | sglang | trtllm
    reason: Reason | None  # None: unproven
    why: str
    source: str
    since: str = ""  # first version of the engine; "" = all
    until: str = ""  # first version for which it does not hold any more
    with_cache: bool = False  # holds with LMCache only
    names: tuple[str, ...] = ()

    def holds(self, engine: str, version: Version, cache: bool) -> bool:
        """Whether the row is about these programs."""
        return self.engine == engine and within(self.since, self.until, version) and (cache or not self.with_cache)


def within(since: str, until: str, version: Version) -> bool:
    """since <= version < until; a release candidate counts with the release before it."""
    return (not since or Version(since) <= version) and (not until or version < Version(until))


def rules(engine: str, version: str, cache: bool) -> tuple[Rule, ...]:
    """Rows that hold for the programs of a spec; none for a version that cannot be read, which is refused elsewhere."""
    try:
        parsed = Version(version)
    except InvalidVersion:
        return ()
    return tuple(Rule(r.check, r.reason, r.why, r.source, r.names) for r in ROWS if r.holds(engine, parsed, cache))


_PARALLELISM: Final[tuple[Row, ...]] = (
    Row(
        Check.TENSOR_DIVIDES, "vllm", PAIR,
        "the NIXL handshake ends in an assertion unless one tensor parallel size divides the other",
        "vLLM all, kv_connector/utils.py TransferTopology.tp_ratio",
    ),
    Row(
        Check.TENSOR_HEADS, "vllm", PAIR,
        "with more prefill ranks than decode ranks and than KV heads the NIXL handshake ends in an assertion",
        "vLLM all, NIXL base_worker.py _validate_remote_agent_handshake (is_kv_replicated); MLA and Mamba are exempt",
    ),
    Row(
        Check.TENSOR_RECURRENT, "vllm", PAIR,
        "models with recurrent state need the same tensor parallel size on both roles: with different sizes a transfer "
        "can succeed and be wrong (vllm-project/vllm issue 55208)",
        "Matrix, footnote 5; vLLM PR 55306, open in September 2026",
    ),
    Row(
        Check.TENSOR_RING, "vllm", PAIR,
        "the handshake refuses sizes on two sides of the number of KV heads, where ring buffers differ in layout",
        "vLLM 0.29.0 to 0.32.0, NIXL base_worker.py _validate_csa_linear_tp_layout",
        since="0.29.0",
    ),
    Row(
        Check.TENSOR_UNSEEN, "sglang", UNPROVEN,
        "different tensor parallel sizes are known to fail for some models (gpt-oss-120b with 1 and 4: clients hang, "
        "llm-d/llm-d issue 2433)",
        "llm-d/llm-d issue 2433",
    ),
    Row(
        Check.HEADS_DIVIDE, "vllm", PAIR,
        "vLLM does not start unless the tensor parallel size divides the number of attention heads",
        "vLLM 0.32.0, config/model.py verify_with_parallel_config",
    ),
    Row(
        Check.EXPERTS, "vllm", PAIR,
        "vLLM does not start with expert parallelism for a model without experts",
        "vLLM 0.32.0, config/model.py _verify_with_expert_parallelism",
    ),
    Row(
        Check.PIPELINE, "vllm", PAIR,
        "vLLM's NIXL connector reads from one pipeline stage only: with more the layers do not match",
        "vLLM 0.25.1 kv_connector/v1/base.py set_xfer_handshake_metadata_pp_aware; 0.26.0 to 0.32.0 NIXL base_worker.py "
        "__init__ and _validate_remote_agent_handshake; PR 45880 (push only), PR 53360 (pull, open), issue 52913",
        until="0.34.0",
    ),
    Row(
        Check.PIPELINE, "vllm", UNPROVEN,
        "no release up to 0.33.0 hands over with pipeline parallelism, and later ones were not read",
        "vLLM PR 53360",
        since="0.34.0",
    ),
)  # fmt: skip

_CONTEXT: Final[tuple[Row, ...]] = (
    Row(
        Check.CONTEXT_PREFILL_ONLY, "vllm", PAIR,
        "vLLM's NIXL connector takes prefill context parallelism on prefill only",
        "vLLM 0.29.0 to 0.32.0, NIXL connector.py __init__; before 0.29.0 NIXL does not know it at all",
        names=PCP,
    ),
    Row(
        Check.CONTEXT_DIVIDES, "vllm", PAIR,
        "the NIXL handshake ends in an assertion unless one decode context parallel size divides the other",
        "vLLM 0.29.0 to 0.32.0, NIXL base_worker.py _validate_remote_agent_handshake",
        names=DCP,
    ),
    Row(
        Check.CONTEXT_RECURRENT, "vllm", PAIR,
        "models with recurrent state need the same decode context parallel size on both roles",
        "vLLM 0.32.0, NIXL base_worker.py _validate_remote_agent_handshake",
        names=DCP,
    ),
    Row(
        Check.CONTEXT_UNSEEN, "vllm", UNPROVEN,
        "NIXL knows decode context parallelism since vLLM 0.29.0 only",
        "vLLM 0.26.0 and 0.29.0, NIXL base_worker.py",
        until="0.29.0", names=DCP,
    ),
    Row(
        Check.CONTEXT_CACHE, "vllm", PAIR,
        "LMCache does not start with prefill and decode context parallelism together",
        "LMCache integration/vllm/lmcache_mp_connector.py validate_dcp_support",
        with_cache=True, names=(*PCP, *DCP),
    ),
)  # fmt: skip

_BLOCKS: Final[tuple[Row, ...]] = (
    Row(
        Check.BLOCK_MULTIPLE, "vllm", PAIR,
        "decode's block size must be a multiple of prefill's, or the NIXL handshake ends in an assertion",
        "vLLM all, kv_connector/utils.py TransferTopology.block_size_ratio; Matrix, footnote 3",
        names=("--block-size",),
    ),
    Row(
        Check.BLOCK_TENSOR, "vllm", PAIR,
        "when prefill has more ranks than decode, both need the same block size",
        "vLLM all, NIXL base_worker.py _validate_remote_agent_handshake",
        names=("--block-size",),
    ),
    Row(
        Check.BLOCK_HYBRID, "vllm", PAIR,
        "models that need the hybrid KV cache manager need the same block size on both roles",
        "vLLM 0.22.1 to 0.26.0, NIXL _validate_remote_agent_handshake; Matrix, footnote 6",
        until="0.29.0", names=("--block-size",),
    ),
    Row(
        Check.BLOCK_HYBRID, "vllm", UNPROVEN,
        "different block sizes with the hybrid KV cache manager are in the sources since 0.29.0, and vLLM's matrix says "
        "no",
        "vLLM 0.29.0 to 0.32.0, NIXL base_worker.py; Matrix, footnote 6",
        since="0.29.0", names=("--block-size",),
    ),
    Row(
        Check.BLOCK_UNSAID, "vllm", UNPROVEN,
        "the other role's block size is the default of its attention backend, which is not known here",
        "vLLM 0.32.0, platforms/interface.py",
        names=("--block-size",),
    ),
    Row(
        Check.CHUNK_BLOCK, "vllm", PAIR,
        "an engine does not start unless LMCache's chunk is a multiple of its block, times the decode context parallel "
        "size",
        "LMCache integration/vllm/vllm_multi_process_adapter.py; default block 16: vLLM config/cache.py "
        "DEFAULT_BLOCK_SIZE",
        with_cache=True, names=("--block-size", *DCP),
    ),
    Row(
        Check.CHUNK_RECURRENT, "vllm", UNPROVEN,
        "vLLM makes the blocks of models with recurrent state as large as that state (544 tokens, for instance), and an "
        "engine does not start unless the chunk is a multiple of that; its log says of what",
        "LMCache integration/vllm/kv_cache_group_edits.py",
        with_cache=True,
    ),
)  # fmt: skip

_OPTIONS: Final[tuple[Row, ...]] = (
    Row(
        Check.SAME_OPTION, "vllm", PAIR,
        "it is part of what the NIXL handshake compares: every handoff of a pair that differs fails",
        HASHED,
        names=("--kv-cache-dtype", "--disable-hybrid-kv-cache-manager"),
    ),
    Row(
        Check.SIMILAR_OPTION, "vllm", PAIR,
        "it is part of what the NIXL handshake compares: every handoff of a pair that differs fails",
        HASHED,
        names=("--dtype", "--attention-backend"),
    ),
    Row(
        Check.SIMILAR_OPTION, "vllm", PAIR,
        "the size of the recurrent state follows from it, and both roles need the same",
        "vLLM 0.32.0, NIXL base_worker.py (ssm_sizes)",
        names=("--mamba-cache-dtype", "--mamba-ssm-cache-dtype"),
    ),
    Row(
        Check.SAME_WEIGHTS, "vllm", PAIR,
        "vLLM does not compare it at the handshake, so state of one model would go on in another, with HTTP 200",
        "vLLM all, NIXL metadata.py compute_nixl_compatibility_hash (not in it)",
        names=("--revision", "--code-revision", "--tokenizer", "--tokenizer-revision", "--hf-overrides", "--hf-config-path"),
    ),
    Row(
        Check.SAME_SPECULATION, "vllm", PAIR,
        "draft models that read hidden states must be the same on both roles; only their number of tokens may differ",
        "vLLM 0.32.0, NIXL metadata.py _get_speculative_compatibility_factors; Matrix, footnote 1",
        names=("--speculative-config", "-sc"),
    ),
    Row(
        Check.SAME_OPTION, "sglang", PAIR,
        "decode raises when prefill's differs",
        "sgl-project/sglang 0.5.23, srt/disaggregation/common/conn.py",
        names=("--kv-cache-dtype",),
    ),
    Row(
        Check.SAME_LAYOUT, "vllm", PAIR,
        "NIXL refuses a peer with another KV cache layout",
        "vLLM all, NIXL _validate_remote_agent_handshake; Matrix, KV cache layout",
        names=("VLLM_KV_CACHE_LAYOUT",),
    ),
    Row(
        Check.LAYOUT_TENSOR, "vllm", PAIR,
        "with this layout the heads of a block are not contiguous, and different tensor parallel sizes cannot split them",
        "vLLM 0.32.0, NIXL _validate_remote_agent_handshake; Matrix, KV cache layout",
        names=("VLLM_KV_CACHE_LAYOUT",),
    ),
    Row(
        Check.DYNAMIC_SCALES, "vllm", STATE,
        "scales of the KV cache that are computed at run time are not handed over",
        "Matrix, quantized KV cache; the flag is gone in vLLM 0.31.0",
        until="0.31.0", names=("--calculate-kv-scales",),
    ),
)  # fmt: skip

_STATE: Final[tuple[Row, ...]] = (
    Row(
        Check.CONV_LAYOUT, "vllm", STATE,
        "NIXL hands it over in layout DS only, and vLLM's default is SD, with which the engine does not start",
        "vLLM all, NIXL base_worker.py __init__, model_executor/layers/mamba/mamba_utils.py",
        names=("VLLM_SSM_CONV_STATE_LAYOUT",),
    ),
    Row(
        Check.HYBRID_MANAGER, "vllm", STATE,
        "NIXL hands it over under the hybrid KV cache manager only",
        "vLLM all, NIXL base_worker.py __init__",
        names=("--disable-hybrid-kv-cache-manager",),
    ),
    Row(
        Check.PREFIX_RECURRENT, "vllm", PAIR,
        "LMCache serves recurrent state only when vLLM keeps snapshots of it, which it does with prefix caching",
        "LMCache integration/vllm/kv_cache_group_edits.py validate_kv_cache_groups; vLLM config/cache.py mamba_cache_mode",
        with_cache=True, names=("--enable-prefix-caching",),
    ),
    Row(
        Check.MODALITIES, "vllm", UNPROVEN,
        "handoff of multimodal models is not validated upstream",
        "Matrix, row Multimodal",
    ),
    *(
        Row(
            Check.MODEL_TYPE, engine, UNPROVEN,
            "no table knows this model type, so its states were read from the keys of config.json only",
            "core/compatibility_model.py MODEL_TYPES",
        )
        for engine in ("vllm", "sglang", "trtllm")
    ),
)  # fmt: skip

_MEMORY: Final[tuple[Row, ...]] = (
    Row(
        Check.EXPANDABLE_MEMORY, "vllm", PAIR,
        "with expandable segments the memory that NIXL registered moves away under it; vLLM does not start",
        "vLLM all, config/vllm.py _verify_kv_transfer_compat",
        names=("PYTORCH_CUDA_ALLOC_CONF",),
    ),
    Row(
        Check.SERVER_MEMORY, "vllm", PAIR,
        "with transfer Server the cache server opens the engine's memory by isolated CUDA IPC, which memory of sleep mode"
        " does not allow",
        "LMCache docs/source/mp/deployment.rst",
        with_cache=True, names=("--enable-sleep-mode", "--enable-cumem-allocator"),
    ),
    Row(
        Check.OLD_LEASE, "vllm", Reason.UNSUPPORTED_VERSION,
        "this vLLM does not read it any more",
        "vLLM PR 41383: there in 0.20.2, gone in 0.22.1",
        names=("VLLM_NIXL_ABORT_REQUEST_TIMEOUT",),
    ),
    *(
        Row(
            Check.FAIL_UNSEEN, "vllm", UNPROVEN,
            "that a failed handoff ends only its own request was measured with vLLM 0.32.0",
            "measured; vLLM issues 40364, 41863, 53049", since=since, until=until,
        )
        for since, until in (("", "0.32.0"), ("0.32.1", ""))
    ),
)  # fmt: skip

_PROGRAMS: Final[tuple[Row, ...]] = (
    *(
        Row(
            Check.ROUTER_PROTOCOL, engine, PAIR, why,
            "sglang-router 0.3.2, smg 1.13.0 and vllm-router 0.1.17 before recording engines; ai-dynamo/dynamo 1.6.1 (its "
            "workers register themselves)",
            names=routers,
        )
        for engine, routers, why in (
            ("vllm", ("smg", "vllm-router", "External"), "vLLM hands over by kv_transfer_params, which it does not send"),
            ("sglang", ("smg", "sglang-router", "External"), "SGLang peers meet by bootstrap_room, which it does not send"),
            ("trtllm", ("trtllm", "External"), "TensorRT-LLM hands over through its own orchestrator"),
        )
    ),
    Row(
        Check.IMAGE_TAG, "vllm", PAIR,
        "the tag and the version name different releases, and every rule here goes by the version",
        "tags of these repositories on hub.docker.com",
        names=("vllm/vllm-openai", "vllm/vllm-router", "lmcache/standalone", "lightseekorg/smg"),
    ),
    Row(
        Check.CACHE_IMAGE, "vllm", UNPROVEN,
        "the engine's image must hold the LMCache package of the server's version (0.5.6 does not speak with 0.5.5), "
        "which cannot be seen here",
        "LMCache 0.5.6 removed the transport of 0.5.5 (v1/multiprocess/mq.py)",
        with_cache=True,
    ),
)  # fmt: skip


ROWS: Final = (*_PARALLELISM, *_CONTEXT, *_BLOCKS, *_OPTIONS, *_STATE, *_MEMORY, *_PROGRAMS)
