from __future__ import annotations

import io
import itertools
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from transformers.trainer_callback import TrainerControl, TrainerState

from grpo_trainer.reports import progress
from grpo_trainer.reports.progress import RichProgress


class Run:
    """Plays the trainer: calls the callback as transformers' loop does."""

    def __init__(self, *, terminal: bool, main: bool = True, steps: int = 25, log_every: int = 1, **kwargs) -> None:
        self.out = io.StringIO()
        console = Console(file=self.out, force_terminal=terminal, width=100)
        self.progress = RichProgress(console, **kwargs)
        self.state = TrainerState(max_steps=steps, logging_steps=log_every, is_world_process_zero=main)
        self.control = TrainerControl()

    def call(self, event: str, **kwargs) -> None:
        getattr(self.progress, event)(None, self.state, self.control, **kwargs)

    def play(self, first: int = 0, fail_at: int | None = None) -> str:
        self.state.global_step = first
        self.call("on_train_begin")
        for step in range(first + 1, self.state.max_steps + 1):
            self.call("on_rollout", table=table(step))
            if step == fail_at:
                raise RuntimeError("the step failed")
            self.state.global_step = step
            self.call("on_step_end")
            if step % self.state.logging_steps == 0:
                self.call("on_log", logs={"reward": step / 100, "loss": 0.0})
        self.call("on_log", logs={"train_runtime": 1.0})
        self.call("on_train_end")
        return self.out.getvalue()


def table(step: int) -> dict:
    return {
        "step": [step] * 2,
        "prompt": ["What is 7 + 12?"] * 2,
        "completion": ["nineteen", "[19]"],
        "last_integer": [0.0, 1.0],
        "advantage": [-0.7, 0.7],
        "finished": [True, True],
        "length": [3, 4],
    }


def test_without_a_terminal_there_are_plain_lines_with_step_reward_and_time_left():
    text = Run(terminal=False, tables=0).play()
    lines = text.splitlines()
    assert lines[0].startswith("step 1/25  reward 0.010  ")
    assert lines[0].endswith(" left")
    assert lines[-1].startswith("step 25/25  reward 0.250  ")
    assert "\x1b" not in text


@pytest.mark.parametrize(("steps", "log_every"), [(25, 1), (1000, 1), (10_000, 10), (100_000, 7)])
def test_a_long_run_does_not_flood_a_log_file(steps, log_every):
    lines = Run(terminal=False, tables=0, lines=12, steps=steps, log_every=log_every).play().splitlines()
    assert 10 <= len(lines) <= 14


def test_in_a_terminal_there_is_a_bar_with_step_and_reward():
    text = Run(terminal=True, tables=0).play()
    assert "25/25" in text
    assert "reward 0.250" in text
    assert "step 1/25" not in text  # no plain lines beside the bar


def test_an_evaluation_gets_a_line_of_its_own():
    run = Run(terminal=False)
    run.state.global_step = 5
    run.call("on_log", logs={"eval_reward": 0.5, "eval_hard_reward": 0.25, "eval_runtime": 1.0})
    assert run.out.getvalue().splitlines() == ["step 5: eval_reward 0.500", "step 5: eval_hard_reward 0.250"]


def test_a_resumed_run_counts_on():
    assert Run(terminal=False, tables=0).play(first=20).splitlines()[0].startswith("step 21/25")
    assert "25/25" in Run(terminal=True, tables=0).play(first=20)


def test_completions_are_shown_now_and_then_beginning_with_the_first():
    # 25 steps, 4 tables: every 7 steps, so before steps 1, 8, 15 and 22
    text = Run(terminal=False, tables=4).play()
    shown = [line.split()[-1] for line in text.splitlines() if line.startswith("sampled for step")]
    assert shown == ["1", "8", "15", "22"]
    assert "nineteen" in text and "[19]" in text


def test_no_table_is_shown_if_none_is_wanted():
    assert "nineteen" not in Run(terminal=False, tables=0).play()


def test_only_the_main_process_shows_anything():
    for terminal in (False, True):
        assert Run(terminal=terminal, main=False).play() == ""


