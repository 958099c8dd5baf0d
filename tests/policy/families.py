"""Small random models of many architectures, each with what sets it apart, and batches to score with them."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from grpo_trainer.types import RolloutBatch

VOCAB_SIZE = 96
LOCAL = ["sliding_attention", "full_attention"]
_ROTARY = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8, "attention_dropout": 0.0}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 5, "layer_types": LOCAL},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 5},
    # softcaps tight enough to bend scores and logits; queries scaled by another number than their size
    "gemma2": {
        **{"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 0.5, "final_logit_softcapping": 0.3},
        "attn_implementation": "eager",  # older releases take sdpa, which leaves the softcap out
    },
    "gemma3_text": {"head_dim": 8, "sliding_window": 5, "layer_types": LOCAL, "query_pre_attn_scalar": 20},
    "phi3": {"sliding_window": 5},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, **_NO_DROPOUT},
    "olmo2": {},
    "granite": {"logits_scaling": 0.4, "attention_multiplier": 0.3, "residual_multiplier": 0.5},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 16, **_EXPERTS},
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 5, "layer_types": LOCAL, **_EXPERTS},
}
"""Model type -> what differs from a small Llama."""


def tiny(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A small random model, in float32 and eval mode, with weights large enough for its predictions to differ."""
    known = CONFIG_MAPPING[family]()
    settings = {name: value for name, value in _ROTARY.items() if hasattr(known, name)}
    config = CONFIG_MAPPING[family](**{**settings, "vocab_size": VOCAB_SIZE, **FAMILIES[family], **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float().eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(4)  # from a deviation of 0.02
    return model


def random_batch(prompts=(3, 9, 1), rows=(4, 3, 2), longest=8, lengths=(), seed=0) -> RolloutBatch:
    """Prompts of the given lengths, so many completions of each, of 0 to ``longest`` tokens or of given lengths."""
    draw = torch.Generator().manual_seed(seed)
    prompt_of_row = tuple(p for p, n in enumerate(rows) for _ in range(n))
    lengths = tuple(lengths or torch.randint(0, longest + 1, (len(prompt_of_row),), generator=draw).tolist())
    width = max(lengths)
    within = torch.arange(width) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=tuple(torch.randint(3, VOCAB_SIZE, (n,), generator=draw) for n in prompts),
        prompt_of_row=prompt_of_row,
        lengths=lengths,
        completion_ids=torch.randint(3, VOCAB_SIZE, within.shape, generator=draw) * within,
        mask=within,
        advantages=torch.randn(len(lengths), generator=draw),
    )
