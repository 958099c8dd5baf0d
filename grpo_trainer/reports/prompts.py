"""The table of the prompts' pass rates on disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

FILE = "prompts.parquet"


class PromptTable(TrainerCallback):
    """Writes ``output_dir/prompts.parquet`` with each checkpoint and at the end: a row per prompt that was drawn.

    Args:
        table: returns column -> values; None if there is nothing to write.
    """

    def __init__(self, table: Callable[[], dict[str, list[Any]] | None]) -> None:
        self._table = table

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes it, on the first process."""
        table = self._table() if state.is_world_process_zero else None
        if table is None:
            return
        from datasets import Dataset

        path = Path(args.output_dir) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f"_{FILE}")
        Dataset.from_dict(table).to_parquet(draft)
        os.replace(draft, path)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Writes it, on the first process."""
        self.on_save(args, state, control)
