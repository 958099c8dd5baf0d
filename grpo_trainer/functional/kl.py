"""Per-token estimators of KL(pi_theta || pi_ref) from one sample of pi_theta, and what is done with them.

All three are from J. Schulman, "Approximating KL Divergence" (2020), written with
``d = log pi_ref - log pi_theta``. Values are in nats. What an estimator is worth depends on where it stands:

====  =========  =================================  =================================  =============================
name  its mean   mean of its gradient, in the loss  ... of its product with the ratio  what it pulls at in the reward
====  =========  =================================  =================================  =============================
k1    KL         0: it does not pull                that of KL                         KL
k2    not KL     that of KL                         that of its mean, which is not KL  neither
k3    KL         that of KL(pi_ref || pi_theta)     that of KL                         KL less KL(pi_ref || pi_theta)
====  =========  =================================  =================================  =============================

Departure: in an exponent d is capped at 20, so that one degenerate token cannot overflow; values with d <= 20 are
exact, and beyond it the gradient is 0. The arithmetic is float32 or wider whatever the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_trainer.functional.numeric import MAX_LOG_RATIO, row_sum, wide
from grpo_trainer.functional.shapes import check_shapes


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The log-ratio itself, unbiased and of either sign: ``-d = log pi_theta - log pi_ref``.

    Args:
        logprobs: (B, T) under the policy.
        ref_logprobs: (B, T) under the reference.

    Returns:
        (B, T) estimates in nats.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> k1(torch.zeros(1, 3), torch.tensor([[0.5, -0.5, 0.0]]))
        tensor([[-0.5000,  0.5000,  0.0000]])
    """
    check_shapes("B T", logprobs=logprobs, ref_logprobs=ref_logprobs)
    return wide(logprobs) - wide(ref_logprobs)


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio, never negative, biased: ``d^2 / 2``. Its gradient is that of KL on average.

    Args:
        logprobs: (B, T) under the policy.
        ref_logprobs: (B, T) under the reference.

    Returns:
        (B, T) estimates in nats, each >= 0.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> k2(torch.zeros(1, 3), torch.tensor([[0.5, -0.5, 0.0]]))
        tensor([[0.1250, 0.1250, 0.0000]])
    """
    check_shapes("B T", logprobs=logprobs, ref_logprobs=ref_logprobs)
    return (wide(ref_logprobs) - wide(logprobs)).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Unbiased, never negative: ``exp(d) - d - 1``. DeepSeekMath (arXiv:2402.03300), equation 4.

    Args:
        logprobs: (B, T) under the policy.
        ref_logprobs: (B, T) under the reference.

    Returns:
        (B, T) estimates in nats, each >= 0.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> k3(torch.zeros(1, 3), torch.tensor([[0.5, -0.5, 0.0]]))
        tensor([[0.1487, 0.1065, 0.0000]])
    """
    check_shapes("B T", logprobs=logprobs, ref_logprobs=ref_logprobs)
    d = (wide(ref_logprobs) - wide(logprobs)).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(d) - d


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "k1": k1,
    "k2": k2,
    "k3": k3,
}
"""Every estimator by name. A new one is a function above and a line here."""


def kl_penalty(kl: Tensor, mask: Tensor, *, beta: float) -> Tensor:
    """What a completion pays in reward for leaving the reference: ``beta * sum_t KL_t``, to be taken off its reward.

    With ``k1`` this is ``beta * log(pi(o) / pi_ref(o))``, the penalty of RLHF: Ziegler et al. (arXiv:1909.08593),
    equation 2. It is a constant: the advantage carries it, and the loss then has no KL term of its own.

    Args:
        kl: (B, T) estimates in nats, of the policy that sampled.
        mask: (B, T), nonzero on the tokens that count.
        beta: price of a nat, in units of reward.

    Returns:
        (B,) penalties in units of reward, without gradient.

    Raises:
        ValueError: if the shapes differ.

    Example:
        >>> kl_penalty(torch.tensor([[0.5, 0.25, 9.0]]), torch.tensor([[1, 1, 0]]), beta=0.1)
        tensor([0.0750])
    """
    check_shapes("B T", kl=kl, mask=mask)
    return beta * row_sum(wide(kl).detach(), mask)[:, 0]


def adaptive_kl_coefficient(beta: float, kl: float, *, target: float, gain: float = 0.1, limit: float = 0.2) -> float:
    """The next ``beta`` of a controller that holds the KL at a target: ``beta * (1 + gain * clip(kl / target - 1))``.

    Ziegler et al. (arXiv:1909.08593), section 2.2: the clip is at +-0.2 and the gain 0.1, so that beta moves by at most
    2 % per step.

    Args:
        beta: the coefficient now, above 0; 0 stays 0.
        kl: the KL that was measured with it, in the unit of ``target``.
        target: the KL to hold, in nats per token or per completion, above 0.
        gain: share of the relative error that is corrected per step.
        limit: largest relative error that is believed.

    Returns:
        The coefficient for the next step.

    Raises:
        ValueError: if the target is not above 0.

    Example:
        >>> adaptive_kl_coefficient(1.0, 0.11, target=0.1), adaptive_kl_coefficient(1.0, 7.0, target=0.1)
        (1.01, 1.02)
    """
    if not target > 0:
        raise ValueError(f"the KL target must be above 0 nats, got {target}. For no KL term at all set beta=0.")
    error = max(-limit, min(limit, kl / target - 1))
    return beta * (1 + gain * error)
