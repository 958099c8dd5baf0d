from __future__ import annotations

import logging
import math
from types import SimpleNamespace

import pandas as pd
import pyarrow.parquet as pq
import pytest

import grpo_trainer.reports.completions as completions
from grpo_trainer.reports.completions import CompletionsWriter, plain_rows, read_completions, write_completions
from tests.helpers import completions_table as rollout


def state(step: int, main: bool = True, logs=()) -> SimpleNamespace:
    """The Trainer's state after ``step`` optimizer steps, with training logs at the steps given and one now."""
    history = [{"loss": 0.0, "step": s} for s in logs] + [{"loss": 0.0, "step": step}]
    return SimpleNamespace(global_step=step, is_world_process_zero=main, log_history=history)


def begun(folder, step: int = 0) -> CompletionsWriter:
    writer = CompletionsWriter(folder)
    writer.on_train_begin(None, state(step), None)
    return writer


def sample(writer: CompletionsWriter, step: int, **kwargs) -> None:
    """The rollout that is collected for ``step``, while the step before it is the last that is complete."""
    writer.on_rollout(None, state(step - 1), None, table=rollout(step, **kwargs))


def column(folder, step: int, name: str) -> list:
    return pq.read_table(folder / f"completions_{step:05d}.parquet")[name].to_pylist()


def test_a_rollout_is_on_disk_as_soon_as_it_is_collected(tmp_path):
    """3 steps of 8: 24 rows with their steps, nothing held back until a log."""
    writer = begun(tmp_path / "completions")
    for step in (1, 2, 3):
        sample(writer, step, rows=8)
        assert column(tmp_path / "completions", step, "step") == [step] * 8
    assert sorted(f.name for f in (tmp_path / "completions").iterdir()) == [
        f"completions_{step:05d}.parquet" for step in (1, 2, 3)
    ]
    table = pq.read_table(tmp_path / "completions" / "completions_00003.parquet")
    assert table.column_names == [
        *("step", "prompt", "completion", "last_integer", "short", "advantage", "finished", "length"),
    ]
    assert table["completion"].to_pylist() == [f"It is {i}." for i in range(1, 9)]


def test_rollouts_of_one_step_share_its_file(tmp_path):
    writer = begun(tmp_path)
    sample(writer, 1, rows=2)
    sample(writer, 1, rows=1, note=["n"])
    sample(writer, 2, rows=1)
    assert column(tmp_path, 1, "completion") == ["It is 1.", "It is 2.", "It is 1."]
    assert column(tmp_path, 1, "note") == [None, None, "n"]
    assert column(tmp_path, 2, "step") == [2]


def test_a_step_that_is_run_again_replaces_its_file(tmp_path):
    for completion in ("first", "second"):
        writer = begun(tmp_path, step=4)  # resumed from step 4, twice
        sample(writer, 5, rows=1, completion=[completion])
    assert column(tmp_path, 5, "completion") == ["second"]


def test_a_run_that_dies_while_it_writes_leaves_no_broken_file(tmp_path, monkeypatch):
    def die(*args):
        raise KeyboardInterrupt  # which no report holds up, as it would not SIGKILL

    writer = begun(tmp_path / "completions")
    sample(writer, 1)
    sample(writer, 2)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(completions.os, "replace", die)
        sample(writer, 3)
    assert read_completions(tmp_path)["step"].tolist() == [1] * 4 + [2] * 4
    assert len(list((tmp_path / "completions").iterdir())) == 3  # the last is half-written, for all that is known ...
    assert len(pd.read_parquet(tmp_path / "completions")) == 8  # ... and its name is one that readers leave out
    sample(begun(tmp_path / "completions", step=2), 3)
    assert sorted(f.name for f in (tmp_path / "completions").iterdir()) == [
        f"completions_{step:05d}.parquet" for step in (1, 2, 3)
    ]


def test_only_the_main_process_writes(tmp_path):
    writer = CompletionsWriter(tmp_path / "completions")
    writer.on_train_begin(None, state(0, main=False), None)
    writer.on_rollout(None, state(0, main=False), None, table=rollout(1))
    assert list(tmp_path.iterdir()) == []


def test_a_new_run_moves_an_earlier_ones_files_aside_and_says_where(tmp_path, caplog):
    folder = tmp_path / "completions"
    for run in range(3):
        writer = begun(folder)
        sample(writer, 1, rows=1, completion=[f"run {run}"])
        (folder / "mine.parquet").write_text("mine")
        if run == 0:
            sample(writer, 7, rows=1)  # it was longer
    assert column(folder, 1, "completion") == ["run 2"]
    assert column(tmp_path / "completions.1", 1, "completion") == ["run 0"]
    assert column(tmp_path / "completions.2", 1, "completion") == ["run 1"]
    assert sorted(f.name for f in folder.iterdir()) == ["completions_00001.parquet", "mine.parquet"]
    said = [r.getMessage() for r in caplog.records]
    assert len(said) == 2 and "(2 files, up to step 7)" in said[0] and said[0].endswith("completions.1 now")


def test_a_resumed_run_moves_nothing(tmp_path):
    sample(begun(tmp_path / "completions"), 1)
    begun(tmp_path / "completions", step=1)
    assert [f.name for f in tmp_path.iterdir()] == ["completions"]


