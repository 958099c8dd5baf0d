"""A tiny model of each dense family, and of those that the group engine leaves to ``generate``; float32, eval mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

from grpo_trainer.types import SamplingParams

VOCAB_SIZE = 128
WINDOW = 8
"""Tokens that a sliding layer attends to: less than most test prompts and completions have."""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GPT2 = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_local_experts": 4}
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}

DENSE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2ForCausalLM", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3ForCausalLM", {**_SLIDING, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3ForCausalLM", {}),
    "gpt2": ("GPT2LMHeadModel", _GPT2),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _EXPERTS),
    "gpt_oss": ("GptOssForCausalLM", {**_SLIDING, **_EXPERTS}),
}
"""Name -> class and what its configuration has besides the common part."""


def family(name: str, seed: int = 0, **overrides: Any) -> Any:
    """The model of a name in ``DENSE``."""
    kind, special = DENSE[name]
    return build(kind, seed, **{**({} if special is _GPT2 else _COMMON), **special, **overrides})


def build(kind: str, seed: int = 0, **settings: Any) -> Any:
    """A model with spread-out predictions: the larger the weights, the rarer near ties."""
    architecture = getattr(transformers, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architecture(architecture.config_class(**settings)).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.15)
    return model


def greedy_config(params: SamplingParams) -> transformers.GenerationConfig:
    """What ``generate`` is given for greedy decoding, written out independently of the engines."""
    return transformers.GenerationConfig(
        do_sample=False,
        max_new_tokens=params.max_new_tokens,
        eos_token_id=list(params.eos_token_ids),
        pad_token_id=params.pad_token_id,
        repetition_penalty=float(params.repetition_penalty),
        **params.extra,
    )


def generate_alone(model: Any, prompt: Sequence[int], config: transformers.GenerationConfig) -> tuple[int, ...]:
    """What ``generate`` says to one prompt, without padding, up to and including its end."""
    model.generation_config = transformers.GenerationConfig()
    out = model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()
    end = next((i for i, token in enumerate(out) if token in config.eos_token_id), len(out) - 1)
    return tuple(out[: end + 1])


def next_scores(model: Any, ids: Sequence[int], params: SamplingParams) -> torch.Tensor:
    """(V,) the scores that ``generate`` would draw the next token from."""
    model.generation_config = transformers.GenerationConfig()
    out = model.generate(
        torch.tensor([ids]),
        do_sample=True,
        max_new_tokens=1,
        pad_token_id=params.pad_token_id,
        temperature=float(params.temperature),
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=float(params.repetition_penalty),
        output_scores=True,
        return_dict_in_generate=True,
        **params.extra,
    )
    return out.scores[0][0]
