"""Rewards for questions whose answer is a number."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_trainer.rewards.text import text_of

_NUMBER = re.compile(
    r"""
    (?P<sign>(?<!\w)[-\u2212])?                            # a minus, unless it follows a digit or a word: 20-7
    (?:
        (?P<whole>[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)  # 1,234,567 or 1234567
        (?P<fraction>(?:\.[0-9]+)*)                        # .50; two of them (1.2.3) are no number at all
      | (?<![\w.])(?P<bare>\.[0-9]+)                       # .5
    )
    """,
    re.VERBOSE,
)


def last_integer(completions: Sequence[Any], answer: Sequence[Any], **kwargs: Any) -> list[float | None]:
    """1.0 where the last number in the completion is the answer, 0.0 elsewhere.

    The last number decides, whatever stands before or after it; it is right if it is an integer and equals the answer.

    - A minus sign (``-`` or ``−``) belongs to the digits that follow it directly, unless it directly follows a digit
      or another word character: ``= -7`` is -7, ``20-7`` ends in 7.
    - Groups of three digits after commas are one number: ``1,234`` is 1234, while ``1, 234`` and ``1,23`` are two.
    - Digits after a decimal point belong to the number: ``19.0`` is the integer 19, ``19.5`` and ``.5`` are no
      integers, so a completion that ends in them scores 0.0 and never counts as 19, 5 or 0. The point that ends a
      sentence (``19.``) is no decimal point. ``1.2.3`` is no integer either.
    - Only the digits 0 to 9 are read, no words (``seven``) and no powers (``2e3`` ends in 3); ``019`` is 19.

    Args:
        completions: N texts, or N message lists, of which the last message is read.
        answer: N integers, as int or as text (``19``, ``"19"``, ``"1,234"``); None where there is no answer.
        **kwargs: the other columns, unused.

    Returns:
        N rewards; None where the answer is None.

    Raises:
        ValueError: if an answer is not an integer, naming its row.

    Example:
        >>> last_integer(["7 + 12 = 19.", "It is 18, I think.", "19.5"], answer=[19, 19, 19])
        [1.0, 0.0, 0.0]
    """
    rewards: list[float | None] = []
    for row, (completion, right) in enumerate(zip(completions, answer, strict=True)):
        if right is None:
            rewards.append(None)
            continue
        expected = _last_integer(str(right))
        if isinstance(right, bool) or expected is None or not _NUMBER.fullmatch(str(right).strip()):
            raise ValueError(
                f"last_integer: the answer of row {row} is {right!r}, not an integer; "
                "give the column `answer` integers, or None where this reward does not apply"
            )
        rewards.append(float(_last_integer(text_of(completion)) == expected))
    return rewards


def _last_integer(text: str) -> str | None:
    """The last number of a text in plain form ("-19"), or None if there is none or it is not an integer.

    It stays a text: a model can write more digits than Python turns into an int.
    """
    last: re.Match[str] | None = None
    for match in _NUMBER.finditer(text):
        last = match
    if last is None or last["bare"]:
        return None
    fraction = last["fraction"]
    if fraction.count(".") > 1 or fraction.strip(".0"):
        return None
    digits = last["whole"].replace(",", "").lstrip("0") or "0"
    return f"-{digits}" if last["sign"] and digits != "0" else digits
