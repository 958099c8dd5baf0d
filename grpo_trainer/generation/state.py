"""The policy's own state while it draws completions, borrowed and given back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from grpo_trainer.policy.modes import eval_mode


@contextlib.contextmanager
def inference_state(model: nn.Module) -> Iterator[None]:
    """Eval mode, cache on, gradient checkpointing off, a blank generation config; all as before afterwards.

    Args:
        model: the policy, unwrapped.
    """
    checkpointing: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    # an adapter's wrapper reads through to the model's own attributes, so setting them on that model is enough
    owners = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
    configs = [(m, m.generation_config) for m in owners if getattr(m, "generation_config", None) is not None]
    caches = [(c, c.use_cache) for c in {id(m.config): m.config for m in owners}.values() if hasattr(c, "use_cache")]
    try:
        for module in checkpointing:
            module.gradient_checkpointing = False
        for owner, _ in configs:
            owner.generation_config = GenerationConfig()
        for config, _ in caches:
            config.use_cache = True
        with eval_mode(model):
            yield
    finally:
        for module in checkpointing:
            module.gradient_checkpointing = True
        for owner, original in configs:
            owner.generation_config = original
        for config, value in caches:
            config.use_cache = value
