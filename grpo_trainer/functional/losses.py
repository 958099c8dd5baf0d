"""Policy losses, per token and unreduced.

Each takes the log-probs of the completion tokens under the current policy and under the policy that sampled them, and
the advantage of each completion. ``old_logprobs=None`` says that the two policies are the same: the ratio is exactly 1
and its gradient is the score function's.

Here are the losses that are a function of the importance ratio, and the table of all; those that are a constant times a
log-prob are in ``score_losses``. A loss that has one value per completion repeats it for each token: with the
aggregation ``sequence_mean`` a completion then counts once, with ``sequence_sum`` as often as it has tokens.

Departure from the papers: log-ratios are capped at +-20 before they are exponentiated (see ``ratios``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_trainer.functional.numeric import bounded_exp, row_mean
from grpo_trainer.functional.ratios import importance_ratio, log_ratio, ratio_at
from grpo_trainer.functional.score_losses import cispo, reinforce, vespo
from grpo_trainer.functional.shapes import check_shapes
from grpo_trainer.functional.token_loss import TokenLoss

__all__ = [
    "POLICY_LOSSES",
    "TokenLoss",
    "clipped",
    "clipped_sequence",
    "clipped_sequence_token",
    "gmpo",
    "importance_ratio",
    "sapo",
]


def clipped(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    delta: float | None = None,
    importance_sampling_level: str = "token",
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
        importance_sampling_level: which ratio: of the ``"token"``, or of the completion, as in ``clipped_sequence``
            (``"sequence"``) or ``clipped_sequence_token`` (``"sequence_token"``).

    Returns:
        Loss (B, T) and the stats ``clip_ratio/low`` (clipped at the lower bound, A < 0), ``clip_ratio/high`` (at the
        upper bound, A > 0) and ``clip_ratio/region`` (either), as 0 or 1 per token, or per completion if the ratio is.

    Raises:
        ValueError: if the shapes do not fit each other, or the level is unknown.

    Example:
        >>> ratio = torch.tensor([[1.5], [1.5], [0.5], [0.5]])
        >>> sign = torch.tensor([1.0, -1.0, 1.0, -1.0])
        >>> clipped(ratio.log(), torch.zeros(4, 1), sign, torch.ones(4, 1)).loss.flatten()
        tensor([-1.2000,  1.5000, -0.5000,  0.8000])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    ratio = ratio_at(importance_sampling_level, logprobs, old_logprobs, mask)
    adv = advantages[:, None]  # (B, 1)
    free = ratio if delta is None else ratio.clamp(max=delta)
    loss = -torch.minimum(free * adv, ratio.clamp(low, high) * adv)
    return TokenLoss(loss.expand(mask.shape), clip_stats(ratio, adv, low, high))


def clipped_sequence(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    delta: float | None = None,
) -> TokenLoss:
    """The clipped surrogate of the completion's ratio: ``-min(s * A, clip(s, 1 - eps, 1 + eps_high) * A)``.

    GSPO (arXiv:2507.18071), equations 5 and 7, with the clip distances of its section 5.1: the ratio of a completion is
    a mean over its tokens and moves far less than a token's. The paper's objective is the mean over completions,
    ``sequence_mean``; weighted by length, ``sequence_sum``, it is LUSPO (arXiv:2602.05261).

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        epsilon: lower clip distance.
        epsilon_high: upper clip distance; None takes ``epsilon``.
        delta: as in ``clipped``.

    Returns:
        Loss (B, T), equal along a row, and the stats of ``clipped``, per completion (B, 1).

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    return clipped(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        importance_sampling_level="sequence",
    )


