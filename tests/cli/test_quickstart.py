from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from grpo_trainer.cli import main
from grpo_trainer.cli.quickstart import resume_command
from grpo_trainer.rewards import sandbox


@pytest.fixture
def folder(tmp_path, monkeypatch, fake_trainer):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    return tmp_path / "out"


def quickstart(folder, *words: str) -> int:
    return main(["quickstart", "--output_dir", str(folder), "--max_steps", "5", *words])


@pytest.fixture
def pressed(fake_trainer, monkeypatch):
    """Ctrl-C in step 3 of the next run, and of no later one."""
    made = fake_trainer.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.before_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None
        monkeypatch.setattr(fake_trainer, "__init__", made)

    monkeypatch.setattr(fake_trainer, "__init__", make)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_writes_summary_curve_completions_and_model(folder, fake_trainer, capsys):
    assert quickstart(folder, "--seed", "1") == 0
    assert names(folder) == ["completions", "model", "reward_curve.png", "run.json", "run.yaml", "summary.json"]
    summary = json.loads((folder / "summary.json").read_text())
    assert list(summary)[:9] == [
        *("seed", "reward_before", "reward_after", "steps", "train_seconds", "seconds_per_step"),
        *("generation_seconds", "update_seconds", "peak_rss_bytes"),
    ]
    assert summary["seed"] == 1
    assert summary["reward_before"] == {"mean": 0.0, "low": 0.0, "high": 0.0, "n": 64}
    assert summary["reward_after"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "n": 64}
    assert summary["steps"] == 5
    assert summary["generation_seconds"] == 10.0  # the fake says 2 s and 3 s in each of 5 steps
    assert summary["update_seconds"] == 15.0
    assert summary["seconds_per_step"] == summary["train_seconds"] / 5
    assert summary["peak_rss_bytes"] > 50_000_000
    files = sorted((folder / "completions").iterdir())
    assert [f.name for f in files] == [f"completions_{step:05d}.parquet" for step in range(1, 6)]
    assert pq.read_table(files[2])["step"].to_pylist() == [3, 3]
    out = capsys.readouterr().out
    for words in ("held-out reward before training: 0.000", "step 5/5  reward 0.500", "It is 0.", "summary.json"):
        assert words in out
    assert "\x1b" not in out and len(out.splitlines()) < 60  # no terminal: plain, and not a flood


def test_before_and_after_are_measured_on_the_same_prompts_that_are_not_trained_on(folder, fake_trainer):
    quickstart(folder, "--seed", "2")
    (trainer,) = fake_trainer.made
    assert trainer.sampled == [(64, 2), (64, 2)]
    from grpo_trainer.tasks import load_task

    train, _ = load_task("builtin:sums", 2)
    assert trainer.train_dataset.to_list() == train.to_list()
    assert trainer.args.seed == 2


def test_ctrl_c_saves_a_checkpoint_says_how_to_go_on_and_ends_with_130(folder, pressed, capsys):
    assert quickstart(folder, "--seed", "1") == 130
    out = capsys.readouterr().out
    assert "Press it again to stop at once" in out
    assert f"Stopped after step 3 of 5; checkpoint: {folder / 'checkpoint-3'}" in out
    command = f"-m grpo_trainer quickstart --resume --output_dir {folder} --max_steps 5 --seed 1"
    assert out.rstrip().endswith(command)
    assert "summary.json" not in names(folder) and "model" not in names(folder)


def test_resume_goes_on_from_the_checkpoint_and_keeps_the_measure_before(folder, pressed, fake_trainer, capsys):
    assert quickstart(folder) == 130
    record = json.loads((folder / "run.json").read_text())
    record["train_seconds"], record["peak_rss_bytes"] = 1000.0, 10**15
    record["before"]["reward"] = [0.125, 0.0, 0.25, 64]
    (folder / "run.json").write_text(json.dumps(record))
    assert quickstart(folder, "--resume") == 0
    trainer = fake_trainer.made[-1]
    assert trainer.resumed_from == str(folder / "checkpoint-3")
    assert len(trainer.sampled) == 1  # only after
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["reward_before"] == {"mean": 0.125, "low": 0.0, "high": 0.25, "n": 64}
    assert summary["train_seconds"] > 1000.0  # both parts
    assert summary["peak_rss_bytes"] == 10**15
    assert summary["generation_seconds"] == 10.0  # of all 5 steps
    assert len(list((folder / "completions").iterdir())) == 5
    assert "checkpoint-3" not in names(folder)  # the model is saved, so the stopped run's checkpoint goes


