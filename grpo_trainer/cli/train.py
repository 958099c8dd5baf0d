"""``train``: a recipe from start to saved model."""

from __future__ import annotations

import os
import shlex
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

from grpo_trainer.cli.errors import RecipeError, starting
from grpo_trainer.cli.launch import check_joined, check_processes
from grpo_trainer.cli.recipe import Recipe, load_recipe, split_words
from grpo_trainer.cli.run_file import save_run_file

Say = Callable[[str], None]


def train(name: str, words: Sequence[str] = (), *, dry_run: bool = False) -> int:
    """Trains by a recipe, and saves model and tokenizer into its ``output_dir``.

    Args:
        name: path or name of the recipe.
        words: settings that go over the recipe's, ``--key value …``.
        dry_run: make everything ready, tell the plan, and do nothing.

    Returns:
        0; 130 after Ctrl-C; 143 after SIGTERM.

    Raises:
        RecipeError: if the recipe, its data or its settings are wrong.
        StartupError: if something else fails before training begins.
    """
    with starting():
        recipe = load_recipe(name, words, os.environ)
        say = speaker()
        for note in (*recipe.notes, check_processes(recipe.arguments.num_processes, os.environ)):
            if note:
                say(f"note: {note}")
        config = recipe.config()
        check_joined(config.world_size, os.environ)
        checkpoint = checkpoint_to_resume(config.output_dir, recipe.settings.get("resume_from_checkpoint"), say)
    if dry_run:
        return _tell(recipe, checkpoint, say)
    return _run(recipe, config, checkpoint, ["grpo-trainer", "train", name, *words], say)


def _run(recipe: Recipe, config: Any, checkpoint: str | None, command: list[str], say: Say) -> int:
    """Trains, and saves the model."""
    with starting():
        from grpo_trainer.cli.interrupt import train_until_stopped
        from grpo_trainer.reports.progress import RichProgress

        progress = RichProgress(tables=0)  # the tables of sampled completions are `log_completions`, the trainer's own
        trainer = _trainer(recipe, config, [progress], say)
        if config.process_index == 0:
            save_run_file(config.output_dir, recipe, command, processes=config.world_size)
    alone = config.world_size == 1
    code = train_until_stopped(trainer, checkpoint, progress, say)
    if code:
        saved = last_checkpoint(config.output_dir)
        say(f"Stopped after step {trainer.state.global_step} of {trainer.state.max_steps}; checkpoint: {saved}")
        say(f"Go on with: {resume_command(command)}" + ("" if alone else "  (under the same launcher)"))
    else:
        trainer.save_model(config.output_dir)
        say(f"model: {config.output_dir}")
    if not alone:
        trainer.accelerator.wait_for_everyone()  # a launcher ends the others as soon as one has left
        trainer.end()  # or torch complains that the process group was left open
    return code


def _tell(recipe: Recipe, checkpoint: str | None, say: Say) -> int:
    """Makes everything ready in a folder that is thrown away, and tells the plan."""
    from grpo_trainer.cli.plan import plan_of

    with starting(), tempfile.TemporaryDirectory() as folder:
        # a trainer makes its output folder, and its repository on the hub
        config = recipe.config(output_dir=folder, push_to_hub=False)
        plan = plan_of(_trainer(recipe, config, [], say))
    for line in plan.lines():
        say(line)
    if checkpoint is not None:
        say(f"it would go on from {checkpoint}")
    say("dry run: nothing was trained, nothing was written")
    return 0


def _trainer(recipe: Recipe, config: Any, callbacks: list[Any], say: Say) -> Any:
    """The trainer, with its data."""
    from grpo_trainer.cli.build import build_trainer, quiet_libraries
    from grpo_trainer.cli.data import build_datasets

    quiet_libraries()
    with config.main_process_first(desc="data"):  # the others find what it downloads and maps
        train_rows, eval_rows = build_datasets(recipe, config, say)
    trainer = build_trainer(recipe, config, train_rows, eval_rows, callbacks)
    kept = trainer.train_dataset  # without the prompts that are too long
    rows = f"{len(kept)} prompts" if hasattr(kept, "__len__") else "a stream"
    count = config.world_size
    say(
        f"{recipe.arguments.model_name_or_path} on {rows} of {recipe.arguments.data_name}, "
        f"{count} process{'' if count == 1 else 'es'}"
    )
    return trainer


def speaker() -> Say:
    """Prints lines, from one process only."""
    from rich.console import Console

    console = Console()
    speaks = os.environ.get("RANK", "0") == "0"

    def say(line: str) -> None:
        if speaks:
            console.print(line, highlight=False, markup=False, soft_wrap=True)

    return say


def resume_command(command: Sequence[str]) -> str:
    """The command that goes on with a stopped run.

    Args:
        command: the words of the command that started it.

    Returns:
        The command, with ``--resume_from_checkpoint true``.

    Example:
        >>> resume_command(["grpo-trainer", "train", "a.yaml", "--seed", "1", "--resume_from_checkpoint", "out/x"])
        'grpo-trainer train a.yaml --seed 1 --resume_from_checkpoint true'
    """
    head, words = list(command[:3]), command[3:]
    kept = {key: given for key, given in split_words(words).items() if key != "resume_from_checkpoint"}
    kept["resume_from_checkpoint"] = ["true"]
    return shlex.join([*head, *(word for key, given in kept.items() for word in (f"--{key}", *given))])


def checkpoint_to_resume(folder: str, wanted: bool | str | None, say: Say = print) -> str | None:
    """The checkpoint to go on from.

    Args:
        folder: the run's output folder.
        wanted: a checkpoint's folder; true for the last one in ``folder``; false or None for none.
        say: prints a line.

    Returns:
        Its folder, or None to start anew.

    Raises:
        RecipeError: if the folder that is asked for is no checkpoint that a run can go on from.
    """
    from grpo_trainer.checkpoint import find_checkpoint

    said = {"true": True, "false": False}.get(str(wanted).lower(), wanted)
    try:
        found = find_checkpoint(folder, said)
    except ValueError as error:
        raise RecipeError(str(error)) from error
    if said and found is None:
        say(f"resume_from_checkpoint: no checkpoint in {folder} to go on from; starting anew")
    return found


def last_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """The checkpoint of the highest step in a folder, or None."""
    from grpo_trainer.checkpoint import checkpoints

    return next(reversed(checkpoints(folder)), None)
