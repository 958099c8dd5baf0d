"""``train``: a recipe from start to saved model."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.recipe import load_recipe


def train(name: str, words: Sequence[str] = ()) -> int:
    """Trains by a recipe, and saves model and tokenizer into its ``output_dir``.

    Args:
        name: path or name of the recipe.
        words: settings that go over the recipe's, ``--key value …``.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        RecipeError: if the recipe, its data or its settings are wrong.
    """
    recipe = load_recipe(name, words)
    config = recipe.config()

    from rich.console import Console

    from grpo_trainer.cli.build import build_datasets, build_trainer, quiet_libraries
    from grpo_trainer.cli.interrupt import GracefulStop
    from grpo_trainer.reports.progress import RichProgress

    console = Console()

    def say(line: str) -> None:
        if config.process_index == 0:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    quiet_libraries()
    train_rows, eval_rows = build_datasets(recipe, config)
    # the tables of sampled completions are `log_completions`, the trainer's own
    progress = RichProgress(console, tables=0)
    stop = GracefulStop(say)
    # With several processes a stop would have to be agreed upon; there Ctrl-C ends them all, as the launcher does.
    alone = config.world_size == 1
    trainer = build_trainer(recipe, config, train_rows, eval_rows, [progress, *([stop] if alone else [])])
    checkpoint = checkpoint_to_resume(config.output_dir, recipe.settings.get("resume_from_checkpoint"), say)
    say(
        f"{recipe.arguments.model_name_or_path} on {len(train_rows)} prompts of {recipe.arguments.dataset_name}, "
        f"{config.world_size} process{'' if alone else 'es'}"
    )
    with progress:
        if alone:
            with stop:
                trainer.train(resume_from_checkpoint=checkpoint)
        else:
            trainer.train(resume_from_checkpoint=checkpoint)
    stopped = stop.requested and trainer.state.global_step < trainer.state.max_steps
    saved = last_checkpoint(config.output_dir) if stopped else None
    if saved is not None:
        say(f"Stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; checkpoint: {saved}")
        say("Go on with the same command and --resume_from_checkpoint true")
        return 130
    trainer.save_model(config.output_dir)
    say(f"model: {config.output_dir}")
    return 0


def checkpoint_to_resume(folder: str, wanted: bool | str | None, say: Callable[[str], None] = print) -> str | None:
    """The checkpoint to go on from.

    Args:
        folder: the run's output folder.
        wanted: a checkpoint's folder; true for the last one in ``folder``; false or None for none.
        say: prints a line.

    Returns:
        Its folder, or None to start anew.

    Raises:
        RecipeError: if the folder that is asked for is not there.
    """
    if wanted is None or str(wanted).lower() == "false":
        return None
    if str(wanted).lower() == "true":
        found = last_checkpoint(folder)
        if found is None:
            say(f"resume_from_checkpoint: no checkpoint in {folder} to go on from; starting anew")
        return found
    if not Path(str(wanted)).is_dir():
        raise RecipeError(
            f"resume_from_checkpoint={wanted}: there is no such folder. Give a checkpoint's folder, or true for the "
            f"last one in {folder}"
        )
    return str(wanted)


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint of the highest step in a folder, or None."""
    from transformers.trainer_utils import get_last_checkpoint

    return get_last_checkpoint(str(folder)) if Path(folder).is_dir() else None
