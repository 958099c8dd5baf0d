"""Models whose predictions are known beforehand, and what can be seen of a model from outside."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from grpo_trainer.types import SamplingParams
from tests import helpers

MODELS = {"llama": helpers.tiny_llama, "gpt2": helpers.tiny_gpt2}
PROMPTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (17,)]


def sampling(**knobs: Any) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 5, "eos_token_ids": (1,), "pad_token_id": 2, **knobs})


def watch(model) -> list[dict]:
    """What each forward pass inside is given."""
    seen: list[dict] = []
    model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(dict(kwargs)), with_kwargs=True)
    return seen


def with_logits(model, logits_after):
    """The model with its predictions replaced: ``logits_after(last id of each row) -> (rows, V)``."""

    def replace(module, args, kwargs, out):
        out.logits = logits_after(kwargs["input_ids"][:, -1])[:, None]
        return out

    model.register_forward_hook(replace, with_kwargs=True)
    return model


def counting(vocab_size=256):
    """Says n + 1 after n: what a prompt is completed with is known beforehand."""
    return with_logits(
        helpers.tiny_llama(), lambda last: torch.full((len(last), vocab_size), -1e9).scatter(1, last[:, None] + 1, 0.0)
    )


def nearly_uniform(vocab_size=1000):
    """No two logits are equal: a top-k filter keeps every tie, and would hide among equal ones."""
    return always(torch.linspace(0, 1e-3, vocab_size))


def always(logits):
    """Predicts the same whatever came before."""
    return with_logits(helpers.tiny_llama(vocab_size=len(logits)), lambda last: logits.expand(len(last), -1))


def unusual(name):
    """A policy in the middle of training: dropout on, one part frozen in eval mode, checkpointing on, cache off."""
    model = MODELS[name](**({"resid_pdrop": 0.5, "embd_pdrop": 0.5} if name == "gpt2" else {"attention_dropout": 0.5}))
    model.train()
    model.get_input_embeddings().eval()
    model.gradient_checkpointing_enable()
    model.config.use_cache = False
    model.generation_config = GenerationConfig(top_k=3, temperature=0.5, do_sample=True)
    return model


def state_of(model) -> dict:
    return {
        "modes": [module.training for module in model.modules()],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "use_cache": model.config.use_cache,
        "attention": model.config._attn_implementation,
        "generation config": (id(model.generation_config), model.generation_config.to_dict()),
        "random state": torch.get_rng_state().tolist(),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_autocast_enabled("cpu")),
        "parameters": [(id(p), p.dtype, p.data_ptr(), p.requires_grad, p._version) for p in model.parameters()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
    }
