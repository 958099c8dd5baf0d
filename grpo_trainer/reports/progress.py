"""Progress of a run: a bar with reward and time left, and a few sampled completions now and then."""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers.trainer_callback import TrainerCallback

from grpo_trainer.generation.base import Observer
from grpo_trainer.reports.guard import Guard
from grpo_trainer.reports.notebook import Output, at_end_of_cell, in_notebook
from grpo_trainer.reports.printer import show_table
from grpo_trainer.reports.rollout_progress import Spoken


class RichProgress(TrainerCallback):
    """Shows how a run goes, in place of transformers' bars and printed dicts. Silent on all but the main process.

    In a terminal it draws a live bar, in a notebook an HTML one. Elsewhere (a file, a pipe, a CI log) it writes plain
    lines, about ``lines`` over the whole run, however long that is. The bar is taken down when a run ends, and when the
    cell of a notebook that it runs in is interrupted; a script uses it as a context manager for that.

    Args:
        console: where to write; None takes the standard output.
        lines: how many plain lines a run writes where there is no terminal.
        tables: how many tables of sampled completions a run shows, evenly spread and beginning with the first rollout.
        table_rows: completions in such a table.

    ::

        with RichProgress() as progress:
            GRPOTrainer(..., callbacks=[progress]).train()
    """

    replaces_progress = True
    """The trainer leaves out transformers' own callbacks for the same where one of its callbacks has this."""

    def __init__(
        self, console: Console | None = None, *, lines: int = 12, tables: int = 4, table_rows: int = 4
    ) -> None:
        self.console = console or Console()
        self.lines, self.tables, self.table_rows = lines, tables, table_rows
        self._bar: _TerminalBar | _NotebookBar | None = None
        self._reward = float("nan")
        self._start_time, self._start_step = 0.0, 0
        self._next_table = self._next_line = 0
        self._guard = Guard("progress is not shown")

    def __enter__(self) -> RichProgress:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar down. May be called more than once."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._guard:
                bar.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Draws the bar."""
        self.close()  # of a run that was broken off in the same process
        self._reward = float("nan")
        self._start_time, self._start_step = time.monotonic(), state.global_step
        self._next_table = self._next_line = state.global_step
        if not state.is_world_process_zero:
            return
        with self._guard:
            if in_notebook():
                self._bar = _NotebookBar(state)
            elif self.console.is_terminal:
                self._bar = _TerminalBar(self.console, state)
            at_end_of_cell(self.close)

    def on_rollout(
        self, args: Any, state: Any, control: Any, table: Mapping[str, Sequence[Any]], **kwargs: Any
    ) -> None:
        """Shows a few completions, if it is time for that."""
        if not state.is_world_process_zero or self.tables < 1 or state.global_step < self._next_table:
            return
        self._next_table = _next_mark(state, self.tables)
        title = f"sampled for step {state.global_step + 1}"
        with self._guard:
            show_table(table, Output(), self.console, rows=self.table_rows, title=title)

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Takes the reward from the log; an evaluation gets a line of its own."""
        if not state.is_world_process_zero:
            return
        for name, value in (logs or {}).items():
            if name.startswith("eval_") and name.endswith("_reward"):
                self._say(f"step {state.global_step}: {name} {value:.3f}")
        if logs is None or "reward" not in logs:
            return
        self._reward = float(logs["reward"])
        if self._bar is None and not in_notebook() and self._is_due(state):
            self._say(self._line(state))
        self._draw(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Moves the bar."""
        self._draw(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the bar down."""
        self.close()

    def rollout(self, total: int) -> contextlib.AbstractContextManager[Observer]:
        """What an engine tells of a rollout: a long one says now and then how far it is.

        Args:
            total: completions of the rollout on this process.

        Returns:
            A context that gives the observer.
        """
        return contextlib.nullcontext(Spoken(total, self._say))

    def _draw(self, state: Any) -> None:
        if self._bar is not None:
            with self._guard:
                self._bar.draw(self._reward)

    def _say(self, line: str) -> None:
        with self._guard:
            if isinstance(self._bar, _NotebookBar):
                self._bar.say(line)
            else:
                self.console.print(line, highlight=False, soft_wrap=True)

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


class _TerminalBar:
    """A live bar, drawn by a thread of its own until it is stopped."""

    def __init__(self, console: Console, state: Any) -> None:
        self.state = state
        self.progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("reward {task.fields[reward]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=600,  # steps may take minutes; half a minute, the default, would hold none
        )
        self._task = self.progress.add_task("training", total=state.max_steps, completed=state.global_step, reward="–")
        self.progress.start()

    def draw(self, reward: float) -> None:
        self.progress.update(self._task, completed=self.state.global_step, reward=_figure(reward))

    def stop(self) -> None:
        self.progress.stop()


class _NotebookBar:
    """A bar in the output of a cell. It is no more than what was last shown, so an interruption breaks nothing."""

    SECONDS = 0.2  # at least, from one drawing to the next: a browser need not draw every step of a quick run

    def __init__(self, state: Any) -> None:
        self.state, self._output = state, Output()
        self._start_time, self._start_step = time.monotonic(), state.global_step
        self._drawn = 0.0
        self._reward = float("nan")
        self._said: list[str] = []
        self.draw(self._reward, force=True)

    def draw(self, reward: float, *, force: bool = False) -> None:
        self._reward = reward
        if force or time.monotonic() - self._drawn > self.SECONDS:
            done, total = self.state.global_step, self.state.max_steps
            left = "" if done == self._start_step else f"{_duration(self._per_step() * (total - done))} left"
            self._show(f"step {done}/{total}", left)

    def say(self, line: str) -> None:
        self._said.append(line)
        self.draw(self._reward, force=True)

    def stop(self) -> None:
        done, total = self.state.global_step, self.state.max_steps
        self._show(f"step {done}/{total}" if done >= total else f"stopped at step {done}/{total}", "")

    def _per_step(self) -> float:
        return (time.monotonic() - self._start_time) / max(1, self.state.global_step - self._start_step)

    def _show(self, place: str, left: str) -> None:
        self._drawn = time.monotonic()
        speed = f"{self._per_step():.1f} s a step" if self.state.global_step > self._start_step else ""
        line = "  ".join(part for part in (place, f"reward {_figure(self._reward)}", speed, left) if part)
        bar = (
            f'<progress value="{self.state.global_step}" max="{max(1, self.state.max_steps)}" '
            'style="width:300px;vertical-align:middle"></progress>'
        )
        lines = [f"{bar} {html.escape(line)}", *map(html.escape, self._said)]
        self._output.show("".join(f"<div>{text}</div>" for text in lines), "\n".join([line, *self._said]))


def _figure(value: float) -> str:
    return "–" if value != value else f"{value:.3f}"


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
