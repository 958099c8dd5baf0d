"""Weights for completions that another engine sampled: its probabilities are not quite the trainer's.

With ``d_t = log pi_train(token_t) - log pi_sampler(token_t)``, both of the weights that sampled, the ratio is

========= ======================== ========================================================================
level     ratio                    what it is
========= ======================== ========================================================================
token     exp(d_t)                 biased, since it forgets the tokens before; low variance
sequence  exp(sum_t d_t)           unbiased; its spread grows with the length of the completion
geometric exp(mean_t d_t)          comparable across lengths; a measure of the mismatch rather than a correction
========= ======================== ========================================================================

and it is either truncated to ``[clip_min, clip_max]`` or masked: 0 outside. The policy loss of each token is multiplied
by it; it is a constant. Where the sampling weights are the current ones, ``logprobs`` are those of the training pass,
and no other pass is needed.

Truncated per token: Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training" (2025). Masked
per token: IcePop (arXiv:2510.18855). Per sequence: Liu et al., "When Speed Kills Stability" (2025). The bounds and
their defaults are TRL's; a geometric ratio lies close to 1, so bounds that mean something are tighter.

The sampler's log-probs must be those of the distribution that the trainer computes: after the temperature, and before
top-k, top-p and penalties, which it knows nothing of. A token whose log-prob is unknown (NaN) has a ratio of 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_trainer.functional.numeric import bounded_exp, row_mean, row_sum, wide
from grpo_trainer.functional.shapes import check_shapes


def token_truncate(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """The truncated ratio of each token: log-probs and mask (B, T) -> weights (B, T)."""
    return _truncated(bounded_exp(_difference(logprobs, sampling_logprobs, mask)), clip_min, clip_max)


def token_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """The ratio of each token, 0 out of bounds: log-probs and mask (B, T) -> weights (B, T)."""
    return _masked(bounded_exp(_difference(logprobs, sampling_logprobs, mask)), clip_min, clip_max)


def sequence_truncate(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """The truncated ratio of each completion: log-probs and mask (B, T) -> weights (B, 1).

    Args:
        logprobs: (B, T) of the trainer, for the weights that sampled.
        sampling_logprobs: (B, T) of the sampler; NaN = unknown.
        mask: (B, T), nonzero on credited tokens; the sum is over those.
        clip_max: the greatest weight; None sets none.
        clip_min: the least weight; None sets none.

    Returns:
        (B, 1) weights without gradient; 1 for a completion without a credited token.

    Raises:
        ValueError: if the shapes differ, or ``clip_min`` is not below ``clip_max``.

    Example:
        >>> d = torch.tensor([[0.1, 0.2, 0.3]])
        >>> sequence_truncate(d, torch.zeros(1, 3), torch.tensor([[1, 1, 1]]))  # exp(.6)
        tensor([[1.8221]])
        >>> sequence_truncate(d, torch.zeros(1, 3), torch.tensor([[1, 1, 0]]))  # exp(.3)
        tensor([[1.3499]])
    """
    difference = _difference(logprobs, sampling_logprobs, mask)
    return _truncated(bounded_exp(row_sum(difference, mask)), clip_min, clip_max)


def sequence_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """The ratio of each completion, 0 out of bounds: log-probs and mask (B, T) -> weights (B, 1)."""
    return _masked(bounded_exp(row_sum(_difference(logprobs, sampling_logprobs, mask), mask)), clip_min, clip_max)


def geometric_truncate(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """The truncated ratio of each completion, normalised by its length: log-probs and mask (B, T) -> (B, 1)."""
    return _truncated(bounded_exp(row_mean(_difference(logprobs, sampling_logprobs, mask), mask)), clip_min, clip_max)


def geometric_mask(
    logprobs: Tensor,
    sampling_logprobs: Tensor,
    mask: Tensor,
    *,
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Tensor:
    """The ratio of each completion, normalised by its length, 0 out of bounds: log-probs and mask (B, T) -> (B, 1)."""
    return _masked(bounded_exp(row_mean(_difference(logprobs, sampling_logprobs, mask), mask)), clip_min, clip_max)


CORRECTIONS: dict[str, Callable[..., Tensor]] = {
    "token_truncate": token_truncate,
    "token_mask": token_mask,
    "sequence_truncate": sequence_truncate,
    "sequence_mask": sequence_mask,
    "geometric_truncate": geometric_truncate,
    "geometric_mask": geometric_mask,
}
"""Every correction by name. A new one is a function above and a line here."""


class MismatchStats(NamedTuple):
    """Figures about the mismatch that can be added up over micro-batches and processes. All are ().

    Attributes:
        difference_sum: sum of ``|d|`` over the credited tokens that the sampler scored, in nats.
        difference_count: their number.
        difference_max: the greatest ``|d|``; 0 if there are none.
        ratio_sum: sum of the weights, after clipping, over credited tokens or over completions that have any.
        ratio_count: their number.
        ratio_min: the least weight; infinite if there are none.
        ratio_max: the greatest weight; minus infinite if there are none.
    """

    difference_sum: Tensor
    difference_count: Tensor
    difference_max: Tensor
    ratio_sum: Tensor
    ratio_count: Tensor
    ratio_min: Tensor
    ratio_max: Tensor


def mismatch_stats(logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor, weights: Tensor) -> MismatchStats:
    """What is worth logging about the mismatch.

    Args:
        logprobs: (B, T) of the trainer.
        sampling_logprobs: (B, T) of the sampler; NaN = unknown.
        mask: (B, T), nonzero on credited tokens.
        weights: (B, T) or (B, 1), from one of ``CORRECTIONS``.

    Returns:
        The figures.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    difference = _difference(logprobs, sampling_logprobs, mask).abs()
    scored = mask.bool() & ~sampling_logprobs.isnan()
    counted = mask.bool() if weights.shape == mask.shape else mask.bool().any(dim=1, keepdim=True)
    check_shapes("B T", weights=weights, counted=counted)
    return MismatchStats(
        difference_sum=torch.where(scored, difference, 0.0).sum(),
        difference_count=scored.sum(),
        difference_max=torch.cat([difference.new_zeros(1), difference.flatten()]).max(),
        ratio_sum=torch.where(counted, weights, 0.0).sum(),
        ratio_count=counted.sum(),
        ratio_min=_among(weights, counted, torch.inf).min(),
        ratio_max=_among(weights, counted, -torch.inf).max(),
    )


