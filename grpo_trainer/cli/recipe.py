"""Recipes: flat YAML files of settings, overridden on the command line, checked and typed.

A recipe's keys are the fields of `RecipeArguments` (model, data, rewards, adapter; TRL's names) and of ``GRPOConfig``.
The values are checked by pydantic against the types of those two dataclasses, which therefore are all the schema there
is. argparse-style parsers that build on dataclasses were left aside: they neither refuse unknown keys of a file with a
suggestion nor read a list of mappings (the rewards).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_trainer.cli.arguments import DatasetEntry, RecipeArguments, RewardEntry
from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.retired import RETIRED, translate
from grpo_trainer.cli.shipped import find_recipe
from grpo_trainer.cli.values import parse_words, parse_yaml, typed, typed_from_words
from grpo_trainer.registry import suggest

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig

__all__ = ["DatasetEntry", "Recipe", "RecipeArguments", "RecipeError", "RewardEntry", "load_recipe", "split_words"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with the command line's settings in it, checked.

    Attributes:
        path: the file.
        arguments: model, data, rewards, adapter.
        settings: the fields of ``GRPOConfig`` that it sets.
        environment: the environment variables that it names, with the values that hold.
        notes: a sentence for each setting that has another name now, or that something else overrules.
    """

    path: Path
    arguments: RecipeArguments
    settings: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def config(self, **changes: Any) -> GRPOConfig:
        """The trainer's configuration.

        Args:
            **changes: fields that are set otherwise than in the recipe.

        Returns:
            A ``GRPOConfig``.

        Raises:
            RecipeError: if the configuration refuses a value or a combination.
        """
        from grpo_trainer import GRPOConfig

        settings = dict(self.settings)
        arguments = self.arguments
        chosen = {
            "dtype": arguments.dtype,
            "attn_implementation": arguments.attn_implementation,
            "revision": arguments.model_revision,
        }
        if any(value is not None for value in chosen.values()):
            given = settings.get("model_init_kwargs") or {}
            if isinstance(given, str):
                given = parse_yaml(given, "model_init_kwargs")
            settings["model_init_kwargs"] = {**{k: v for k, v in chosen.items() if v is not None}, **given}
        weights = arguments.weights()
        if any(weight != 1.0 for weight in weights):
            if settings.get("reward_weights") is not None:
                raise RecipeError(
                    f"{self.path}: reward_weights={settings['reward_weights']} and weights {weights} in reward_funcs "
                    "say the same thing twice; give the weights in one place"
                )
            settings["reward_weights"] = weights
        try:
            return GRPOConfig(**{**settings, **changes})
        except (ValueError, TypeError, ImportError) as error:  # the last: a package that a setting asks for
            raise RecipeError(f"{self.path}: {error}") from error


def load_recipe(name: str, words: Sequence[str] = (), environ: MutableMapping[str, str] | None = None) -> Recipe:
    """Reads a recipe and the settings that the command line puts over it.

    Args:
        name: a path, or the name of a packaged recipe.
        words: the command line's settings, ``--key value …``.
        environ: where the variables that the recipe names are set, before any library that reads them is imported;
            None sets none.

    Returns:
        The recipe.

    Raises:
        RecipeError: if the recipe is not found, is not a flat mapping, has an unknown key, or a value does not fit.
    """
    path = find_recipe(name)
    file, line = _Source(str(path)), _Source("command line")
    for key, value in _read(path).items():
        file.add(key, value, None)
    for key, given in split_words(words).items():
        line.add(key, parse_words(given), given)
    environment, notes = _set_environment(file, line, {} if environ is None else environ)
    types = _known_types()
    values = {**file.typed(types), **line.typed(types)}
    own = {f.name for f in dataclasses.fields(RecipeArguments)}
    return Recipe(
        path=path,
        arguments=RecipeArguments(**{k: v for k, v in values.items() if k in own}),
        settings={k: v for k, v in values.items() if k not in own},
        environment=environment,
        notes=(*file.notes, *line.notes, *notes),
    )


