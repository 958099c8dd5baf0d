"""Completions in a tracking service: a table per log of training, in Weights & Biases and in Trackio.

Both services are given the figures by transformers' own callbacks, one row per log, with the optimizer step under
``train/global_step``. The table is a row of its own right after, with the same step. It names no step of the service's
own: W&B drops a row whose step is lower than one that it has seen, and neither counts optimizer steps.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.completions import CompletionsWriter, is_training_log, plain_rows
from grpo_trainer.reports.guard import Guard
from grpo_trainer.reports.tables import unique_prompts

TABLE_SERVICES = ("wandb", "trackio")
"""Those that take tables, by their names in ``report_to``; others have the figures only."""

STEP = "train/global_step"


class CompletionsTracker(TrainerCallback):
    """Logs the completions of the latest step whenever figures of training are logged, on the main process only.

    Args:
        source: has the completions.
        unique: log only the first completion of each prompt.
    """

    def __init__(self, source: CompletionsWriter, *, unique: bool = False) -> None:
        self.source, self.unique = source, unique
        self._guards = {name: Guard(f"the completions are not logged to {name}") for name in TABLE_SERVICES}

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        """Logs what no log before has shown; transformers' callbacks come first and have logged the figures."""
        services = [name for name in TABLE_SERVICES if name in args.report_to]
        if not services or not state.is_world_process_zero or not is_training_log(logs or {}):
            return
        for name in services:
            with self._guards[name]:
                table = self.source.latest(state)
                if table is None:
                    return
                columns, rows = plain_rows(unique_prompts(table) if self.unique else table)
                service: Any = importlib.import_module(name)
                service.log({"completions": service.Table(columns=columns, data=rows), STEP: state.global_step})
