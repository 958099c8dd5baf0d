"""Policy losses, per token and unreduced.

Each takes the log-probs of the completion tokens under the current policy and under the policy that sampled them, and
the advantage of each completion. ``old_logprobs=None`` says that the two policies are the same: the ratio is exactly 1
and its gradient is the score function's.

Departure from the papers: log-ratios are capped at +-20 before they are exponentiated (see ``kl.MAX_LOG_RATIO``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_trainer.functional.kl import MAX_LOG_RATIO
from grpo_trainer.functional.shapes import check_shapes


class TokenLoss(NamedTuple):
    """What a policy loss returns: the loss of each token, unreduced, and what is worth logging about it.

    Attributes:
        loss: (B, T) loss per token; entries outside the mask are ignored by whoever sums.
        stats: name -> (B, T) figure per token, averaged over credited tokens when it is logged.
    """

    loss: Tensor
    stats: dict[str, Tensor]


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
    """``pi_theta(token) / pi_old(token)`` for each token.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.

    Returns:
        (B, T) ratios; exactly 1, with the gradient of ``logprobs``, if ``old_logprobs`` is None.

    Raises:
        ValueError: if the shapes differ.
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs)
    old = logprobs.detach() if old_logprobs is None else old_logprobs
    return (logprobs - old).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
) -> TokenLoss:
    """The clipped surrogate: ``-min(ratio * A, clip(ratio, 1 - eps, 1 + eps_high) * A)``.

    PPO (arXiv:1707.06347), equation 7, as GRPO uses it: DeepSeekMath (arXiv:2402.03300), equation 3. ``epsilon_high``
    is DAPO's clip-higher (arXiv:2503.14476), equation 10. ``delta`` bounds the ratio where the advantage is negative
    and the clip leaves it free, ``min(ratio, delta) * A`` in the first branch: the two-sided clipping of INTELLECT-2
    (arXiv:2505.07291).

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        epsilon: lower clip distance.
        epsilon_high: upper clip distance; None takes ``epsilon``.
        delta: upper bound of the unclipped ratio, above ``1 + epsilon_high``; None sets none.

    Returns:
        Loss (B, T) and the stats ``clip_ratio/low`` (token clipped at the lower bound, A < 0), ``clip_ratio/high``
        (at the upper bound, A > 0) and ``clip_ratio/region`` (either), as 0 or 1 per token.

    Raises:
        ValueError: if the shapes do not fit each other.

    Example:
        >>> ratio = torch.tensor([[1.5], [1.5], [0.5], [0.5]])
        >>> sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> clipped(ratio.log(), torch.zeros(4, 1), sign, torch.ones(4, 1)).loss.flatten()
        tensor([-1.2000,  1.5000, -0.5000,  0.8000])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    ratio = importance_ratio(logprobs, old_logprobs)
    adv = advantages[:, None]  # (B, 1)
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * adv, ratio.clamp(low, high) * adv)
    with torch.no_grad():
        at_low = ((ratio < low) & (adv < 0)).float()
        at_high = ((ratio > high) & (adv > 0)).float()
    return TokenLoss(
        loss, {"clip_ratio/low": at_low, "clip_ratio/high": at_high, "clip_ratio/region": at_low + at_high}
    )


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clipped": clipped,
}
"""Every policy loss by name. A new one is a function above and a line here."""