class _Source:
    """The settings of the file or of the command line, in the words of today.

    Args:
        where: its name in a message.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.settings: dict[str, tuple[Any, list[str] | None]] = {}  # the value, and the words it was read from
        self.environment: dict[str, str] = {}
        self.notes: list[str] = []

    def add(self, key: str, value: Any, words: list[str] | None) -> None:
        """Takes one setting up, a retired one by what became of it."""
        if key == "env":
            annotation = typing.get_type_hints(RecipeArguments)["env"]
            self._set_variables(typed(key, value, annotation, self.where) or {})
        elif key.startswith("no_") and key[3:] in RETIRED and words == []:
            self.add(key[3:], False, None)
        elif key not in RETIRED:
            self._put(key, value, words)
        else:
            now = translate(key, value, self.where)
            for new, converted in now.settings.items():
                self._put(new, converted, words if converted is value else None)
            self._set_variables(now.environment)
            self.notes.append(now.note)

    def typed(self, types: Mapping[str, Any]) -> dict[str, Any]:
        """The settings in their types."""
        out = {}
        for key, (value, words) in self.settings.items():
            if key not in types and key.startswith("no_") and key[3:] in types and words == []:
                key, value, words = key[3:], False, None  # --no_x is --x false
            if key not in types:
                raise RecipeError(
                    f"{self.where}: unknown setting {key!r}.{suggest(key, [*types, *RETIRED])} "
                    "A recipe may hold the fields of GRPOConfig and of RecipeArguments."
                )
            out[key] = (
                typed(key, value, types[key], self.where)
                if words is None
                else typed_from_words(key, words, types[key], self.where)
            )
        return out

    def _put(self, key: str, value: Any, words: list[str] | None) -> None:
        if key in self.settings:
            raise RecipeError(
                f"{self.where}: {key} is set twice, once under a name that it had before; give {key} only"
            )
        self.settings[key] = (value, words)

    def _set_variables(self, variables: Mapping[str, Any]) -> None:
        for name, value in variables.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            if self.environment.get(name, text) != text:
                raise RecipeError(f"{self.where}: {name} is set twice, to {self.environment[name]!r} and to {text!r}")
            self.environment[name] = text


def _set_environment(
    file: _Source, line: _Source, environ: MutableMapping[str, str]
) -> tuple[dict[str, str], list[str]]:
    """Sets the variables of a recipe: the command line wins over the environment, and that over the file."""
    holds, notes = {}, []
    for name, value in file.environment.items():
        holds[name] = environ.setdefault(name, value)
        if holds[name] != value and name not in line.environment:
            notes.append(
                f"{file.where}: {name} is {value!r} there but {holds[name]!r} in the environment of this command, "
                "which wins"
            )
    for name, value in line.environment.items():
        environ[name] = holds[name] = value
    return holds, notes


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"{path} cannot be read as text in UTF-8: {error}") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"{path} must be a flat mapping of settings, `key: value` on each line")
    return content


def split_words(words: Sequence[str]) -> dict[str, list[str]]:
    """The settings of a command line: key -> the words that follow it.

    A key that is given twice counts the last time. ``-`` in a key means ``_``.

    Args:
        words: ``--key value``, ``--key=value`` or ``--key``.

    Returns:
        The words of each key, in the order given.

    Raises:
        RecipeError: if a word belongs to no key.

    Example:
        >>> split_words(["--max-steps", "5", "--run_name=a b", "--bf16", "--lora_target_modules", "q", "v"])
        {'max_steps': ['5'], 'run_name': ['a b'], 'bf16': [], 'lora_target_modules': ['q', 'v']}
    """
    out: dict[str, list[str]] = {}
    current: list[str] | None = None
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word[2:].partition("=")
            current = out[key.replace("-", "_")] = [value] if equals else []
            if equals:
                current = None
        elif current is None:
            raise RecipeError(f"unexpected word {word!r} on the command line; settings are given as --key value")
        else:
            current.append(word)
    return out


def _known_types() -> dict[str, Any]:
    """Every legal key with its type."""
    from grpo_trainer import GRPOConfig

    types = {}
    for kind in (GRPOConfig, RecipeArguments):
        hints = typing.get_type_hints(kind)
        types.update({f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init})
    types["resume_from_checkpoint"] = bool | str | None  # true: the last checkpoint in output_dir
    types["scale_rewards"] = bool | str  # true: group, false: none; a parser of flags would take only the bool
    return types
