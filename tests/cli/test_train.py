from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from grpo_trainer.cli import main
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import load_recipe
from grpo_trainer.cli.train import checkpoint_to_resume, last_checkpoint

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
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "trainer_state.json").touch()
        (folder / "optimizer.pt").touch()
    assert checkpoint_to_resume(str(tmp_path), True) == str(tmp_path / "checkpoint-10")
    assert checkpoint_to_resume(str(tmp_path), str(tmp_path / "checkpoint-2")) == str(tmp_path / "checkpoint-2")
    assert checkpoint_to_resume(str(tmp_path), "True") == str(tmp_path / "checkpoint-10")
    (tmp_path / "checkpoint-11").mkdir()  # nothing in it
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path / "nowhere") is None
    for off in (None, False, "false"):
        assert checkpoint_to_resume(str(tmp_path), off) is None


def test_a_folder_that_is_no_checkpoint_is_refused_with_those_that_are_there(tmp_path):
    good = tmp_path / "checkpoint-3"
    good.mkdir()
    (good / "trainer_state.json").touch()
    (tmp_path / "checkpoint-4").mkdir()
    for wrong, why in [("no/such", "there is no such folder"), (str(tmp_path / "checkpoint-4"), "is no checkpoint")]:
        with pytest.raises(RecipeError) as caught:
            checkpoint_to_resume(str(tmp_path), wrong)
        assert f"resume_from_checkpoint={wrong!r}" in str(caught.value) and why in str(caught.value)
        assert "checkpoint-3" in str(caught.value)
    with pytest.raises(RecipeError, match="holds weights but no optimizer state"):
        checkpoint_to_resume(str(tmp_path), str(good))
    assert not Path("no").exists()


def test_sigterm_ends_with_143_and_the_command_to_go_on(tmp_path, fake_trainer, capsys, monkeypatch):
    ran = fake_trainer.train

    def terminate(self, **kwargs):
        self.args.max_steps = 2
        ran(self, **kwargs)
        folder = Path(self.args.output_dir) / "checkpoint-2"
        folder.mkdir()
        self.state.save_to_json(str(folder / "trainer_state.json"))
        raise SystemExit(143)  # as the trainer leaves after it has saved

    monkeypatch.setattr(fake_trainer, "train", terminate)
    assert train(tmp_path, "--run_name", "a b", "--resume_from_checkpoint", "false") == 143
    out = capsys.readouterr().out
    assert f"Stopped after step 2 of 5; checkpoint: {tmp_path / 'checkpoint-2'}" in out
    command = f"--output_dir {tmp_path} --max_steps 5 --run_name 'a b' --resume_from_checkpoint true"
    assert out.rstrip().endswith(f"Go on with: grpo-trainer train {SUMS} {command}")
    assert not (tmp_path / "config.json").exists()


def test_any_other_exit_is_passed_on(tmp_path, fake_trainer, monkeypatch):
    def leave(self, **kwargs):
        raise SystemExit(7)

    monkeypatch.setattr(fake_trainer, "train", leave)
    with pytest.raises(SystemExit) as end:
        train(tmp_path)
    assert end.value.code == 7


def test_the_settings_are_saved_when_training_starts(tmp_path, fake_trainer, monkeypatch):
    there: list[bool] = []
    ran = fake_trainer.train
    monkeypatch.setattr(
        fake_trainer, "train", lambda self, **k: (there.append((tmp_path / "run.yaml").is_file()), ran(self, **k))[1]
    )
    assert train(tmp_path, "--seed", "9") == 0
    assert there == [True]
    saved = load_recipe(str(tmp_path / "run.yaml"))
    assert saved.settings["seed"] == 9 and saved.settings["max_steps"] == 5
    command = f"grpo-trainer train {SUMS} --output_dir {tmp_path} --max_steps 5 --seed 9"
    assert saved.arguments.provenance["command"] == command
    # and it is a recipe
    assert main(["train", str(tmp_path / "run.yaml")]) == 0
    first, second = (t.args.to_dict() for t in fake_trainer.made)
    assert first == second


def test_notes_are_told_once_by_one_process(tmp_path, fake_trainer, capsys, monkeypatch):
    assert train(tmp_path, "--no_cuda") == 0
    assert capsys.readouterr().out.count("note: command line: no_cuda is now called use_cpu") == 1
    monkeypatch.setenv("RANK", "1")
    assert train(tmp_path, "--no_cuda") == 0
    assert "note:" not in capsys.readouterr().out


def test_variables_of_the_recipe_are_set(tmp_path, fake_trainer, monkeypatch):
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    monkeypatch.setenv("WANDB_ENTITY", "shell")
    try:
        assert train(tmp_path, "--env", "{WANDB_PROJECT: sums}", "--wandb_entity", "line") == 0
        assert (os.environ["WANDB_PROJECT"], os.environ["WANDB_ENTITY"]) == ("sums", "line")
    finally:
        os.environ.pop("WANDB_PROJECT", None)
