"""``list``: what can be asked for by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from grpo_trainer.cli.recipe import recipe_names, recipes_folder


def print_lists() -> int:
    """Prints recipes, losses, rewards and tasks, each with one line about it.

    Returns:
        0.
    """
    from rich.console import Console
    from rich.table import Table

    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for title, rows in _sections().items():
        table.add_row(title, "", style="cyan")
        for name, line in rows.items():
            table.add_row(f"  {name}", line)
        table.add_row()
    Console().print(table, markup=False)
    return 0


def _sections() -> dict[str, dict[str, str]]:
    from grpo_trainer.functional.advantages import ADVANTAGES
    from grpo_trainer.functional.aggregation import AGGREGATIONS
    from grpo_trainer.functional.kl import KL_ESTIMATORS
    from grpo_trainer.functional.losses import POLICY_LOSSES
    from grpo_trainer.objective import LOSS_TYPES
    from grpo_trainer.rewards import REWARDS
    from grpo_trainer.tasks import BUILTIN_TASKS

    return {
        "Recipes": {name: _recipe_line(name) for name in recipe_names()},
        "Losses (loss_type)": {n: f"{loss.policy_loss}, {loss.aggregation}" for n, loss in LOSS_TYPES.items()},
        "Advantages": _first_lines(ADVANTAGES),
        "Policy losses": _first_lines(POLICY_LOSSES),
        "KL estimators": _first_lines(KL_ESTIMATORS),
        "Aggregations": _first_lines(AGGREGATIONS),
        "Rewards (reward_funcs)": _first_lines(REWARDS),
        "Tasks (dataset_name)": _first_lines(BUILTIN_TASKS),
    }


def _first_lines(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: (inspect.getdoc(function) or "").partition("\n")[0] for name, function in table.items()}


def _recipe_line(name: str) -> str:
    """The first line of a recipe, if it is a comment."""
    first = (recipes_folder() / f"{name}.yaml").read_text(encoding="utf-8").partition("\n")[0]
    return first.lstrip("# ") if first.startswith("#") else ""
