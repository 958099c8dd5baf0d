"""What a policy loss returns."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class TokenLoss(NamedTuple):
    """What a policy loss returns: the loss of each token, unreduced, and what is worth logging about it.

    Attributes:
        loss: (B, T) loss per token; entries outside the mask are ignored by whoever sums.
        stats: name -> figure per token (B, T), averaged over credited tokens when it is logged, or per completion
            (B, 1).
    """

    loss: Tensor
    stats: dict[str, Tensor]
