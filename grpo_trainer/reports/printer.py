"""Completions in the terminal, at each log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console  # not when it prints first: importing it draws a random number
from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.completions import render_table


class CompletionsPrinter(TrainerCallback):
    """Prints completions of the latest rollout whenever the Trainer logs, on the main process only.

    Args:
        rows: how many; None prints all.
    """

    def __init__(self, rows: int | None = None) -> None:
        self.rows = rows
        self._latest: Mapping[str, Sequence[Any]] | None = None

    def on_rollout(
        self, args: Any, state: Any, control: Any, table: Mapping[str, Sequence[Any]], **kwargs: Any
    ) -> None:
        """Keeps the rollout until the next log."""
        self._latest = table

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Prints what was kept."""
        if self._latest is None or not state.is_world_process_zero:
            return
        Console().print(render_table(self._latest, rows=self.rows, title=f"Step {state.global_step}"))
        self._latest = None
