"""The command line of `vllm serve`: all flags are known, the ones that matter are checked and used."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from standin import flags
from standin.kvconfig import KvConfig, KvConfigError, parse

_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_POSITIVE = (
    "block_size",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_num_queued_reqs",
    "max_num_queued_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "num_gpu_blocks_override",
    "kv_cache_memory_bytes",
)
_SAME_NAME = (
    *("host", "port", "shutdown_timeout", "block_size", "max_num_seqs", "max_num_batched_tokens", "max_num_queued_reqs"),
    *("max_num_queued_tokens", "tensor_parallel_size", "pipeline_parallel_size", "dtype", "kv_cache_dtype"),
    *("num_gpu_blocks_override", "kv_cache_memory_bytes", "stream_interval"),
)


@dataclass
class EngineArgs:
    """What the stand-in uses of the command line."""

    model: str
    served_names: list[str]
    host: str = "0.0.0.0"
    port: int = 8000
    shutdown_timeout: int = 0  # seconds; 0 aborts at SIGTERM
    block_size: int = 16
    max_model_len: int = 8192
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    prefix_caching: bool = True
    stream_interval: int = 1
    api_keys: list[str] = field(default_factory=list)
    kv: KvConfig = field(default_factory=KvConfig.none)
    side_host: str = "localhost"
    side_port: int = 5600
    dev_mode: bool = False  # VLLM_SERVER_DEV_MODE: routes for tests
    keep_alive: float = 5.0  # seconds that an idle HTTP connection stays open


def whole(text: str) -> int:
    """A whole number, with vLLM's unit letters. Raises ArgumentTypeError."""
    unit = _UNITS.get(text[-1:], 1)
    number = text[:-1] if text[-1:] in _UNITS else text
    try:
        value = float(number) * unit
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}") from None
    if value != int(value):
        raise argparse.ArgumentTypeError(f"invalid int value: {text!r}")
    return int(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm serve", usage="vllm serve [model_tag] [options]")
    parser.add_argument("model_tag", nargs="?")

    def add(table: str, **options: Any) -> None:
        for words in table.split():
            names = words.split("|")
            parser.add_argument(*names[1:], names[0], default=None, **options)

    add(flags.TEXT)
    add(flags.BOOLEAN, action=argparse.BooleanOptionalAction)
    add(flags.NUMBER, type=whole)
    add(flags.FRACTION, type=float)
    add(flags.MANY, nargs="+")
    add(flags.OPTIONAL, nargs="?")
    add(flags.SWITCH, action="store_true")
    add(flags.REPEATED, action="append")
    return parser


def _dashes(argument: str) -> str:
    """`--max_model_len=1` is `--max-model-len=1` for vLLM."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value


def _model_length(model: str, default: int) -> int:
    """max_position_embeddings of a local model's config.json, else `default` tokens."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
        return int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return default


def _kv(text: str | None, parser: argparse.ArgumentParser) -> KvConfig:
    """The checked --kv-transfer-config; ends the process with status 2 if vLLM would refuse it."""
    if text is None:
        return KvConfig.none()
    try:
        return parse(json.loads(text))
    except KvConfigError as error:
        parser.error(f"argument --kv-transfer-config: {error}")
    except ValueError as error:
        parser.error(f"argument --kv-transfer-config: not JSON: {error}")


def _check_numbers(given: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    for name in _POSITIVE:
        value = getattr(given, name)
        if value is not None and value <= 0:
            parser.error(f"argument --{name.replace('_', '-')}: must be greater than 0, not {value}")
    if given.shutdown_timeout is not None and given.shutdown_timeout < 0:
        parser.error("argument --shutdown-timeout: must not be negative")


def parse_serve(argv: Sequence[str], environment: dict[str, str] | None = None, default_length: int = 8192) -> EngineArgs:
    """Parses the arguments after `serve`.

    Ends the process with status 2 for a flag that vLLM does not have or a value that it does not take, as argparse does.
    """
    environment = dict(os.environ) if environment is None else environment
    parser = _parser()
    given = parser.parse_args([_dashes(argument) for argument in argv])
    model = given.model_tag or given.model
    if not model:
        parser.error("`model` should be provided as the first positional argument when using `vllm serve`")
    _check_numbers(given, parser)
    try:
        side_port = int(environment.get("VLLM_NIXL_SIDE_CHANNEL_PORT", "5600"))
        keep_alive = float(environment.get("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "5"))
    except ValueError as error:
        parser.error(f"environment: {error}")
    keys = given.api_key or ([environment["VLLM_API_KEY"]] if environment.get("VLLM_API_KEY") else [])
    arguments = EngineArgs(
        model=model,
        served_names=given.served_model_name or [model],
        max_model_len=given.max_model_len or _model_length(model, default_length),
        prefix_caching=given.enable_prefix_caching is not False,
        api_keys=keys,
        kv=_kv(given.kv_transfer_config, parser),
        side_host=environment.get("VLLM_NIXL_SIDE_CHANNEL_HOST", "localhost"),
        side_port=side_port,
        dev_mode=environment.get("VLLM_SERVER_DEV_MODE", "0") == "1",
        keep_alive=keep_alive,
    )
    for name in _SAME_NAME:
        if getattr(given, name) is not None:
            setattr(arguments, name, getattr(given, name))
    return arguments


def split_command(argv: Sequence[str]) -> list[str]:
    """The arguments of `vllm serve ...`; prints the version or refuses other commands (status 2)."""
    if argv and argv[0] in ("--version", "-v"):
        print(os.environ.get("STANDIN_VERSION", "0.32.0"))
        sys.exit(0)
    if not argv or argv[0] != "serve":
        print(f"usage: vllm serve MODEL [flags]; the stand-in has no command {argv[0] if argv else ''!r}", file=sys.stderr)
        sys.exit(2)
    return list(argv[1:])
