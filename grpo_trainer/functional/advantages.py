"""From the rewards of a group to the advantage of each member.

A group is an axis: every function takes rewards (P, G) and returns advantages (P, G). NaN marks a completion that no
reward function could score, or a place that a smaller group does not have: it stays out of every statistic and its
advantage is 0. Statistics are taken in float64.

Two members of a group have the same advantage if they have the same reward. A group whose scorable rewards are all
equal has advantages of exactly 0, whatever the constant: rounding in a mean never becomes a gradient. ``global_zscore``
knows no groups; there it is so for a batch whose rewards are all equal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from grpo_trainer.functional.shapes import check_shapes
from grpo_trainer.functional.statistics import centred, in_dtype_of, is_constant, nanstd, scaled

__all__ = [
    "ADVANTAGES",
    "EPS",
    "MULTI_REWARD_ADVANTAGES",
    "batch_zscore",
    "global_zscore",
    "group_center",
    "group_center_global_std",
    "group_zscore",
    "is_constant",
    "leave_one_out",
    "normalize_then_sum",
]

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
    return in_dtype_of(rewards, scaled(centred(r), nanstd(r, dim=-1, ddof=ddof), eps))


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
    return in_dtype_of(rewards, centred(rewards.double()))


def leave_one_out(rewards: Tensor) -> Tensor:
    """Each reward less the mean of the others in its group: ``A_i = r_i - mean_{j != i}(r_j)``.

    RLOO (arXiv:2402.14740), section 2.3: a baseline that the completion itself had no part in, so the gradient has no
    bias. It is ``group_center`` times n / (n - 1), with n scorable rewards in the group.

    Args:
        rewards: (P, G), NaN = unscorable.

    Returns:
        (P, G) advantages in units of reward; 0 for the only scorable member of a group.

    Raises:
        ValueError: if ``rewards`` is not (P, G).

    Example:
        >>> leave_one_out(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
        tensor([[ 1.0000, -0.3333, -0.3333, -0.3333]])
    """
    check_shapes("P G", rewards=rewards)
    r = rewards.double()
    scored = (~r.isnan()).sum(dim=-1, keepdim=True)
    return in_dtype_of(rewards, centred(r) * scored / (scored - 1).clamp(min=1))


def batch_zscore(rewards: Tensor, *, ddof: int = 1, eps: float = EPS) -> Tensor:
    """Centred within the group, divided by the standard deviation of the whole batch.

    ``A_i = (r_i - mean_group(r)) / (std_batch(r) + eps)``: the deviation is that of the rewards, so it holds what lies
    between groups too. ``group_center_global_std`` divides by that of the centred rewards.

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
    return in_dtype_of(rewards, scaled(centred(r), nanstd(r.flatten(), dim=0, ddof=ddof), eps))


def global_zscore(rewards: Tensor, *, ddof: int = 1, eps: float = EPS) -> Tensor:
    """The z-score of each reward within the whole batch; groups play no part.

    ``A_i = (r_i - mean_batch(r)) / (std_batch(r) + eps)``, REINFORCE++ (arXiv:2501.03262v9), equation 5. It
    pushes all completions of a hard prompt down and all of an easy one up: many prompts with few completions suit it.

    Args:
        rewards: (P, G), NaN = unscorable.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation, in units of reward.

    Returns:
        (P, G) advantages without unit, in the dtype of ``rewards`` (float32 for integers); exactly 0 if all scorable
        rewards of the batch are equal.

    Raises:
        ValueError: if ``rewards`` is not (P, G).

    Example:
        >>> global_zscore(torch.tensor([[1.0, 1.0], [0.0, 0.0]]))
        tensor([[ 0.8659,  0.8659],
                [-0.8659, -0.8659]])
    """
    check_shapes("P G", rewards=rewards)
    everything = rewards.double().reshape(1, -1)
    advantages = scaled(centred(everything), nanstd(everything, dim=-1, ddof=ddof), eps)
    return in_dtype_of(rewards, advantages.reshape(rewards.shape))


def group_center_global_std(rewards: Tensor, *, ddof: int = 1, eps: float = EPS) -> Tensor:
    """Centred within the group, then divided by the standard deviation of all centred rewards.

    ``A_i = A'_i / (std_batch(A') + eps)`` with ``A'_i = r_i - mean_group(r)``, the group-baseline form of REINFORCE++
    (arXiv:2501.03262v9), equations 6 and 7. The paper also takes off the mean of A', which is 0.

    Args:
        rewards: (P, G), NaN = unscorable.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviation, in units of reward.

    Returns:
        (P, G) advantages without unit, in the dtype of ``rewards`` (float32 for integers).

    Raises:
        ValueError: if ``rewards`` is not (P, G).

    Example:
        >>> group_center_global_std(torch.tensor([[0.0, 2.0], [100.0, 102.0]]))
        tensor([[-0.8660,  0.8660],
                [-0.8660,  0.8660]])
    """
    check_shapes("P G", rewards=rewards)
    r = rewards.double()
    within = centred(r)
    return in_dtype_of(rewards, scaled(within, _batch_std(within, r.isnan(), ddof=ddof), eps))


ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "group_zscore": group_zscore,
    "group_center": group_center,
    "leave_one_out": leave_one_out,
    "batch_zscore": batch_zscore,
    "global_zscore": global_zscore,
    "group_center_global_std": group_center_global_std,
}
"""Every advantage by name. A new one is a function above and a line here."""


