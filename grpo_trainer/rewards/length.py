"""Rewards for the length of a completion, in tokens as they were sampled, the end-of-sequence token included."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from grpo_trainer.registry import resolve
from grpo_trainer.rewards.options import options_of, reward


def soft_overlong(
    completion_ids: Sequence[Sequence[int]], *, max_length: int, cache: int, **kwargs: Any
) -> list[float]:
    """0 up to L_max − L_cache tokens, then falling in a line to −1 at L_max, −1 beyond.

    DAPO's soft overlong punishment (arXiv:2503.14476, equation 13):
    R = ((L_max − L_cache) − |y|) / L_cache  for  L_max − L_cache < |y| ≤ L_max.

    Args:
        completion_ids: N lists of token ids.
        max_length: L_max in tokens, at most the run's ``max_completion_length``.
        cache: L_cache in tokens, more than 0 and at most ``max_length``.
        **kwargs: the other columns, unused.

    Returns:
        N rewards in [−1, 0].

    Raises:
        ValueError: if ``cache`` is out of range.

    Example:
        >>> soft_overlong([[0] * n for n in (80, 90, 100, 101)], max_length=100, cache=20)
        [0.0, -0.5, -1.0, -1.0]
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"soft_overlong: cache={cache} must be above 0 and at most max_length={max_length}")
    return [-min(max(len(ids) - (max_length - cache), 0) / cache, 1.0) + 0.0 for ids in completion_ids]


@reward(isolation="process", time_limit=5.0, rows_per_call=16, memory_limit=4 << 30)
def cosine_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    *,
    max_length: int,
    correct_short: float = 1.0,
    correct_long: float = 0.5,
    wrong_short: float = -1.0,
    wrong_long: float = -0.5,
    exceeded: float | None = None,
    correctness: str = "math_answer",
    **kwargs: Any,
) -> list[float | None]:
    """The reward of a right or a wrong answer, which goes from one value to another with the length, along a cosine.

    R = r_L + (r_0 − r_L) / 2 · (1 + cos(π L / L_max)), with (r_0, r_L) those of right answers (shorter is better) or of
    wrong ones (longer is less bad); Yeo et al. 2025 (arXiv:2502.03373, appendix C.1). The paper's values
    are 2, 1, −10, 0 and ``exceeded`` −10; the defaults here are TRL's. A longer completion than L_max counts as L_max,
    where the formula alone would turn round.

    Args:
        completions: N completions.
        completion_ids: N lists of token ids.
        max_length: L_max in tokens.
        correct_short: r_0 of a right answer, in the limit of no tokens.
        correct_long: r_L of a right answer.
        wrong_short: r_0 of a wrong answer.
        wrong_long: r_L of a wrong answer.
        exceeded: the reward from L_max on, right or wrong; None goes on with r_L.
        correctness: the reward that says what is right, by name or as ``pkg.mod:fn``; 1 or more is right.
        **kwargs: the other columns, which that reward is given.

    Returns:
        N rewards; None where that reward is None.

    Raises:
        ValueError: if ``max_length`` is not above 0, or that reward asks for a sandbox.

    Example:
        >>> ids = [[0] * 50, [0] * 50]
        >>> cosine_length(["#### 7", "#### 8"], ids, answer=[7, 7], max_length=100, correctness="last_integer")
        [0.75, -0.75]
    """
    if not max_length > 0:
        raise ValueError(f"cosine_length: max_length={max_length} must be above 0")
    rewards: list[float | None] = []
    for right, ids in zip(_right(correctness, completions, completion_ids, kwargs), completion_ids, strict=True):
        if right is None:
            rewards.append(None)
        elif exceeded is not None and len(ids) >= max_length:
            rewards.append(exceeded)
        else:
            short, long = (correct_short, correct_long) if right else (wrong_short, wrong_long)
            turned = (1 + math.cos(math.pi * min(len(ids) / max_length, 1.0))) / 2
            rewards.append(long + (short - long) * turned)
    return rewards


@reward(isolation="process", time_limit=30.0, memory_limit=4 << 30, group=True)
def relative_length(
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]],
    prompts: Sequence[Any] | None = None,
    *,
    correctness: str = "math_answer",
    **kwargs: Any,
) -> list[float | None]:
    """From 0.5 for the shortest completion of a group to −0.5 for its longest; a wrong answer gets no more than 0.

    Kimi k1.5's length reward (arXiv:2501.12599, section 2.3.3): λ = 0.5 − (len − min) / (max − min), with min and max
    over the group; λ for a right answer, min(0, λ) for a wrong one, 0 for all if they are equally long. The paper
    counts tokens, as here; Open-R1 counts characters, over the whole batch.

    Args:
        completions: N completions.
        completion_ids: N lists of token ids.
        prompts: N prompts; completions of equal prompts are a group. None takes all for one group.
        correctness: as in `cosine_length`.
        **kwargs: the other columns, which that reward is given.

    Returns:
        N rewards; None where that reward is None.

    Raises:
        ValueError: if that reward asks for a sandbox.

    Example:
        >>> ids = [[0] * n for n in (10, 20, 30, 10)]
        >>> answers = ["7", "7", "7", "8"]
        >>> relative_length(answers, ids, answer=[7] * 4, correctness="last_integer")
        [0.5, 0.0, -0.5, 0.0]
    """
    if prompts is not None:
        kwargs["prompts"] = prompts
    right = _right(correctness, completions, completion_ids, kwargs)
    groups: dict[str, list[int]] = {}
    for row in range(len(completions)):
        groups.setdefault(repr(prompts[row]) if prompts is not None else "", []).append(row)
    rewards: list[float | None] = [None] * len(completions)
    for rows in groups.values():
        lengths = [len(completion_ids[row]) for row in rows]
        shortest, longest = min(lengths), max(lengths)
        for row, length in zip(rows, lengths, strict=True):
            share = 0.0 if shortest == longest else 0.5 - (length - shortest) / (longest - shortest)
            rewards[row] = None if right[row] is None else share if right[row] else min(0.0, share)
    return rewards


def _right(
    name: str, completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], columns: dict[str, Any]
) -> list[bool | None]:
    """What another reward says of the answers."""
    from grpo_trainer.rewards import REWARDS

    judge: Callable[..., Any] = resolve(name, REWARDS, "correctness")
    if options_of(judge).isolation == "sandbox":
        raise ValueError(
            f"correctness={name!r} asks for a sandbox, which a reward that is called by another has not; "
            "give both in reward_funcs, with weights, or name a reward that runs without"
        )
    quiet = {k: v for k, v in columns.items() if k not in ("log_extra", "log_metric")}
    values = judge(completions=completions, completion_ids=completion_ids, **quiet)
    return [None if value is None else value >= 1.0 for value in values]
