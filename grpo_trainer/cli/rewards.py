"""``rewards check`` and ``rewards try``: the rewards of a recipe, looked at before a run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_trainer.cli.errors import RecipeError, starting
from grpo_trainer.cli.recipe import Recipe, load_recipe, split_words
from grpo_trainer.cli.train import speaker

ROWS, SAMPLED_ROWS, SAMPLES = 32, 8, 8
OWN = ("completion", "row", "rows", "samples", "reference", "no_model")


def rewards(action: str, name: str, words: Sequence[str] = ()) -> int:
    """Runs one of the two commands.

    Args:
        action: ``check`` or ``try``.
        name: path or name of the recipe.
        words: settings that go over the recipe's, and the command's own, ``--key value …``.

    Returns:
        0; for ``check`` 1 if something is off.

    Raises:
        RecipeError: if the recipe, its data, its rewards or an option are wrong.
        StartupError: if something else fails before anything is scored.
    """
    given = split_words(words)
    own = {key: given.pop(key) for key in OWN if key in given}
    settings = [word for key, values in given.items() for word in (f"--{key}", *values)]
    return _check(name, settings, own) if action == "check" else _try(name, settings, own)


def _check(name: str, settings: list[str], own: dict[str, list[str]]) -> int:
    from rich.console import Console

    from grpo_trainer.cli.reward_check import check, references_of, table_of
    from grpo_trainer.rewards import REWARDS

    _refuse(own, ("rows", "samples", "reference", "no_model"), "check")
    with starting(), _made(name, settings, model="no_model" not in own) as (scorer, data, draw):
        rows = _first(data, _number(own, "rows", ROWS))
        column, references = _named(references_of, rows, _one(own, "reference"))
        samples = draw(rows[:SAMPLED_ROWS], _number(own, "samples", SAMPLES)) if draw else []
        report = check(scorer, rows, references, samples, [n for n in scorer.names if n in REWARDS])
    say = speaker()
    say(f"{len(rows)} rows" + (f", references from the column {column!r}" if column else ""))
    Console().print(table_of(report))
    if report.form:
        say(f"references score best {report.form}")
    if report.signal is not None:
        say(f"{report.signal:.0%} of {len(samples)} sampled prompts have completions with different totals")
    for note in report.notes:
        say(f"note: {note}")
    for sentence in report.off:
        say(f"off: {sentence}")
    say("nothing is off" if not report.off else f"{len(report.off)} things are off")
    return 1 if report.off else 0


def _try(name: str, settings: list[str], own: dict[str, list[str]]) -> int:
    from grpo_trainer.cli.reward_check import with_columns

    _refuse(own, ("completion", "row"), "try")
    text = _one(own, "completion")
    if text is None:
        raise RecipeError('rewards try: give a text with --completion "…"')
    place = _number(own, "row", 0, least=0)
    with starting(), _made(name, settings, model=False) as (scorer, data, _):
        rows = _first(data, place + 1)
        if place >= len(rows):
            raise RecipeError(f"--row {place}: the data has {len(rows)} rows, 0 to {len(rows) - 1}")
        row = rows[place]
        columns, logs = scorer.score([row], [text])
    say = speaker()
    say(f"row {place}: {_question(row)}")
    for key, value in row.items():
        if key != "prompt":
            say(f"  {key}: {str(value)[:200]}")
    for line, values, log, function in zip(scorer.lines, columns, logs, scorer.functions, strict=True):
        value = values[0]
        if line.name in scorer.failures:
            say(f"{line.name}: failed with {scorer.failures[line.name]}")
            continue
        said = "None (it does not apply)" if math.isnan(value) else f"{value:g} x {line.weight:g}"
        say(f"{line.name}: {said}   {_about(function)}")
        for key, what in with_columns(row, log).items():
            say(f"    {key}: {what}")
    say(f"total: {scorer.totals(columns)[0]:g}")
    return 1 if scorer.failures else 0


@contextlib.contextmanager
def _made(name: str, settings: list[str], *, model: bool) -> Iterator[tuple[Any, Any, Callable[..., Any] | None]]:
    """The scorer, the training rows, and what draws samples of the model, if it is loaded."""
    from grpo_trainer.cli.build import build_trainer, quiet_libraries
    from grpo_trainer.cli.data import build_datasets
    from grpo_trainer.cli.reward_check import Scorer

    quiet_libraries()
    recipe = load_recipe(name, settings, os.environ)
    with tempfile.TemporaryDirectory() as folder:
        config = recipe.config(output_dir=folder, push_to_hub=False, report_to="none", eval_strategy="no")
        data, _ = build_datasets(recipe, config)
        trainer = build_trainer(recipe, config, data) if model else None
        found = _without_model(recipe, config) if trainer is None else trainer.collector.rewards
        encode = _quarter if trainer is None else _encoder(trainer.processing_class)
        found.close()  # each reward has workers of its own here
        scorer = Scorer(found, encode)
        try:
            yield scorer, data, None if trainer is None else _drawer(trainer)
        finally:
            scorer.close()


def _without_model(recipe: Recipe, config: Any) -> Any:
    from grpo_trainer.assembly import reward_set
    from grpo_trainer.cli.build import build_rewards

    functions = build_rewards(recipe)
    if any(isinstance(function, str) for function in functions):
        raise RecipeError(f"{recipe.path}: a reward model is scored with the model only; leave out --no_model")
    try:
        return reward_set(functions, None, config, renderer=None)  # type: ignore[arg-type]
    except ValueError as error:
        raise RecipeError(f"{recipe.path}: {error}") from error


def _drawer(trainer: Any) -> Callable[..., Any]:
    """Draws completions and hands them over unscored: they are scored by each reward by itself."""

    def draw(rows: Sequence[Mapping[str, Any]], count: int) -> list[list[str]]:
        return trainer.sample(list(rows), num_generations=count, temperature=1.0, seed=trainer.args.seed).completions

    return draw


def _encoder(tokenizer: Any) -> Callable[[str], list[int]]:
    return lambda text: list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _quarter(text: str) -> list[int]:
    """Stands in for tokens where no tokenizer is loaded: four letters each, about what they hold in English."""
    return [int.from_bytes(text[i : i + 4].encode("utf-8", "surrogatepass"), "big") for i in range(0, len(text), 4)]


def _first(data: Any, count: int) -> list[dict[str, Any]]:
    """The first rows of a dataset or a stream."""
    if hasattr(data, "__len__"):
        return [dict(data[i]) for i in range(min(count, len(data)))]
    return [dict(row) for _, row in zip(range(count), data, strict=False)]


def _question(row: Mapping[str, Any]) -> str:
    prompt = row["prompt"]
    return (prompt if isinstance(prompt, str) else str(prompt[-1]["content"]))[-300:]


def _about(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _number(own: Mapping[str, list[str]], key: str, default: int, least: int = 1) -> int:
    text = _one(own, key)
    if text is None:
        return default
    if not text.isdecimal() or int(text) < least:
        raise RecipeError(f"--{key} {text}: give a whole number, at least {least}")
    return int(text)


def _one(own: Mapping[str, list[str]], key: str) -> str | None:
    if key not in own:
        return None
    if len(own[key]) != 1:
        raise RecipeError(f"--{key} takes one value, in quotes if it has spaces; it got {len(own[key])}")
    return own[key][0]


def _refuse(own: Mapping[str, list[str]], known: Sequence[str], action: str) -> None:
    for key in own:
        if key not in known:
            raise RecipeError(f"rewards {action} takes {', '.join(f'--{k}' for k in known)}, not --{key}")


def _named(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ValueError as error:
        raise RecipeError(str(error)) from error
