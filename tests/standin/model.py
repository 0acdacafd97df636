"""The "language model": a tokenizer, and text that is a pure function of the KV cache's bytes.

Tokens are pieces of text (a word of up to five letters, up to three digits, one other sign). The answer is a sequence of
made-up words drawn from a hash of the prompt's KV bytes. So an engine that computed the prompt itself, and one that
received the same bytes over the network, give the same text; one that received other bytes gives other text.
"""

import re
import zlib
from collections.abc import Iterable
from hashlib import blake2b

_CONSONANTS = "bdfgklmnprstvzhj"
_VOWELS = "aeio"
_SYLLABLES = [c + v for c in _CONSONANTS for v in _VOWELS]
WORDS = 4096  # ids 0..4095 are the words that the model can say; the ids above are pieces of prompts
VOCABULARY = 32000
_PIECE = re.compile(r" ?[A-Za-z]{1,5}| ?[0-9]{1,3}|\s+| ?[^\sA-Za-z0-9]")
SPECIAL = {"<|system|>": VOCABULARY - 1, "<|user|>": VOCABULARY - 2, "<|assistant|>": VOCABULARY - 3, "</s>": VOCABULARY - 4}
_SPECIAL_SPLIT = re.compile("(" + "|".join(re.escape(text) for text in SPECIAL) + ")")


def word(token: int) -> str:
    """The text of a token id; ids that only prompts have give a placeholder."""
    if token < WORDS:
        return " " + _SYLLABLES[token // 64] + _SYLLABLES[token % 64]
    return f" <{token}>"


_IDS = {word(token): token for token in range(WORDS)}


def encode(text: str) -> list[int]:
    """Token ids of `text`. Words that the model says are encoded to the ids it said them with."""
    ids: list[int] = []
    for part in _SPECIAL_SPLIT.split(text):
        if part in SPECIAL:
            ids.append(SPECIAL[part])
            continue
        for piece in _PIECE.findall(part):
            known = _IDS.get(piece)
            ids.append(known if known is not None else WORDS + zlib.crc32(piece.encode()) % (VOCABULARY - WORDS - len(SPECIAL)))
    return ids


def decode(tokens: Iterable[int]) -> str:
    """Text of token ids."""
    return "".join(word(token) for token in tokens)


def chat_prompt(messages: list[dict[str, object]]) -> str:
    """The chat template: every message between its role's mark and an end mark, then the assistant's mark."""
    parts = []
    for message in messages:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "\n".join(str(item.get("text", "")) for item in content if isinstance(item, dict))
        parts.append(f"<|{message.get('role')}|>{content}</s>")
    return "".join(parts) + "<|assistant|>"


def state_of(digests: Iterable[bytes]) -> bytes:
    """The state from which an answer is generated: a hash of the contents of the prompt's KV blocks, in order."""
    return blake2b(b"".join(digests), digest_size=16).digest()


def next_token(state: bytes, index: int, choice: int = 0) -> int:
    """Token number `index` of the answer; `choice` makes the answers of n > 1 differ."""
    raw = blake2b(state + index.to_bytes(4, "big") + choice.to_bytes(2, "big"), digest_size=8).digest()
    return int.from_bytes(raw, "big") % WORDS


def natural_length(state: bytes) -> int:
    """Length of an answer whose client gave no limit: 64 to 255 tokens, then the end-of-text token."""
    return 64 + int.from_bytes(state[:2], "big") % 192
