"""What the services are sent, with fakes in their place; ``tests/properties/test_tracking.py`` has the real ones."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from grpo_trainer.reports.completions import CompletionsWriter, write_completions
from grpo_trainer.reports.tracker import CompletionsTracker
from tests.helpers import completions_table


class Service:
    """A tracking service that drops what goes back on its axis, as W&B does, and complains."""

    def __init__(self):
        self.rows = []

    def Table(self, columns, data):
        return SimpleNamespace(columns=columns, data=data)

    def log(self, row):
        assert not self.rows or row["train/global_step"] >= self.rows[-1]["train/global_step"], "steps go back"
        self.rows.append(row)


@pytest.fixture
def services(monkeypatch):
    fakes = {name: Service() for name in ("wandb", "trackio")}
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    return fakes


def play(tmp_path, report_to=("wandb",), steps=6, log_every=2, rollout_every=1, main=True, **kwargs):
    writer = CompletionsWriter(tmp_path / "completions")
    tracker = CompletionsTracker(writer, **kwargs)
    state = SimpleNamespace(global_step=0, is_world_process_zero=main, log_history=[])
    args = SimpleNamespace(report_to=list(report_to))

    def log(**logs):
        state.log_history.append({**logs, "step": state.global_step})
        tracker.on_log(args, state, None, logs=logs)

    writer.on_train_begin(args, state, None)
    for step in range(1, steps + 1):
        if (step - 1) % rollout_every == 0:
            table = completions_table(step, prompt=["a", "a", "b", "b"])
            writer.on_rollout(args, state, None, table=table)
        state.global_step = step
        if step % log_every == 0:
            log(loss=0.0)
            log(eval_reward=1.0)
    log(train_runtime=1.0)


def test_each_log_of_training_is_followed_by_the_latest_completions_under_its_step(tmp_path, services):
    play(tmp_path, report_to=["wandb", "tensorboard", "trackio"])
    for service in services.values():
        assert [row["train/global_step"] for row in service.rows] == [2, 4, 6]
        assert [row["completions"].data[0][0] for row in service.rows] == [2, 4, 6]
        assert [len(row["completions"].data) for row in service.rows] == [4, 4, 4]
        assert list(service.rows[0]) == ["completions", "train/global_step"]


def test_no_rollout_is_logged_under_two_steps(tmp_path, services):
    """A rollout for 4 steps, a log for each: 2 rollouts, 8 logs, 2 tables, each at the first log after its rollout."""
    play(tmp_path, steps=8, log_every=1, rollout_every=4)
    assert [(row["train/global_step"], row["completions"].data[0][0]) for row in services["wandb"].rows] == [
        *((1, 1), (5, 5)),
    ]


def test_what_was_drawn_after_the_last_log_goes_with_the_summary_of_the_run(tmp_path, services):
    play(tmp_path, steps=5, log_every=2)
    assert [row["train/global_step"] for row in services["wandb"].rows] == [2, 4, 5]


def test_one_row_per_prompt_if_that_is_wanted(tmp_path, services):
    play(tmp_path, unique=True)
    assert [row["completions"].data[0][1] for row in services["wandb"].rows] == ["a"] * 3
    assert all(len(row["completions"].data) == 2 for row in services["wandb"].rows)


@pytest.mark.parametrize(("report_to", "main"), [((), True), (("tensorboard",), True), (("wandb",), False)])
def test_nobody_is_sent_what_is_not_asked_for(tmp_path, services, report_to, main):
    play(tmp_path, report_to=report_to, main=main)
    assert services["wandb"].rows == services["trackio"].rows == []


def test_other_processes_of_a_resumed_run_log_nothing(tmp_path, services):
    """They see the files of the main process."""
    write_completions(tmp_path / "completions_00003.parquet", [completions_table(3)])
    for main, tables in ((False, 0), (True, 1)):
        writer = CompletionsWriter(tmp_path)
        state = SimpleNamespace(global_step=3, is_world_process_zero=main, log_history=[{"loss": 0.0, "step": 4}])
        writer.on_train_begin(None, state, None)
        CompletionsTracker(writer).on_log(SimpleNamespace(report_to=["wandb"]), state, None, logs={"loss": 0.0})
        assert len(services["wandb"].rows) == tables


def test_a_service_that_fails_is_said_once_and_holds_up_neither_the_run_nor_the_other(
    tmp_path, services, monkeypatch, caplog
):
    def fail(row):
        raise RuntimeError("You must call wandb.init() before wandb.log()")

    monkeypatch.setattr(services["wandb"], "log", fail)
    play(tmp_path, report_to=["wandb", "trackio"])
    (record,) = caplog.records
    assert "not logged to wandb" in record.getMessage() and "wandb.init()" in record.getMessage()
    assert len(services["trackio"].rows) == 3
