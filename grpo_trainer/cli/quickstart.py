"""``quickstart``: a real pretrained model learns a small task, and what it learned is measured on what it never saw.

::

    measure held-out rows -> train -> measure the same rows -> summary.json, reward_curve.png, completions/, model/
                               |
                             Ctrl-C or SIGTERM -> checkpoint -> --resume
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainer.cli.errors import RecipeError, starting
from grpo_trainer.cli.heldout import SAMPLES_PER_PROMPT, Measure, before_after_table, measure
from grpo_trainer.cli.launch import started_processes
from grpo_trainer.cli.recipe import Recipe, load_recipe
from grpo_trainer.cli.record import RECORD, Record, checkpoints_in, make_way, write_json
from grpo_trainer.cli.run_file import save_run_file
from grpo_trainer.cli.train import last_checkpoint

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What a quickstart teaches.

    Attributes:
        recipe: name of its recipe.
        dataset: its task.
        noun: what its rows are, for what is printed.
        title: of the curve.
        measured: name of the reward that is measured and drawn; None: all of them together.
    """

    recipe: str
    dataset: str
    noun: str
    title: str
    measured: str | None = None


LESSONS = {
    "sums": Lesson(
        recipe="quickstart/smollm2-135m-sums",
        dataset="builtin:sums",
        noun="sums",
        title="Sums of two numbers from 1 to 20",
    ),
    "format": Lesson(
        recipe="quickstart/smollm2-135m-format",
        dataset="builtin:sums_in_tags",
        noun="sums",
        title="<think>…</think> <answer>…</answer> from one example",
        measured="think_answer_format",
    ),
    "code": Lesson(
        recipe="quickstart/smollm2-135m-functions",
        dataset="builtin:functions",
        noun="functions",
        title="Python functions of one number, tested",
    ),
}
"""Every quickstart by the name that ``--task`` takes."""
RECIPE = LESSONS["sums"].recipe
_SETTLED = (
    *("dataset_name", "dataset_config", "datasets", "dataset_streaming", "dataset_map_fn", "dataset_column_mapping"),
    *("dataset_prompt_column", "test_split_size", "system_prompt", "reward_funcs", "reward_model_name_or_path"),
    *("resume_from_checkpoint", "num_processes"),
)


def quickstart(words: Sequence[str] = (), *, resume: bool = False, task: str = "sums") -> int:
    """Runs the quickstart.

    Args:
        words: settings that go over the recipe's, ``--key value …``.
        resume: go on from the last checkpoint of a stopped run, if there is one.
        task: a key of `LESSONS`.

    Returns:
        0; 130 after Ctrl-C; 143 after SIGTERM.

    Raises:
        RecipeError: if a setting is wrong, or the run to be resumed had other settings.
        StartupError: if something else fails before anything is measured.
    """
    from rich.console import Console

    console = Console()
    say = functools.partial(_say, console)
    if task not in LESSONS:
        raise RecipeError(f"--task {task}: there is no such quickstart; use one of {', '.join(LESSONS)}")
    lesson = LESSONS[task]
    given = ["--task", task, *words] if task != "sums" else [*words]
    with starting():
        recipe = _recipe(lesson, words, say)
        config = recipe.config()
        folder = Path(config.output_dir)
        if resume and (folder / "summary.json").is_file():
            say(f"--resume: the run in {folder} is finished, see its summary.json; leave out --resume to run anew")
            return 0
        checkpoint = _checkpoint(folder, recipe, resume, say)
        trainer, heldout, progress = _prepare(lesson, recipe, config, console)
    if checkpoint is None:
        make_way(folder, say)
        save_run_file(folder, recipe, ["grpo-trainer", "quickstart", *given], processes=1)
        record = Record(
            settings=_comparable(recipe),
            before=measure(trainer, heldout, config.seed, console, "before training", lesson.noun, lesson.measured),
        )
        record.save(folder)
    else:
        record = Record.load(folder)
        say(f"going on from {checkpoint}; held-out reward before training: {record.before.reward}")
    code = _train(trainer, checkpoint, record, folder, progress, say)
    if code:
        state = trainer.state
        say(f"Stopped after step {state.global_step} of {state.max_steps}; checkpoint: {last_checkpoint(folder)}")
        say(f"Go on with: {resume_command(words, config.seed, task)}")
        return code
    trainer.save_model(str(folder / "model"))  # before the measure: whatever happens to that, this is kept
    after = measure(trainer, heldout, config.seed, console, "after training", lesson.noun, lesson.measured)
    _finish(lesson, trainer, record, after, folder, console)
    return 0


