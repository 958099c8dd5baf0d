"""The engines by name."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_trainer.generation.base import ENGINES, Generator, Observer
from grpo_trainer.generation.continuous import ContinuousGenerator
from grpo_trainer.generation.group import GroupGenerator
from grpo_trainer.generation.hf import HFGenerator
from grpo_trainer.registry import suggest
from grpo_trainer.types import Completions, SamplingParams

logger = logging.getLogger(__name__)


def make_generator(
    engine: str,
    policy: Callable[[], Any],
    autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
    *,
    max_cache_tokens: int | None = None,
    continuous_batching: Mapping[str, Any] | None = None,
) -> Generator:
    """The generator of a name.

    Args:
        engine: one of ``ENGINES``.
        policy: returns the module that is trained, unwrapped.
        autocast: returns the context of mixed precision.
        max_cache_tokens: see ``GroupGenerator``.
        continuous_batching: see ``ContinuousGenerator``.

    Returns:
        The generator.

    Raises:
        ValueError: if the name is unknown, or ``continuous_batching`` holds what transformers does not know.
    """
    if engine == "auto":
        return AutoGenerator(policy, autocast, max_cache_tokens)
    if engine == "group":
        return GroupGenerator(policy, autocast, max_cache_tokens)
    if engine == "generate":
        return HFGenerator(policy, autocast)
    if engine == "continuous_batching":
        return ContinuousGenerator(policy, continuous_batching, max_cache_tokens)
    raise ValueError(f"generation_engine is {engine!r}.{suggest(engine, ENGINES)}")


class AutoGenerator:
    """The group engine where it can draw, ``generate`` where it cannot; then a warning says why, once per reason.

    Args:
        policy: returns the module that is trained, unwrapped.
        autocast: returns the context of mixed precision.
        max_cache_tokens: see ``GroupGenerator``.
    """

    def __init__(
        self,
        policy: Callable[[], Any],
        autocast: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext,
        max_cache_tokens: int | None = None,
    ) -> None:
        self._group = GroupGenerator(policy, autocast, max_cache_tokens)
        self._generate = HFGenerator(policy, autocast)
        self._said: set[str] = set()

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
        """Draws completions; see ``Generator.generate``.

        Args:
            prompts: P prompts as token ids, none of them empty.
            num_samples: for each prompt how many completions to draw.
            sampling: how to draw them.
            seed: fixes every random number that is used.
            row_ids: for each completion its pair (prompt, completion).
            observer: is told what is drawn, as it is drawn.

        Returns:
            The completions, group-major.

        Raises:
            ValueError: if a prompt is empty, or ``sampling.extra`` holds what transformers does not know.
        """
        drawn = self._group.attempt(prompts, num_samples, sampling, seed=seed, row_ids=row_ids, observer=observer)
        if not isinstance(drawn, str):
            return drawn
        if drawn not in self._said:
            self._said.add(drawn)
            logger.warning(
                "completions are drawn with generate of transformers, slower than the group engine, because %s",
                drawn,
            )
        return self._generate.generate(prompts, num_samples, sampling, seed=seed, row_ids=row_ids)