def test_the_bar_is_taken_down_when_the_run_fails():
    run = Run(terminal=True, tables=0)
    with pytest.raises(RuntimeError), run.progress:
        run.play(fail_at=3)
    assert run.out.getvalue().endswith("\x1b[?25h")  # the cursor is shown again


def test_a_run_can_be_started_again_after_it_was_broken_off():
    run = Run(terminal=True, tables=0)
    with pytest.raises(RuntimeError):
        run.play(fail_at=3)
    abandoned = run.progress._bar
    assert "25/25" in run.play()
    assert not abandoned.progress.live.is_started  # two bars would draw over each other


# --- in a notebook ---------------------------------------------------------------------------------------------------


def test_in_a_notebook_one_bar_is_drawn_anew_in_its_place(notebook):
    run = Run(terminal=False, tables=0)
    assert run.play() == ""  # nothing is printed beside it
    assert len(notebook.shown) == 1
    assert '<progress value="25" max="25"' in notebook.html(0)
    assert "step 25/25  reward 0.250" in notebook.html(0) and "stopped" not in notebook.html(0)
    assert notebook.shown[0]["text/plain"].startswith("step 25/25  reward 0.250")


def test_a_quick_run_does_not_keep_the_browser_busy(notebook, monkeypatch):
    hundredths = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(hundredths) / 100)
    monkeypatch.setattr(progress, "time", clock)
    Run(terminal=False, tables=0, steps=2000).play()
    assert 2000 / 100 * 5 / 2 < notebook.drawn < next(hundredths) / 100 * 5  # at most five times a second


def test_in_a_notebook_evaluations_and_tables_are_html(notebook):
    run = Run(terminal=False, tables=1)
    run.call("on_train_begin")
    run.call("on_rollout", table=table(1))
    run.state.global_step = 1
    run.call("on_log", logs={"eval_reward": 0.5, "eval_<b>_reward": 0.25})
    assert "<div>step 1: eval_reward 0.500</div><div>step 1: eval_&lt;b&gt;_reward 0.250</div>" in notebook.html(0)
    assert "<table>" in notebook.html(1) and "nineteen" in notebook.html(1)
    assert "nineteen" in notebook.shown[1]["text/plain"] and "<" not in notebook.shown[1]["text/plain"]
    assert run.out.getvalue() == ""


def test_an_interrupted_cell_leaves_a_bar_that_says_so(notebook):
    run = Run(terminal=False, tables=0)
    with pytest.raises(RuntimeError):
        run.play(fail_at=4)
    notebook.end_cell()
    assert "stopped at step 3/25" in notebook.html(0)
    assert notebook.at_end == []


def test_a_cell_that_is_run_again_draws_a_bar_of_its_own(notebook):
    run = Run(terminal=False, tables=0)
    with pytest.raises(RuntimeError):
        run.play(fail_at=4)
    notebook.end_cell()
    run.play()
    notebook.end_cell()
    assert ["stopped" in bundle["text/html"] for bundle in notebook.shown] == [True, False]
    assert "step 25/25" in notebook.html(1)


def test_only_the_main_process_draws_in_a_notebook(notebook):
    Run(terminal=False, main=False).play()
    assert notebook.shown == []


def test_a_display_that_fails_is_said_once_and_the_run_goes_on(notebook, caplog, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError("the browser is gone")

    monkeypatch.setattr(sys.modules["IPython.display"], "display", fail)
    Run(terminal=False, tables=4).play()
    (record,) = caplog.records
    assert "the browser is gone" in record.getMessage()


def test_a_pipe_that_breaks_is_said_once_and_the_run_goes_on(caplog, monkeypatch):
    run = Run(terminal=False, tables=4)

    def fail(*args, **kwargs):
        raise BrokenPipeError("nobody reads")

    monkeypatch.setattr(run.progress.console, "print", fail)
    run.play()
    (record,) = caplog.records
    assert "progress is not shown" in record.getMessage() and "nobody reads" in record.getMessage()
