"""From the rewards of a group to the advantage of each member.

A group is an axis: every function takes rewards (P, G) and returns advantages (P, G). NaN marks a completion that no
reward function could score: it stays out of every statistic and its advantage is 0. Statistics are taken in float64.

Two members of a group have the same advantage if they have the same reward, and a group whose scorable rewards are all
equal has advantages of exactly 0, whatever the constant: rounding in a mean never becomes a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from grpo_trainer.functional.shapes import check_shapes

EPS = 1e-4
"""Added to every standard deviation before dividing by it."""


def group_zscore(rewards: Tensor, *, ddof: int = 1, eps: float = EPS) -> Tensor:
    """The z-score of each reward within its group.

    ``A_i = (r_i - mean(r)) / (std(r) + eps)``, DeepSeekMath (arXiv:2402.03300), section 4.1.2. The paper does not say
    which standard deviation; ``ddof=1`` (sample) is the default here.

    Args:
        rewards: (P, G), NaN = unscorable.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation, in units of reward.

    Returns:
        (P, G) advantages without unit, in the dtype of ``rewards`` (float32 for integers). ``|A|`` is below
        (G-1)/sqrt(G) for ``ddof=1`` and below sqrt(G-1) for ``ddof=0``.

    Raises:
        ValueError: if ``rewards`` is not (P, G).

    Example:
        >>> group_zscore(torch.tensor([[10.0, 8.0, 3.0, 1.0]]))
        tensor([[ 1.0706,  0.5948, -0.5948, -1.0706]])
    """
    check_shapes("P G", rewards=rewards)
    r = rewards.double()
    advantages = _centred(r) / (_nanstd(r, dim=-1, ddof=ddof) + eps)
    return _like(advantages, rewards)


def group_center(rewards: Tensor) -> Tensor:
    """Each reward less the mean of its group: ``A_i = r_i - mean(r)``.

    Dr. GRPO (arXiv:2503.20783), section 3.2: dividing by the standard deviation favours questions that are nearly
    always or nearly never solved.

    Args:
        rewards: (P, G), NaN = unscorable.

    Returns:
        (P, G) advantages in units of reward.

    Raises:
        ValueError: if ``rewards`` is not (P, G).

    Example:
        >>> group_center(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    check_shapes("P G", rewards=rewards)
    return _like(_centred(rewards.double()), rewards)


def batch_zscore(rewards: Tensor, *, ddof: int = 1, eps: float = EPS) -> Tensor:
    """Centred within the group, divided by the standard deviation of the whole batch.

    ``A_i = (r_i - mean_group(r)) / (std_batch(r) + eps)``.

    Args:
        rewards: (P, G), NaN = unscorable.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation, in units of reward.

    Returns:
        (P, G) advantages without unit, in the dtype of ``rewards`` (float32 for integers).

    Raises:
        ValueError: if ``rewards`` is not (P, G).

    Example:
        >>> batch_zscore(torch.tensor([[0.0, 1.0], [0.0, 10.0]]))
        tensor([[-0.1030,  0.1030],
                [-1.0296,  1.0296]])
    """
    check_shapes("P G", rewards=rewards)
    r = rewards.double()
    std = _nanstd(r.flatten(), dim=0, ddof=ddof)
    return _like(_centred(r) / (std + eps), rewards)


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_zscore": group_zscore,
    "group_center": group_center,
    "batch_zscore": batch_zscore,
}
"""Every advantage by name. A new one is a function above and a line here."""


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


def _centred(rewards: Tensor) -> Tensor:
    """(P, G) -> (P, G): less the group mean; exactly 0 in constant groups and where unscorable."""
    centred = _deviations(rewards, dim=-1)
    return centred.masked_fill(rewards.isnan() | is_constant(rewards)[:, None], 0.0)


def _nanstd(values: Tensor, *, dim: int, ddof: int) -> Tensor:
    """Standard deviation over the entries that are not NaN, kept as a dimension; 0 where there are too few."""
    counted = ~values.isnan()
    squares = _deviations(values, dim=dim).square().masked_fill(~counted, 0.0).sum(dim=dim, keepdim=True)
    freedom = counted.sum(dim=dim, keepdim=True) - ddof
    return torch.where(freedom > 0, squares / freedom.clamp(min=1), 0.0).sqrt()


def _deviations(values: Tensor, *, dim: int) -> Tensor:
    """Each value less the mean, NaN where it is NaN.

    The least value is taken off first: values far from 0 and close to each other keep their differences, which the
    rounding of a mean of that size would swallow.
    """
    least = values.masked_fill(values.isnan(), math.inf).amin(dim=dim, keepdim=True)
    shifted = values - least
    return shifted - shifted.nanmean(dim=dim, keepdim=True)


def _like(advantages: Tensor, rewards: Tensor) -> Tensor:
    """In the dtype of the rewards, or in float32 if that holds whole numbers only."""
    return advantages.to(rewards.dtype if rewards.is_floating_point() else torch.float32)
