"""Parts of the stand-ins that need no process: KV blocks, text, metrics pages, command lines, shapes."""

import json
import random
from typing import Any

import pytest

from standin import conformance, kv, kvconfig, model, shapes
from standin.args import parse_serve
from standin.cache_args import parse_server
from standin.cache_store import CacheMetrics, ChunkStore
from standin.core import StartError, count_blocks
from standin.engine_metrics import EngineMetrics, token_buckets
from standin.settings import Faults, Settings, StepLaw

NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}


def test_the_same_tokens_give_the_same_keys_and_other_tokens_other_keys() -> None:
    root = b"root"
    first = kv.prompt_keys(root, list(range(40)), 16)
    assert first == kv.prompt_keys(root, list(range(40)), 16)
    other = kv.prompt_keys(root, [*range(39), 99], 16)
    assert first[:2] == other[:2]
    assert first[2] != other[2]
    assert kv.prompt_keys(b"other model", list(range(40)), 16)[0] != first[0]


def test_blocks_are_reused_oldest_first_and_cached_ones_are_found_until_then() -> None:
    pool = kv.BlockPool(4, 16, 8, caching=True)
    taken = pool.allocate(3)
    for block, key in zip(taken, (b"a", b"b", b"c"), strict=True):
        pool.fill(block, key)
        pool.cache(block, key)
    assert pool.usage == pytest.approx(0.75)
    pool.release(taken)
    assert pool.usage == 0
    found = pool.lookup([b"a", b"b", b"x"])
    assert [block.seed for block in found] == [b"a", b"b"]
    pool.hold(found)
    assert not pool.can_allocate(3)
    pool.allocate(2)  # takes the block that never was used and the one of key c
    assert pool.lookup([b"c"]) == []
    with pytest.raises(MemoryError):
        pool.allocate(1)


def test_received_contents_are_kept_when_they_are_not_what_was_expected() -> None:
    pool = kv.BlockPool(2, 16, 8, caching=True)
    right, wrong = pool.allocate(2)
    pool.receive(right, b"k", kv.expand(b"k", pool.block_bytes))
    pool.receive(wrong, b"k", bytes(pool.block_bytes))
    assert right.raw is None
    assert pool.contents(wrong) == bytes(pool.block_bytes)
    assert pool.digest(right) != pool.digest(wrong)


def test_text_goes_through_the_tokenizer_and_back() -> None:
    state = model.state_of([b"digest"])
    tokens = [model.next_token(state, index) for index in range(48)]
    assert model.encode(model.decode(tokens)) == tokens
    assert len(set(tokens)) >= 40
    assert [model.next_token(state, index, 1) for index in range(48)] != tokens
    assert model.encode("hello world, 12345") == model.encode("hello world, 12345")
    assert model.encode("<|user|>hi</s>")[0] >= model.WORDS


def test_step_time_is_linear_and_jitter_is_seeded() -> None:
    law = StepLaw(1.0, 0.1, 2.0, 0.01, 0.001)
    dice = random.Random(1)
    assert law.seconds(10, 0, 0, dice) == pytest.approx(2.0)
    assert law.seconds(0, 3, 100, dice) == pytest.approx(2.0 + 0.03 + 0.1)
    assert law.seconds(10, 3, 100, dice) == pytest.approx(4.13)
    noisy = StepLaw(jitter=0.2)
    assert noisy.seconds(10, 1, 5, random.Random(7)) == noisy.seconds(10, 1, 5, random.Random(7))


def test_settings_come_from_the_environment_and_unknown_names_are_refused() -> None:
    settings = Settings.from_environment({"STANDIN_VERSION": "0.31.0", "STANDIN_FAULTS": '{"slow": 2}', "PATH": "/bin"})
    assert settings.minor == (0, 31)
    assert settings.faults.slow == 2.0
    with pytest.raises(ValueError, match="STANDIN_TYPO"):
        Settings.from_environment({"STANDIN_TYPO": "1"})
    with pytest.raises(ValueError, match="unknown fault"):
        Faults().update({"nonsense": True})
    with pytest.raises(ValueError, match="takes a bool"):
        Faults().update({"stall": 1})


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--no-such-flag", "1"],
        ["m", "--max-num-seqs", "zero"],
        ["m", "--max-num-seqs", "0"],
        ["m", "--shutdown-timeout", "-1"],
        ["m", "--kv-transfer-config", "{"],
        ["m", "--kv-transfer-config", '{"kv_connector": "NixlConnector"}'],
        ["m", "--kv-transfer-config", '{"kv_connector": "P2pNcclConnector", "kv_role": "kv_both"}'],
        ["--served-model-name"],
        [],
    ],
)
def test_a_wrong_command_line_ends_with_status_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_serve(arguments, {})
    assert ended.value.code == 2


def test_a_right_command_line_is_understood() -> None:
    line = ["/models/x", "--served-model-name", "chat", "alias", "--port", "8001", "--max_model_len", "4k", "-tp", "2"]
    line += [
        "--no-enable-prefix-caching",
        "--kv-transfer-config",
        json.dumps(NIXL),
        "--gpu-memory-utilization=0.9",
        "--enforce-eager",
    ]
    args = parse_serve(line, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"})
    assert (args.model, args.served_names, args.port) == ("/models/x", ["chat", "alias"], 8001)
    assert (args.max_model_len, args.tensor_parallel_size, args.prefix_caching) == (4000, 2, False)
    assert (args.side_host, args.side_port) == ("10.0.0.1", 5601)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({**NIXL, "kv_role": "both"}, "Unsupported kv_role"),
        ({**NIXL, "kv_load_failure_policy": "ignore"}, "kv_load_failure_policy"),
        ({**NIXL, "surprise": 1}, "unexpected keys"),
        ({"kv_connector": "MultiConnector", "kv_role": "kv_both"}, "connectors"),
        (
            {
                "kv_connector": "MultiConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"connectors": [{"kv_connector": "X", "kv_role": "kv_both"}]},
            },
            "no connector",
        ),
    ],
)
def test_kv_transfer_config_is_checked_as_vllm_checks_it(config: dict[str, Any], words: str) -> None:
    with pytest.raises(kvconfig.KvConfigError, match=words):
        kvconfig.parse(config)


