"""Progress of a run in the terminal: a bar with reward and time left, and a few sampled completions now and then."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.completions import render_table


class RichProgress(TrainerCallback):
    """Shows how a run goes, in place of transformers' bars and printed dicts. Silent on all but the main process.

    In a terminal it draws a live bar. Elsewhere (a file, a pipe, a CI log) it writes plain lines, about ``lines`` over
    the whole run, however long that is. It can be used as a context manager, which takes the bar down when a run fails.

    Args:
        console: where to write; None takes the standard output.
        lines: how many plain lines a run writes where there is no terminal.
        tables: how many tables of sampled completions a run shows, evenly spread and beginning with the first rollout.
        table_rows: completions in such a table.

    ::

        with RichProgress() as progress:
            GRPOTrainer(..., callbacks=[progress]).train()
    """

    def __init__(
        self, console: Console | None = None, *, lines: int = 12, tables: int = 4, table_rows: int = 4
    ) -> None:
        self.console = console or Console()
        self.lines, self.tables, self.table_rows = lines, tables, table_rows
        self._bar: Progress | None = None
        self._task: Any = None
        self._reward = float("nan")
        self._start_time, self._start_step = 0.0, 0
        self._next_table = self._next_line = 0

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar down. May be called more than once."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draws the bar."""
        self.close()  # of a run that was broken off in the same notebook
        self._start_time, self._start_step = time.monotonic(), state.global_step
        self._next_table = self._next_line = state.global_step
        if not state.is_world_process_zero or not self.console.is_terminal:
            return
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self.console,
            speed_estimate_period=600,  # steps may take minutes; half a minute, the default, would hold none
        )
        self._task = self._bar.add_task("training", total=state.max_steps, completed=state.global_step, reward="–")
        self._bar.start()

    def on_rollout(
        self, args: Any, state: Any, control: Any, table: Mapping[str, Sequence[Any]], **kwargs: Any
    ) -> None:
        """Shows a few completions, if it is time for that."""
        if not state.is_world_process_zero or self.tables < 1 or state.global_step < self._next_table:
            return
        self._next_table = _next_mark(state, self.tables)
        title = f"sampled for step {state.global_step + 1}"
        self.console.print(render_table(table, rows=self.table_rows, title=title))

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Takes the reward from the log; an evaluation gets a line of its own."""
        for name, value in (logs or {}).items():
            if name.startswith("eval_") and name.endswith("_reward") and state.is_world_process_zero:
                self.console.print(f"step {state.global_step}: {name} {value:.3f}", highlight=False, soft_wrap=True)
        if logs is None or "reward" not in logs:
            return
        self._reward = float(logs["reward"])
        if self._bar is not None:
            self._bar.update(self._task, reward=f"{self._reward:.3f}")
        elif state.is_world_process_zero and self._is_due(state):
            self.console.print(self._line(state), highlight=False, soft_wrap=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the bar down."""
        self.close()

    def _is_due(self, state: Any) -> bool:
        """Whether this log is the first, the last, or the first after one of the ``lines`` marks."""
        last = state.global_step + max(1, state.logging_steps) > state.max_steps
        if state.global_step < self._next_line and not last:
            return False
        self._next_line = _next_mark(state, self.lines)
        return True

    def _line(self, state: Any) -> str:
        done = max(1, state.global_step - self._start_step)
        per_step = (time.monotonic() - self._start_time) / done
        left = per_step * (state.max_steps - state.global_step)
        return (
            f"step {state.global_step}/{state.max_steps}  reward {self._reward:.3f}  "
            f"{per_step:.1f} s a step  {_duration(left)} left"
        )


def _next_mark(state: Any, marks: int) -> int:
    """The first of about ``marks`` evenly spread steps that is still to come."""
    every = max(1, -(-state.max_steps // marks))
    return state.global_step - state.global_step % every + every


def _duration(seconds: float) -> str:
    """A duration as a person says it.

    >>> _duration(42.4), _duration(200), _duration(7300)
    ('42 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