@pytest.mark.parametrize("error", [OSError("No space left on device"), ValueError("of no kind")])
def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path, caplog, monkeypatch, error):
    def fail(*args, **kwargs):
        raise error

    writer = begun(tmp_path / "out")
    monkeypatch.setattr(pq, "write_table", fail)
    with caplog.at_level(logging.WARNING):
        for step in (1, 2, 3):
            sample(writer, step)
    (record,) = caplog.records
    assert str(tmp_path / "out") in record.getMessage() and str(error) in record.getMessage()
    assert writer.latest(state(3))["step"] == [3] * 4  # what is shown needs no disk
    monkeypatch.undo()
    sample(writer, 4)
    assert column(tmp_path / "out", 4, "step") == [4] * 4


def test_ctrl_c_is_no_failed_report(tmp_path, monkeypatch):
    def press(*args, **kwargs):
        raise KeyboardInterrupt

    writer = begun(tmp_path)
    monkeypatch.setattr(pq, "write_table", press)
    with pytest.raises(KeyboardInterrupt):
        sample(writer, 1)


# --- what a log shows ------------------------------------------------------------------------------------------------


def test_a_log_shows_the_rollouts_of_the_latest_step(tmp_path):
    writer = begun(tmp_path)
    for step in (1, 2):
        sample(writer, step)
    sample(writer, 2, rows=1)
    assert writer.latest(state(2))["step"] == [2] * 5


def test_a_rollout_is_shown_at_one_log_only(tmp_path):
    """It serves steps 3 to 6; logs are at 2, 4 and 6, an evaluation's at 5 and the summary of the run at 6."""
    writer = begun(tmp_path)
    sample(writer, 1)
    assert writer.latest(state(2)) is not None
    sample(writer, 3)
    assert writer.latest(state(4, logs=[2]))["step"] == [3] * 4
    assert writer.latest(state(6, logs=[2, 4])) is None
    summary = state(6, logs=[2, 4, 6])
    summary.log_history[-1] = {"train_runtime": 1.0, "step": 6}
    assert writer.latest(summary) is None


def test_an_evaluation_between_is_no_log_of_training(tmp_path):
    writer = begun(tmp_path)
    sample(writer, 3)
    now = state(4)
    now.log_history.insert(0, {"eval_reward": 1.0, "step": 3})
    assert writer.latest(now)["step"] == [3] * 4


def test_a_resumed_run_shows_at_its_next_log_what_it_would_have_shown(tmp_path):
    first = begun(tmp_path)
    sample(first, 1)
    sample(first, 3, found=[1, "x", None, {"a": 1}])
    uninterrupted = first.latest(state(4, logs=[2]))
    sample(first, 5)  # and was killed after that, with a checkpoint of step 3
    second = begun(tmp_path, step=3)
    assert plain_rows(second.latest(state(4, logs=[2]))) == plain_rows(uninterrupted)
    assert second.latest(state(6, logs=[2, 4])) is None  # file 5 is of a life that is no more
    third = begun(tmp_path, step=3)
    assert third.latest(state(4, logs=[2, 3])) is None  # the log at step 3 has shown it


# --- values ----------------------------------------------------------------------------------------------------------


def test_a_reward_that_does_not_apply_is_null_never_zero(tmp_path):
    path = tmp_path / "a.parquet"
    write_completions(path, [rollout(1, rows=3, last_integer=[1.0, math.nan, None])])
    table = pq.read_table(path)
    assert table["last_integer"].to_pylist() == [1.0, None, None]
    assert table["short"].to_pylist() == [None] * 3
    assert {str(table.schema.field(name).type) for name in ("last_integer", "short", "advantage")} == {"double"}


def test_mixed_values_of_an_extra_column_become_text(tmp_path):
    path = tmp_path / "a.parquet"
    write_completions(path, [rollout(1, rows=3, found=[1, "none", {"a": [2]}])])
    assert pq.read_table(path)["found"].to_pylist() == ["1", '"none"', '{"a": [2]}']


@pytest.mark.parametrize(
    ("values", "kept"), [([{}, {}], ["{}", "{}"]), ([[{}], None], ["[{}]", None]), ([[1], [2, 3]], [[1], [2, 3]])]
)
def test_nested_values_are_kept_where_parquet_can_hold_them(tmp_path, values, kept):
    write_completions(tmp_path / "a.parquet", [rollout(1, rows=2, found=values)])
    assert pq.read_table(tmp_path / "a.parquet")["found"].to_pylist() == kept


def test_a_run_reads_back_as_one_data_frame(tmp_path):
    writer = begun(tmp_path / "completions")
    sample(writer, 1, rows=2, note=[None, None])
    sample(writer, 2, rows=2, last_integer=[None, 0.5], note=["a", "b"])
    frame = read_completions(tmp_path)
    assert frame["step"].tolist() == [1, 1, 2, 2]
    assert frame["note"].isna().tolist() == [True, True, False, False] and frame["note"].iloc[3] == "b"
    assert frame["last_integer"].mean() == pytest.approx(2.5 / 3)  # of the three that apply
    assert frame["short"].isna().all()


def test_no_completions_are_said_with_what_writes_them(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"output_dir='.*' holds no completions/.*log_completions=True"):
        read_completions(tmp_path)


def test_a_tracking_service_gets_columns_of_one_kind():
    table = rollout(1, rows=2, found=[1, "x"], where=[[1, 2], None], sure=[True, None])
    names, rows = plain_rows(table)
    assert names == list(table)
    assert rows[0] == [1, "What is 0 + 1?", "It is 1.", 1.0, None, 0.5, True, 5, "1", "[1, 2]", True]
    assert rows[1][-3:] == ['"x"', None, None]
