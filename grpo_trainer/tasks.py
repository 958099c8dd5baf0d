"""Tasks that come with the package: small data sets that are made, not downloaded, each with a held-out part.

A task is a function and its line in `BUILTIN_TASKS`; a recipe or a notebook asks for it by name, ``builtin:sums``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from grpo_trainer.registry import suggest

if TYPE_CHECKING:
    from datasets import Dataset

Rows = list[dict[str, Any]]

TaskFn = Callable[[random.Random], tuple[Rows, Rows]]
"""``(rng) -> (train rows, held-out rows)``, both shuffled; no question is in both parts."""

LARGEST_TERM = 20
HELDOUT_SUMS = 64
HELDOUT_FUNCTIONS = 64

_FUNCTIONS: dict[str, Callable[[int, int], int | bool]] = {
    "a plus {k}": lambda a, k: a + k,
    "a minus {k}": lambda a, k: a - k,
    "twice a, plus {k}": lambda a, k: 2 * a + k,
    "{k} minus a": lambda a, k: k - a,
    "the remainder of a divided by {k}": lambda a, k: a % k,
    "the larger of a and {k}": max,
    "the smaller of a and {k}": min,
    "the square of a, plus {k}": lambda a, k: a * a + k,
    "whether a is greater than {k}": lambda a, k: a > k,
    "whether a is divisible by {k}": lambda a, k: a % k == 0,
}
"""What a function returns, and that."""
_EXAMPLES = (
    "# b minus 42\ndef f(b): return b - 42\n\n"
    "# the larger of b and 30\ndef f(b): return max(b, 30)\n\n"
    "# whether b is less than 40\ndef f(b): return b < 40\n\n"
)


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


def sums_in_tags(rng: random.Random) -> tuple[Rows, Rows]:
    """The sums of `sums`, each after one that has been answered in R1's form, ``<think>…</think> <answer>…</answer>``.

    Args:
        rng: as for `sums`, which gives the same split.

    Returns:
        Train rows and held-out rows, with the columns ``prompt`` (three messages) and ``answer`` (int).
    """
    example = [
        {"role": "user", "content": "What is 3 + 5? Answer with a number."},
        {"role": "assistant", "content": "<think>3 + 5 = 8</think> <answer>8</answer>"},
    ]
    train, heldout = ([{**row, "prompt": [*example, *row["prompt"]]} for row in part] for part in sums(rng))
    return train, heldout


COUNTDOWN_ROWS, COUNTDOWN_HELDOUT = 2000, 200


def countdown(rng: random.Random) -> tuple[Rows, Rows]:
    """Reach a target with three or four numbers from 1 to 20, each used once, and ``+ - * /``.

    Of 2,200 problems, no two with the same numbers and target, 200 are held out. Each can be solved: the target is what
    a random expression comes to, a whole number from 1 to 100.

    Args:
        rng: decides the problems and the split.

    Returns:
        Train rows and held-out rows, with the columns ``prompt`` (one user message), ``numbers``, ``target`` and
        ``answer``, an expression that reaches it.
    """
    found: dict[tuple[tuple[int, ...], int], dict[str, Any]] = {}
    while len(found) < COUNTDOWN_ROWS + COUNTDOWN_HELDOUT:
        numbers = [rng.randint(1, 20) for _ in range(rng.choice([3, 4]))]
        expression, value = _random_expression(numbers, rng)
        if value is None or value.denominator != 1 or not 1 <= value <= 100:
            continue
        key = (tuple(sorted(numbers)), int(value))
        if key in found:
            continue
        question = (
            f"Using the numbers {', '.join(map(str, sorted(numbers)))}, make {int(value)}. Use each number once, and "
            "+ - * / and parentheses. Show your work in <think> </think> tags, and give the expression in <answer> "
            "</answer> tags."
        )
        found[key] = {
            "prompt": [{"role": "user", "content": question}],
            "numbers": sorted(numbers),
            "target": int(value),
            "answer": expression,
        }
    rows = list(found.values())
    return rows[COUNTDOWN_HELDOUT:], rows[:COUNTDOWN_HELDOUT]


def _random_expression(numbers: list[int], rng: random.Random) -> tuple[str, Fraction | None]:
    """An expression that uses each number once, and what it comes to; None where it divides by zero."""
    parts = [(str(n), Fraction(n)) for n in rng.sample(numbers, len(numbers))]
    while len(parts) > 1:
        (a, x), (b, y) = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
        sign = rng.choice("+-*/")
        if sign == "/" and y == 0:
            return "", None
        parts.append((f"({a} {sign} {b})", {"+": x + y, "-": x - y, "*": x * y, "/": x / (y or 1)}[sign]))
    return parts[0][0][1:-1], parts[0][1]


def math_answer_of(row: Mapping[str, Any]) -> dict[str, str]:
    r"""What is in the last ``\boxed{}`` of a MATH solution, as a recipe's ``dataset_map_fn``.

    Args:
        row: holds ``solution``.

    Returns:
        ``answer``, as it is written.

    Raises:
        ValueError: if nothing is boxed.

    Example:
        >>> math_answer_of({"solution": r"So $x = \boxed{\frac{1}{2}}$."})["answer"]
        '\\frac{1}{2}'
    """
    solution = row["solution"]
    start = max(solution.rfind("\\boxed{"), solution.rfind("\\fbox{"))
    depth, begin = 0, solution.find("{", start) + 1
    for place in range(begin, len(solution)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(solution[place], 0)
        if depth < 0:
            return {"answer": solution[begin:place].strip()}
    raise ValueError(f"the solution has no \\boxed{{}}: {solution[-60:]!r}")


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


def human_eval_problem(row: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of the reward ``code_tests`` for a problem of HumanEval, as a recipe's ``dataset_map_fn``.

    Args:
        row: holds ``prompt`` (imports, helpers, and a function with its docstring), ``test`` and ``entry_point``.

    Returns:
        ``code_prefix``, the prompt, which the completion goes on with; ``test_setup``, the prompt again, since some
        tests use its helpers; ``tests``; and ``entry_point``.

    Example:
        >>> row = {"prompt": "def f():", "test": "def check(candidate): ...", "entry_point": "f"}
        >>> sorted(human_eval_problem(row))
        ['code_prefix', 'entry_point', 'test_setup', 'tests']
    """
    prompt = row["prompt"]
    return {"code_prefix": prompt, "test_setup": prompt, "tests": row["test"], "entry_point": row["entry_point"]}


