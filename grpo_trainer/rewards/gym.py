"""The scorers of reasoning-gym, in a sandbox: some of them evaluate what the model wrote."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from typing import Any

from grpo_trainer.rewards.options import reward
from grpo_trainer.rewards.text import text_of

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@reward(
    isolation="sandbox",
    time_limit=10.0,
    memory_limit=4 << 30,
    rows_per_call=8,
    cache=True,
    imports=("reasoning_gym", "grpo_trainer.gym"),
)
def reasoning_gym(
    completions: Sequence[Any], problem: Sequence[str | None], full_only: bool = False, **kwargs: Any
) -> list[float | None]:
    """What reasoning-gym says of an answer to one of its problems, from 0 to 1.

    The answer is what stands in the last ``<answer>…</answer>``, and where there is none the whole text; spaces around
    it do not count. Many tasks give a part of the credit, some a little to any answer (``countdown`` 0.01); with
    ``full_only`` nothing counts but 1. An answer that a scorer cannot read is wrong: 0.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        problem: which problem each answers, as ``gym.load_gym_task`` writes it; None where there is none.
        full_only: give no part of the credit.
        **kwargs: the other columns, unused.

    Returns:
        N rewards; None where there is no problem.

    Raises:
        ImportError: if the library is not installed.

    Source:
        reasoning-gym (arXiv:2505.24760), ``score_answer`` of each task.
    """
    return [
        None if each is None else _score(text_of(completion), each, full_only)
        for completion, each in zip(completions, problem, strict=True)
    ]


def _score(text: str, problem: str, full_only: bool) -> float:
    where = json.loads(problem)
    index = where.pop("index")
    problems = _problems(json.dumps(where))
    found = _TAGGED.findall(text)
    answer = (found[-1] if found else text).strip()
    try:
        score = float(problems.score_answer(answer=answer, entry=_entry(json.dumps(where), index)))
    except Exception:  # of a scorer that does not expect such an answer
        return 0.0
    return float(score >= 1.0) if full_only else min(max(score, 0.0), 1.0)


@functools.lru_cache(maxsize=64)
def _problems(problems: str) -> Any:
    from grpo_trainer.gym import make

    return make(problems)


@functools.lru_cache(maxsize=4096)
def _entry(problems: str, index: int) -> Any:
    return _problems(problems)[index]