def _recipe(lesson: Lesson, words: Sequence[str], say: Callable[[str], None]) -> Recipe:
    """The recipe, if this machine and the settings allow a quickstart."""
    recipe = load_recipe(lesson.recipe, words, os.environ)
    for note in recipe.notes:
        say(f"note: {note}")
    for key in _SETTLED:
        if key in _keys(words):
            raise RecipeError(f"{key} is settled in the quickstart; for another task: grpo-trainer train RECIPE")
    if importlib.util.find_spec("matplotlib") is None:
        raise RecipeError("the quickstart draws a curve with matplotlib: pip install 'grpo-trainer[quickstart]'")
    processes = started_processes(os.environ)
    if processes > 1:
        raise RecipeError(
            f"quickstart runs in one process, not in {processes}. For several: "
            f"accelerate launch -m grpo_trainer train {lesson.recipe}"
        )
    return recipe


def _prepare(lesson: Lesson, recipe: Recipe, config: Any, console: Console) -> tuple[Any, Any, Any]:
    """The trainer, the held-out rows and the progress."""
    from grpo_trainer.cli.build import build_trainer, quiet_libraries
    from grpo_trainer.reports.completions import CompletionsWriter
    from grpo_trainer.reports.progress import RichProgress
    from grpo_trainer.tasks import load_task

    quiet_libraries()
    train_rows, heldout = load_task(lesson.dataset, config.seed)
    _say(console, f"loading {recipe.arguments.model_name_or_path} …")
    progress = RichProgress(console, tables=0 if config.log_completions else 4)
    own = [] if config.log_completions else [CompletionsWriter(Path(config.output_dir) / "completions")]
    trainer = build_trainer(recipe, config, train_rows, callbacks=[progress, *own])
    plan = config.batch_plan()
    _say(
        console,
        f"{len(train_rows)} {lesson.noun} to train on, {len(heldout)} others held out; {config.max_steps} steps of "
        f"{plan.completions_per_rollout // plan.num_generations} prompts x {plan.num_generations} completions",
    )
    return trainer, heldout, progress


def _train(
    trainer: Any, checkpoint: str | None, record: Record, folder: Path, progress: Any, say: Callable[[str], None]
) -> int:
    """Trains; returns 0, or the exit code if the run was stopped and a checkpoint saved."""
    from grpo_trainer.cli.interrupt import train_until_stopped
    from grpo_trainer.runtime import peak_rss_bytes

    start = time.monotonic()
    code = train_until_stopped(trainer, checkpoint, progress, say)
    record.train_seconds += time.monotonic() - start
    record.peak_rss_bytes = max(record.peak_rss_bytes, peak_rss_bytes())
    record.save(folder)
    return code


def _finish(lesson: Lesson, trainer: Any, record: Record, after: Measure, folder: Path, console: Console) -> None:
    """Writes summary and curve, and shows what was learned."""
    from grpo_trainer.reports.curve import draw_reward_curve

    summary = summarise(trainer, record, after)
    write_json(folder / "summary.json", summary)
    name = "reward" if lesson.measured is None else f"rewards/{lesson.measured}/mean"
    logged = [entry for entry in trainer.state.log_history if name in entry]
    draw_reward_curve(
        folder / "reward_curve.png",
        [entry["step"] for entry in logged],
        [entry[name] for entry in logged],
        record.before.reward,
        after.reward,
        title=f"{lesson.title}, {trainer.args.num_generations} completions per prompt",
    )
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "no":
        for found in checkpoints_in(folder):  # those of Ctrl-C, which the saved model replaces
            shutil.rmtree(found)
    console.print(before_after_table(record.before, after, lesson.noun))
    _say(
        console,
        f"{summary['steps']} steps in {summary['train_seconds']:.0f} s ({summary['seconds_per_step']:.1f} s a step: "
        f"{summary['generation_seconds']:.0f} s generating, {summary['update_seconds']:.0f} s updating), "
        f"{summary['peak_rss_bytes'] / 1e9:.1f} GB of memory",
    )
    for name in ("summary.json", "reward_curve.png", "completions/", "model/"):
        _say(console, f"wrote {folder}/{name}")