def test_resume_where_nothing_was_stopped_says_so_and_starts_anew(folder, fake_trainer, capsys):
    assert quickstart(folder, "--resume") == 0
    assert f"no checkpoint of a stopped run in {folder} to go on from; starting anew" in capsys.readouterr().out
    assert fake_trainer.made[-1].resumed_from is None


def test_resume_with_other_settings_is_refused_and_names_them(folder, pressed, capsys):
    assert quickstart(folder, "--seed", "1") == 130
    assert quickstart(folder, "--seed", "2", "--learning_rate", "1e-3", "--resume") == 2
    error = capsys.readouterr().err
    assert "learning_rate=0.001 (it had 3e-05)" in error and "seed=2 (it had 1)" in error
    assert (folder / "checkpoint-3").is_dir()  # nothing is lost
    assert quickstart(folder, "--seed", "1", "--max_steps", "8", "--resume") == 2  # its rate falls more slowly
    assert "max_steps=8 (it had 5)" in capsys.readouterr().err


def test_under_a_constant_rate_a_longer_run_is_the_same_run(folder, pressed, fake_trainer):
    constant = ["--lr_scheduler_type", "constant"]
    assert quickstart(folder, *constant) == 130
    assert quickstart(folder, *constant, "--max_steps", "8", "--resume") == 0
    assert fake_trainer.made[-1].state.global_step == 8


def test_a_fresh_run_clears_what_an_earlier_one_made_and_nothing_else(folder, pressed, capsys):
    assert quickstart(folder) == 130
    capsys.readouterr()
    (folder / "notes.txt").write_text("mine")
    (folder / "checkpoint-best").mkdir()
    (folder / "checkpoint-7").mkdir()  # no trainer made this: it has no trainer_state.json
    (folder / "completions" / "mine.parquet").write_text("mine")
    (folder / "completions" / "completions_00099.parquet").write_text("stale")
    assert quickstart(folder) == 0
    assert {"notes.txt", "checkpoint-best", "checkpoint-7"} < set(names(folder))
    assert "checkpoint-3" not in names(folder)
    assert "mine.parquet" in names(folder / "completions")
    assert "completions_00099.parquet" not in names(folder / "completions")
    assert f"removing an earlier run from {folder}, which trained for 0 s: checkpoint-3" in capsys.readouterr().out


