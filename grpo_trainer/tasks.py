"""Tasks that come with the package: small data sets that are made, not downloaded, each with a held-out part.

A task is a function and its line in `BUILTIN_TASKS`; a recipe or a notebook asks for it by name, ``builtin:sums``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from grpo_trainer.registry import suggest

if TYPE_CHECKING:
    from datasets import Dataset

Rows = list[dict[str, Any]]

TaskFn = Callable[[random.Random], tuple[Rows, Rows]]
"""``(rng) -> (train rows, held-out rows)``, both shuffled; no question is in both parts."""

LARGEST_TERM = 20
HELDOUT_SUMS = 64


def sums(rng: random.Random) -> tuple[Rows, Rows]:
    """Sums of two numbers from 1 to 20, asked in the chat format.

    Of the 400 questions, one for each ordered pair, 64 are held out and the other 336 are for training. ``12 + 7`` may
    be held out and ``7 + 12`` trained on: they are two questions.

    Args:
        rng: decides the split, the order of the terms and of the rows.

    Returns:
        Train rows and held-out rows, with the columns ``prompt`` (one user message) and ``answer`` (int).
    """
    pairs = [(a, b) for a in range(1, LARGEST_TERM + 1) for b in range(1, LARGEST_TERM + 1)]
    rng.shuffle(pairs)
    rows = [_sum_row(*pair) for pair in pairs]
    return rows[HELDOUT_SUMS:], rows[:HELDOUT_SUMS]


def gsm8k_answer(row: Mapping[str, Any]) -> dict[str, str]:
    """The final number of a GSM8K solution, as a recipe's ``dataset_map_fn``.

    Args:
        row: holds ``answer``, a solution that ends in ``#### 72``.

    Returns:
        ``answer``, the number as it is written; and ``solution``, the whole text.

    Raises:
        ValueError: if nothing follows ``####``.

    Example:
        >>> gsm8k_answer({"question": "How many?", "answer": "48/2 = <<48/2=24>>24 in May. #### 1,072"})["answer"]
        '1,072'
    """
    solution = row["answer"]
    _, mark, answer = solution.rpartition("####")
    if not mark or not answer.strip():
        raise ValueError(f"the solution has no final number after ####: {solution[-60:]!r}")
    return {"answer": answer.strip(), "solution": solution}


BUILTIN_TASKS: dict[str, TaskFn] = {
    "builtin:sums": sums,
}
"""Every task by the name that a recipe gives as ``dataset_name``."""


def load_task(
    name: str, seed: int = 0, *, train_size: int | None = None, heldout_size: int | None = None
) -> tuple[Dataset, Dataset]:
    """The two parts of a task that comes with the package.

    Args:
        name: a key of `BUILTIN_TASKS`.
        seed: decides the split and the order; the same seed gives the same rows.
        train_size: number of training rows; None takes all.
        heldout_size: number of held-out rows; None takes all.

    Returns:
        ``(train, heldout)``, both shuffled. Rows that a smaller size leaves out of one part never move to the other.

    Raises:
        ValueError: if the name is unknown, or a size is less than 1 or more than the task has.

    Example:
        >>> train, heldout = load_task("builtin:sums", seed=0, heldout_size=10)
        >>> len(heldout), sorted(heldout.column_names)
        (10, ['answer', 'prompt'])
    """
    from datasets import Dataset

    if name not in BUILTIN_TASKS:
        raise ValueError(f"unknown task {name!r}.{suggest(name, BUILTIN_TASKS)} Known: {', '.join(BUILTIN_TASKS)}.")
    train, heldout = BUILTIN_TASKS[name](random.Random(seed))
    train = _take(train, train_size, f"train_size of {name}")
    heldout = _take(heldout, heldout_size, f"heldout_size of {name}")
    return Dataset.from_list(train), Dataset.from_list(heldout)


def _sum_row(a: int, b: int) -> dict[str, Any]:
    question = f"What is {a} + {b}? Answer with a number."
    return {"prompt": [{"role": "user", "content": question}], "answer": a + b}


def _take(rows: Rows, size: int | None, what: str) -> Rows:
    if size is None:
        return rows
    if not 1 <= size <= len(rows):
        raise ValueError(f"{what} is {size}; give a number from 1 to {len(rows)}, or leave it out for all")
    return rows[:size]