def normalize_then_sum(
    rewards: Tensor, *, weights: Sequence[float] | Tensor | None = None, ddof: int = 1, eps: float = EPS
) -> Tensor:
    """Several rewards, each a z-score within its group before they are added up; the sum is scaled by its deviation.

    GDPO (arXiv:2601.05242), equations 4 to 7: ``A_k = (r_k - mean_group) / (std_group + eps)`` for each reward function
    k, ``A = sum_k w_k A_k``, divided by ``std_batch(A) + eps``. Added up first, rewards of (0, 1) and (0, 2) would give
    the same advantages. The paper also takes off the batch's mean of A, which is 0.

    Args:
        rewards: (P, G, R), NaN where a reward function does not apply: it is out of that function's statistics, and its
            share of the sum is 0. A completion that none applies to has advantage 0 and is out of the deviation.
        weights: R of them; None weighs all alike.
        ddof: 1 for the sample standard deviation, 0 for the population's.
        eps: added to the standard deviations.

    Returns:
        (P, G) advantages without unit, in the dtype of ``rewards`` (float32 for integers); exactly 0 in a group where
        every reward function is constant.

    Raises:
        ValueError: if ``rewards`` is not (P, G, R), or there are not R weights.

    Example:
        >>> two = torch.tensor([[[0.0, 0.0], [0.0, 1.0]], [[0.0, 0.0], [1.0, 1.0]]])  # sums 0, 1 and 0, 2
        >>> normalize_then_sum(two)
        tensor([[-0.5477,  0.5477],
                [-1.0954,  1.0954]])
    """
    check_shapes("P G R", rewards=rewards)
    r = rewards.double()
    functions = r.shape[-1]
    w = r.new_ones(functions) if weights is None else torch.as_tensor(weights, dtype=r.dtype, device=r.device)
    if w.shape != (functions,):
        raise ValueError(f"{functions} reward functions need {functions} weights, got {tuple(w.shape)}")
    each = [group_zscore(r[..., k], ddof=ddof, eps=eps) for k in range(functions)]
    total = (torch.stack(each, dim=-1) * w).sum(dim=-1)
    return in_dtype_of(rewards, scaled(total, _batch_std(total, r.isnan().all(dim=-1), ddof=ddof), eps))


MULTI_REWARD_ADVANTAGES: dict[str, Callable[..., Tensor]] = {
    "normalize_then_sum": normalize_then_sum,
}
"""Every advantage of several rewards (P, G, R) by name. A new one is a function above and a line here."""


def _batch_std(values: Tensor, unscorable: Tensor, *, ddof: int) -> Tensor:
    """(P, G) -> (1,): the deviation of all values but those of unscorable completions."""
    return nanstd(values.masked_fill(unscorable, torch.nan).flatten(), dim=0, ddof=ddof)
