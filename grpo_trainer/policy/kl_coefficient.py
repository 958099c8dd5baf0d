"""The price of a nat of KL to the reference, fixed, or following the KL from optimizer step to step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from grpo_trainer.functional.kl import adaptive_kl_coefficient
from grpo_trainer.policy.step_mean import StepMean


@dataclass(kw_only=True)
class KLCoefficient:
    """The coefficient beta, fixed or adaptive.

    Attributes:
        beta: loss or reward per nat; with a target that of now.
        target: the KL to hold, in nats per token (Ziegler et al., arXiv:1909.08593); None leaves beta as it is.
        gain: share of the relative error that is corrected per optimizer step.

    Example:
        >>> import torch
        >>> coefficient = KLCoefficient(beta=1.0, target=0.1)
        >>> coefficient.count(torch.tensor(5.5), torch.tensor(50.0))  # 0.11 nats per token, a tenth too much
        >>> coefficient.end_step()
        >>> round(coefficient.beta, 6)
        1.01
    """

    beta: float = 0.0
    target: float | None = None
    gain: float = 0.1
    _mean: StepMean = field(default_factory=StepMean, init=False, repr=False)

    @property
    def adaptive(self) -> bool:
        """Whether it moves."""
        return self.target is not None

    def count(self, total: Tensor, count: Tensor) -> None:
        """Adds the KL of some tokens.

        Args:
            total: () sum over tokens, in nats.
            count: () their number.
        """
        if self.adaptive:
            self._mean.count(total, count)

    def end_step(self, add_up: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        """Moves beta by what was measured since the last step; leaves it if nothing was. Every process has to call it.

        Args:
            add_up: sums a tensor over processes.
        """
        measured = self._mean.take(add_up)
        if self.target is not None and measured is not None:
            self.beta = adaptive_kl_coefficient(self.beta, measured, target=self.target, gain=self.gain)

    def state_dict(self) -> dict[str, float]:
        """What the rest of a run depends on; empty if nothing moves."""
        return {"beta": self.beta} if self.adaptive else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes up what ``state_dict`` gave.

        Args:
            state: from a checkpoint, taken at the end of an optimizer step.
        """
        if self.adaptive and state:
            self.beta = state["beta"]
