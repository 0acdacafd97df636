"""Write a tiny Llama (2 layers, 128 hidden, 0.43 M parameters, its own BPE tokenizer and chat template) to argv[1]. No network.

Runs inside the runtime's environment, not in that of the tests. The seeds are fixed: the same versions give the same weights.
"""

import random
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = (  # noqa: SIM905
    "the quick brown fox jumps over the lazy dog prefill decode cache block token router engine server "
    "request stream answer system user assistant kubernetes pod node service volume probe lease transfer "
    "0 1 2 3 4 5 6 7 8 9 . , : ; ! ? ( ) [ ] { } - _ + = / \\ ' \""
).split()
VOCABULARY = 512
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_tokenizer(out: Path) -> None:
    """Train a byte-level BPE tokenizer on a seeded word soup and save it to `out`."""
    source = random.Random(7)
    corpus = [" ".join(source.choice(WORDS) for _ in range(40)) for _ in range(400)]
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)


def write_weights(out: Path) -> None:
    """Save untrained, seeded weights to `out`.

    The embeddings are not tied and the initializer range is wide on purpose: with tied embeddings an untrained model repeats
    its last prompt token for ever, and a test that compares two answers would compare nothing.
    """
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        initializer_range=0.25,
        torch_dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out, safe_serialization=True)


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True, exist_ok=True)
    write_tokenizer(target)
    write_weights(target)
