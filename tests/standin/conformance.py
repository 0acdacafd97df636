"""The same calls against a stand-in and against the real thing, as a record that can be compared.

    python3 -m standin.conformance record --prefill URL --decode URL [--cache URL] --out record.json
    python3 -m standin.conformance compare standin.json real.json

A record holds, for every call, the status, the content type and the shape of the answer; for streams the shapes of the
events; for /metrics the families with type and label names. It holds no values that differ from run to run.
"""

import argparse
import fnmatch
import http.client
import json
import sys
import uuid
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from standin import shapes

Record = dict[str, Any]
WORDS = "prefill decode cache block token router engine server request stream answer system pod node service volume"

# A chunk is read back only where LMCache holds more of a prompt than the engine's own cache, which keeps whole blocks and never the
# last token: that hangs on how many tokens a prompt has, and each has random words in front.
READ_BACK = "counts once a chunk was read back, which hangs on how many tokens the random prompts have"

# Differences that are known, each with its reason. Patterns are matched against the path of the difference.
REAL_ONLY: dict[str, str] = {
    "metrics/*/vllm:estimated_*": "FLOP and bandwidth estimates of a real model; the stand-in has none",
    "metrics/cache/lmcache_mp_l1_chunk_*": "ages of chunks: histograms of a sample of 1 %, so they may or may not appear",
    "metrics/cache/lmcache_mp_l0_block_*": "ages of engine blocks: histograms of a sample of 1 %, so they may or may not appear",
    "metrics/cache/lmcache_mp_l1_read_chunks_total": READ_BACK,
    "metrics/cache/lmcache_mp_real_reuse_gap*": "reuse of chunks: histograms of a sample of 1 %, so they may or may not appear",
    "calls/cache_status/shape/*context_meta/*": "keys are the random numbers of engine instances",
}
STANDIN_ONLY: dict[str, str] = {
    "metrics/cache/lmcache_mp_l1_read_chunks_total": READ_BACK,
    "calls/cache_status/shape/*context_meta/*": "keys are the random numbers of engine instances",
}
DIFFERENT: dict[str, str] = {
    "metrics/*/python_info/labels": "labels depend on the interpreter",
    "calls/cache_status/shape/storage_manager/l2_adapters": "with P2P the real server lists one adapter per peer",
}


class Client:
    """HTTP calls to one server, each on its own connection."""

    def __init__(self, url: str, timeout_s: float = 60.0) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self.timeout_s = timeout_s

    def call(
        self, method: str, path: str, body: Any = None, *, raw: bytes | None = None, media: str = "application/json"
    ) -> tuple[int, str, str]:
        """(status, content type, text). Raises OSError when there is no answer in time."""
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)
        try:
            content = raw if raw is not None else (json.dumps(body).encode() if body is not None else None)
            connection.request(method, path, content, {"content-type": media} if content is not None else {})
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            return answer.status, (answer.getheader("content-type") or "").split(";")[0], text
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None) -> Any:
        """The decoded answer of a call that must succeed. Raises RuntimeError otherwise."""
        status, _, text = self.call(method, path, body)
        if status != 200:
            raise RuntimeError(f"{method} {path} answered {status}: {text[:500]}")
        return json.loads(text)

    def page(self) -> str:
        """The text of /metrics."""
        return self.call("GET", "/metrics")[2]


def normalise(status: int, content_type: str, text: str) -> Record:
    """The record of one call."""
    record: Record = {"status": status, "content_type": content_type}
    try:
        body = json.loads(text) if text else None
    except ValueError:
        return {**record, "shape": "text"}
    error = shapes.error_values(body)
    return {**record, "error": error} if error else {**record, "shape": shapes.shape(body)}


def prompt_of(words: int) -> str:
    """A prompt that no run has used before, so that no cache knows it."""
    some = WORDS.split()
    return f"{uuid.uuid4().hex} " + " ".join(some[index % len(some)] for index in range(words))


