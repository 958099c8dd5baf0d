"""Countdown: reach a target with some numbers and the four operations. Nothing that the model writes is evaluated."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from grpo_trainer.rewards.text import text_of

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_LONGEST = 200
"""Characters of an expression: six numbers need a quarter of it."""
_SIGNS = str.maketrans({"×": "*", "·": "*", "÷": "/", "−": "-", "–": "-"})


def countdown(
    completions: Sequence[Any],
    numbers: Sequence[Sequence[int] | None],
    target: Sequence[int | None],
    use_all: bool = True,
    **kwargs: Any,
) -> list[float | None]:
    """1.0 where an expression in the given numbers comes to the target, 0.0 elsewhere.

    The expression is what stands in the last ``<answer>…</answer>``, and where there is none the last line that is not
    empty; from an equals sign on it is not read. It consists of the given numbers, each used once (with ``use_all``
    false: at most once), of ``+ - * /`` and parentheses; ``× ÷ −`` are read as well. Powers, names, other numbers, a
    sign in front of a number, and division by zero are no expression. It is computed in exact fractions.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        numbers: N lists of whole numbers; None where there is no problem.
        target: N whole numbers; None where there is no problem.
        use_all: every number has to be used.
        **kwargs: the other columns, unused.

    Returns:
        N rewards; None where there is no problem.

    Example:
        >>> countdown(
        ...     ["<answer>(8 - 2) * 7</answer>", "8 * 7 - 14", "8 ** 2"], numbers=[[2, 7, 8]] * 3, target=[42] * 3
        ... )
        [1.0, 0.0, 0.0]
    """
    return [
        None if given is None or goal is None else float(_reaches(text_of(completion), given, goal, use_all))
        for completion, given, goal in zip(completions, numbers, target, strict=True)
    ]


def _reaches(text: str, given: Sequence[int], goal: int, use_all: bool) -> bool:
    found = _TAGGED.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    expression = (found[-1] if found else lines[-1] if lines else "").partition("=")[0].translate(_SIGNS).strip()
    if not expression or len(expression) > _LONGEST or not re.fullmatch(r"[0-9+\-*/() \t\n]+", expression):
        return False
    used: list[int] = []
    try:
        value = _value(ast.parse(expression.replace("\n", " "), mode="eval").body, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return False
    left = Counter(given)
    left.subtract(used)
    counts = left.values()
    return value == goal and min(counts, default=0) >= 0 and not (use_all and any(counts))


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp):
        left, right = _value(node.left, used), _value(node.right, used)
        if isinstance(node.op, ast.Add):
            return left + right
        if isinstance(node.op, ast.Sub):
            return left - right
        if isinstance(node.op, ast.Mult):
            return left * right
        if isinstance(node.op, ast.Div):
            return left / right
    raise ValueError("not one of the four operations on numbers")
