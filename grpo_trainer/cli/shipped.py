"""The files that come with the package: recipes, and configurations of the launcher, found by name."""

from __future__ import annotations

from pathlib import Path

from grpo_trainer.cli.errors import RecipeError
from grpo_trainer.registry import suggest

_LAUNCHER = "accelerate"


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
    if Path(name).is_dir():
        raise RecipeError(f"{name!r} is a folder; give a recipe in it, e.g. the run.yaml that a run leaves there")
    short = [n.rpartition("/")[2] for n in names]
    raise RecipeError(
        f"there is no file {name!r}, and no recipe of that name.{suggest(wanted, [*names, *short])} "
        f"Recipes: {', '.join(names)}."
    )


def recipe_names() -> list[str]:
    """The names of the packaged recipes, ``folder/name`` without the ending."""
    root = recipes_folder()
    files = sorted(root.glob("*/*.yaml"))
    return [f.relative_to(root).with_suffix("").as_posix() for f in files if f.parent.name != _LAUNCHER]


def launcher_files() -> list[Path]:
    """The packaged configurations of ``accelerate launch``, for its ``--config_file``."""
    return sorted((recipes_folder() / _LAUNCHER).glob("*.yaml"))


def recipes_folder() -> Path:
    """Where the recipes lie: inside the installed package, or beside it in a checkout."""
    from importlib.resources import files

    package = Path(str(files("grpo_trainer")))
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"


def first_comment(path: Path) -> str:
    """The first line of a file, if it is a comment, as a line about the file."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""
