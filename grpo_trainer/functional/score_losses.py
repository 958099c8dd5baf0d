"""Policy losses of the form ``-weight * A * log pi``: a constant weight, and a gradient that no clip switches off.

Their names stand in the table of ``losses``. The value of such a loss is not an objective: only its gradient,
``-weight * A`` per token, means something.

Departure from the papers: log-ratios are capped at +-20 before they are exponentiated (see ``ratios``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from grpo_trainer.functional.numeric import MAX_LOG_RATIO, row_sum, wide
from grpo_trainer.functional.ratios import importance_ratio, log_ratio, ratio_at
from grpo_trainer.functional.shapes import check_shapes
from grpo_trainer.functional.token_loss import TokenLoss


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon_high: float = 5.0,
    importance_sampling_level: str = "token",
) -> TokenLoss:
    """A capped, constant importance weight: ``-sg[min(ratio, epsilon_high)] * A * log pi``.

    MiniMax-M1 (arXiv:2506.13585), equations 4 and 5; ``sg`` stops the gradient. A token whose ratio is beyond the cap
    keeps a gradient, where the clipped surrogate drops it. The paper writes the cap as ``1 + eps_high`` and sets no
    lower one; which value it uses it does not say. Here ``epsilon_high`` is the cap itself, as ``epsilon_max`` in
    ScaleRL (arXiv:2510.13786) and as TRL has it; 5 is the value recommended there for ScaleRL.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        epsilon_high: the largest weight of a token, at least 1: not a distance from 1.
        importance_sampling_level: which ratio, as in ``losses.clipped``; the paper's is the token's.

    Returns:
        Loss (B, T) and the stat ``cispo_clip_ratio``: 1 where the cap holds, else 0, for A != 0.

    Raises:
        ValueError: if the cap is below 1, the shapes do not fit each other, or the level is unknown.

    Example:
        >>> logprobs = torch.tensor([[7.0, 0.5]]).log().requires_grad_()
        >>> cispo(logprobs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2)).loss.sum().backward()
        >>> logprobs.grad
        tensor([[-5.0000, -0.5000]])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    if epsilon_high < 1:
        raise ValueError(
            f"cispo caps the ratio itself at epsilon_high, so epsilon_high={epsilon_high} would shrink every token, on "
            "policy too. Give the largest ratio allowed, at least 1 (5.0 is the default)."
        )
    ratio = ratio_at(importance_sampling_level, logprobs, old_logprobs, mask).detach()
    adv = advantages[:, None]  # (B, 1)
    loss = -ratio.clamp(max=epsilon_high) * adv * wide(logprobs)
    return TokenLoss(loss, {"cispo_clip_ratio": ((ratio > epsilon_high) & (adv != 0)).float()})


def vespo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> TokenLoss:
    """A smooth weight of the whole completion: ``-phi(W) * A * log pi``, ``phi(W) = W^k * exp(lambda * (1 - W))``.

    VESPO (arXiv:2602.10693). W is the ratio of the whole completion, ``exp(sum_t d_t)``, not normalised by its length;
    phi is a constant for the gradient, 1 on policy, largest at ``W = k / lambda`` and 0 far from it on either side.
    k and lambda depend on the sign of the advantage. W compares with the policy that sampled: where a sampler's own
    log-probs are known, they are the ``old_logprobs`` of this loss, and no other correction is needed.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens; W is the product over those.
        vespo_k_pos: k for A >= 0.
        vespo_lambda_pos: lambda for A >= 0, above 0.
        vespo_k_neg: k for A < 0.
        vespo_lambda_neg: lambda for A < 0, above 0.

    Returns:
        Loss (B, T) and the stat ``vespo/phi_seq_mean``: phi, per completion (B, 1).

    Raises:
        ValueError: if the shapes do not fit each other.

    Example:
        >>> log_ratios = torch.tensor([2.0, 0.5]).log()[:, None]  # phi: 4 exp(-3) and .25 exp(1.5)
        >>> vespo(log_ratios, torch.zeros(2, 1), torch.ones(2), torch.ones(2, 1)).stats["vespo/phi_seq_mean"]
        tensor([[0.1991],
                [1.1204]])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    adv = advantages[:, None]  # (B, 1)
    with torch.no_grad():
        # Only the upper end is capped: W^k exp(-lambda W) goes to 0 by itself at either end.
        log_w = row_sum(log_ratio(logprobs, old_logprobs), mask).clamp(max=MAX_LOG_RATIO)
        k = torch.where(adv >= 0, log_w.new_tensor(vespo_k_pos), log_w.new_tensor(vespo_k_neg))
        lam = torch.where(adv >= 0, log_w.new_tensor(vespo_lambda_pos), log_w.new_tensor(vespo_lambda_neg))
        phi = (k * log_w + lam * (1 - log_w.exp())).clamp(max=MAX_LOG_RATIO).exp()
    return TokenLoss(-phi * adv * wide(logprobs), {"vespo/phi_seq_mean": phi})


def reinforce(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    importance_weighted: bool = True,
) -> TokenLoss:
    """The plain policy gradient, never clipped: ``-sg[ratio] * A * log pi``.

    Williams, "Simple statistical gradient-following algorithms for connectionist reinforcement learning" (1992); with
    the weight of a token under an older sampling policy: MiniMax-M1 (arXiv:2506.13585), equation 3. Its gradient is
    that of the surrogate without a clip, ``-ratio * A``. On policy the ratio is 1 and nothing has to be chosen.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        importance_weighted: False leaves the ratio out also off policy, ``-A * log pi``, as if the current policy had
            sampled.

    Returns:
        Loss (B, T), no stats.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    loss = -advantages[:, None] * wide(logprobs)
    return TokenLoss(importance_ratio(logprobs, old_logprobs).detach() * loss if importance_weighted else loss, {})
