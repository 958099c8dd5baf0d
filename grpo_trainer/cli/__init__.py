"""The command line: ``grpo-trainer`` or ``python -m grpo_trainer``. Commands import what they need when they run."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from grpo_trainer import __version__
from grpo_trainer.cli.errors import RecipeError

EXIT_OK, EXIT_FAILED, EXIT_BAD_RECIPE, EXIT_INTERRUPTED = 0, 1, 2, 130

_OVERRIDES = """
Every setting of the recipe can be given on the command line, where it wins over the file:
  --learning_rate 2e-6   --learning_rate=2e-6   --learning-rate 2e-6
  --use_peft             the same as --use_peft true; --no_use_peft is --use_peft false
  --lora_target_modules q_proj v_proj           several values make a list
  --model_init_kwargs '{revision: main}'        mappings and lists may be written as YAML or JSON

Exit codes: 0 success, 1 the run failed, 2 the recipe or a setting is wrong, 130 stopped by Ctrl-C.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        argv: the arguments; None takes those of the process.

    Returns:
        The exit code: 0 success, 1 a failed run, 2 a wrong recipe, 130 stopped by Ctrl-C.

    Raises:
        SystemExit: from argparse, after ``--help``, ``--version`` or a wrong command.
    """
    options, settings = _parser().parse_known_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a completion may hold what the terminal cannot show
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # where a recipe's own `package.module:function` lies
    try:
        return _dispatch(options, settings)
    except RecipeError as error:
        if options.debug:
            traceback.print_exc()
        _complain(f"error: {error}")
        return EXIT_BAD_RECIPE
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

        return train(options.recipe, settings)
    if options.command == "quickstart":
        from grpo_trainer.cli.quickstart import quickstart

        return quickstart(settings, resume=options.resume)
    if settings:
        raise RecipeError(f"`list` takes no settings, but got {' '.join(settings)}")
    from grpo_trainer.cli.listing import print_lists

    return print_lists()


def _parser() -> argparse.ArgumentParser:
    # allow_abbrev=False: --max_steps must never be taken for the start of another option
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

    train = command("train", "Train a model by a recipe.", "RECIPE [--key value ...]", _OVERRIDES)
    train.add_argument("recipe", metavar="RECIPE", help="a YAML file, or the name of a recipe that `list` shows")
    quickstart = command(
        "quickstart",
        "Train a small pretrained model to add, and measure what it learned.",
        "[--seed N] [--resume] [--output_dir FOLDER] [--key value ...]",
        _OVERRIDES,
    )
    quickstart.add_argument("--resume", action="store_true", help="go on from the last checkpoint of a stopped run")
    command("list", "List recipes, losses, rewards and tasks.", "")
    return parser


def _complain(message: str) -> None:
    """One message, from one process only, however many there are."""
    if os.environ.get("RANK", "0") == "0":
        print(message, file=sys.stderr)
