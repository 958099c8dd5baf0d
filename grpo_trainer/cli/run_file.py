"""``run.yaml``: what a run was started with, in its output folder; a recipe that repeats it.

Every field of the configuration stands in it, also those at their default, so that a later version with other defaults
does the same. What the machine settles (``bf16: null``) is left open. Secrets are left out.
"""

from __future__ import annotations

import dataclasses
import enum
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from grpo_trainer import __version__
from grpo_trainer.cli.arguments import RecipeArguments
from grpo_trainer.cli.recipe import Recipe
from grpo_trainer.cli.values import RecipeLoader, parse_words

FILE = "run.yaml"
MASK = "***"
_HEAD = """\
# What this run was started with. `grpo-trainer train {name}` repeats it.
# A setting at null takes its default, or is settled by the machine.
"""
_PACKAGES = ("torch", "transformers", "trl", "peft", "accelerate", "datasets")
_SECRET = re.compile(r"(^|_)(api_?key|secret|password|passwd|credentials?)$|^(\w*(hub|auth|access|hf)_)?token$", re.I)
_SECRET_VARIABLE = re.compile(r"(^|_)(TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS?)(_|$)", re.I)


class _Dumper(yaml.SafeDumper):
    """Puts a text into quotes where either version of YAML would read it as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Writes everything out."""
        return True


_Dumper.yaml_implicit_resolvers = {
    first: [
        *yaml.SafeDumper.yaml_implicit_resolvers.get(first, []),
        *RecipeLoader.yaml_implicit_resolvers.get(first, []),
    ]
    for first in {*yaml.SafeDumper.yaml_implicit_resolvers, *RecipeLoader.yaml_implicit_resolvers}
}


def save_run_file(folder: str | os.PathLike[str], recipe: Recipe, command: Sequence[str], *, processes: int) -> Path:
    """Writes ``run.yaml``.

    Args:
        folder: the output folder; made if it is not there.
        recipe: the recipe, with the command line's settings in it.
        command: the words of the command, without secrets or with them: they are masked.
        processes: how many train.

    Returns:
        The file.
    """
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(run_file(recipe, command, processes=processes, name=str(path)), encoding="utf-8")
    os.replace(unfinished, path)
    return path


def run_file(recipe: Recipe, command: Sequence[str], *, processes: int, name: str = FILE) -> str:
    """The text of ``run.yaml``.

    Args:
        recipe: the recipe, with the command line's settings in it.
        command: the words of the command.
        processes: how many train.
        name: the file's name, for its first line.

    Returns:
        YAML.
    """
    arguments, left_out = without_secrets(_arguments(recipe, processes))
    settings, more = without_secrets(_settings(recipe))
    provenance = {
        "command": shlex.join(masked(command)),
        "versions": versions(),
        "git": git_state(),
        "left_out": [*left_out, *more] or None,
    }
    del arguments["provenance"]  # to the end
    content = {**arguments, **settings, "provenance": {k: v for k, v in provenance.items() if v is not None}}
    return _HEAD.format(name=name) + yaml.dump(content, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _arguments(recipe: Recipe, processes: int) -> dict[str, Any]:
    """What the recipe says about model, data and rewards."""
    arguments = dataclasses.replace(
        recipe.arguments, num_processes=processes, env=dict(recipe.environment) or None, provenance=None
    )
    return {f.name: _plain(getattr(arguments, f.name)) for f in dataclasses.fields(RecipeArguments)}


def _settings(recipe: Recipe) -> dict[str, Any]:
    """Every field of the configuration, as the recipe or the default has it."""
    from grpo_trainer import GRPOConfig

    values = {}
    for f in dataclasses.fields(GRPOConfig):
        if f.init:
            default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
            values[f.name] = _plain(recipe.settings.get(f.name, default))
    values["resume_from_checkpoint"] = None  # whoever repeats a run begins it anew
    return values


def _plain(value: Any) -> Any:
    """A value as YAML can hold it; of an entry only what differs from its default."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        given = {f.name: (getattr(value, f.name), f) for f in dataclasses.fields(value)}
        return {name: _plain(v) for name, (v, f) in given.items() if v != f.default and v != {}}
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def without_secrets(value: Mapping[str, Any], where: str = "") -> tuple[dict[str, Any], list[str]]:
    """A mapping without what nobody else should read.

    Args:
        value: setting -> value; mappings in it are walked.
        where: the keys above it.

    Returns:
        A copy in which secrets are None, and the names of the secrets.

    Example:
        >>> without_secrets({"hub_token": "hf_x", "seed": 1, "env": {"WANDB_API_KEY": "k"}})
        ({'hub_token': None, 'seed': 1, 'env': {}}, ['hub_token', 'env.WANDB_API_KEY'])
    """
    out: dict[str, Any] = {}
    names: list[str] = []
    variables = where == "env."
    for key, item in value.items():
        secret = (_SECRET_VARIABLE if variables else _SECRET).search(key)
        if secret and item not in (None, True, False):
            names.append(f"{where}{key}")
            if not where:
                out[key] = None
        elif isinstance(item, Mapping):
            out[key], inner = without_secrets(item, f"{where}{key}.")
            names += inner
        else:
            out[key] = item
    return out, names


def masked(command: Sequence[str]) -> list[str]:
    """The words of a command, secrets replaced.

    Args:
        command: the words.

    Returns:
        As many words.

    Example:
        >>> masked(["grpo-trainer", "train", "my.yaml", "--hub_token", "hf_x", "--seed", "1", "--hub-token=hf_x"])
        ['grpo-trainer', 'train', 'my.yaml', '--hub_token', '***', '--seed', '1', '--hub-token=***']
    """
    out, key = [], ""
    for word in command:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            key = name.replace("-", "_")
            out.append(f"--{name}={MASK}" if equals and _is_secret(key, value) else word)
        else:
            out.append(MASK if key and _is_secret(key, word) else word)
    return out


def _is_secret(key: str, word: str) -> bool:
    value = parse_words([word])
    return bool(without_secrets({key: value if isinstance(value, Mapping) else word})[1])


def versions() -> dict[str, str]:
    """The versions that a run depends on."""
    found = {"python": platform.python_version(), "grpo_trainer": __version__}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def git_state() -> dict[str, Any] | None:
    """The commit of the working folder and whether tracked files differ from it; None where there is no repository."""
    commit = _git("rev-parse", "HEAD")
    if not commit:
        return None
    return {"commit": commit, "changed": bool(_git("status", "--porcelain", "--untracked-files=no"))}


def _git(*words: str) -> str | None:
    try:
        done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
