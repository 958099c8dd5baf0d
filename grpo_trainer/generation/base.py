"""What the collector asks of a generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from grpo_trainer.types import Completions, SamplingParams


class Generator(Protocol):
    """Draws completions from the policy."""

    def generate(
        self, prompts: Sequence[Sequence[int]], num_samples: Sequence[int], sampling: SamplingParams, *, seed: int
    ) -> Completions:
        """Draws completions.

        Args:
            prompts: P prompts as token ids, none of them empty.
            num_samples: for each prompt how many completions to draw.
            sampling: how to draw them.
            seed: fixes every random number that is used. The state of the process's own generators is as before
                when this returns.

        Returns:
            ``sum(num_samples)`` completions, those of one prompt next to each other, in the order of ``prompts``.
        """
        ...
