"""The mean of a figure over one optimizer step: what a coefficient is moved by."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


class StepMean:
    """Adds sums up where they arise, and says their mean over all micro-batches and processes once.

    Example:
        >>> mean = StepMean()
        >>> mean.count(torch.tensor(9.0), torch.tensor(3.0))
        >>> mean.count(torch.tensor(0.0), torch.tensor(7.0))
        >>> mean.take(), mean.take()
        (0.9, None)
    """

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def count(self, total: Tensor, count: Tensor) -> None:
        """Adds a part of the step.

        Args:
            total: () the sum of what is averaged.
            count: () of how many.
        """
        pair = torch.stack([total.detach().double(), count.detach().double()])
        self._sums = pair if self._sums is None else self._sums + pair

    def take(self, add_up: Callable[[Tensor], Tensor] = lambda t: t) -> float | None:
        """The mean, and a new beginning. Every process has to call it.

        Args:
            add_up: sums a tensor over processes.

        Returns:
            The mean; None if nothing was counted.
        """
        if self._sums is None:
            return None
        total, count = add_up(self._sums).tolist()
        self._sums = None
        return total / count if count else None
