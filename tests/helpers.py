"""Small real models and a small real tokenizer, built in code: nothing is downloaded, and each call is alike.

Example:
    >>> tokenizer = tiny_tokenizer()
    >>> tokenizer.decode(tokenizer("1 + 2")["input_ids"])
    '1 + 2'
    >>> tiny_llama().config.vocab_size == len(tokenizer) == VOCAB_SIZE
    True
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 256
BOS, EOS, PAD, UNK = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|unk|>"
BOS_ID, EOS_ID, PAD_ID, UNK_ID = range(4)

# ChatML without a default system message: what a test writes is all that the model sees.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; the four special tokens are distinct, and each of the 256 ids decodes to something."""
    ascii_and_latin = ["\n", *map(chr, range(0x20, 0x7F)), *map(chr, range(0xA0, 0x100))]
    letters = [chr(0x400 + n) for n in range(VOCAB_SIZE - 4 - len(ascii_and_latin))]  # fills up to 256
    vocab = {token: index for index, token in enumerate([BOS, EOS, PAD, UNK, *ascii_and_latin, *letters])}
    backend = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_llama(seed: int = 0, **overrides: Any) -> LlamaForCausalLM:
    """Two layers, 64 wide, rotary positions, 4 query and 2 key heads; fp32, in eval mode, weights fixed by ``seed``."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return _build(LlamaForCausalLM, LlamaConfig(**{**settings, **overrides}), seed)


def tiny_gpt2(seed: int = 0, **overrides: Any) -> GPT2LMHeadModel:
    """Two layers, 64 wide, absolute positions, 4 heads, no dropout; fp32, in eval mode, weights fixed by ``seed``."""
    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 256,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    return _build(GPT2LMHeadModel, GPT2Config(**{**settings, **overrides}), seed)


def _build(architecture: Any, config: Any, seed: int) -> Any:
    """Builds the model without touching the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return architecture(config).float().eval()


def completions_table(step: int, rows: int = 4, **columns: Any) -> dict[str, list[Any]]:
    """What the trainer hands to callbacks for one rollout; ``columns`` go over it or are added to its end."""
    return {
        "step": [step] * rows,
        "prompt": [f"What is {i} + 1?" for i in range(rows)],
        "completion": [f"It is {i + 1}." for i in range(rows)],
        "last_integer": [1.0] * rows,
        "short": [None] * rows,
        "advantage": [0.5] * rows,
        "finished": [True] * rows,
        "length": [5] * rows,
        **columns,
    }