def test_a_stopped_run_has_no_model_of_an_earlier_one(folder, fake_trainer, monkeypatch):
    assert quickstart(folder) == 0 and (folder / "model").is_dir()
    made = fake_trainer.__init__

    def make(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.before_step = lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 3 else None

    monkeypatch.setattr(fake_trainer, "__init__", make)
    assert quickstart(folder) == 130
    assert names(folder) == ["checkpoint-3", "completions", "run.json", "run.yaml"]


def test_sigterm_keeps_what_going_on_needs_and_ends_with_143(folder, fake_trainer, monkeypatch, capsys):
    ran = fake_trainer.train

    def terminate(self, resume_from_checkpoint=None):
        self.args.max_steps = 2
        ran(self, resume_from_checkpoint)
        saved = folder / "checkpoint-2"
        saved.mkdir()
        self.state.save_to_json(str(saved / "trainer_state.json"))
        (saved / "optimizer.pt").touch()
        raise SystemExit(143)  # as the trainer leaves after it has saved

    monkeypatch.setattr(fake_trainer, "train", terminate)
    assert quickstart(folder, "--seed", "1") == 143
    out = capsys.readouterr().out
    assert f"Stopped after step 2 of 5; checkpoint: {folder / 'checkpoint-2'}" in out
    assert "quickstart --resume" in out.splitlines()[-1]
    assert json.loads((folder / "run.json").read_text())["train_seconds"] > 0
    monkeypatch.setattr(fake_trainer, "train", ran)
    assert quickstart(folder, "--seed", "1", "--resume") == 0
    assert fake_trainer.made[-1].resumed_from == str(folder / "checkpoint-2")


@pytest.mark.parametrize(
    "words", [["--dataset_map_fn", "a:b"], ["--datasets", "[{path: a}]"], ["--test_split_size", "3"]]
)
def test_what_is_trained_on_is_settled(folder, words, capsys):
    assert quickstart(folder, *words) == 2
    assert f"{words[0][2:]} is settled in the quickstart" in capsys.readouterr().err


def test_a_folder_that_no_quickstart_made_is_left_as_it_is(folder):
    other = folder / "checkpoint-3"
    other.mkdir(parents=True)
    (other / "trainer_state.json").write_text("{}")
    (folder / "summary.json").write_text("other")
    assert quickstart(folder, "--resume", "--save_strategy", "epoch") == 0
    assert (other / "trainer_state.json").is_file()


def test_a_run_that_cannot_start_clears_nothing(folder, pressed, fake_trainer, monkeypatch):
    assert quickstart(folder) == 130
    before = names(folder)

    def refuse(self, **kwargs):
        raise ValueError("no such model")

    monkeypatch.setattr(fake_trainer, "__init__", refuse)
    assert quickstart(folder) == 2
    assert names(folder) == before


def test_the_command_to_go_on_is_makes_if_make_started_it(monkeypatch):
    monkeypatch.setenv("MAKELEVEL", "1")
    assert resume_command(["--seed", "1"], 1) == "make quickstart SEED=1 RESUME=1"
    assert resume_command([], 0) == "make quickstart SEED=0 RESUME=1"
    full = resume_command(["--seed", "1", "--run_name", "a b"], 1)
    assert full.endswith("-m grpo_trainer quickstart --resume --seed 1 --run_name 'a b'")
    monkeypatch.delenv("MAKELEVEL")
    assert resume_command([], 0).endswith("-m grpo_trainer quickstart --resume")


def test_the_python_of_the_command_is_named_from_here(monkeypatch, tmp_path):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", str(tmp_path / ".venv" / "bin" / "python"))
    assert resume_command([], 0).startswith(".venv/bin/python -m grpo_trainer")


def test_log_completions_writes_the_completions_once(folder, fake_trainer):
    assert quickstart(folder, "--log_completions", "true") == 0
    assert not (folder / "completions").exists()  # that is then the trainer's own, which the fake is not


@pytest.mark.parametrize("words", [["--task", "code"], ["--task=code"]])
def test_another_task_by_name(folder, fake_trainer, words, capsys):
    assert quickstart(folder, *words, "--seed", "1") == 0
    (trainer,) = fake_trainer.made
    assert [f.__name__ for f in trainer.reward_funcs] == ["code_tests"]
    assert trainer.train_dataset[0]["code_prefix"] == "def f(a): return"
    assert trainer.sampled == [(64, 1), (64, 1)]
    assert {"summary.json", "reward_curve.png", "completions", "model"} < set(names(folder))
    out = capsys.readouterr().out
    assert "176 functions to train on, 64 others held out" in out and "Held-out functions" in out
    assert "def f(a): return" in out and "the larger of b and 30" not in out.partition("Held-out")[2]
    assert "--task code" in (folder / "run.yaml").read_text()


def test_an_unknown_task_is_refused_with_the_known_ones(folder, capsys):
    assert quickstart(folder, "--task", "cooking") == 2
    assert "--task cooking: there is no such quickstart; use one of sums, format, code" in capsys.readouterr().err


def test_the_command_to_go_on_keeps_the_task(monkeypatch):
    monkeypatch.delenv("MAKELEVEL", raising=False)
    assert resume_command(["--seed", "1"], 1, "code").endswith("quickstart --task code --resume --seed 1")
    monkeypatch.setenv("MAKELEVEL", "1")
    assert resume_command(["--seed", "1"], 1, "code") == "make quickstart-code SEED=1 RESUME=1"


@pytest.mark.skipif(not sandbox.sandbox_is_available(), reason=f"no sandbox here: {sandbox._trouble()}")
def test_the_recipe_of_functions_rewards_a_function_that_is_right():
    from grpo_trainer.cli.build import build_rewards
    from grpo_trainer.cli.recipe import load_recipe
    from grpo_trainer.tasks import load_task

    recipe = load_recipe("quickstart/smollm2-135m-functions", ["--use_cpu"])
    (reward,) = build_rewards(recipe)
    _, heldout = load_task(recipe.arguments.dataset_name, 0)
    row = next(row for row in heldout if "# a plus " in row["prompt"])
    k = row["prompt"].rpartition("a plus ")[2].split("\n")[0]
    columns = {name: [row[name]] * 3 for name in ("tests", "code_prefix")}
    assert reward(completions=[f" a + {k}\n", f" {k} - a\n", " a +\n"], **columns) == [1.0, 0.0, 0.0]
    assert recipe.config().generation_kwargs == {"stop_strings": ["\n"]}
