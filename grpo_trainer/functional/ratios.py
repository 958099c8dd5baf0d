"""How much likelier a completion has become: the importance ratio, per token and per completion.

With ``d_t = log pi_theta(token_t) - log pi_old(token_t)``. ``old_logprobs=None`` says that the two policies are the
same: every ratio is exactly 1, and its gradient is the score function's.

Departure from the papers: a log-ratio is cut to +-20 before it is exponentiated (see ``numeric.MAX_LOG_RATIO``), with
no gradient beyond. The arithmetic is float32 or wider whatever the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_trainer.functional.numeric import MAX_LOG_RATIO, bounded_exp, row_mean, wide
from grpo_trainer.functional.shapes import check_shapes


def log_ratio(logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
    """``log pi_theta(token) - log pi_old(token)`` for each token.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.

    Returns:
        (B, T) differences in nats; exactly 0, with the gradient of ``logprobs``, if ``old_logprobs`` is None.

    Raises:
        ValueError: if the shapes differ.
    """
    check_shapes("B T", logprobs=logprobs, old_logprobs=old_logprobs)
    return wide(logprobs) - (wide(logprobs).detach() if old_logprobs is None else wide(old_logprobs))


def importance_ratio(logprobs: Tensor, old_logprobs: Tensor | None) -> Tensor:
    """``pi_theta(token) / pi_old(token)`` for each token: ``r_t = exp(d_t)``.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.

    Returns:
        (B, T) ratios; exactly 1, with the gradient of ``logprobs``, if ``old_logprobs`` is None.

    Raises:
        ValueError: if the shapes differ.
    """
    return bounded_exp(log_ratio(logprobs, old_logprobs))


def token_ratio(logprobs: Tensor, old_logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """``importance_ratio``, as the level ``"token"``: (B, T) for log-probs and mask (B, T)."""
    check_shapes("B T", logprobs=logprobs, mask=mask)
    return importance_ratio(logprobs, old_logprobs)


def sequence_ratio(logprobs: Tensor, old_logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """One ratio per completion, normalised by its length: ``s = exp(mean_t d_t)``, the geometric mean of its tokens'.

    GSPO (arXiv:2507.18071), equation 7.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        mask: (B, T), nonzero on credited tokens; the mean is over those.

    Returns:
        (B, 1) ratios; 1 for a completion without a credited token.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> sequence_ratio(torch.tensor([[0.1, 0.2, 0.3]]), torch.zeros(1, 3), torch.ones(1, 3)).log()
        tensor([[0.2000]])
    """
    check_shapes("B T", logprobs=logprobs, mask=mask)
    return bounded_exp(row_mean(log_ratio(logprobs, old_logprobs), mask))


def sequence_token_ratio(logprobs: Tensor, old_logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """The value of the completion's ratio with the gradient of the token's: ``s_t = sg[s] * pi_t / sg[pi_t]``.

    GSPO-token (arXiv:2507.18071), equation 14; ``sg`` stops the gradient. The ratio of a completion moves one token's
    log-prob by ``s / |o|`` per token of the completion; here each token is moved by its own loss alone, so that tokens
    of one completion may have advantages of their own.

    Args:
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        mask: (B, T), nonzero on credited tokens.

    Returns:
        (B, T) ratios, equal along a row.

    Raises:
        ValueError: if the shapes differ.
    """
    check_shapes("B T", logprobs=logprobs, mask=mask)
    mean = row_mean(log_ratio(logprobs, old_logprobs).detach(), mask)
    one = importance_ratio(logprobs, None)
    return bounded_exp(mean) * torch.where(mean.abs() <= MAX_LOG_RATIO, one, one.detach())


RATIOS: dict[str, Callable[[Tensor, Tensor | None, Tensor], Tensor]] = {
    "token": token_ratio,
    "sequence": sequence_ratio,
    "sequence_token": sequence_token_ratio,
}
"""Every ``importance_sampling_level`` by name. A new one is a function above and a line here."""


def ratio_at(level: str, logprobs: Tensor, old_logprobs: Tensor | None, mask: Tensor) -> Tensor:
    """The importance ratio at a level.

    Args:
        level: a key of ``RATIOS``.
        logprobs: (B, T) under the current policy.
        old_logprobs: (B, T) under the sampling policy, or None if that is the current policy.
        mask: (B, T), nonzero on credited tokens.

    Returns:
        (B, T), or (B, 1) where a completion has one ratio.

    Raises:
        ValueError: if the level is unknown, or the shapes differ.
    """
    if level not in RATIOS:
        raise ValueError(f"unknown importance_sampling_level {level!r}. Known: {', '.join(RATIOS)}.")
    return RATIOS[level](logprobs, old_logprobs, mask)
