"""Scoring while other completions are still being drawn: each group is scored as soon as it is complete."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grpo_trainer.generation.base import Observer
from grpo_trainer.rewards.base import RewardInputs, RewardLog, RewardSet
from grpo_trainer.types import Prompt, Row


class ScoredWhileDrawn:
    """The rewards of a batch that is being drawn. A context: what ends the drawing ends the scoring.

    Args:
        rewards: the functions.
        tokenizer: turns ids into text.
        rows: N dataset rows, one per completion.
        prompts: N prompts.
        group_sizes: how many completions each prompt has.
        trainer_state: for the functions.
    """

    def __init__(
        self,
        rewards: RewardSet,
        tokenizer: Any,
        rows: Sequence[Row],
        prompts: Sequence[Prompt],
        group_sizes: Sequence[int],
        trainer_state: Any,
    ) -> None:
        self._rewards = rewards
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._sizes = list(group_sizes)
        self._texts: list[str | None] = [None] * len(rows)
        self._completions: list[Any] = [None] * len(rows)
        self._ids: list[Sequence[int]] = [()] * len(rows)
        self._left = list(group_sizes)  # completions that are still being drawn, by group
        self._batch = rewards.begin(
            RewardInputs(
                rows=rows,
                completions=self._completions,
                completion_ids=self._ids,
                trainer_state=trainer_state,
                group_sizes=tuple(group_sizes),
            )
        )

    def __enter__(self) -> ScoredWhileDrawn:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._batch.abandon()

    def observer(self, inner: Observer | None) -> Observer | None:
        """What an engine is to tell.

        Args:
            inner: is told as well.

        Returns:
            An observer; ``inner`` itself if no function can begin early.
        """
        return _Groups(self, inner or Observer()) if self._rewards.starts_early else inner

    @property
    def hidden(self) -> float | None:
        """Seconds of scoring while completions were being drawn; None if no function can begin early."""
        return self._batch.hidden if self._rewards.starts_early else None

    def finish(self, ids: Sequence[Sequence[int]]) -> tuple[list[str], tuple[Tensor, RewardLog]]:
        """The rewards of all.

        Args:
            ids: N completions.

        Returns:
            N texts, special tokens left out, and what ``RewardSet.score`` returns: (N, R) and a log.

        Raises:
            ValueError: if a completion is another than the engine told when it had ended.
        """
        for row, each in enumerate(ids):
            if self._texts[row] is None:
                self._take(row, each)
            elif tuple(self._ids[row]) != tuple(each):
                raise ValueError(
                    f"the generator returned another completion {row} than it told its observer when that had ended"
                )
        return [text or "" for text in self._texts], self._batch.finish()

    def ended(self, prompt: int, completion: int, ids: Sequence[int]) -> None:
        """A completion has ended; with the last of its group, this is scored.

        Args:
            prompt: place of its prompt.
            completion: place among the prompt's completions.
            ids: the completion.
        """
        self._take(sum(self._sizes[:prompt]) + completion, ids)
        self._left[prompt] -= 1
        if not self._left[prompt]:
            self._batch.start(prompt)

    def _take(self, row: int, ids: Sequence[int]) -> None:
        text = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        self._texts[row], self._ids[row] = text, ids
        conversational = self._prompts[row].conversational
        self._completions[row] = [{"role": "assistant", "content": text}] if conversational else text


class _Groups(Observer):
    """Passes on what an engine tells."""

    def __init__(self, scored: ScoredWhileDrawn, inner: Observer) -> None:
        self._scored = scored
        self._inner = inner

    def tick(self, tokens: int) -> None:
        self._inner.tick(tokens)

    def finished(self, prompt: int, completion: int, ids: tuple[int, ...], ended: bool) -> None:
        self._inner.finished(prompt, completion, ids, ended)
        self._scored.ended(prompt, completion, ids)
