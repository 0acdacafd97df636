"""config.json of a model: what is read from it, and what is refused, with ConfigMap, key and problem."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import make_snapshot, make_spec
from hypothesis import given
from hypothesis import strategies as st

from pd_operator.api.conditions import Reason
from pd_operator.core.capabilities import Refusal, State
from pd_operator.core.compatibility import review
from pd_operator.core.compatibility_model import FIELD, KEY, MAX_SIZE, Model, read_model
from pd_operator.core.plan import make_plan
from pd_operator.core.references import references
from pd_operator.core.snapshot import Reference

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8}


def read(config: Any) -> Model | Refusal:
    return read_model("cfg", {KEY: config if isinstance(config, str) else json.dumps(config)})


def model(**changes: Any) -> Model:
    found = read({**LLAMA, **changes})
    assert isinstance(found, Model), found
    return found


def refused(found: Model | Refusal) -> Refusal:
    """A refusal that names ConfigMap, key and remedy, and that is looked at again."""
    assert isinstance(found, Refusal), found
    assert (found.reason, found.field, found.value, found.outside) == (Reason.INVALID_SPEC, FIELD, "cfg", True)
    assert found.accepted.startswith(f"ConfigMap cfg, key {KEY} ")
    assert found.accepted.endswith("put the config.json of the model there, or remove spec.model.configMapRef")
    return found


PROBLEMS: dict[str, tuple[str, str]] = {
    "empty": ("", "is not JSON: Expecting value"),
    "cut off": ('{"model_type": "llama"', "is not JSON"),
    "yaml": ("model_type: llama", "is not JSON"),
    "a list": ("[1]", "is a JSON array, not an object"),
    "a string": ('"llama"', "is a JSON string, not an object"),
    "a number": ("1.5", "is a JSON number, not an object"),
    "true": ("true", "is a JSON boolean, not an object"),
    "null": ("null", "is a JSON null, not an object"),
    "nothing in it": ("{}", "has neither model_type nor architectures"),
    "generation_config.json": ('{"temperature": 0.6, "top_p": 0.9}', "has neither model_type nor architectures"),
    "architectures": ('{"architectures": "Llama"}', "has architectures that are not a list of strings"),
    "heads as text": (
        '{"model_type": "llama", "num_attention_heads": "32"}',
        "has num_attention_heads=32, which is not a whole number",
    ),
    "heads as truth": ('{"model_type": "llama", "num_attention_heads": true}', "num_attention_heads=True"),
    "negative heads": ('{"model_type": "llama", "num_key_value_heads": -8}', "has num_key_value_heads=-8"),
    "half a head": ('{"model_type": "llama", "num_key_value_heads": 1.5}', "has num_key_value_heads=1.5"),
    "huge": ('{"model_type": "llama", "num_key_value_heads": 1e99}', "has num_key_value_heads=1e+99"),
    "too many digits": ('{"model_type": "llama", "num_key_value_heads": ' + "9" * 5000 + "}", "is not JSON"),
    "layer types": ('{"model_type": "llama", "layer_types": "full"}', "has a layer_types that is not a list of strings"),
    "engram layers": ('{"model_type": "deepseek_v41", "engram_layer_ids": {"a": 1}}', "which is not a list of whole numbers"),
    "text_config": ('{"model_type": "gemma3", "text_config": [1]}', "has a text_config that is a JSON array, not an object"),
    "deep": ("[" * 100_000, "is n"),  # "is nested too deeply" or, in Pythons that can, "is not JSON"
    "too large": ('{"model_type": "llama", "x": "' + "y" * MAX_SIZE + '"}', f"bytes, more than {MAX_SIZE}"),
    "too large in bytes": ('{"model_type": "' + "é" * (MAX_SIZE // 2) + '"}', f"bytes, more than {MAX_SIZE}"),
}


@pytest.mark.parametrize(("text", "problem"), PROBLEMS.values(), ids=PROBLEMS)
def test_what_is_no_config_json_is_refused_with_the_problem(text: str, problem: str) -> None:
    refusal = refused(read(text))
    assert problem in refusal.accepted
    assert len(refusal.message) < 400, "content is not repeated"


def test_the_largest_that_is_read() -> None:
    head, tail = '{"model_type": "llama", "x": "', '"}'
    text = head + "y" * (MAX_SIZE - len(head) - len(tail)) + tail
    assert isinstance(read(text), Model)
    assert isinstance(read(text.replace('"x": "', '"x": "y')), Refusal)


@pytest.mark.parametrize(
    ("data", "binary", "problem"),
    [
        (None, frozenset(), "is missing (there is nothing)"),
        ({}, frozenset(), "is missing (there is nothing)"),
        ({"config.yaml": "x", "a": "y"}, frozenset({"b"}), "is missing (there is a, b, config.yaml)"),
        ({}, frozenset({KEY}), "is binary, not text"),
    ],
)
def test_a_config_map_without_the_key(data: dict[str, str] | None, binary: frozenset[str], problem: str) -> None:
    assert problem in refused(read_model("cfg", data, binary)).accepted


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
KEYS = st.sampled_from(
    [
        *("model_type", "architectures", "num_attention_heads", "num_key_value_heads", "kv_lora_rank", "index_topk"),
        *("compress_ratios", "sliding_window", "use_sliding_window", "layer_types", "layers_block_type", "engram_layer_ids"),
        *("ple_layer_ids", "text_config", "vision_config", "is_encoder_decoder", "num_experts", "linear_attn_config"),
        "hybrid_override_pattern",
    ]
)


@given(st.dictionaries(KEYS, VALUES, max_size=8))
def test_any_object_is_read_or_refused(config: dict[str, Any]) -> None:
    found = read(json.dumps(config))
    if isinstance(found, Refusal):
        refused(found)
    else:
        assert found.heads >= 0 and found.kv_heads >= 0 and found.experts >= 0 and isinstance(found.known, bool)
        assert all(isinstance(s, State) for s in found.states)


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused(text: str) -> None:
    found = read(text)
    assert isinstance(found, Model) or refused(found)


# --- what is read ---------------------------------------------------------------------------------------------------------


def test_sizes() -> None:
    assert (model().heads, model().kv_heads, model().experts) == (32, 8, 0)
    assert model(num_key_value_heads=None).kv_heads == 32, "as many as attention heads"
    assert model(num_key_value_heads=None, multi_query_group_num=2).kv_heads == 2
    assert model(n_routed_experts=256).experts == 256
    assert model(num_key_value_heads=[8, 4, 8]).kv_heads == 8, "one for each layer: the largest"


def test_the_language_model_inside_a_multimodal_one() -> None:
    inner = {"text_config": {"model_type": "qwen3_next", "num_attention_heads": 16}, "vision_config": {"depth": 2}}
    found = model(**inner)
    assert (found.heads, found.model_type, found.modalities) == (16, "qwen3_next", ("vision_config",))
    assert found.recurrent == (State.DELTA,)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        ({"sliding_window": 4096}, True),
        ({"sliding_window": None}, False),
        ({"sliding_window": 0}, False),
        ({"sliding_window": 4096, "use_sliding_window": False}, False),
        ({"sliding_window": 4096, "use_sliding_window": True}, True),
        ({"sliding_window": 4096, "layer_types": ["full_attention"]}, False),
        ({"layer_types": ["full_attention", "sliding_attention"]}, True),
    ],
)
def test_sliding_windows(config: dict[str, Any], window: bool) -> None:
    assert (State.WINDOW in model(**config).states) is window


@pytest.mark.parametrize("key", ["hybrid_override_pattern", "mamba_d_state", "mamba_num_heads", "linear_conv_kernel_dim"])
def test_signs_of_recurrence_in_a_type_that_no_table_knows(key: str) -> None:
    found = model(model_type="brand_new", **{key: 4})
    assert found.recurrent == (State.OTHER,) and not found.known
    assert model(**{key: 4}).recurrent == (), "the table knows llama"


def test_a_model_without_a_type_goes_by_its_architecture() -> None:
    found = read({"architectures": ["SomethingForCausalLM"]})
    assert isinstance(found, Model) and (found.model_type, found.known) == ("SomethingForCausalLM", False)


# --- where it goes --------------------------------------------------------------------------------------------------------


def test_the_config_map_is_a_reference() -> None:
    assert references(make_spec({"model": {"configMapRef": {"name": "cfg"}}})) == (Reference("ConfigMap", "cfg", FIELD),)
    assert references(make_spec({"model": {"configMapRef": {}}})) == ()


def test_a_reference_without_a_name_is_refused() -> None:
    spec = make_spec({"model": {"configMapRef": {}}})
    (refusal,) = review(spec, make_snapshot(spec).upstream, make_snapshot(spec).images)
    assert (refusal.reason, refusal.field) == (Reason.INVALID_SPEC, FIELD) and "the name of a ConfigMap" in refusal.accepted
    assert not refusal.outside, "only an edit of the spec helps"


def test_the_plan_takes_the_refusal_of_what_cannot_be_read() -> None:
    found = read("{")
    snapshot = make_snapshot({"model": {"configMapRef": {"name": "cfg"}}}, model=found)
    plan = make_plan(snapshot)
    assert plan.refusal == found and plan.refusal.outside and plan.more_refusals == 0


def test_what_the_config_json_decides_is_looked_at_again() -> None:
    """The spec may stay as it is when the ConfigMap is corrected; without a model only an edit of the spec helps."""
    spec = {"prefill": {"parallelism": {"tensor": 3}}, "decode": {"parallelism": {"tensor": 3}}}
    with_model = make_plan(make_snapshot(spec, model=model())).refusal
    assert with_model is not None and with_model.outside
    without = make_plan(make_snapshot({"decode": {"parallelism": {"pipeline": 2}}})).refusal
    assert without is not None and not without.outside
