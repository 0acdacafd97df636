"""The model's config.json: which state its requests need on decode, and the sizes that prefill and decode must agree on.

Keys are those that vLLM reads (vllm/transformers_utils/model_arch_config_convertor.py, vllm/config/model.py and the model
files at 0.32.0). What a model type means is in `MODEL_TYPES`; the rest is read from keys, so a type that the table does not
know still shows its states.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pd_operator.api.conditions import Reason
from pd_operator.core.capabilities import RECURRENT, Refusal, State

KEY: Final = "config.json"
FIELD: Final = "spec.model.configMapRef.name"
MAX_SIZE: Final = 256 * 1024  # bytes; a config.json has a few KiB, a ConfigMap may hold 1 MiB
TEXT_KEYS: Final = ("text_config", "llm_config", "language_config")  # the language model inside a multimodal one
MODALITY_KEYS: Final = ("vision_config", "audio_config", "vision_tower_config")
KV_HEAD_KEYS: Final = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "num_attention_groups")
HEAD_KEYS: Final = ("num_attention_heads", "n_head", "num_heads", "n_heads")
EXPERT_KEYS: Final = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
ENTRIES: Final = {"linear_attention", "mamba", "conv", "short_conv", "recurrent", "ssm", "kda", "gdn", "hybrid"}  # of layer lists

# model_type -> the recurrent state of its layers, or None: the mixer classes of vllm/model_executor/models at 0.32.0.
MODEL_TYPES: Final[Mapping[str, State | None]] = {
    **dict.fromkeys(("mamba", "falcon_mamba", "jamba"), State.MAMBA1),
    **dict.fromkeys(
        ("mamba2", "bamba", "zamba2", "nemotron_h", "falcon_h1", "granitemoehybrid", "nemotron_h_puzzle"), State.MAMBA2
    ),
    **dict.fromkeys(
        (
            *("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
            *("kimi_linear", "kimi_k3", "qwen4_exp", "qwen4_exp_text"),
        ),
        State.DELTA,
    ),
    **dict.fromkeys(("minimax", "minimax_text_01", "minimax_m1"), State.LINEAR),
    **dict.fromkeys(("lfm2", "lfm2_moe"), State.SHORT_CONV),
    **dict.fromkeys(
        (
            *("llama", "llama4", "mistral", "mixtral", "ministral3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3", "phimoe"),
            *("gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gpt_oss", "cohere", "cohere2", "olmo2", "olmo3", "olmoe"),
            *("deepseek_v2", "deepseek_v3", "deepseek_v32", "deepseek_v4", "deepseek_v41", "kimi_k2", "glm4", "glm4_moe"),
            *("glm_moe_dsa", "granite", "granitemoe", "falcon", "gpt_neox", "gpt2", "opt", "bloom", "starcoder2", "stablelm"),
            *("exaone", "exaone4", "nemotron", "minimax_m2", "ernie4_5", "ernie4_5_moe", "seed_oss", "hunyuan_v1_dense"),
        ),
        None,
    ),
}
# Where one model_type stands for several architectures.
ARCHITECTURES: Final[Mapping[str, State]] = {
    "BailingMoeV2_5ForCausalLM": State.LINEAR,
    "BailingMoeV3ForCausalLM": State.DELTA,
}
ATTENTION_FREE: Final = frozenset({"mamba", "mamba2", "falcon_mamba"})
SPARSE_LAYERS: Final = frozenset({"qwen_sparse_attention", "indexed_attention"})  # with ring buffers (models/qwen4_exp)
# A hybrid type all of whose layers are these keeps no recurrent state (granite-4.0-micro).
ATTENTION_LAYERS: Final = SPARSE_LAYERS | {"attention", "full_attention", "sliding_attention", "deepseek_sparse_attention"}


@dataclass(frozen=True, slots=True)
class Model:
    """What config.json says. Sizes are 0 where it does not say."""

    config_map: str
    model_type: str
    states: Mapping[State, str]  # state -> the key that asks for it
    heads: int
    kv_heads: int
    experts: int
    modalities: tuple[str, ...]  # keys of what is not text
    known: bool  # MODEL_TYPES has the type

    @property
    def replicated(self) -> bool:
        """Whether every tensor parallel rank holds the whole cache, as MLA does."""
        return State.COMPRESSED in self.states or State.GROUPS in self.states

    @property
    def recurrent(self) -> tuple[State, ...]:
        """Its recurrent states."""
        return tuple(s for s in self.states if s in RECURRENT)


def read_model(config_map: str, data: Mapping[str, str] | None, binary: frozenset[str] = frozenset()) -> Model | Refusal:
    """Read the data of a ConfigMap; `binary` are the keys of its binaryData."""
    try:
        return _model(config_map, _load(data or {}, binary))
    except _Problem as exc:
        remedy = "put the config.json of the model there, or remove spec.model.configMapRef"
        accepted = f"ConfigMap {config_map}, key {KEY} {exc}; {remedy}"
        return Refusal(Reason.INVALID_SPEC, FIELD, config_map, accepted, outside=True)


class _Problem(Exception):
    """Something in config.json that no model has."""


def _load(data: Mapping[str, str], binary: frozenset[str]) -> Mapping[str, Any]:
    text = data.get(KEY)
    if text is None:
        found = ", ".join(sorted({*data, *binary})[:5]) or "nothing"
        raise _Problem("is binary, not text" if KEY in binary else f"is missing (there is {found})")
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_SIZE:
        raise _Problem(f"has {size} bytes, more than {MAX_SIZE}: that is not a model's config.json")
    try:
        config = json.loads(text)
    except RecursionError:
        raise _Problem("is nested too deeply") from None
    except ValueError as exc:
        raise _Problem(f"is not JSON: {exc}") from None
    if not isinstance(config, Mapping):
        raise _Problem(f"is a JSON {_json_type(config)}, not an object")
    return config


def _model(config_map: str, config: Mapping[str, Any]) -> Model:
    text = _text(config)
    model_type = str(text.get("model_type") or config.get("model_type") or "")
    architectures = config.get("architectures") or []
    if not model_type and not architectures:
        raise _Problem("has neither model_type nor architectures")
    if not isinstance(architectures, list) or not all(isinstance(a, str) for a in architectures):
        raise _Problem("has architectures that are not a list of strings")
    states = {State.PAGED: "model_type"} if model_type not in ATTENTION_FREE else {}
    for state, key in _states(text, config, model_type):
        states.setdefault(state, key)
    states |= {ARCHITECTURES[a]: "architectures" for a in architectures if a in ARCHITECTURES}
    heads = _whole(text, HEAD_KEYS)
    return Model(
        config_map=config_map,
        model_type=model_type or architectures[0],
        states=states,
        heads=heads,
        kv_heads=_whole(text, KV_HEAD_KEYS) or heads,
        experts=_whole(text, EXPERT_KEYS),
        modalities=tuple(key for key in MODALITY_KEYS if config.get(key)),
        known=model_type in MODEL_TYPES or bool(ARCHITECTURES.keys() & set(architectures)),
    )


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part, over what stands beside it."""
    for key in TEXT_KEYS:
        inner = config.get(key)
        if inner is None:
            continue
        if not isinstance(inner, Mapping):
            raise _Problem(f"has a {key} that is a JSON {_json_type(inner)}, not an object")
        return {**config, **inner}
    return config


