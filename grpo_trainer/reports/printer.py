"""Completions in the terminal or the notebook, at each log of training."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console  # not when it prints first: importing it draws a random number
from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.completions import CompletionsWriter, is_training_log
from grpo_trainer.reports.guard import Guard
from grpo_trainer.reports.notebook import Output, in_notebook
from grpo_trainer.reports.tables import html_table, render_table, unique_prompts


class CompletionsPrinter(TrainerCallback):
    """Prints completions of the latest step whenever figures of training are logged, on the main process only.

    In a notebook the table is HTML, and replaced where it stands.

    Args:
        source: has the completions.
        rows: how many; None prints all, 0 nothing.
        unique: print only the first completion of each prompt.
    """

    def __init__(self, source: CompletionsWriter, rows: int | None = None, *, unique: bool = False) -> None:
        self.source, self.rows, self.unique = source, rows, unique
        self._output = Output()
        self._guard = Guard("the completions are not printed")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins a new place in a notebook's output."""
        self._output = Output()

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Prints what no log before has shown."""
        none = self.rows is not None and self.rows < 1
        if none or not state.is_world_process_zero or not is_training_log(logs or {}):
            return
        with self._guard:
            table = self.source.latest(state)
            if table is None:
                return
            title = f"Step {table['step'][0]}" if table["step"] else ""
            table = unique_prompts(table) if self.unique else table
            show_table(table, self._output, rows=self.rows, title=title)


def show_table(
    table: Mapping[str, Sequence[Any]], output: Output, console: Console | None = None, *, rows: int | None, title: str
) -> None:
    """Shows completions where the user sits.

    Args:
        table: dict of equally long lists.
        output: where to, in a notebook.
        console: where to, elsewhere; None takes the standard output.
        rows: how many to show; None shows all.
        title: the table's title.
    """
    if not in_notebook():
        (console or Console()).print(render_table(table, rows=rows, title=title))
        return
    text = io.StringIO()  # for who cannot see HTML
    plain = Console(file=text, width=115, force_jupyter=False, force_terminal=False, color_system=None)
    plain.print(render_table(table, rows=rows, title=title))
    output.show(html_table(table, rows=rows, title=title), text.getvalue())
