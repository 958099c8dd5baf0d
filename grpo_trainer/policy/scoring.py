"""Log-probs of completions under a model: the same arithmetic for the policy, the old policy and the reference.

Rows are laid out as a rectangle: prompts padded on the left, completions on the right, so that every completion starts
in the same column. Positions count from the first real token, so a row has the same log-probs alone and in a batch,
with rotary as with absolute positions.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from grpo_trainer.functional.logprobs import token_entropy, token_logprobs
from grpo_trainer.types import RolloutBatch


class Scores(NamedTuple):
    """What a scoring pass gives.

    Attributes:
        logprobs: (B, T) float32 in nats; 0 beyond a row's length.
        entropy: (B, T) float32 in nats, without gradient; None if it was not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None


def completion_logprobs(
    model: nn.Module, batch: RolloutBatch, *, temperature: float = 1.0, with_entropy: bool = False
) -> Scores:
    """Log-probs of the completion tokens of a micro-batch, one forward pass.

    Token t of a completion after a prompt of Q tokens is predicted at position Q + t - 1.

    Args:
        model: a causal language model, possibly wrapped (adapter, data parallel).
        batch: B rows.
        temperature: the sampling temperature, > 0; the logits are divided by it.
        with_entropy: also the entropy of each predicted distribution.

    Returns:
        The scores. The log-probs carry a gradient if gradients are enabled.
    """
    inputs = _rectangle(batch)
    width = batch.completion_ids.shape[1]
    parameters = _forward_parameters(model)
    kwargs: dict[str, Any] = {k: v for k, v in inputs.items() if k != "position_ids" or k in parameters}
    if "logits_to_keep" in parameters:
        kwargs["logits_to_keep"] = width + 1
    if "use_cache" in parameters:
        kwargs["use_cache"] = False
    logits = model(**kwargs).logits  # (B, T + 1, V), or (B, Q + T, V) from a model that keeps all
    logits = logits[:, logits.shape[1] - width - 1 : -1]  # (B, T, V): the last position predicts nothing of ours
    real = _within(batch)
    logprobs = token_logprobs(logits, batch.completion_ids, temperature=temperature)
    entropy = None
    if with_entropy:
        with torch.no_grad():
            entropy = token_entropy(logits.detach(), temperature=temperature).masked_fill(~real, 0.0)
    return Scores(logprobs.masked_fill(~real, 0.0), entropy)


def _rectangle(batch: RolloutBatch) -> dict[str, Tensor]:
    """Input ids, attention mask and position ids, each (B, Q + T)."""
    rows, width = batch.completion_ids.shape
    prompts = [batch.prompt_ids[p] for p in batch.prompt_of_row]
    longest = max((len(p) for p in prompts), default=0)
    ids = batch.completion_ids.new_zeros(rows, longest + width)
    mask = torch.zeros_like(ids)
    for row, (prompt, length) in enumerate(zip(prompts, batch.lengths, strict=True)):
        ids[row, longest - len(prompt) : longest] = prompt
        mask[row, longest - len(prompt) : longest + length] = 1
    ids[:, longest:] = batch.completion_ids
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


def _within(batch: RolloutBatch) -> Tensor:
    """(B, T) bool: True on a row's own tokens, whether credited or not."""
    device = batch.completion_ids.device
    columns = torch.arange(batch.completion_ids.shape[1], device=device)
    return columns < torch.tensor(batch.lengths, device=device)[:, None]


def _forward_parameters(model: nn.Module) -> frozenset[str]:
    """Names that the innermost model's forward takes: wrappers hide them behind ``*args, **kwargs``."""
    inner: Any = model
    while True:
        if hasattr(inner, "get_base_model"):  # an adapter
            inner = inner.get_base_model()
        elif isinstance(getattr(inner, "_orig_mod", None), nn.Module):  # a compiled model
            inner = inner._orig_mod
        elif isinstance(getattr(inner, "module", None), nn.Module):  # data parallel
            inner = inner.module
        else:
            break
    parameters = inspect.signature(type(inner).forward).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return frozenset(parameters) | (frozenset(["position_ids"]) if takes_any else frozenset())
