"""What the collector asks of a generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from grpo_trainer.types import Completions, SamplingParams

ENGINES = {
    "auto": "the group engine, or generate where that cannot draw",
    "group": "the group engine: each prompt is prefilled once, rows that end leave the batch",
    "generate": "generate of transformers",
    "continuous_batching": "continuous batching of transformers",
}
"""Name of an engine -> what draws."""


class Observer:
    """Is told what an engine draws, as it is drawn. What the methods do by default is nothing.

    An engine that draws all rows at once may tell of none before it returns.
    """

    def tick(self, tokens: int) -> None:
        """A step of decoding is over.

        Args:
            tokens: drawn in it.
        """

    def finished(self, prompt: int, completion: int, ids: tuple[int, ...], ended: bool) -> None:
        """A completion has ended.

        Args:
            prompt: index of its prompt in the call.
            completion: index among the prompt's completions.
            ids: as in ``Completions.ids``.
            ended: as in ``Completions.finished``.
        """


class Generator(Protocol):
    """Draws completions from the policy."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: Sequence[int],
        sampling: SamplingParams,
        *,
        seed: int,
        row_ids: Sequence[tuple[int, int]] | None = None,
        observer: Observer | None = None,
    ) -> Completions:
        """Draws completions.

        Args:
            prompts: P prompts as token ids, none of them empty.
            num_samples: for each prompt how many completions to draw.
            sampling: how to draw them.
            seed: fixes every random number that is used. The state of the process's own generators is as before
                when this returns.
            row_ids: for each completion the pair (prompt, completion) that tells it from all others drawn with this
                seed, on whichever process; None counts within this call. A generator whose rows own their random
                numbers gives a row of the same seed, identity and prompt the same completion in every call.
            observer: is told what is drawn, as it is drawn.

        Returns:
            ``sum(num_samples)`` completions, those of one prompt next to each other, in the order of ``prompts``.
        """
        ...