def _among(values: Tensor, counted: Tensor, otherwise: float) -> Tensor:
    """The values that count, and another one in place of each that does not, and once more."""
    return torch.cat([values.new_full((1,), otherwise), torch.where(counted, values, otherwise).flatten()])


def _difference(logprobs: Tensor, sampling_logprobs: Tensor, mask: Tensor) -> Tensor:
    """(B, T): how much likelier a token is to the trainer than to the sampler, in nats; 0 where unknown or hidden."""
    check_shapes("B T", logprobs=logprobs, sampling_logprobs=sampling_logprobs, mask=mask)
    difference = wide(logprobs).detach() - wide(sampling_logprobs)
    return torch.where(mask.bool() & ~sampling_logprobs.isnan(), difference, 0.0)


def _truncated(ratio: Tensor, clip_min: float | None, clip_max: float | None) -> Tensor:
    _check_bounds(clip_min, clip_max)
    return ratio if clip_min is None and clip_max is None else ratio.clamp(clip_min, clip_max)


def _masked(ratio: Tensor, clip_min: float | None, clip_max: float | None) -> Tensor:
    _check_bounds(clip_min, clip_max)
    low, high = -torch.inf if clip_min is None else clip_min, torch.inf if clip_max is None else clip_max
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def _check_bounds(clip_min: float | None, clip_max: float | None) -> None:
    if clip_min is not None and clip_max is not None and clip_min >= clip_max:
        raise ValueError(f"clip_min={clip_min} must be below clip_max={clip_max}, or no ratio lies between them.")
