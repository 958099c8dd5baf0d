"""A price on certainty: the entropy bonus, and a coefficient that follows the entropy."""

from __future__ import annotations

from torch import Tensor

from grpo_trainer.functional.numeric import wide


def entropy_bonus(entropy: Tensor, *, coefficient: float) -> Tensor:
    """The loss that rewards uncertainty: ``-coefficient * H`` per token.

    It is a mean over tokens by itself, whatever the policy loss is averaged over: give it the weights and the count of
    ``token_mean``, so that the coefficient means the same for every loss.

    Args:
        entropy: (B, T) in nats, with its gradient.
        coefficient: loss per nat; 0 for none.

    Returns:
        (B, T) loss per token.

    Example:
        >>> import torch
        >>> entropy_bonus(torch.tensor([[2.0]]), coefficient=0.01)
        tensor([[-0.0200]])
    """
    return -coefficient * wide(entropy)


def adaptive_entropy_coefficient(
    coefficient: float,
    entropy: float,
    *,
    target: float = 0.2,
    delta: float = 0.005,
    minimum: float = 0.0,
    maximum: float = 1.0,
) -> float:
    """The next coefficient of a controller that keeps the entropy from falling below a target: one step up or down.

    Skywork-OR1 (arXiv:2505.22312), section 3.2.5: up by ``delta`` while the entropy is at or below the target, down
    otherwise. What is put into the loss is ``applied_entropy_coefficient``. What happens exactly at the target, and the
    bounds, are TRL's.

    Args:
        coefficient: the coefficient now.
        entropy: mean entropy per token of the optimizer step that used it, in nats.
        target: the entropy to hold, in nats.
        delta: the step, in loss per nat.
        minimum: the least coefficient.
        maximum: the greatest coefficient.

    Returns:
        The coefficient for the next step.

    Raises:
        ValueError: if the bounds are the wrong way round.

    Example:
        >>> adaptive_entropy_coefficient(0.01, 0.15), adaptive_entropy_coefficient(0.01, 0.25)
        (0.015, 0.005)
    """
    if minimum > maximum:
        raise ValueError(f"the least entropy coefficient, {minimum}, is above the greatest, {maximum}; swap them.")
    step = delta if entropy <= target else -delta
    return max(minimum, min(maximum, coefficient + step))


def applied_entropy_coefficient(coefficient: float, entropy: float, *, target: float = 0.2) -> float:
    """The coefficient that stands in the loss: none while the policy is uncertain enough.

    Skywork-OR1 (arXiv:2505.22312), section 3.2.5.

    Args:
        coefficient: the controller's.
        entropy: mean entropy per token of the last optimizer step, in nats; infinite before the first.
        target: the entropy to hold, in nats.

    Returns:
        ``coefficient`` if the entropy is at or below the target, else 0.
    """
    return coefficient if entropy <= target else 0.0
