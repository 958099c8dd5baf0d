"""The price on certainty in the loss, and a coefficient that follows the entropy from optimizer step to step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from grpo_trainer.functional.entropy import adaptive_entropy_coefficient, applied_entropy_coefficient
from grpo_trainer.policy.step_mean import StepMean


@dataclass(kw_only=True)
class EntropyBonus:
    """The coefficient of the entropy bonus, fixed or adaptive.

    Attributes:
        coefficient: loss per nat; with ``adaptive`` that of now.
        adaptive: whether it follows the entropy (Skywork-OR1).
        target: the entropy to hold, in nats.
        delta: step of the coefficient.
        minimum: its least value.
        maximum: its greatest value.
        last_entropy: mean entropy per trained token of the last optimizer step, in nats; infinite before the first.

    Example:
        >>> import torch
        >>> bonus = EntropyBonus(coefficient=0.01, adaptive=True)
        >>> bonus.applied  # nothing has been measured
        0.0
        >>> bonus.count(torch.tensor(0.3), torch.tensor(2.0))
        >>> bonus.end_step()
        >>> bonus.coefficient, bonus.applied
        (0.015, 0.015)
    """

    coefficient: float = 0.0
    adaptive: bool = False
    target: float = 0.2
    delta: float = 0.005
    minimum: float = 0.0
    maximum: float = 1.0
    last_entropy: float = math.inf
    _mean: StepMean = field(default_factory=StepMean, init=False, repr=False)

    @property
    def enabled(self) -> bool:
        """Whether there is a bonus at all, now or later in the run."""
        return self.adaptive or self.coefficient != 0.0

    @property
    def applied(self) -> float:
        """The coefficient that stands in the loss of the current optimizer step."""
        if not self.adaptive:
            return self.coefficient
        return applied_entropy_coefficient(self.coefficient, self.last_entropy, target=self.target)

    def count(self, total: Tensor, count: Tensor) -> None:
        """Adds the entropies of a micro-batch.

        Args:
            total: () sum over the tokens that the bonus is about, in nats.
            count: () their number.
        """
        if self.adaptive:
            self._mean.count(total, count)

    def end_step(self, add_up: Callable[[Tensor], Tensor] = lambda t: t) -> None:
        """Moves the coefficient by what the optimizer step has measured. Every process has to call it.

        Args:
            add_up: sums a tensor over processes.
        """
        measured = self._mean.take(add_up)
        if measured is None:
            return
        self.last_entropy = measured
        self.coefficient = adaptive_entropy_coefficient(
            self.coefficient,
            self.last_entropy,
            target=self.target,
            delta=self.delta,
            minimum=self.minimum,
            maximum=self.maximum,
        )

    def state_dict(self) -> dict[str, float]:
        """What the rest of a run depends on; empty if nothing moves."""
        return {"coefficient": self.coefficient, "last_entropy": self.last_entropy} if self.adaptive else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Takes up what ``state_dict`` gave.

        Args:
            state: from a checkpoint, taken at the end of an optimizer step.
        """
        if self.adaptive and state:
            self.coefficient, self.last_entropy = state["coefficient"], state["last_entropy"]