def _states(text: Mapping[str, Any], config: Mapping[str, Any], model_type: str) -> Iterator[tuple[State, str]]:
    if config.get("is_encoder_decoder") or text.get("is_encoder_decoder"):
        yield State.CROSS, "is_encoder_decoder"
    ratios = _numbers(text, "compress_ratios")
    if _whole(text, ("kv_lora_rank",)):
        yield State.COMPRESSED, "kv_lora_rank"
    if _whole(text, ("index_topk",)):
        yield State.INDEX, "index_topk"
    if any(ratio > 1 for ratio in ratios):
        yield State.GROUPS, "compress_ratios"
        yield State.RING, "compress_ratios"
    if SPARSE_LAYERS & set(_names(text, "layer_types")):
        yield State.INDEX, "layer_types"
        yield State.RING, "layer_types"
    yield from _windows(text, model_type)
    yield from _recurrent(text, model_type)
    if _numbers(text, "engram_layer_ids"):
        yield State.NGRAM, "engram_layer_ids"
    if _numbers(text, "ple_layer_ids"):
        yield State.NGRAM, "ple_layer_ids"
        yield State.PLE_CONV, "ple_layer_ids"


def _windows(text: Mapping[str, Any], model_type: str) -> Iterator[tuple[State, str]]:
    """Sliding windows; DeepSeek V4.1 replays its window on a prefix hit (vllm/models/deepseek_v41/attention.py)."""
    if any("sliding" in layer for layer in _names(text, "layer_types")):
        yield State.WINDOW, "layer_types"
    elif _whole(text, ("sliding_window",)) and text.get("use_sliding_window") is not False and "layer_types" not in text:
        yield State.WINDOW, "sliding_window"
    if model_type == "deepseek_v41":
        yield State.WINDOW, "model_type"
        yield State.REPLAY, "model_type"


def _recurrent(text: Mapping[str, Any], model_type: str) -> Iterator[tuple[State, str]]:
    """From the type, else from lists of layers whose entries name something recurrent."""
    lists = {key: _names(text, key) for key in ("layer_types", "layers_block_type")}
    kind = MODEL_TYPES.get(model_type)
    if kind is not None:
        entries = {e for names in lists.values() for e in names}
        if not entries or entries - ATTENTION_LAYERS:
            yield kind, "model_type"
        return
    if isinstance(text.get("linear_attn_config"), Mapping) and text["linear_attn_config"].get("kda_layers"):
        yield State.DELTA, "linear_attn_config"
    if model_type in MODEL_TYPES:
        return
    for key, names in lists.items():
        if ENTRIES & set(names):
            yield State.OTHER, key
    for key in ("hybrid_override_pattern", "mamba_d_state", "ssm_cfg", "mamba_num_heads", "linear_conv_kernel_dim"):
        if text.get(key):
            yield State.OTHER, key


def _whole(text: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    """The first of the keys that is there, as a whole number; 0 when none is."""
    for key in keys:
        value = text.get(key)
        if value is None:
            continue
        if isinstance(value, list) and value and all(isinstance(v, int) for v in value):
            value = max(value)  # one number for each layer
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1_000_000_000:
            raise _Problem(f"has {key}={str(value)[:40]}, which is not a whole number")
        return value
    return 0


def _numbers(text: Mapping[str, Any], key: str) -> list[int]:
    value = text.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, int) for v in value):
        raise _Problem(f"has {key}={str(value)[:40]}, which is not a list of whole numbers")
    return value


def _names(text: Mapping[str, Any], key: str) -> list[str]:
    value = text.get(key)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise _Problem(f"has a {key} that is not a list of strings")
    return value


def _json_type(value: object) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds: dict[type, str] = {list: "array", str: "string", int: "number", float: "number"}
    return next((name for kind, name in kinds.items() if isinstance(value, kind)), "null")