def summarise(trainer: Any, record: Record, after: Measure) -> dict[str, Any]:
    """The figures of a finished run.

    Args:
        trainer: after training.
        record: the run's record.
        after: the measure after training.

    Returns:
        What goes into summary.json. Seconds are totals over training; ``n`` is the number of held-out prompts.
    """
    from grpo_trainer.reports.summary import total_over_steps
    from grpo_trainer.runtime import peak_rss_bytes

    history, steps = trainer.state.log_history, trainer.state.global_step
    return {
        "seed": trainer.args.seed,
        "reward_before": record.before.reward._asdict(),
        "reward_after": after.reward._asdict(),
        "steps": steps,
        "train_seconds": record.train_seconds,
        "seconds_per_step": record.train_seconds / max(1, steps),
        "generation_seconds": total_over_steps(history, "time/generation"),
        "update_seconds": total_over_steps(history, "time/update"),
        "peak_rss_bytes": max(record.peak_rss_bytes, peak_rss_bytes()),
        "samples_per_prompt": SAMPLES_PER_PROMPT,
        "measure_seconds": [record.before.seconds, after.seconds],
    }


def resume_command(words: Sequence[str], seed: int, task: str = "sums") -> str:
    """The command that goes on with a stopped run.

    Args:
        words: the settings that the stopped run was given.
        seed: its seed.
        task: what it teaches.

    Returns:
        ``make quickstart SEED=1 RESUME=1`` if make started it with no other setting, else the full command.

    Example:
        >>> resume_command(["--max_steps", "5"], seed=0).endswith("-m grpo_trainer quickstart --resume --max_steps 5")
        True
    """
    others = [key for key in _keys(words) if key != "seed"]
    if os.environ.get("MAKELEVEL") and not others:
        return f"make quickstart{'' if task == 'sums' else f'-{task}'} SEED={seed} RESUME=1"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    which = [] if task == "sums" else ["--task", task]
    return shlex.join([str(python), "-m", "grpo_trainer", "quickstart", *which, "--resume", *words])


def _checkpoint(folder: Path, recipe: Recipe, resume: bool, say: Callable[[str], None]) -> str | None:
    """The checkpoint to go on from, or None to start anew."""
    if not resume:
        return None
    checkpoint = last_checkpoint(folder) if (folder / RECORD).is_file() else None
    if checkpoint is None:
        say(f"--resume: no checkpoint of a stopped run in {folder} to go on from; starting anew")
        return None
    kept, given = Record.load(folder).settings, _comparable(recipe)
    differing = sorted(key for key in kept.keys() | given.keys() if kept.get(key) != given.get(key))
    if differing:
        changes = ", ".join(f"{key}={given.get(key)} (it had {kept.get(key)})" for key in differing)
        raise RecipeError(
            f"--resume: the stopped run in {folder} had other settings: {changes}. "
            "Give its settings, or leave out --resume to start anew"
        )
    return checkpoint


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """The settings that a resumed run must share with its first part, as JSON holds them."""
    settings = {**asdict(recipe.arguments), **recipe.settings}
    settings.pop("output_dir", None)
    if settings.get("lr_scheduler_type") == "constant":  # a longer run then begins like a shorter one
        settings.pop("max_steps", None)
    return json.loads(json.dumps(settings, default=str))


def _keys(words: Sequence[str]) -> list[str]:
    from grpo_trainer.cli.recipe import split_words

    return list(split_words(words))


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
