"""``list``: what can be asked for by name."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import Any

from grpo_trainer.cli.shipped import find_recipe, first_comment, launcher_files, recipe_names


def print_lists() -> int:
    """Prints recipes, launcher files, losses, rewards and tasks, each with one line about it.

    Returns:
        0.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console()
    for title, rows in _sections().items():
        console.print(Text(title, style="cyan"), soft_wrap=True)
        for line in laid_out(rows, console.width):
            console.print(Text(line), soft_wrap=True)
        console.print()
    return 0


def laid_out(rows: Mapping[str, str], width: int) -> list[str]:
    """Names and the lines about them, beside each other, or under each other where a name takes half of the width.

    Args:
        rows: name -> line about it.
        width: columns of the terminal.

    Returns:
        Lines; only a name or a single word can be longer than the width.

    Example:
        >>> laid_out({"sums": "Adds two numbers.", "gcd": "A divisor."}, 20)
        ['  sums  Adds two', '        numbers.', '  gcd   A divisor.']
        >>> laid_out({"a/very/long/name": "A divisor."}, 20)
        ['  a/very/long/name', '      A divisor.']
    """
    longest = max(map(len, rows), default=0)
    beside = longest + 4 <= width // 2
    lines = []
    for name, about in rows.items():
        head = f"  {name.ljust(longest)}  " if beside else " " * 6
        wrapped = textwrap.wrap(
            about,
            max(width, 20),
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_on_hyphens=False,
            break_long_words=False,
        )
        lines += [*([] if beside else [f"  {name}"]), *(wrapped or [head.rstrip()] * beside)]
    return lines


def _sections() -> dict[str, dict[str, str]]:
    from grpo_trainer.functional.advantages import ADVANTAGES, MULTI_REWARD_ADVANTAGES
    from grpo_trainer.functional.aggregation import AGGREGATIONS
    from grpo_trainer.functional.correction import CORRECTIONS
    from grpo_trainer.functional.kl import KL_ESTIMATORS
    from grpo_trainer.functional.losses import POLICY_LOSSES
    from grpo_trainer.functional.ratios import RATIOS
    from grpo_trainer.objective import LOSS_TYPES
    from grpo_trainer.rewards import REWARDS
    from grpo_trainer.tasks import BUILTIN_TASKS

    return {
        "Recipes (grpo-trainer train NAME)": {name: first_comment(find_recipe(name)) for name in recipe_names()},
        "Files for the launcher (accelerate launch --config_file FILE)": {
            str(path): first_comment(path) for path in launcher_files()
        },
        "Losses (loss_type)": {n: f"{loss.policy_loss}, {loss.aggregation}" for n, loss in LOSS_TYPES.items()},
        "Policy losses (loss_type, with token_mean)": _first_lines(POLICY_LOSSES),
        "Ratios (importance_sampling_level)": _first_lines(RATIOS),
        "Advantages (advantage_estimator)": _first_lines(ADVANTAGES),
        "Advantages of several rewards (multi_objective_aggregation)": _first_lines(MULTI_REWARD_ADVANTAGES),
        "KL estimators (kl_estimator)": _first_lines(KL_ESTIMATORS),
        "Aggregations (loss_aggregation)": _first_lines(AGGREGATIONS),
        "Corrections (vllm_importance_sampling_mode)": _first_lines(CORRECTIONS),
        "Rewards (reward_funcs)": _first_lines(REWARDS),
        "Tasks (dataset_name)": _first_lines(BUILTIN_TASKS),
    }


def _first_lines(table: Mapping[str, Any]) -> dict[str, str]:
    return {name: (inspect.getdoc(function) or "").partition("\n")[0] for name, function in table.items()}
