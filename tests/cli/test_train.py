from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from grpo_trainer.cli import main
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.train import checkpoint_to_resume

SUMS = "quickstart/smollm2-135m-sums"


def train(folder, *words: str) -> int:
    return main(["train", SUMS, "--output_dir", str(folder), "--max_steps", "5", *words])


def test_a_recipe_is_trained_and_the_model_saved(tmp_path, fake_trainer, capsys):
    assert train(tmp_path / "out") == 0
    (trainer,) = fake_trainer.made
    assert trainer.state.global_step == 5 and trainer.resumed_from is None
    assert (tmp_path / "out" / "config.json").is_file()
    out = capsys.readouterr().out
    assert "builtin:smollm2-135m-instruct on" in out and "step 5/5  reward 0.500" in out
    assert f"model: {tmp_path / 'out'}" in out


def test_evaluation_rows_are_given_only_if_the_recipe_evaluates(tmp_path, fake_trainer):
    train(tmp_path)
    train(tmp_path, "--eval_strategy", "epoch")
    assert [t.eval_dataset and len(t.eval_dataset) for t in fake_trainer.made] == [None, 64]


def test_ctrl_c_leaves_a_checkpoint_and_the_way_to_go_on(tmp_path, fake_trainer, capsys, monkeypatch):
    def press_in_step_2(self, step):
        if step == 2:
            os.kill(os.getpid(), signal.SIGINT)

    made = fake_trainer.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.before_step = lambda step: press_in_step_2(self, step)

    monkeypatch.setattr(fake_trainer, "__init__", make)
    assert train(tmp_path) == 130
    assert "Stopped after step 2 of 5" in capsys.readouterr().out
    assert not (tmp_path / "config.json").exists()  # what is not finished is not saved as the model

    monkeypatch.setattr(fake_trainer, "__init__", made)
    assert train(tmp_path, "--resume_from_checkpoint", "true") == 0
    assert fake_trainer.made[-1].resumed_from == str(tmp_path / "checkpoint-2")
    assert fake_trainer.made[-1].state.global_step == 5


def test_resuming_where_nothing_is_starts_anew_with_a_note(tmp_path, fake_trainer, capsys):
    assert train(tmp_path / "fresh", "--resume_from_checkpoint", "true") == 0
    assert f"no checkpoint in {tmp_path / 'fresh'} to go on from; starting anew" in capsys.readouterr().out


def test_the_checkpoint_of_the_highest_step_is_taken(tmp_path):
    for step in (9, 10, 2):
        (tmp_path / f"checkpoint-{step}").mkdir()
    assert checkpoint_to_resume(str(tmp_path), True) == str(tmp_path / "checkpoint-10")
    assert checkpoint_to_resume(str(tmp_path), str(tmp_path / "checkpoint-2")) == str(tmp_path / "checkpoint-2")
    for off in (None, False, "false"):
        assert checkpoint_to_resume(str(tmp_path), off) is None


def test_a_checkpoint_that_is_not_there_is_refused():
    with pytest.raises(RecipeError, match="resume_from_checkpoint=no/such: there is no such folder"):
        checkpoint_to_resume("out", "no/such")
    assert not Path("no").exists()
