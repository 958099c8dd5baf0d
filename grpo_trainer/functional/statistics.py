"""Means and deviations of rewards: exact where a group is constant, blind to what could not be scored.

NaN marks a completion that no reward function could score, or a place that a smaller group does not have: it stays out
of every statistic.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from grpo_trainer.functional.shapes import check_shapes


def is_constant(rewards: Tensor) -> Tensor:
    """Which groups carry no signal: all scorable rewards equal, or none scorable.

    Args:
        rewards: (P, G), NaN = unscorable.

    Returns:
        (P,) bool.

    Raises:
        ValueError: if ``rewards`` is not (P, G).
    """
    check_shapes("P G", rewards=rewards)
    scored = ~rewards.isnan()
    high = rewards.masked_fill(~scored, -math.inf).amax(dim=-1)
    low = rewards.masked_fill(~scored, math.inf).amin(dim=-1)
    return high <= low


def centred(rewards: Tensor) -> Tensor:
    """Each reward less the mean of its group: (P, G) -> (P, G); exactly 0 in constant groups and where unscorable."""
    return deviations(rewards, dim=-1).masked_fill(rewards.isnan() | is_constant(rewards)[:, None], 0.0)


def nanstd(values: Tensor, *, dim: int, ddof: int) -> Tensor:
    """Standard deviation over the entries that are not NaN.

    Args:
        values: (..., T), NaN = not there.
        dim: the dimension to take it over.
        ddof: 1 for the sample standard deviation, 0 for the population's.

    Returns:
        The same shape with 1 in ``dim``; 0 where there are too few entries.
    """
    counted = ~values.isnan()
    squares = deviations(values, dim=dim).square().masked_fill(~counted, 0.0).sum(dim=dim, keepdim=True)
    freedom = counted.sum(dim=dim, keepdim=True) - ddof
    return torch.where(freedom > 0, squares / freedom.clamp(min=1), 0.0).sqrt()


def scaled(values: Tensor, std: Tensor, eps: float) -> Tensor:
    """Values (..., T) over ``std + eps``; 0 where both are 0, which leaves only values of 0."""
    return values / (std + eps).clamp(min=torch.finfo(values.dtype).tiny)


def deviations(values: Tensor, *, dim: int) -> Tensor:
    """Each of the values (..., T) less their mean over one dimension, NaN where it is NaN.

    The least value is taken off first: values far from 0 and close to each other keep their differences, which the
    rounding of a mean of that size would swallow.
    """
    least = values.masked_fill(values.isnan(), math.inf).amin(dim=dim, keepdim=True)
    shifted = values - least
    return shifted - shifted.nanmean(dim=dim, keepdim=True)


def in_dtype_of(rewards: Tensor, advantages: Tensor) -> Tensor:
    """Advantages (P, G) in the dtype of the rewards, or in float32 if that holds whole numbers only."""
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)
