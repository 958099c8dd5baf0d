"""Completions as a person reads them: a table for the terminal, and the same as HTML.

The table that these functions take is what the trainer hands to callbacks once per rollout: a dict of equally long
lists with the columns ``step, prompt, completion``, one per reward, ``advantage, finished, length``, then extra ones.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

FIXED_COLUMNS = ("step", "prompt", "completion", "advantage", "finished", "length")
_CHAT_MARK = re.compile(r"<\|[^<>|]*\|>")
_ROLE = re.compile(r"^(system|user|assistant|model|tool)(\n|$)")


def render_table(
    table: Mapping[str, Sequence[Any]], *, rows: int | None = None, title: str = "", prompt_width: int = 60
) -> Table:
    """Completions as a table for the terminal.

    Args:
        table: dict of equally long lists.
        rows: how many to show, evenly spread over the table, so that several prompts are seen; None shows all.
        title: the table's title.
        prompt_width: the longest prompt that is shown in full, in characters; a longer one loses its start.

    Returns:
        A rich table with the columns prompt, completion, each reward, advantage.
    """
    from rich.table import Table
    from rich.text import Text

    heads, lines = _cells(table, rows, prompt_width)
    view = Table(title=title or None, title_justify="left", show_lines=False, pad_edge=False)
    for head, ratio in zip(heads, (2, 3), strict=False):
        view.add_column(head, ratio=ratio, overflow="fold")
    for head in heads[2:]:
        view.add_column(head, justify="right", overflow="fold")
    for line in lines:
        # Text, not str: a completion may hold [brackets] that rich would take for its markup
        view.add_row(*map(Text, line))
    return view


def html_table(
    table: Mapping[str, Sequence[Any]], *, rows: int | None = None, title: str = "", prompt_width: int = 200
) -> str:
    """Completions as HTML, for a notebook.

    Args:
        table: dict of equally long lists.
        rows: how many to show, evenly spread over the table; None shows all.
        title: the table's title.
        prompt_width: the longest prompt that is shown in full, in characters; a longer one loses its start.

    Returns:
        A ``<table>`` with the columns prompt, completion, each reward, advantage.
    """
    heads, lines = _cells(table, rows, prompt_width)
    sides = ["left"] * 2 + ["right"] * (len(heads) - 2)

    def row(tag: str, cells: Sequence[str]) -> str:
        styled = zip(sides, cells, strict=True)
        return "".join(f'<{tag} style="text-align:{side}">{html.escape(cell)}</{tag}>' for side, cell in styled)

    caption = f'<caption style="text-align:left">{html.escape(title)}</caption>' if title else ""
    body = "".join(f"<tr>{row('td', line)}</tr>" for line in lines)
    return f"<table>{caption}<thead><tr>{row('th', heads)}</tr></thead><tbody>{body}</tbody></table>"


def reward_columns(table: Mapping[str, Sequence[Any]]) -> list[str]:
    """The names of the rewards: the columns between ``completion`` and ``advantage``.

    Args:
        table: dict of equally long lists.

    Returns:
        The names, in the table's order.

    Example:
        >>> reward_columns({"step": [], "prompt": [], "completion": [], "correct": [], "advantage": [], "note": []})
        ['correct']
    """
    names = list(table)
    return [n for n in names[: names.index("advantage")] if n not in FIXED_COLUMNS]


def unique_prompts(table: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """The first row of each distinct prompt.

    Args:
        table: dict of equally long lists.

    Returns:
        The same columns with fewer rows, in the same order.

    Example:
        >>> unique_prompts({"prompt": ["a", "a", "b", "a"], "length": [3, 5, 2, 4]})
        {'prompt': ['a', 'b'], 'length': [3, 2]}
    """
    firsts: dict[Any, int] = {}
    for i, prompt in enumerate(table["prompt"]):
        firsts.setdefault(prompt, i)
    return {name: [values[i] for i in firsts.values()] for name, values in table.items()}


def short_prompt(prompt: str, width: int = 60) -> str:
    r"""The last turn of a prompt on one line, without the marks of a chat template such as ``<|im_start|>``.

    Args:
        prompt: a rendered prompt.
        width: the most characters to show; a longer one loses its start, where it says least.

    Returns:
        The turn.

    Example:
        >>> short_prompt("<|im_start|>user\nWhat is 7 + 12?<|im_end|>\n<|im_start|>assistant\n")
        'What is 7 + 12?'
        >>> short_prompt("What is 7 + 12?", width=10)
        '…s 7 + 12?'
    """
    turns = (_ROLE.sub("", turn.strip()).strip() for turn in _CHAT_MARK.split(prompt))
    text = one_line(([turn for turn in turns if turn] or [""])[-1])
    return text if len(text) <= width else "…" + text[1 - width :]


def one_line(text: str) -> str:
    r"""A text on one line, fit for a terminal: a model can write control sequences, which would act on it.

    Args:
        text: any text.

    Returns:
        The text with single spaces, and ``\ufffd`` for what cannot be printed.

    Example:
        >>> one_line("a\n  b\x1b[2J")
        'a b�[2J'
    """
    return "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))


def _cells(
    table: Mapping[str, Sequence[Any]], rows: int | None, prompt_width: int
) -> tuple[list[str], list[list[str]]]:
    """The heads and the lines that a person sees of a table."""
    figures = [*reward_columns(table), "advantage"]
    lines = [
        [
            short_prompt(table["prompt"][i], prompt_width),
            one_line(table["completion"][i]),
            *(_figure(table[name][i]) for name in figures),
        ]
        for i in _spread(len(table["prompt"]), rows)
    ]
    return ["prompt", "completion", *figures], lines


def _figure(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _spread(total: int, wanted: int | None) -> list[int]:
    """Indices of ``wanted`` rows, evenly spread: the middle row of each of ``wanted`` equal parts."""
    if wanted is None or wanted >= total:
        return list(range(total))
    return [(2 * k + 1) * total // (2 * wanted) for k in range(wanted)]
