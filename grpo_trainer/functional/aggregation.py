"""From losses per token to one number: ``sum(w * loss) / Z``.

Each function gives the weights w (B, T) of a micro-batch and what the micro-batch adds to Z, its number of items. Z is
summed over all micro-batches and all processes of an optimizer step before anything is divided, so the gradient does
not depend on how the step was cut. The one exception says so in its first line. Weights are float32, or float64 for a
float64 mask.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from grpo_trainer.functional.numeric import wide
from grpo_trainer.functional.shapes import check_shapes


def token_mean(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over the credited tokens of the optimizer step: ``w = m``, ``Z = sum(m)``.

    DAPO (arXiv:2503.14476), equation 8: every token counts the same, whatever the length of its completion.

    Args:
        mask: (B, T), True on credited tokens.

    Returns:
        weights (B, T) and the number of credited tokens, (), both float32.

    Raises:
        ValueError: if ``mask`` is not (B, T).
    """
    check_shapes("B T", mask=mask)
    weights = wide(mask)
    return weights, weights.sum()


def sequence_mean(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over completions of the mean over their tokens: ``w = m / |o|``, ``Z = rows``.

    DeepSeekMath (arXiv:2402.03300), equation 3. A completion without a credited token adds 0 and counts as a row.

    Args:
        mask: (B, T), True on credited tokens.

    Returns:
        weights (B, T) and the number of rows, (), both float32.

    Raises:
        ValueError: if ``mask`` is not (B, T).
    """
    check_shapes("B T", mask=mask)
    weights = wide(mask)
    return weights / weights.sum(dim=1, keepdim=True).clamp(min=1), weights.new_tensor(len(weights))


def fixed_length(mask: Tensor, *, length: int) -> tuple[Tensor, Tensor]:
    """Sum over tokens, divided by rows and a constant length: ``w = m / L``, ``Z = rows``.

    Dr. GRPO (arXiv:2503.20783), section 3.2: dividing by each completion's own length makes long wrong answers cheap.

    Args:
        mask: (B, T), True on credited tokens.
        length: the constant L in tokens; the largest completion length allowed, never the padded width.

    Returns:
        weights (B, T) and the number of rows, (), both float32.

    Raises:
        ValueError: if ``mask`` is not (B, T).
    """
    check_shapes("B T", mask=mask)
    weights = wide(mask)
    return weights / length, weights.new_tensor(len(weights))


def sequence_sum(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Mean over completions of the sum over their tokens: ``w = m``, ``Z = rows``.

    LUSPO (arXiv:2602.05261) over ``losses.clipped_sequence``: the loss of a completion times its length, so that each
    of its tokens is moved as much as one of a short completion. Loss and gradient grow with the lengths.

    Args:
        mask: (B, T), True on credited tokens.

    Returns:
        weights (B, T) and the number of rows, (), both float32.

    Raises:
        ValueError: if ``mask`` is not (B, T).
    """
    check_shapes("B T", mask=mask)
    weights = wide(mask)
    return weights, weights.new_tensor(len(weights))


def micro_batch_token_mean(mask: Tensor) -> tuple[Tensor, Tensor]:
    """NOT invariant to how a step is cut: mean over micro-batches of their token means, ``w = m / sum(m)``, ``Z = 1``.

    The "bnpo" normaliser of TRL. Prefer ``token_mean``.

    Args:
        mask: (B, T), True on credited tokens.

    Returns:
        weights (B, T) and 1, (), both float32.

    Raises:
        ValueError: if ``mask`` is not (B, T).
    """
    check_shapes("B T", mask=mask)
    weights = wide(mask)
    return weights / weights.sum().clamp(min=1), weights.new_tensor(1.0)


AGGREGATIONS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "fixed_length": fixed_length,
    "sequence_sum": sequence_sum,
    "micro_batch_token_mean": micro_batch_token_mean,
}
"""Every aggregation by name. A new one is a function above and a line here."""