def functions(rng: random.Random) -> tuple[Rows, Rows]:
    """Functions of one number, to be written after a line that says what they return, and three that are there already.

    Of the 240 functions, ten kinds with 24 constants each, 64 are held out and the other 176 are for training: a
    held-out function is of a kind that is trained on, with a constant that this kind is not trained on with.

    Args:
        rng: decides the split and the order.

    Returns:
        Train rows and held-out rows, with the columns ``prompt`` (a text that ends in ``return``), ``code_prefix`` and
        ``tests`` (eight asserts), as the reward ``code_tests`` takes them.
    """
    kinds = [(what, value, k) for what, value in _FUNCTIONS.items() for k in range(2, 26)]
    rng.shuffle(kinds)
    rows = [_function_row(*kind) for kind in kinds]
    return rows[HELDOUT_FUNCTIONS:], rows[:HELDOUT_FUNCTIONS]


BUILTIN_TASKS: dict[str, TaskFn] = {
    "builtin:sums": sums,
    "builtin:sums_in_tags": sums_in_tags,
    "builtin:countdown": countdown,
    "builtin:functions": functions,
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


def _function_row(what: str, value: Callable[[int, int], int | bool], k: int) -> dict[str, Any]:
    arguments = (0, 1, 17, -3, k - 1, k, k + 1, 2 * k)
    return {
        "prompt": f"{_EXAMPLES}# {what.format(k=k)}\ndef f(a): return",
        "code_prefix": "def f(a): return",
        "tests": [f"assert f({a}) == {value(a, k)}" for a in arguments],
    }


def _take(rows: Rows, size: int | None, what: str) -> Rows:
    if size is None:
        return rows
    if not 1 <= size <= len(rows):
        raise ValueError(f"{what} is {size}; give a number from 1 to {len(rows)}, or leave it out for all")
    return rows[:size]