def clipped_sequence_token(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    epsilon: float = 3e-4,
    epsilon_high: float | None = 4e-4,
    delta: float | None = None,
) -> TokenLoss:
    """``clipped_sequence`` with a gradient per token: the value of the completion's ratio, the gradient of the token's.

    GSPO-token (arXiv:2507.18071), equations 13 and 14. Under ``sequence_mean`` loss and gradient are those of
    ``clipped_sequence``, as long as all tokens of a completion have the same advantage and weight.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        epsilon: lower clip distance.
        epsilon_high: upper clip distance; None takes ``epsilon``.
        delta: as in ``clipped``.

    Returns:
        Loss (B, T) and the stats of ``clipped``, per token.

    Raises:
        ValueError: if the shapes do not fit each other.
    """
    return clipped(
        logprobs,
        old_logprobs,
        advantages,
        mask,
        epsilon=epsilon,
        epsilon_high=epsilon_high,
        delta=delta,
        importance_sampling_level="sequence_token",
    )


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    sapo_temperature_pos: float = 1.0,
    sapo_temperature_neg: float = 1.05,
    importance_sampling_level: str = "token",
) -> TokenLoss:
    """A soft gate in place of the clip: ``-(4 / tau) * sigmoid(tau * (ratio - 1)) * A``.

    SAPO (arXiv:2511.20347), the gate in equation 6. The gradient of a token is ``-w * ratio * A`` with
    ``w = 4 p (1 - p)``, ``p = sigmoid(tau * (ratio - 1))``: 1 on policy, and less the further the ratio is from 1, on
    either side and for either sign of A. ``tau`` is ``sapo_temperature_pos`` where A > 0 and ``sapo_temperature_neg``
    elsewhere; the higher it is, the sooner a token is let go.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        sapo_temperature_pos: tau for A > 0, above 0.
        sapo_temperature_neg: tau for A <= 0, above 0.
        importance_sampling_level: which ratio, as in ``clipped``; the paper's is the token's.

    Returns:
        Loss (B, T), no stats.

    Raises:
        ValueError: if the shapes do not fit each other, or the level is unknown.

    Example:
        >>> on_policy = torch.zeros(1, 1)
        >>> sapo(on_policy, None, torch.ones(1), torch.ones(1, 1)).loss  # 4 * sigmoid(0) = 2, the gate and no ratio
        tensor([[-2.]])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    ratio = ratio_at(importance_sampling_level, logprobs, old_logprobs, mask)
    adv = advantages[:, None]  # (B, 1)
    tau = torch.where(adv > 0, ratio.new_tensor(sapo_temperature_pos), ratio.new_tensor(sapo_temperature_neg))
    gate = torch.sigmoid(tau * (ratio - 1)) * (4 / tau)
    return TokenLoss((-gate * adv).expand(mask.shape), {})


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    mask: Tensor,
    *,
    gmpo_epsilon: float = 0.4,
    gmpo_epsilon_high: float | None = None,
) -> TokenLoss:
    """The geometric mean of clipped token ratios: ``-exp(mean_t clip(d_t)) * A``, d_t the log-ratio of a token.

    GMPO (arXiv:2507.20673). The clip is in log space and one-sided, as the surrogate's: ``min(d, eps_high)`` where
    A > 0, ``max(d, -eps)`` where A < 0, for each token before the mean. So one outlying token cannot silence its
    completion, as it can in GSPO, nor outweigh the others, as it can in GRPO. The paper's objective is the mean over
    completions, ``sequence_mean``.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        advantages: (B,) one per completion.
        mask: (B, T), True on credited tokens.
        gmpo_epsilon: lower clip distance in nats: a ratio is kept above ``exp(-gmpo_epsilon)``.
        gmpo_epsilon_high: upper clip distance in nats; None takes ``gmpo_epsilon``.

    Returns:
        Loss (B, T), equal along a row, and the stats of ``clipped``, per token.

    Raises:
        ValueError: if the shapes do not fit each other.

    Example:
        >>> log_ratios = torch.tensor([[0.1, 0.3, 2.0]])  # the last counts as 0.4
        >>> gmpo(log_ratios, torch.zeros(1, 3), torch.ones(1), torch.ones(1, 3)).loss.neg().log()
        tensor([[0.2667, 0.2667, 0.2667]])
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs, mask=mask)
    check_shapes("B", advantages=advantages, rows=mask.any(dim=1))
    low, high = -gmpo_epsilon, gmpo_epsilon if gmpo_epsilon_high is None else gmpo_epsilon_high
    d = log_ratio(logprobs, old_logprobs)
    adv = advantages[:, None]  # (B, 1)
    kept = torch.where(adv > 0, d.clamp(max=high), d.clamp(min=low))
    loss = -bounded_exp(row_mean(kept, mask)) * adv
    return TokenLoss(loss.expand(mask.shape), clip_stats(d, adv, low, high))


def clip_stats(ratio: Tensor, advantages: Tensor, low: float, high: float) -> dict[str, Tensor]:
    """Which ratios a one-sided clip holds, as 0 or 1.

    Args:
        ratio: (B, T), or (B, 1) per completion; ratios or log-ratios, as the bounds are.
        advantages: (B, 1).
        low: the lower bound, which holds where A < 0.
        high: the upper bound, which holds where A > 0.

    Returns:
        ``clip_ratio/low``, ``clip_ratio/high`` and ``clip_ratio/region`` (either), in the shape of ``ratio``.
    """
    with torch.no_grad():
        at_low = ((ratio < low) & (advantages < 0)).float()
        at_high = ((ratio > high) & (advantages > 0)).float()
    return {"clip_ratio/low": at_low, "clip_ratio/high": at_high, "clip_ratio/region": at_low + at_high}


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {
    "clipped": clipped,
    "clipped_sequence": clipped_sequence,
    "clipped_sequence_token": clipped_sequence_token,
    "cispo": cispo,
    "sapo": sapo,
    "vespo": vespo,
    "gmpo": gmpo,
    "reinforce": reinforce,
}
"""Every policy loss by name. A new one is a function above and a line here."""
