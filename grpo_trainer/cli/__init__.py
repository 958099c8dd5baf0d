"""The command line: ``grpo-trainer`` or ``python -m grpo_trainer``. Commands import what they need when they run."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from grpo_trainer import __version__
from grpo_trainer.cli.errors import RecipeError, StartupError

EXIT_OK, EXIT_FAILED, EXIT_BAD_RECIPE, EXIT_INTERRUPTED = 0, 1, 2, 130

_OVERRIDES = """
Every setting of the recipe can be given on the command line, where it wins over the file:
  --learning_rate 2e-6   --learning_rate=2e-6   --learning-rate 2e-6
  --use_peft             the same as --use_peft true; --no_use_peft is --use_peft false
  --lora_target_modules q_proj v_proj           several values make a list
  --model_init_kwargs '{revision: main}'        mappings and lists may be written as YAML or JSON
"""
_TRAIN = """
For example:
  grpo-trainer train quickstart/smollm2-135m-sums --max_steps 10
  grpo-trainer train my.yaml --dry_run
  grpo-trainer train out/run.yaml --output_dir out/again
  accelerate launch --config_file FILE -m grpo_trainer train my.yaml
"""
_REWARDS = """
For example:
  grpo-trainer rewards check gsm8k/smollm2-135m-gsm8k
  grpo-trainer rewards check my.yaml --rows 100 --samples 16 --reference solution
  grpo-trainer rewards check my.yaml --no_model
  grpo-trainer rewards try quickstart/smollm2-135m-sums --completion "It is 19." --row 3

check scores the reference answers, which must get full marks, texts that say nothing and the answers of other rows,
which must not, and a few samples of the model; it ends with 1 if something is off. try scores one text and explains
each part.
"""
_CODES = """
Exit codes: 0 success, 1 the run failed, 2 the recipe or a setting is wrong, 130 stopped by Ctrl-C, 143 by SIGTERM.
"""
_FLAGS = {"-h", "--help", "--debug", "--dry_run", "--dry-run", "--resume"}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code: 0 success, 1 a failed run, 2 a wrong recipe, 130 stopped by Ctrl-C, 143 by SIGTERM.

    Raises:
        SystemExit: from argparse, after ``--help``, ``--version`` or a wrong command.
    """
    options, settings = _parse(list(sys.argv[1:] if argv is None else argv))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a completion may hold what the terminal cannot show
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a recipe's own `package.module:function` lies
    try:
        return _dispatch(options, settings)
    except (RecipeError, StartupError) as error:
        if options.debug:
            traceback.print_exc()
        if isinstance(error, RecipeError):
            _complain(f"error: {error}")
            return EXIT_BAD_RECIPE
        _complain(f"error: the run could not start: {error}" + ("" if options.debug else " (--debug shows where)"))
        return EXIT_FAILED
    except KeyboardInterrupt:
        _complain("stopped by Ctrl-C")
        return EXIT_INTERRUPTED
    except Exception as error:
        # A run that fails after hours can't be repeated to see more, so this one keeps its traceback.
        traceback.print_exc()
        _complain(f"error: the run failed: {type(error).__name__}: {error}")
        return EXIT_FAILED


def _dispatch(options: argparse.Namespace, settings: list[str]) -> int:
    if options.command == "train":
        from grpo_trainer.cli.train import train

        resume = ["--resume_from_checkpoint", "true"] if options.resume else []
        return train(options.recipe, [*settings, *resume], dry_run=options.dry_run)
    if options.command == "quickstart":
        from grpo_trainer.cli.quickstart import quickstart

        return quickstart(settings, resume=options.resume, task=options.task)
    if options.command == "rewards":
        from grpo_trainer.cli.rewards import rewards

        return rewards(options.action, options.recipe, settings)
    if settings:
        raise RecipeError(f"`list` takes no settings, but got {' '.join(settings)}")
    from grpo_trainer.cli.listing import print_lists

    return print_lists()


def _parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the settings, which argparse never sees: it would take their values for a recipe."""
    place = next((i for i, word in enumerate(argv) if not word.startswith("-")), len(argv))
    command, rest = argv[place : place + 1], argv[:place] + argv[place + 1 :]
    if not command:
        return _parser().parse_args(argv), []
    flags = [word for word in rest if word in _FLAGS]
    settings = [word for word in rest if word not in _FLAGS]
    action = settings[:1] if command == ["rewards"] else []
    settings = settings[len(action) :]
    recipe, settings = _split_off_recipe(settings) if command in (["train"], ["rewards"]) else ([], settings)
    task, settings = _split_off_task(settings) if command == ["quickstart"] else ([], settings)
    return _parser().parse_args([*command, *flags, *task, *action, *recipe]), settings


def _split_off_task(words: list[str]) -> tuple[list[str], list[str]]:
    """``--task code`` among the settings of a quickstart."""
    for place, word in enumerate(words):
        if word == "--task":
            return words[place : place + 2], words[:place] + words[place + 2 :]
        if word.startswith("--task="):
            return [word], words[:place] + words[place + 1 :]
    return [], words


def _split_off_recipe(words: list[str]) -> tuple[list[str], list[str]]:
    """The recipe is the first word, or the last one if that is one: ``train --max_steps 1 my.yaml``."""
    if not words or not words[0].startswith("--"):
        return words[:1], words[1:]
    from grpo_trainer.cli.shipped import find_recipe

    last = words[-1]
    try:
        is_recipe = last.endswith((".yaml", ".yml")) or bool(find_recipe(last))
    except RecipeError:
        is_recipe = False
    return ([last], words[:-1]) if is_recipe else ([], words)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="grpo-trainer", description="GRPO training of language models.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"grpo-trainer {__version__}")
    parser.set_defaults(debug=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, summary: str, usage: str, epilog: str = "") -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=summary,
            description=summary,
            usage=f"%(prog)s {usage}",
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    train = command(
        "train",
        "Train a model by a recipe.",
        "RECIPE [--dry_run] [--resume] [--key value ...]",
        _TRAIN + _OVERRIDES + _CODES,
    )
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a recipe that `list` shows")
    train.add_argument(
        "--dry_run", "--dry-run", action="store_true", help="build all, print the plan and the first prompt, and stop"
    )
    train.add_argument("--resume", action="store_true", help="the same as --resume_from_checkpoint true")
    quickstart = command(
        "quickstart",
        "Train a small pretrained model to add, to keep a form or to write functions, and measure what it learned.",
        "[--task sums|format|code] [--seed N] [--resume] [--output_dir FOLDER] [--key value ...]",
        _OVERRIDES + _CODES,
    )
    quickstart.add_argument("--task", default="sums", help="what it learns: sums (as it is), format or code")
    quickstart.add_argument("--resume", action="store_true", help="go on from the last checkpoint of a stopped run")
    rewards = command(
        "rewards",
        "Look at the rewards of a recipe before a run: check them, or try them on a text.",
        "{check,try} RECIPE [--rows N] [--samples N] [--reference COLUMN] [--no_model] [--completion TEXT] [--row N] "
        "[--key value ...]",
        _REWARDS + _OVERRIDES + _CODES,
    )
    rewards.add_argument("action", metavar="check|try", choices=("check", "try"), help="what to do")
    rewards.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a recipe that `list` shows")
    command("list", "List recipes, files for the launcher, losses, rewards and tasks.", "")
    return parser


def _complain(message: str) -> None:
    """One message, from one process only, however many there are."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
