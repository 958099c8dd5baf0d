"""Per-token estimators of KL(pi_theta || pi_ref) from one sample of pi_theta.

All three are from J. Schulman, "Approximating KL Divergence" (2020), written with
``d = log pi_ref - log pi_theta``. Values are in nats.

Departure: d is capped at 20, so that one degenerate token cannot overflow; values with d <= 20 are exact, and beyond it
the gradient is 0. The arithmetic is float32 or wider whatever the input.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from grpo_trainer.functional.shapes import check_shapes

MAX_LOG_RATIO = 20.0
"""Largest exponent that is taken: exp(20) = 4.85e8 is far outside anything that trains, and finite."""


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
    d = (_wide(ref_logprobs) - _wide(logprobs)).clamp(max=MAX_LOG_RATIO)
    return torch.expm1(d) - d


KL_ESTIMATORS: dict[str, Callable[..., Tensor]] = {
    "k3": k3,
}
"""Every estimator by name. A new one is a function above and a line here."""


def _wide(t: Tensor) -> Tensor:
    return t if t.dtype == torch.float64 else t.float()
