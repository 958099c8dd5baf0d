"""The commands, from their words to their exit codes. (``grpo_trainer/cli/__init__.py`` and ``__main__.py``.)"""

from __future__ import annotations

import subprocess
import sys

import pytest

from grpo_trainer import __version__
from grpo_trainer.cli import main

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
    assert "--learning_rate 2e-6" in done.stdout and "Exit codes" in done.stdout


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