def test_the_policy_is_read_at_the_top_level_only() -> None:
    child = {**NIXL, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": {"kv_lease_duration": 45}}
    top = {"kv_connector": "MultiConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {"connectors": [child]}}
    parsed = kvconfig.parse(top)
    assert parsed.policy == "fail"
    assert parsed.nixl == kvconfig.NixlSettings(45.0)
    assert not parsed.consumer


def test_a_cache_that_cannot_hold_one_request_is_refused() -> None:
    args = parse_serve(["m", "--max-model-len", "1000", "--num-gpu-blocks-override", "10"], {})
    with pytest.raises(StartError, match="larger than the available 10"):
        count_blocks(args, Settings())
    args = parse_serve(["m", "--max-model-len", "1000", "--kv-cache-memory-bytes", "1M", "--block-size", "32"], {})
    assert count_blocks(args, Settings()) == 64


def test_metric_pages_have_vllms_names_and_types() -> None:
    page = EngineMetrics("m", 100, consumer=True, nixl=True, version=(0, 32)).registry.render().decode()
    families = shapes.families(page)
    assert families["vllm:num_requests_kv_fetch_by_stage"] == {"type": "gauge", "labels": ["engine", "model_name", "stage"]}
    assert families["vllm:prompt_tokens_total"]["type"] == "counter"
    assert families["vllm:iteration_tokens_total"]["type"] == "histogram"
    assert families["vllm:admission_rejections_total"]["labels"] == ["model_name", "reason"]
    assert shapes.total(page, "vllm:request_success_total", finished_reason="abort") == 0
    older = shapes.families(EngineMetrics("m", 100, consumer=True, nixl=True, version=(0, 31)).registry.render().decode())
    assert set(families) - set(older) >= {"vllm:num_requests_kv_fetch_by_stage", "vllm:nixl_num_notifications_after_expiry_total"}
    producer = shapes.families(EngineMetrics("m", 100, consumer=False, nixl=True, version=(0, 32)).registry.render().decode())
    assert "vllm:num_requests_kv_fetch_by_stage" not in producer
    assert token_buckets(100) == [1, 2, 5, 10, 20, 50, 100]


def test_chunks_are_evicted_in_bulk_and_counted() -> None:
    metrics = CacheMetrics()
    assert "lmcache_mp_l1_write_chunks_total" not in metrics.registry.render().decode()
    store = ChunkStore(1000, 10, 0.8, 0.2, metrics)
    for number in range(9):
        store.put(str(number), bytes(95))
    assert len(store) == 6
    assert store.prefix(["0", "1"]) == 0
    assert store.prefix(["7", "8", "x"]) == 2
    assert shapes.total(metrics.registry.render().decode(), "lmcache_mp_l1_evicted_chunks_total") == 3


@pytest.mark.parametrize(
    "arguments",
    [
        ["--l1-size-gb", "1"],
        ["--eviction-policy", "LRU"],
        ["--l1-size-gb", "1", "--eviction-policy", "FIFO"],
        ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--p2p-advertise-url", "10.0.0.1:5700"],
        ["--l1-size-gb", "1", "--eviction-policy", "LRU", "--no-such-flag"],
    ],
)
def test_a_wrong_cache_command_line_ends_with_status_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_COORDINATOR_URL", raising=False)
    with pytest.raises(SystemExit) as ended:
        parse_server(arguments)
    assert ended.value.code == 2


def test_shapes_hold_types_and_not_values() -> None:
    assert shapes.shape({"a": [1, 2], "b": None, "c": [{"d": 1.5}, {"d": "x"}]}) == {
        "a": ["int"],
        "b": "null",
        "c": [{"d": "float"}, {"d": "str"}],
    }
    text = 'data: {"a":1}\n\ndata: {"a":2}\n\ndata: {"a":"x"}\n\ndata: [DONE]\n\n'
    assert shapes.events(text) == [{"a": "int"}, {"a": "str"}, "[DONE]"]
    assert shapes.error_values({"error": {"type": "t", "param": "body.12", "code": 400, "message": "m"}}) == {
        "type": "t",
        "param": "body.N",
        "code": 400,
    }


def test_differences_are_named_unless_a_table_explains_them() -> None:
    left = {"calls": {"x": {"status": 200}}, "metrics": {"prefill": {"a": {"type": "gauge"}}}}
    right = {
        "calls": {"x": {"status": 404}},
        "metrics": {"prefill": {"b": {"type": "gauge"}, "c": {"type": "gauge"}}},
    }
    assert conformance.compare(left, left) == []
    assert conformance.compare(left, right) == [
        "different: calls/x/status: stand-in 200, real 404",
        "only real: metrics/prefill/b/type = gauge",
        "only real: metrics/prefill/c/type = gauge",
        "only stand-in: metrics/prefill/a/type = gauge",
    ]
    known = {"metrics/prefill/python_info/labels": ["version"]}
    assert conformance.reason_for(next(iter(known)), conformance.DIFFERENT)