def engine_calls(client: Client, model: str, max_model_len: int) -> Record:
    """All calls that a single engine answers."""
    chat = {"model": model, "messages": [{"role": "user", "content": prompt_of(30)}], "max_tokens": 8, "temperature": 0}
    completion = {"model": model, "prompt": prompt_of(30), "max_tokens": 8, "temperature": 0}
    posts: dict[str, tuple[str, Any]] = {
        "chat": ("/v1/chat/completions", chat),
        "chat_token_ids": ("/v1/chat/completions", {**chat, "return_token_ids": True}),
        "chat_completion_limit": ("/v1/chat/completions", {**chat, "max_tokens": None, "max_completion_tokens": 4}),
        "chat_n": ("/v1/chat/completions", {**chat, "n": 2, "temperature": 1.0}),
        "chat_greedy_n": ("/v1/chat/completions", {**chat, "n": 2}),
        "completion": ("/v1/completions", completion),
        "completion_default_limit": ("/v1/completions", {"model": model, "prompt": "hello"}),
        "completion_tokens": ("/v1/completions", {**completion, "prompt": [5, 6, 7, 8, 9], "return_token_ids": True}),
        "completion_list": ("/v1/completions", {**completion, "prompt": ["one", "two"]}),
        "completion_no_model": ("/v1/completions", {"prompt": "hello", "max_tokens": 2}),
        "unknown_model": ("/v1/chat/completions", {**chat, "model": "no-such-model"}),
        "missing_messages": ("/v1/chat/completions", {"model": model, "max_tokens": 4}),
        "missing_prompt": ("/v1/completions", {"model": model, "max_tokens": 4}),
        "messages_no_list": ("/v1/chat/completions", {**chat, "messages": "hello"}),
        "max_tokens_no_number": ("/v1/completions", {**completion, "max_tokens": "many"}),
        "max_tokens_zero": ("/v1/completions", {**completion, "max_tokens": 0}),
        "chat_max_tokens_zero": ("/v1/chat/completions", {**chat, "max_tokens": 0}),
        "max_tokens_negative": ("/v1/completions", {**completion, "max_tokens": -1}),
        "max_tokens_too_many": ("/v1/completions", {**completion, "max_tokens": max_model_len + 1}),
        "prompt_too_long": ("/v1/completions", {**completion, "prompt": [7] * (max_model_len + 10)}),
        "prompt_fills_model": ("/v1/completions", {**completion, "prompt": [7] * max_model_len}),
        "empty_prompt": ("/v1/completions", {**completion, "prompt": ""}),
        "stream_options_alone": ("/v1/completions", {**completion, "stream_options": {"include_usage": True}}),
        "stream_unknown_model": ("/v1/completions", {**completion, "stream": True, "model": "no-such-model"}),
        "tokenize": ("/tokenize", {"model": model, "prompt": "hello world"}),
    }
    record = {name: normalise(*client.call("POST", path, body)) for name, (path, body) in posts.items()}
    record |= stream_calls(client, chat, completion)
    for name, method, path in (
        ("health", "GET", "/health"),
        ("ping", "GET", "/ping"),
        ("load", "GET", "/load"),
        ("version", "GET", "/version"),
        ("models", "GET", "/v1/models"),
        ("no_such_path", "GET", "/no/such/path"),
        ("wrong_method", "GET", "/v1/chat/completions"),
    ):
        record[name] = normalise(*client.call(method, path))
    record["bad_json"] = normalise(*client.call("POST", "/v1/completions", raw=b'{"prompt": '))
    record["wrong_media"] = normalise(*client.call("POST", "/v1/completions", raw=b"prompt=hello", media="text/plain"))
    return record


def stream_calls(client: Client, chat: Record, completion: Record) -> Record:
    """Streams with and without usage and token ids."""
    record: Record = {}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    streams = {
        "chat_stream": ("/v1/chat/completions", {**chat, "stream": True}),
        "chat_stream_usage": ("/v1/chat/completions", {**chat, **usage}),
        "chat_stream_token_ids": ("/v1/chat/completions", {**chat, "stream": True, "return_token_ids": True}),
        "completion_stream": ("/v1/completions", {**completion, "stream": True}),
        "completion_stream_usage": ("/v1/completions", {**completion, **usage}),
        "completion_stream_token_ids": ("/v1/completions", {**completion, "stream": True, "return_token_ids": True}),
    }
    for name, (path, body) in streams.items():
        status, content_type, text = client.call("POST", path, body)
        record[name] = {"status": status, "content_type": content_type, "events": shapes.events(text)}
    return record


