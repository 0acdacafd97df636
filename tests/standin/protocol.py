"""OpenAI's request and answer bodies as vLLM 0.32 reads and writes them.

The shapes are those of vllm/entrypoints/openai/{chat_completion,completion}/protocol.py: which keys an answer has, also
when they are null, and which keys a chunk of a stream has. Errors are as its exception handlers write them.
"""

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from standin import model
from standin.sequence import Limits, Output


class ApiError(Exception):
    """An error answer."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param

    def body(self) -> dict[str, Any]:
        """The JSON that the client gets."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.status}}


def invalid(message: str, param: str | None) -> ApiError:
    """FastAPI's validation error as vLLM renders it."""
    return ApiError(400, f"1 validation error:\n  {message}", "Bad Request", param)


def refused(message: str, param: str | None, value: object = None) -> ApiError:
    """vLLM's own validation error: its text ends with the parameter and the value."""
    extras = ", ".join(f"{name}={it}" for name, it in (("parameter", param), ("value", value)) if it is not None)
    return ApiError(400, f"{message} ({extras})" if extras else message, "BadRequestError", param)


@dataclass
class Generation:
    """A checked request."""

    kind: str  # chat or completion
    request_id: str
    model_name: str
    prompts: list[list[int]]
    max_tokens: int | None
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    min_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    return_token_ids: bool
    logprobs: bool
    params: dict[str, Any]
    greedy: bool  # temperature 0; the text does not depend on the temperature
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def response_id(self) -> str:
        """The id of the answer."""
        return f"{'chatcmpl' if self.kind == 'chat' else 'cmpl'}-{self.request_id}"

    def limits(self, prompt_length: int, max_model_len: int, eos_tokens: int) -> Limits:
        """When an answer to a prompt of that many tokens ends."""
        room = max_model_len - prompt_length
        return Limits(
            max_tokens=room if self.max_tokens is None else min(room, self.max_tokens),
            natural_end=self.max_tokens is None,
            min_tokens=self.min_tokens,
            stop=self.stop,
            ignore_eos=self.ignore_eos,
            eos_tokens=eos_tokens,
        )


def _field(body: dict[str, Any], name: str, kinds: tuple[type, ...], default: Any) -> Any:
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise invalid(
            f"{{'type': '{wanted}_type', 'loc': 'body.{name}', 'msg': 'Input should be a valid {wanted}'}}", f"body.{name}"
        )
    return value


def _prompts(prompt: Any) -> list[list[int]]:
    """The token ids of every prompt of a completion request."""
    if isinstance(prompt, str):
        return [model.encode(prompt)]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in prompt):
            return [list(prompt)]
        if all(isinstance(item, (str, list)) for item in prompt):
            return [tokens for item in prompt for tokens in _prompts(item)]
    raise invalid("{'type': 'string_type', 'loc': 'body.prompt', 'msg': 'Input should be a valid string'}", "body.prompt")


