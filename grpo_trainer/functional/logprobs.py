"""Log-probabilities of given tokens under a model's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.functional.shapes import check_shapes


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float = 1.0) -> Tensor:
    """``log softmax(logits / temperature)`` at the given ids.

    The arithmetic is float32 (float64 for float64 logits) under any autocast. Top-k, top-p, min-p and the repetition
    penalty never enter: they change what is sampled, not what is trained.

    Args:
        logits: (B, T, V); position t predicts ``ids[:, t]``.
        ids: (B, T) int64.
        temperature: the sampling temperature, > 0.

    Returns:
        (B, T) log-probs in nats.

    Raises:
        ValueError: if the shapes do not fit each other.

    Example:
        >>> logits = torch.tensor([[[2.0, 0.0]]])
        >>> [
        ...     round(token_logprobs(logits, torch.zeros(1, 1, dtype=torch.long), temperature=t).item(), 6)
        ...     for t in (0.5, 1.0, 2.0)
        ... ]
        [-0.01815, -0.126928, -0.313262]
    """
    check_shapes("B T", ids=ids, logits=logits[..., 0])
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, ids[..., None]).squeeze(-1)
    return chosen - scaled.logsumexp(dim=-1)


def token_entropy(logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Entropy of ``softmax(logits / temperature)`` over the whole vocabulary.

    ``H = -sum_v p_v log p_v``, in float32 or wider.

    Args:
        logits: (B, T, V).
        temperature: the sampling temperature, > 0.

    Returns:
        (B, T) entropies in nats; ``log V`` for uniform logits.

    Example:
        >>> token_entropy(torch.zeros(1, 1, 8))
        tensor([[2.0794]])
    """
    logp = torch.log_softmax(_scaled(logits, temperature), dim=-1)
    return -(logp.exp() * logp.masked_fill(logp == -torch.inf, 0.0)).sum(dim=-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits in float32 or wider, divided by the temperature."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide if temperature == 1.0 else wide / temperature