def handoff_calls(prefill: Client, decode: Client, model: str) -> Record:
    """A handoff by hand: the prefill leg, then the decode leg with what the first one answered."""
    record: Record = {}
    for name, path, request in (
        ("chat", "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt_of(60)}]}),
        ("completion", "/v1/completions", {"prompt": prompt_of(60)}),
    ):
        base = {"model": model, "temperature": 0, **request}
        asked = {"do_remote_decode": True, "do_remote_prefill": False}
        first = {**base, "max_tokens": 1, "stream": False, "kv_transfer_params": asked}
        status, content_type, text = prefill.call("POST", path, first)
        record[f"{name}_prefill_leg"] = normalise(status, content_type, text)
        params = json.loads(text).get("kv_transfer_params") if status == 200 else None
        before = decode.page()
        second = {**base, "max_tokens": 8, "kv_transfer_params": params}
        record[f"{name}_decode_leg"] = normalise(*decode.call("POST", path, second))
        after = decode.page()
        moved = {
            "transfers": shapes.total(after, "vllm:nixl_bytes_transferred_count")
            - shapes.total(before, "vllm:nixl_bytes_transferred_count"),
            "local_compute": shapes.total(after, "vllm:prompt_tokens_by_source_total", source="local_compute")
            - shapes.total(before, "vllm:prompt_tokens_by_source_total", source="local_compute"),
        }
        record[f"{name}_moved"] = moved
    return record


def cache_calls(client: Client) -> Record:
    """What an LMCache server answers. /config only by its first level: the rest is LMCache's own business."""
    record: Record = {}
    for path in ("/", "/healthcheck", "/status", "/version", "/lmc_version", "/commit_id", "/no/such/path"):
        record["cache_" + (path.strip("/").replace("/", "_") or "root")] = normalise(*client.call("GET", path))
    status, content_type, text = client.call("GET", "/config")
    record["cache_config"] = {"status": status, "content_type": content_type, "shape": sorted(json.loads(text))}
    return record


def record_of(prefill_url: str, decode_url: str, cache_url: str | None = None, *, timeout_s: float = 120.0) -> Record:
    """Runs all calls.

    Raises OSError when a server does not answer and RuntimeError when it does not tell its model.
    """
    prefill, decode = Client(prefill_url, timeout_s), Client(decode_url, timeout_s)
    card = prefill.json("GET", "/v1/models")["data"][0]
    model, length = str(card["id"]), int(card["max_model_len"])
    calls: Record = {f"decode_{name}": value for name, value in engine_calls(decode, model, length).items()}
    calls |= {f"prefill_{name}": value for name, value in engine_calls(prefill, model, length).items()}
    record: Record = {"handoff": handoff_calls(prefill, decode, model), "calls": calls}
    if cache_url:
        record["calls"] |= cache_calls(Client(cache_url, timeout_s))
    pages = {"prefill": prefill.page(), "decode": decode.page()}
    if cache_url:
        pages["cache"] = Client(cache_url, timeout_s).page()
    record["metrics"] = {name: shapes.families(page) for name, page in pages.items()}
    return record


def reason_for(path: str, table: dict[str, str]) -> str | None:
    """The reason why a difference is allowed; None if it is not."""
    for pattern, reason in table.items():
        if fnmatch.fnmatchcase(path, pattern) or fnmatch.fnmatchcase(path, pattern + "/*"):
            return reason
    return None


def compare(standin: Record, real: Record) -> list[str]:
    """Differences between two records that no table above explains, one line each."""
    left, right = shapes.flatten(standin), shapes.flatten(real)
    lines = [f"only real: {path} = {right[path]}" for path in right if path not in left and not reason_for(path, REAL_ONLY)]
    lines += [f"only stand-in: {path} = {left[path]}" for path in left if path not in right and not reason_for(path, STANDIN_ONLY)]
    for path in left:
        if path in right and left[path] != right[path] and not reason_for(path, DIFFERENT):
            lines.append(f"different: {path}: stand-in {left[path]}, real {right[path]}")
    return sorted(lines)


def main(argv: list[str]) -> int:
    """Entry point; status 1 when there are differences."""
    parser = argparse.ArgumentParser(prog="standin.conformance")
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("--prefill", required=True)
    recording.add_argument("--decode", required=True)
    recording.add_argument("--cache")
    recording.add_argument("--out", type=Path, required=True)
    comparing = commands.add_parser("compare")
    comparing.add_argument("standin", type=Path)
    comparing.add_argument("real", type=Path)
    given = parser.parse_args(argv)
    if given.command == "record":
        given.out.write_text(json.dumps(record_of(given.prefill, given.decode, given.cache), indent=1, sort_keys=True))
        return 0
    differences = compare(json.loads(given.standin.read_text()), json.loads(given.real.read_text()))
    print("\n".join(differences) or "no differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
