"""The commands, from their words to their exit codes. (``grpo_trainer/cli/__init__.py`` and ``__main__.py``.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_trainer import __version__
from grpo_trainer.cli import _parse, main

SUMS = "quickstart/smollm2-135m-sums"


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_help_and_version_import_neither_torch_nor_transformers():
    code = (
        "import sys; from grpo_trainer.cli import main\n"
        "for words in (['--help'], ['train', '--help'], ['quickstart', '--help'], ['--version']):\n"
        "    try: main(words)\n"
        "    except SystemExit as end: assert end.code == 0\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pydantic', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = run("-c", code)
    assert done.returncode == 0, done.stderr
    assert f"grpo-trainer {__version__}" in done.stdout
    for words in ("--learning_rate 2e-6", "Exit codes", "143 by SIGTERM", "--dry_run"):
        assert words in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_the_module_runs_as_a_program():
    done = run("-m", "grpo_trainer", "train", "no-such-recipe")
    assert done.returncode == 2
    assert done.stderr.startswith("error: there is no file 'no-such-recipe'")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [[], ["trian"], ["train"]])
def test_a_wrong_command_ends_with_2(words):
    with pytest.raises(SystemExit) as end:
        main(words)
    assert end.value.code == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--learning_rat", "1"], "command line: unknown setting 'learning_rat'. Did you mean 'learning_rate'?"),
        (["--max_steps", "2.5"], "command line: max_steps: 2.5 is not int"),
        (["--num_generations", "7"], "num_generations=7"),
        (["--reward_funcs", "last_intege"], "unknown reward 'last_intege'. Did you mean 'last_integer'?"),
        (["--reward_funcs", "{name: last_integer, kwargs: {x: 1}}", "--dataset_name", "builtin:sum"], "builtin:sum"),
        (["stray"], "unexpected word 'stray'"),
        (["--resume_from_checkpoint", "nowhere"], "resume_from_checkpoint='nowhere': there is no such folder"),
        (["--num_processes", "3"], "num_processes=3, but 1 process runs"),
        (["--dataset_name", "rows.jsonl"], "dataset_name=rows.jsonl: there is no such file"),
    ],
)
def test_a_wrong_setting_is_one_short_message_and_ends_with_2(words, message, capsys, fake_trainer):
    assert main(["train", SUMS, *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and message in error
    assert error.count("\n") == 1


def test_debug_shows_the_traceback(capsys):
    assert main(["train", SUMS, "--debug", "--max_steps", "2.5"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error and error.splitlines()[-1].startswith("error: command line: max_steps")


def test_a_message_comes_from_one_process_only(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["train", "no-such-recipe"]) == 2
    assert capsys.readouterr().err == ""


def test_what_fails_at_the_start_is_one_short_message_without_a_traceback(capsys, fake_trainer, monkeypatch, tmp_path):
    def fail(self, **kwargs):
        raise RuntimeError("\nno memory left on the device\nand ten lines of statistics")

    monkeypatch.setattr(fake_trainer, "__init__", fail)
    out = tmp_path / "out"
    assert main(["train", SUMS, "--output_dir", str(out)]) == 1
    error = capsys.readouterr().err
    expected = "error: the run could not start: RuntimeError: no memory left on the device (--debug shows where)\n"
    assert error == expected and not out.exists()
    assert main(["train", SUMS, "--debug", "--output_dir", str(out)]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error and "ten lines of statistics" in error
    assert error.splitlines()[-1] == "error: the run could not start: RuntimeError: no memory left on the device"


@pytest.mark.parametrize(
    "words",
    [
        ["--max_steps", "2", "RECIPE"],
        ["--use_cpu", "RECIPE"],
        ["--max_steps=2", "RECIPE"],
        ["--dry_run", "RECIPE", "--max_steps", "2"],
        ["RECIPE", "--dry-run", "--max_steps", "2"],
        ["--debug", "--max_steps", "2", "RECIPE"],
    ],
)
@pytest.mark.parametrize("recipe", [SUMS, "smollm2-135m-sums", f"{SUMS}.yaml", "mine.yml"])
def test_the_recipe_may_come_first_or_last(words, recipe):
    options, settings = _parse(["train", *(recipe if word == "RECIPE" else word for word in words)])
    assert options.recipe == recipe
    assert options.dry_run == any("dry" in word for word in words)
    assert options.debug == ("--debug" in words)
    assert settings in (["--max_steps", "2"], ["--max_steps=2"], ["--use_cpu"])


def test_a_value_is_never_taken_for_the_recipe(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out").mkdir()
    for words in (["--max_steps", "1"], ["--output_dir", "out"], ["--run_name", "smollm2-135m-sum"]):
        with pytest.raises(SystemExit) as end:
            main(["train", *words])
        assert end.value.code == 2
        assert "the following arguments are required: RECIPE" in capsys.readouterr().err


def test_resume_is_short_for_going_on_from_the_last_checkpoint(fake_trainer, tmp_path):
    out = ["--output_dir", str(tmp_path), "--max_steps", "1"]
    assert main(["train", SUMS, *out, "--resume"]) == 0  # anew, as there is none
    checkpoint = tmp_path / "checkpoint-1"
    checkpoint.mkdir()
    (checkpoint / "trainer_state.json").write_text('{"global_step": 1}')
    (checkpoint / "optimizer.pt").touch()
    assert main(["train", SUMS, *out, "--resume"]) == 0
    assert [t.resumed_from for t in fake_trainer.made] == [None, str(checkpoint)]


def test_a_run_that_fails_ends_with_1_and_says_where(capsys, fake_trainer, monkeypatch, tmp_path):
    def fail(self, **kwargs):
        raise RuntimeError("the reward is broken")

    monkeypatch.setattr(fake_trainer, "train", fail)
    assert main(["train", SUMS, "--output_dir", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1] == "error: the run failed: RuntimeError: the reward is broken"


def test_ctrl_c_ends_with_130(capsys, fake_trainer, monkeypatch, tmp_path):
    def interrupt(self, *args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(fake_trainer, "sample", interrupt)
    assert main(["quickstart", "--output_dir", str(tmp_path)]) == 130
    assert "stopped by Ctrl-C" in capsys.readouterr().err


def test_list_takes_no_settings(capsys):
    assert main(["list", "--seed", "1"]) == 2
    assert "takes no settings, but got --seed 1" in capsys.readouterr().err
