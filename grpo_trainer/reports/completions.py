"""Completions as a person reads them: a table in the terminal, and parquet files on disk.

The table that these functions take is what the trainer hands to callbacks once per rollout: a dict of equally long
lists with the columns ``step, prompt, completion``, one per reward, ``advantage, finished, length``, then extra ones.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_callback import TrainerCallback

if TYPE_CHECKING:
    from rich.table import Table

FILE_PREFIX = "completions_"
logger = logging.getLogger(__name__)

FIXED_COLUMNS = ("step", "prompt", "completion", "advantage", "finished", "length")
_CHAT_MARK = re.compile(r"<\|[^<>|]*\|>")
_ROLE = re.compile(r"^(system|user|assistant|model|tool)(\n|$)")


class CompletionsWriter(TrainerCallback):
    """Writes every completion to parquet: one file per logged step, ``completions_00012.parquet``.

    A file holds all rollouts since the log before it. A step that is run again after a resume replaces its file. The
    files are written on the main process only.

    Args:
        folder: where to write; made when the first file is written.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self._waiting: list[Mapping[str, Sequence[Any]]] = []
        self._complained = False

    def on_rollout(
        self, args: Any, state: Any, control: Any, table: Mapping[str, Sequence[Any]], **kwargs: Any
    ) -> None:
        """Keeps the completions of a rollout until the next log."""
        self._waiting.append({name: list(values) for name, values in table.items()})

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes what was kept."""
        self._flush(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes what was kept since the last log."""
        self._flush(state)

    def _flush(self, state: Any) -> None:
        tables, self._waiting = self._waiting, []
        if not tables or not state.is_world_process_zero:
            return
        path = self.folder / f"{FILE_PREFIX}{state.global_step:05d}.parquet"
        try:
            write_completions(path, tables)
        except OSError as error:  # a report is not worth a run
            if not self._complained:
                logger.warning("completions are not written to %s: %s; training goes on", path, error)
            self._complained = True


def write_completions(path: Path, tables: Sequence[Mapping[str, Sequence[Any]]]) -> None:
    """Writes tables of completions, one below the other, to a parquet file that is complete or not there.

    A reward that does not apply (None or NaN) becomes a null. Values of an extra column that are not of one kind are
    stored as JSON text. A column that a table lacks is null there.

    Args:
        path: the file; its folder is made.
        tables: one or more dicts of equally long lists.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    names = list(dict.fromkeys(name for table in tables for name in table))
    columns: dict[str, list[Any]] = {name: [] for name in names}
    for table in tables:
        rows = len(next(iter(table.values())))
        for name in names:
            columns[name].extend(table.get(name, [None] * rows))
    arrays = {name: _arrow_array(values) for name, values in columns.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    pq.write_table(pa.table(arrays), unfinished)
    os.replace(unfinished, path)


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

    rewards = reward_columns(table)
    view = Table(title=title or None, title_justify="left", show_lines=False, pad_edge=False)
    view.add_column("prompt", ratio=2, overflow="fold")
    view.add_column("completion", ratio=3, overflow="fold")
    for name in [*rewards, "advantage"]:
        view.add_column(name, justify="right", overflow="fold")
    for i in _spread(len(table["prompt"]), rows):
        # Text, not str: a completion may hold [brackets] that rich would take for its markup
        cells = [Text(short_prompt(table["prompt"][i], prompt_width)), Text(one_line(table["completion"][i]))]
        figures = [Text(_figure(table[name][i])) for name in [*rewards, "advantage"]]
        view.add_row(*cells, *figures)
    return view


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


def _figure(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _spread(total: int, wanted: int | None) -> list[int]:
    """Indices of ``wanted`` rows, evenly spread: the middle row of each of ``wanted`` equal parts."""
    if wanted is None or wanted >= total:
        return list(range(total))
    return [(2 * k + 1) * total // (2 * wanted) for k in range(wanted)]


def _arrow_array(values: list[Any]) -> Any:
    import pyarrow as pa

    values = [None if isinstance(v, float) and math.isnan(v) else v for v in values]
    try:
        return pa.array(values)
    except Exception:  # of many kinds: mixed types, whole numbers beyond 64 bits, lone surrogates
        return pa.array([None if v is None else _as_text(v) for v in values])


def _as_text(value: Any) -> str:
    """JSON, or Python's own way of writing it where JSON has none; what UTF-8 cannot hold becomes a question mark."""
    try:
        text = json.dumps(value, default=str)
    except (TypeError, ValueError):
        text = repr(value)
    return text.encode("utf-8", errors="replace").decode("utf-8")
