"""How much of the device's memory keys and values may take, and in what type they are kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from grpo_trainer.generation.support import text_config
from grpo_trainer.loading import base_model

_MEMINFO = Path("/proc/meminfo")
_AT_LEAST = 1 << 30
"""Bytes that the cache of a small model may take, however small the model is."""


def stored_dtype(model: Any, device: torch.device) -> torch.dtype | None:
    """What float32 keys and values are stored as: under autocast, attention would cast them at every step anyway.

    Args:
        model: without a wrapper.
        device: where it computes.

    Returns:
        The autocast dtype; None, as they are, without autocast or where attention is not one call that casts.
    """
    casts = str(getattr(model.config, "_attn_implementation", "")).startswith(("sdpa", "flash"))
    return torch.get_autocast_dtype(device.type) if casts and torch.is_autocast_enabled(device.type) else None


def bytes_per_token(model: Any, device: torch.device) -> int:
    """Bytes of the keys and values of one token, by the model's configuration.

    Args:
        model: without a wrapper.
        device: where it computes.

    Returns:
        Bytes over all layers.
    """
    config = text_config(model)
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    dtype = stored_dtype(model, device) or model.dtype
    return 2 * config.num_hidden_layers * heads * size * dtype.itemsize


def default_cache_tokens(policy: Any, device: torch.device) -> int:
    """Tokens whose keys and values take as much memory as the weights, or 1 GiB if that is more.

    Training needs several times the weights in gradients, optimizer state and activations, none of which is needed at
    the same moment as the cache. Where memory is short, at most half of what is free.

    Args:
        policy: the policy.
        device: where it computes.

    Returns:
        Tokens, at least 1.
    """
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    allowed = max(weights, _AT_LEAST)
    free = _free_bytes(device)
    if free is not None:
        allowed = min(allowed, free // 2)
    return max(1, allowed // bytes_per_token(base_model(policy), device))


def _free_bytes(device: torch.device) -> int | None:
    """Memory that could be allocated now; None where the system does not tell."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
