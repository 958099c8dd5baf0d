"""Recipes: flat YAML files of settings, found by name, overridden on the command line, checked and typed.

A recipe's keys are the fields of `RecipeArguments` (model, data, rewards, adapter; TRL's names) and of ``GRPOConfig``.
The values are checked by pydantic against the types of those two dataclasses, which therefore are all the schema there
is. argparse-style parsers that build on dataclasses were left aside: they neither refuse unknown keys of a file with a
suggestion nor read a list of mappings (the rewards).
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.cli.values import parse_yaml, typed, typed_from_words
from grpo_trainer.registry import suggest

if TYPE_CHECKING:
    from grpo_trainer.config import GRPOConfig

__all__ = ["Recipe", "RecipeArguments", "RecipeError", "RewardEntry", "find_recipe", "load_recipe", "recipe_names"]


@dataclass(frozen=True, kw_only=True)
class RewardEntry:
    """One reward of a recipe.

    Attributes:
        name: a registered name, or ``pkg.mod:fn``.
        weight: its weight in the sum.
        kwargs: keyword arguments that are bound to it.
    """

    __pydantic_config__: typing.ClassVar[dict[str, str]] = {"extra": "forbid"}

    name: str
    weight: float = 1.0
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RecipeArguments:
    """What a recipe says beside the trainer's own configuration. Names are TRL's and open-r1's.

    Attributes:
        model_name_or_path: a folder, a name on the model hub, or ``builtin:smollm2-135m-instruct``.
        model_revision: branch, tag or commit on the hub.
        dtype: type of the weights, e.g. ``bfloat16``; None leaves it to the trainer.
        attn_implementation: e.g. ``sdpa``; None leaves it to the trainer.
        use_peft: train a LoRA adapter and leave the model as it is.
        lora_r: rank of the adapter.
        lora_alpha: scale of the adapter, over its rank.
        lora_dropout: dropout of the adapter.
        lora_target_modules: names of the modules that get one; None takes peft's choice for the architecture.
        load_in_4bit: load the model in 4 bits; needs an adapter.
        load_in_8bit: load the model in 8 bits; needs an adapter.
        bnb_4bit_quant_type: ``nf4`` or ``fp4``.
        use_bnb_nested_quant: quantise the constants of the 4-bit blocks too.
        dataset_name: ``builtin:sums``, a file (.jsonl, .json, .csv, .parquet), a folder, or a name on the hub.
        dataset_config: name of a configuration of the dataset.
        dataset_train_split: split to train on.
        dataset_test_split: split to evaluate on, used if ``eval_strategy`` is not ``no``.
        dataset_prompt_column: column that holds the prompt.
        system_prompt: put before each prompt, which thereby becomes a conversation.
        reward_funcs: one reward or several, each a name, ``pkg.mod:fn``, or a mapping of name, weight and kwargs.
    """

    model_name_or_path: str | None = None
    model_revision: str | None = None
    dtype: str | None = None
    attn_implementation: str | None = None
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    lora_target_modules: str | list[str] | None = None
    load_in_4bit: bool = False
    load_in_8bit: bool = False
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = "nf4"
    use_bnb_nested_quant: bool = False
    dataset_name: str | None = None
    dataset_config: str | None = None
    dataset_train_split: str = "train"
    dataset_test_split: str = "test"
    dataset_prompt_column: str = "prompt"
    system_prompt: str | None = None
    reward_funcs: str | RewardEntry | list[str | RewardEntry] | None = None

    def rewards(self) -> list[RewardEntry]:
        """The rewards, each in its long form."""
        given = self.reward_funcs
        entries = given if isinstance(given, list) else [] if given is None else [given]
        return [RewardEntry(name=e) if isinstance(e, str) else e for e in entries]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """A recipe with the command line's settings in it, checked.

    Attributes:
        path: the file.
        arguments: model, data, rewards, adapter.
        settings: the fields of ``GRPOConfig`` that it sets.
    """

    path: Path
    arguments: RecipeArguments
    settings: Mapping[str, Any]

    def config(self) -> GRPOConfig:
        """The trainer's configuration.

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
        weights = [entry.weight for entry in arguments.rewards()]
        if any(weight != 1.0 for weight in weights):
            if settings.get("reward_weights") is not None:
                raise RecipeError(
                    f"{self.path}: reward_weights={settings['reward_weights']} and weights {weights} in reward_funcs "
                    "say the same thing twice; give the weights in one place"
                )
            settings["reward_weights"] = weights
        try:
            return GRPOConfig(**settings)
        except (ValueError, TypeError) as error:
            raise RecipeError(f"{self.path}: {error}") from error


