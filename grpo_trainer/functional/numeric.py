"""Arithmetic that several modules share: wide enough, bounded, and blind to what a mask hides."""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Largest exponent that is taken: exp(20) = 4.85e8 is far outside anything that trains, and finite."""


def wide(values: Tensor) -> Tensor:
    """The same numbers (..., T) in float32, or in float64 if that is what they are: no exponent is taken in less."""
    return values if values.dtype == torch.float64 else values.float()


def bounded_exp(exponents: Tensor) -> Tensor:
    """``exp`` of exponents (..., T), each first cut to +-``MAX_LOG_RATIO``; no gradient beyond that."""
    return exponents.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def row_sum(values: Tensor, mask: Tensor) -> Tensor:
    """The sum of each row's values under the mask.

    Args:
        values: (B, T); what the mask hides may be anything, also NaN.
        mask: (B, T), nonzero on the entries that count.

    Returns:
        (B, 1) sums, 0 for a row without an entry.

    Example:
        >>> row_sum(torch.tensor([[1.0, 2.0, float("nan")]]), torch.tensor([[1, 1, 0]]))
        tensor([[3.]])
    """
    return torch.where(mask.bool(), values, 0.0).sum(dim=1, keepdim=True)


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean of each row's values under the mask.

    Args:
        values: (B, T); what the mask hides may be anything, also NaN.
        mask: (B, T), nonzero on the entries that count.

    Returns:
        (B, 1) means, 0 for a row without an entry.

    Example:
        >>> row_mean(torch.tensor([[1.0, 2.0, 9.0], [5.0, 5.0, 5.0]]), torch.tensor([[1, 1, 0], [0, 0, 0]]))
        tensor([[1.5000],
                [0.0000]])
    """
    return row_sum(values, mask) / mask.bool().sum(dim=1, keepdim=True).clamp(min=1)
