from __future__ import annotations

import os
from pathlib import Path

import pytest

from grpo_trainer.cli.heldout import Measure
from grpo_trainer.cli.record import KEPT_SECONDS, Record, make_way
from grpo_trainer.reports.summary import Interval


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "out" / "quickstart"


def an_earlier_run(folder: Path, seconds: float, *, finished: bool = False) -> Record:
    for name in ("checkpoint-3", "completions", "model", "mine"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    for name in (
        "checkpoint-3/trainer_state.json",
        "completions/completions_00001.parquet",
        "completions/mine.parquet",
    ):
        (folder / name).write_text("x")
    for name in ("model/config.json", "run.yaml", "notes.txt", *(["summary.json", "reward_curve.png"] * finished)):
        (folder / name).write_text("x")
    record = Record(settings={"seed": 1}, before=Measure(reward=Interval(0.5, 0.0, 1.0, 4), examples=[], seconds=1.0))
    record.train_seconds = seconds
    record.save(folder)
    return record


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


MINE = {"completions/mine.parquet", "notes.txt"}


def test_a_record_is_read_as_it_was_written(folder):
    record = an_earlier_run(folder, 3.0)
    assert Record.load(folder) == record


@pytest.mark.parametrize("finished", [True, False])
def test_a_short_run_is_removed_and_said_so(folder, finished):
    an_earlier_run(folder, KEPT_SECONDS - 1, finished=finished)
    said: list[str] = []
    make_way(folder, said.append)
    assert names(folder) == MINE
    assert len(said) == 1 and said[0].startswith(f"removing an earlier run from {folder}, which trained for 1799 s: ")
    for name in ("checkpoint-3", "completions", "model", "run.json", "run.yaml"):
        assert name in said[0]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_long_run_is_moved_aside_with_all_that_going_on_needs(folder):
    an_earlier_run(folder, KEPT_SECONDS)
    (folder.parent / "quickstart-1").mkdir()  # taken
    before, said = names(folder), []
    make_way(folder, said.append)
    aside = folder.parent / "quickstart-2"
    assert names(folder) == MINE and names(aside) == before - MINE
    assert f"trained for 30 minutes, so it is moved to {aside}" in said[0]
    assert said[1] == f"to go on with it: the same settings with --resume --output_dir {aside}"
    assert Record.load(aside).train_seconds == KEPT_SECONDS


def test_a_long_run_that_is_finished_is_kept_too(folder):
    an_earlier_run(folder, KEPT_SECONDS, finished=True)
    said: list[str] = []
    make_way(folder, said.append)
    assert "summary.json" in names(folder.parent / "quickstart-1") and len(said) == 1  # nothing to go on with


def test_a_run_that_was_killed_trained_until_its_last_checkpoint(folder):
    an_earlier_run(folder, 0.0)
    begun = (folder / "run.json").stat().st_mtime
    os.utime(folder / "checkpoint-3", (begun + KEPT_SECONDS, begun + KEPT_SECONDS))
    make_way(folder, lambda line: None)
    assert (folder.parent / "quickstart-1" / "checkpoint-3").is_dir()


def test_a_folder_that_no_quickstart_made_is_left_alone(folder):
    an_earlier_run(folder, 0.0)
    (folder / "run.json").unlink()
    before, said = names(folder), []
    make_way(folder, said.append)
    make_way(folder.parent / "nowhere", said.append)
    assert names(folder) == before and said == []
