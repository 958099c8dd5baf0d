from __future__ import annotations

from types import SimpleNamespace

import pytest

from grpo_trainer.reports.completions import CompletionsWriter
from grpo_trainer.reports.printer import CompletionsPrinter
from tests.helpers import completions_table


@pytest.fixture
def run(tmp_path):
    """Collects a rollout of two prompts for a step, or logs, as the trainer does."""
    writer = CompletionsWriter(tmp_path / "completions")
    state = SimpleNamespace(global_step=0, is_world_process_zero=True, log_history=[])
    writer.on_train_begin(None, state, None)

    def rollout(step):
        state.global_step = step - 1
        writer.on_rollout(None, state, None, table=completions_table(step, prompt=["a", "a", "b", "b"]))

    def log(printer, step, **logs):
        state.global_step = step
        state.log_history.append({**logs, "step": step})
        printer.on_log(None, state, None, logs=logs)

    return SimpleNamespace(writer=writer, state=state, rollout=rollout, log=log)


def test_the_latest_step_is_printed_once_at_the_next_log_of_training(run, capsys):
    printer = CompletionsPrinter(run.writer)
    for step in (1, 2):
        run.rollout(step)
    run.log(printer, 2, eval_reward=1.0)
    assert capsys.readouterr().out == ""
    run.log(printer, 2, loss=0.0)
    out = capsys.readouterr().out
    assert "Step 2" in out and out.count("It is") == 4
    run.log(printer, 3, loss=0.0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("rows", "unique", "shown"), [(None, False, 4), (3, False, 3), (None, True, 2), (1, True, 1)])
def test_as_many_rows_are_printed_as_are_wanted(run, capsys, rows, unique, shown):
    run.rollout(1)
    run.log(CompletionsPrinter(run.writer, rows, unique=unique), 1, loss=0.0)
    assert capsys.readouterr().out.count("It is") == shown


def test_no_rows_are_no_table(run, capsys):
    run.rollout(1)
    run.log(CompletionsPrinter(run.writer, 0), 1, loss=0.0)
    assert capsys.readouterr().out == ""


def test_only_the_main_process_prints(run, capsys):
    run.rollout(1)
    run.state.is_world_process_zero = False
    run.log(CompletionsPrinter(run.writer), 1, loss=0.0)
    assert capsys.readouterr().out == ""


def test_in_a_notebook_the_table_is_html_and_replaced_where_it_stands(run, notebook, capsys):
    printer = CompletionsPrinter(run.writer)
    printer.on_train_begin(None, run.state, None)
    for step in (1, 2):
        run.rollout(step)
        run.log(printer, step, loss=0.0)
    (bundle,) = notebook.shown
    assert "Step 2" in bundle["text/html"] and bundle["text/html"].count("<td") == 4 * 5
    assert bundle["text/plain"].count("It is") == 4
    assert capsys.readouterr().out == ""
    printer.on_train_begin(None, run.state, None)  # the cell is run again
    run.rollout(3)
    run.log(printer, 3, loss=0.0)
    assert "Step 2" in notebook.html(0) and "Step 3" in notebook.html(1)


def test_what_cannot_be_printed_is_said_once_and_the_run_goes_on(run, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise UnicodeEncodeError("ascii", "\u2500", 0, 1, "not in range")

    monkeypatch.setattr("rich.console.Console.print", fail)
    printer = CompletionsPrinter(run.writer)
    for step in (1, 2):
        run.rollout(step)
        run.log(printer, step, loss=0.0)
    (record,) = caplog.records
    assert "the completions are not printed" in record.getMessage()
