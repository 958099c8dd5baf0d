"""A penalty for saying the same again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from grpo_trainer.rewards.text import text_of


def repetition(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    ngram: int = 3,
    max_penalty: float = -1.0,
    unit: Literal["tokens", "words"] = "tokens",
    **kwargs: Any,
) -> list[float]:
    """The share of n-grams that stand more than once, times a penalty: (1 − distinct n-grams / n-grams) · p.

    Yeo et al. 2025 (arXiv:2502.03373, appendix C.2), as a figure of the whole completion; 0 for fewer than n tokens.
    TRL counts tokens, Open-R1 words in lower case.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        completion_ids: N lists of token ids.
        ngram: n, at least 1.
        max_penalty: p, at most 0.
        unit: what an n-gram is made of; words are parted by white space, in lower case.
        **kwargs: the other columns, unused.

    Returns:
        N rewards in [p, 0].

    Raises:
        ValueError: if a keyword argument is out of range.

    Example:
        >>> repetition(["", ""], [[1, 2, 3, 4], [5, 5, 5, 5, 5]], ngram=2)
        [0.0, -0.75]
    """
    if ngram < 1 or max_penalty > 0 or unit not in ("tokens", "words"):
        raise ValueError(
            f"repetition: ngram={ngram} must be at least 1, max_penalty={max_penalty} at most 0, "
            f"and unit={unit!r} tokens or words"
        )
    units: Sequence[Sequence[Any]] = (
        completion_ids if unit == "tokens" else [text_of(completion).lower().split() for completion in completions]
    )
    return [_repeated(sequence, ngram) * max_penalty + 0.0 for sequence in units]


def _repeated(sequence: Sequence[Any], n: int) -> float:
    count = len(sequence) - n + 1
    if count < 1:
        return 0.0
    return 1.0 - len({tuple(sequence[i : i + n]) for i in range(count)}) / count
