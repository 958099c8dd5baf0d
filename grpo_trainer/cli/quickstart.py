"""``quickstart``: a real pretrained model learns to add, and what it learned is measured on sums that it never saw.

::

    measure held-out sums -> train -> measure the same sums -> summary.json, reward_curve.png, completions/, model/
                               |
                             Ctrl-C -> checkpoint -> --resume
"""

from __future__ import annotations

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

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.heldout import SAMPLES_PER_PROMPT, Measure, before_after_table, measure
from grpo_trainer.cli.recipe import Recipe, load_recipe

if TYPE_CHECKING:
    from rich.console import Console

RECIPE = "quickstart/smollm2-135m-sums"
RECORD = "run.json"
"""What a stopped run needs to be gone on with; it also marks the folder as one that quickstart may tidy."""


@dataclass(kw_only=True)
class Record:
    """What a run keeps in its folder between its parts.

    Attributes:
        settings: the recipe's settings, to tell whether a resumed run is the same run.
        before: the measure before training.
        train_seconds: seconds that the parts so far took to train.
        peak_rss_bytes: most memory of the parts so far.
    """

    settings: dict[str, Any]
    before: Measure
    train_seconds: float = 0.0
    peak_rss_bytes: int = 0

    def save(self, folder: Path) -> None:
        """Writes it."""
        _write_json(folder / RECORD, asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Record:
        """Reads it."""
        from grpo_trainer.reports.summary import Interval

        content = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        before = content.pop("before")
        return cls(before=Measure(**{**before, "reward": Interval(*before["reward"])}), **content)


def quickstart(words: Sequence[str] = (), *, resume: bool = False) -> int:
    """Runs the quickstart.

    Args:
        words: settings that go over the recipe's, ``--key value …``.
        resume: go on from the last checkpoint of a stopped run, if there is one.

    Returns:
        0, or 130 after Ctrl-C.

    Raises:
        RecipeError: if a setting is wrong, or the run to be resumed had other settings.
    """
    recipe = load_recipe(RECIPE, words)
    for key in ("dataset_name", "dataset_prompt_column", "system_prompt", "reward_funcs", "resume_from_checkpoint"):
        if key in _keys(words):
            raise RecipeError(f"{key} is settled in the quickstart; for another task: grpo-trainer train RECIPE")
    if importlib.util.find_spec("matplotlib") is None:
        raise RecipeError("the quickstart draws a curve with matplotlib: pip install 'grpo-trainer[quickstart]'")
    config = recipe.config()
    if config.world_size > 1:
        raise RecipeError(
            f"quickstart runs in one process, not in {config.world_size}. For several: "
            f"accelerate launch -m grpo_trainer train {RECIPE}"
        )

    from rich.console import Console

    from grpo_trainer.cli.build import build_trainer, quiet_libraries
    from grpo_trainer.cli.interrupt import GracefulStop
    from grpo_trainer.reports.completions import CompletionsWriter
    from grpo_trainer.reports.progress import RichProgress
    from grpo_trainer.tasks import load_task

    console = Console()
    folder = Path(config.output_dir)
    if resume and (folder / "summary.json").is_file():
        _say(
            console, f"--resume: the run in {folder} is finished, see its summary.json; leave out --resume to run anew"
        )
        return 0
    checkpoint = _checkpoint(folder, recipe, resume, lambda line: _say(console, line))
    quiet_libraries()
    train_rows, heldout = load_task("builtin:sums", config.seed)
    _say(console, f"loading {recipe.arguments.model_name_or_path} …")
    stop = GracefulStop(lambda line: _say(console, line))
    progress = RichProgress(console, tables=0 if config.log_completions else 4)
    own = [] if config.log_completions else [CompletionsWriter(folder / "completions")]
    trainer = build_trainer(recipe, config, train_rows, callbacks=[progress, stop, *own])
    plan = config.batch_plan()
    _say(
        console,
        f"{len(train_rows)} sums to train on, {len(heldout)} others held out; {config.max_steps} steps of "
        f"{plan.completions_per_rollout // plan.num_generations} prompts x {plan.num_generations} completions",
    )
    if checkpoint is None:
        clear_earlier_run(folder)
        folder.mkdir(parents=True, exist_ok=True)
        before = measure(trainer, heldout, config.seed, console, "before training")
        record = Record(settings=_comparable(recipe), before=before)
        record.save(folder)
    else:
        record = Record.load(folder)
        _say(console, f"going on from {checkpoint}; held-out reward before training: {record.before.reward}")
    saved = _train(trainer, checkpoint, record, folder, progress, stop)
    if saved is not None:
        state = trainer.state
        _say(console, f"Stopped after step {state.global_step} of {state.max_steps}; checkpoint: {saved}")
        _say(console, f"Go on with: {resume_command(words, config.seed)}")
        return 130
    trainer.save_model(str(folder / "model"))  # before the measure: whatever happens to that, this is kept
    _finish(trainer, record, measure(trainer, heldout, config.seed, console, "after training"), folder, console)
    return 0


def _train(trainer: Any, checkpoint: str | None, record: Record, folder: Path, progress: Any, stop: Any) -> str | None:
    """Trains; returns the checkpoint that was saved if Ctrl-C ended it."""
    from grpo_trainer.cli.train import last_checkpoint
    from grpo_trainer.runtime import peak_rss_bytes

    start = time.monotonic()
    with progress, stop:
        trainer.train(resume_from_checkpoint=checkpoint)
    record.train_seconds += time.monotonic() - start
    record.peak_rss_bytes = max(record.peak_rss_bytes, peak_rss_bytes())
    record.save(folder)
    stopped = stop.requested and trainer.state.global_step < trainer.state.max_steps
    return last_checkpoint(folder) if stopped else None


def _finish(trainer: Any, record: Record, after: Measure, folder: Path, console: Console) -> None:
    """Writes model, summary and curve, and shows what was learned."""
    from grpo_trainer.reports.curve import draw_reward_curve

    summary = summarise(trainer, record, after)
    _write_json(folder / "summary.json", summary)
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    draw_reward_curve(
        folder / "reward_curve.png",
        [entry["step"] for entry in logged],
        [entry["reward"] for entry in logged],
        record.before.reward,
        after.reward,
        title=f"Sums of two numbers from 1 to 20, {trainer.args.num_generations} completions per prompt",
    )
    if str(getattr(trainer.args.save_strategy, "value", trainer.args.save_strategy)) == "no":
        _remove_checkpoints(folder)  # those of Ctrl-C, which the saved model replaces
    console.print(before_after_table(record.before, after))
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


def resume_command(words: Sequence[str], seed: int) -> str:
    """The command that goes on with a stopped run.

    Args:
        words: the settings that the stopped run was given.
        seed: its seed.

    Returns:
        ``make quickstart SEED=1 RESUME=1`` if make started it with no other setting, else the full command.

    Example:
        >>> resume_command(["--max_steps", "5"], seed=0).endswith("-m grpo_trainer quickstart --resume --max_steps 5")
        True
    """
    others = [key for key in _keys(words) if key != "seed"]
    if os.environ.get("MAKELEVEL") and not others:
        return f"make quickstart SEED={seed} RESUME=1"
    python = Path(sys.executable)
    if python.is_relative_to(Path.cwd()):
        python = python.relative_to(Path.cwd())
    return shlex.join([str(python), "-m", "grpo_trainer", "quickstart", "--resume", *words])


def clear_earlier_run(folder: Path) -> None:
    """Removes what an earlier quickstart made in its folder, and nothing else; other folders are left alone.

    Args:
        folder: the output folder.
    """
    from grpo_trainer.reports.completions import FILE_PREFIX

    if not (folder / RECORD).is_file():
        return
    _remove_checkpoints(folder)
    for file in folder.glob(f"completions/{FILE_PREFIX}*.parquet"):
        file.unlink()
    for name in ("summary.json", "reward_curve.png", RECORD):
        (folder / name).unlink(missing_ok=True)


def _checkpoint(folder: Path, recipe: Recipe, resume: bool, say: Callable[[str], None]) -> str | None:
    """The checkpoint to go on from, or None to start anew."""
    from grpo_trainer.cli.train import last_checkpoint

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
    for free in ("output_dir", "max_steps"):  # the rate is constant, so a longer run begins like a shorter one
        settings.pop(free, None)
    return json.loads(json.dumps(settings, default=str))


def _keys(words: Sequence[str]) -> list[str]:
    from grpo_trainer.cli.recipe import split_words

    return list(split_words(words))


def _remove_checkpoints(folder: Path) -> None:
    for state in folder.glob("checkpoint-*/trainer_state.json"):
        if state.parent.name.removeprefix("checkpoint-").isdigit():
            shutil.rmtree(state.parent)


def _write_json(path: Path, content: Any) -> None:
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)