def load_recipe(name: str, words: Sequence[str] = ()) -> Recipe:
    """Reads a recipe and the settings that the command line puts over it.

    Args:
        name: a path, or the name of a packaged recipe.
        words: the command line's settings, ``--key value …``.

    Returns:
        The recipe.

    Raises:
        RecipeError: if the recipe is not found, is not a flat mapping, has an unknown key, or a value does not fit.
    """
    path = find_recipe(name)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise RecipeError(f"{path} cannot be read as text in UTF-8: {error}") from error
    content = parse_yaml(text, str(path))
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise RecipeError(f"{path} must be a flat mapping of settings, `key: value` on each line")
    types = _known_types()
    values = {}
    for key, value in content.items():
        _check_known(key, types, str(path))
        values[key] = typed(key, value, types[key], str(path))
    for key, given in split_words(words).items():
        key, given = _positive(key, given, types)
        _check_known(key, types, "command line")
        values[key] = typed_from_words(key, given, types[key], "command line")
    own = {f.name for f in dataclasses.fields(RecipeArguments)}
    return Recipe(
        path=path,
        arguments=RecipeArguments(**{k: v for k, v in values.items() if k in own}),
        settings={k: v for k, v in values.items() if k not in own},
    )


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


def find_recipe(name: str) -> Path:
    """The file of a recipe.

    Args:
        name: a path, or the name of a packaged recipe with or without its folder and its ``.yaml``.

    Returns:
        The path.

    Raises:
        RecipeError: if there is none, with the nearest name.

    Example:
        >>> find_recipe("smollm2-135m-sums").name
        'smollm2-135m-sums.yaml'
    """
    if Path(name).is_file():
        return Path(name)
    names = recipe_names()
    wanted = name.removesuffix(".yaml").removeprefix("recipes/")
    found = [n for n in names if n == wanted or n.rpartition("/")[2] == wanted]
    if len(found) == 1:
        return recipes_folder() / f"{found[0]}.yaml"
    if found:
        raise RecipeError(f"the recipe name {name!r} stands for several: {', '.join(found)}. Give the folder too.")
    short = [n.rpartition("/")[2] for n in names]
    raise RecipeError(
        f"there is no file {name!r}, and no recipe of that name.{suggest(wanted, [*names, *short])} "
        f"Recipes: {', '.join(names)}."
    )


def recipe_names() -> list[str]:
    """The names of the packaged recipes, ``folder/name`` without the ending."""
    root = recipes_folder()
    files = sorted(root.glob("*/*.yaml"))
    return [f.relative_to(root).with_suffix("").as_posix() for f in files if f.parent.name != "accelerate"]


def recipes_folder() -> Path:
    """Where the recipes lie: inside the installed package, or beside it in a checkout."""
    from importlib.resources import files

    package = Path(str(files("grpo_trainer")))
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


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


def _check_known(key: str, types: Mapping[str, Any], where: str) -> None:
    if key not in types:
        raise RecipeError(
            f"{where}: unknown setting {key!r}.{suggest(key, list(types))} "
            "A recipe may hold the fields of GRPOConfig and of RecipeArguments."
        )


def _positive(key: str, words: list[str], types: Mapping[str, Any]) -> tuple[str, list[str]]:
    """``--no_x`` as ``--x false``, if x is a setting and no_x is none."""
    if key.startswith("no_") and key not in types and key[3:] in types and not words:
        return key[3:], ["false"]
    return key, words
