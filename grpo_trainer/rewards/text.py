"""What several rewards read of a completion."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text_of(completion: Any) -> str:
    """The text of a completion.

    Args:
        completion: a text, or a list of messages.

    Returns:
        The text itself, or the content of the last message; empty if there is none.

    Example:
        >>> text_of([{"role": "assistant", "content": "19"}]), text_of("19"), text_of([])
        ('19', '19', '')
    """
    if isinstance(completion, str):
        return completion
    last = completion[-1] if completion else None
    content = last.get("content") if isinstance(last, Mapping) else None
    return content if isinstance(content, str) else ""


def outside_thinking(text: str) -> str:
    """What a completion says after it has thought.

    Args:
        text: a completion.

    Returns:
        What follows the last ``</think>``; nothing if ``<think>`` is opened and not closed; else the whole text.

    Example:
        >>> outside_thinking("<think>3 + 4</think>7"), outside_thinking("3 + 4</think>7"), outside_thinking("<think>7")
        ('7', '7', '')
    """
    _, closed, after = text.rpartition("</think>")
    rest = after if closed else text
    return rest.partition("<think>")[0]
