"""Writes answers: whole ones and streams, for chat and for completions."""

import json
from collections.abc import AsyncIterator
from typing import Any

from standin.protocol import Answer, Generation, chat_logprobs, completion_logprobs, usage
from standin.sequence import Output

DONE = b"data: [DONE]\n\n"


def event(content: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def whole(generation: Generation, answers: list[Answer], model_name: str, fingerprint: str) -> dict[str, Any]:
    """The body of an answer that is not streamed; every key of vLLM's model, null or not."""
    prompts = generation.prompts
    completion_tokens = sum(len(answer.tokens) for answer in answers)
    chat = generation.kind == "chat"
    choices: list[dict[str, Any]] = []
    for index, answer in enumerate(answers):
        prompt = prompts[index // generation.n]
        ids = answer.tokens if generation.return_token_ids else None
        common = {
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
            "token_ids": ids,
            "routed_experts": None,
        }
        if chat:
            message: dict[str, Any] = {"role": "assistant", "content": answer.text}
            message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
            logprobs = chat_logprobs(answer.tokens) if generation.logprobs else None
            choices.append({"index": index, "message": message, "logprobs": logprobs, **common})
        else:
            logprobs = completion_logprobs(answer.tokens) if generation.logprobs else None
            own = {"prompt_logprobs": None, "prompt_token_ids": prompt if generation.return_token_ids else None}
            choices.append({"index": index, "text": answer.text, "logprobs": logprobs, **common, **own})
    head: dict[str, Any] = {
        "id": generation.response_id,
        "object": "chat.completion" if chat else "text_completion",
        "created": generation.created,
        "model": model_name,
        "choices": choices,
        "service_tier": None,
        "system_fingerprint": fingerprint,
        "usage": usage(sum(len(prompt) for prompt in prompts), completion_tokens, full=True),
    }
    if chat:
        ids = prompts[0] if generation.return_token_ids else None
        head |= {"prompt_logprobs": None, "prompt_token_ids": ids, "prompt_text": None}
    return {**head, "kv_transfer_params": answers[0].params, "ec_transfer_params": None, "metrics": None}


class Stream:
    """The events of one streamed answer."""

    def __init__(self, generation: Generation, model_name: str, fingerprint: str) -> None:
        self._generation = generation
        self._fingerprint = fingerprint
        self._chat = generation.kind == "chat"
        self._head = {
            "id": generation.response_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": generation.created,
            "model": model_name,
        }
        self._counts: dict[int, int] = {}
        self._prompt_tokens = sum(len(prompt) for prompt in generation.prompts)

    async def events(self, outputs: AsyncIterator[tuple[int, Output]]) -> AsyncIterator[bytes]:
        """Turns the outputs of all choices into events; ends with [DONE]."""
        opened = False
        async for index, output in outputs:
            if output.finish_reason == "error":
                yield event(
                    {"error": {"message": "Internal server error", "type": "InternalServerError", "param": None, "code": 500}}
                )
                yield DONE
                return
            if self._chat and not opened:
                opened = True
                for choice in range(self._generation.n):
                    yield event(self._opening(choice))
            first = index not in self._counts
            self._counts[index] = self._counts.get(index, 0) + len(output.tokens)
            yield event(self._chunk(index, output, first=first))
        if self._generation.include_usage:
            total = usage(self._prompt_tokens, sum(self._counts.values()), full=False)
            yield event({**self._head, "choices": [], "usage": total, "system_fingerprint": self._fingerprint})
        yield DONE

    def _opening(self, choice: int) -> dict[str, Any]:
        """The first chunk of a chat: the role and no text."""
        delta = {"role": "assistant", "content": ""}
        ids = self._generation.prompts[0] if self._generation.return_token_ids else None
        choices = [{"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}]
        chunk: dict[str, Any] = {**self._head, "choices": choices, "prompt_token_ids": ids, "prompt_text": None}
        if self._generation.continuous_usage:
            chunk["usage"] = usage(self._prompt_tokens, 0, full=False)
        return chunk

    def _chunk(self, index: int, output: Output, *, first: bool) -> dict[str, Any]:
        generation = self._generation
        tokens = list(output.tokens)
        ids = tokens if generation.return_token_ids else None
        choice: dict[str, Any] = {"index": index}
        if self._chat:
            logprobs = chat_logprobs(tokens) if generation.logprobs else None
            choice |= {"delta": {"content": output.text}, "logprobs": logprobs, "finish_reason": output.finish_reason}
            if output.finish_reason:
                choice["stop_reason"] = output.stop_reason
            choice["token_ids"] = ids
        else:
            logprobs = completion_logprobs(tokens) if generation.logprobs else None
            choice |= {"text": output.text, "logprobs": logprobs}
            choice |= {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}
            prompt = generation.prompts[index // generation.n]
            choice |= {"prompt_token_ids": prompt if generation.return_token_ids and first else None, "token_ids": ids}
        chunk: dict[str, Any] = {**self._head, "choices": [choice]}
        if output.finish_reason and not generation.include_usage:
            chunk["system_fingerprint"] = self._fingerprint
        if generation.continuous_usage:
            chunk["usage"] = usage(self._prompt_tokens, self._counts[index], full=False)
        return chunk