def parse(kind: str, body: Any, request_id: str | None) -> Generation:
    """Checks the body of a request. Raises ApiError as vLLM answers."""
    if not isinstance(body, dict):
        raise invalid("{'type': 'model_attributes_type', 'loc': 'body', 'msg': 'Input should be a valid dictionary'}", "body")
    if kind == "chat":
        messages = body.get("messages")
        if messages is None:
            raise invalid("{'type': 'missing', 'loc': 'body.messages', 'msg': 'Field required'}", "body.messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) and message.get("role") for message in messages):
            raise invalid("{'type': 'list_type', 'loc': 'body.messages', 'msg': 'Input should be a valid list'}", "body.messages")
        prompts = [model.encode(model.chat_prompt(messages))]
        limit = _field(body, "max_completion_tokens", (int,), _field(body, "max_tokens", (int,), None))
    else:
        if body.get("prompt") is None:
            raise refused("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
        prompts = _prompts(body["prompt"])
        limit = _field(body, "max_tokens", (int,), 16)
    stream = bool(_field(body, "stream", (bool,), False))
    options = _field(body, "stream_options", (dict,), None)
    if options is not None and not stream:
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
    stop = body.get("stop") or ()
    params = _field(body, "kv_transfer_params", (dict,), {})
    logprobs = body.get("logprobs")
    return Generation(
        kind=kind,
        request_id=request_id or str(body.get("request_id") or uuid.uuid4().hex[:16]),
        model_name=str(body.get("model") or ""),
        prompts=prompts,
        max_tokens=limit,
        n=int(_field(body, "n", (int,), 1)),
        stream=stream,
        include_usage=bool((options or {}).get("include_usage")),
        continuous_usage=bool((options or {}).get("include_usage") and (options or {}).get("continuous_usage_stats")),
        min_tokens=int(_field(body, "min_tokens", (int,), 0)),
        stop=(stop,) if isinstance(stop, str) else tuple(str(text) for text in stop),
        ignore_eos=bool(body.get("ignore_eos")),
        return_token_ids=bool(body.get("return_token_ids")),
        logprobs=bool(logprobs) if kind == "chat" else logprobs is not None and logprobs is not False,
        params=params,
        greedy=body.get("temperature") == 0,
    )


def check_lengths(generation: Generation, max_model_len: int) -> None:
    """Raises ApiError for a prompt that is too long or a limit that makes no sense."""
    if generation.max_tokens is not None and generation.max_tokens > max_model_len:
        name = "max_completion_tokens" if generation.kind == "chat" else "max_tokens"
        raise refused(
            f"{name}={generation.max_tokens} cannot be greater than max_model_len={max_model_len}. "
            "Please request fewer output tokens.",
            name,
            generation.max_tokens,
        )
    for prompt in generation.prompts:
        if not prompt:
            raise refused("The decoder prompt cannot be empty", "prompt")
        if len(prompt) > max_model_len:
            raise refused(
                f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains {len(prompt)} input "
                "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the input prompt.",
                "input_tokens",
                len(prompt),
            )
        room = max_model_len - len(prompt)
        limit = room if generation.max_tokens is None else min(room, generation.max_tokens)
        if limit < 1:
            raise refused(f"max_tokens must be at least 1, got {limit}.", "max_tokens", limit)
    if generation.n < 1:
        raise refused(f"n must be at least 1, got {generation.n}.", "n", generation.n)
    if generation.n > 1 and generation.greedy:
        raise refused(f"n must be 1 when using greedy sampling, got {generation.n}.", None)


@dataclass
class Answer:
    """One finished choice."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = "stop"
    stop_reason: str | None = None
    params: dict[str, Any] | None = None

    def add(self, output: Output) -> None:
        """Appends what one step gave."""
        self.tokens += output.tokens
        self.text += output.text
        if output.finish_reason:
            self.finish_reason, self.stop_reason, self.params = output.finish_reason, output.stop_reason, output.kv_transfer_params


def usage(prompt_tokens: int, completion_tokens: int, *, full: bool) -> dict[str, Any]:
    """The usage object; `full` has the keys that are null."""
    values: dict[str, Any] = {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
    }
    return {**values, "prompt_tokens_details": None, "completion_tokens_details": None} if full else values


def chat_logprobs(tokens: list[int]) -> dict[str, Any]:
    """Invented log probabilities of the right shape for a chat answer."""
    texts = [model.word(token) for token in tokens]
    return {
        "content": [{"token": text, "logprob": -1.0, "bytes": list(text.encode()), "top_logprobs": []} for text in texts],
    }


def completion_logprobs(tokens: list[int]) -> dict[str, Any]:
    """Invented log probabilities of the right shape for a completion."""
    texts = [model.word(token) for token in tokens]
    offsets = [sum(len(text) for text in texts[:index]) for index in range(len(texts))]
    logprobs: list[float] = [-1.0] * len(texts)
    return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": texts, "top_logprobs": [{text: -1.0} for text in texts]}
