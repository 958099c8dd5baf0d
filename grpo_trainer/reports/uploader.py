"""Completions on the hub: the files of a run, in a dataset repository."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers.trainer_callback import TrainerCallback

from grpo_trainer.reports.completions import FILE_PREFIX
from grpo_trainer.reports.guard import Guard

MINUTES = 2
"""From one upload to the next."""


class CompletionsUploader(TrainerCallback):
    """Uploads new files of completions every two minutes and at the end of training, on the main process only.

    Args:
        folder: where they are written.
        repo_id: the dataset repository; made if it is not there.
    """

    def __init__(self, folder: str | os.PathLike[str], repo_id: str) -> None:
        self.folder, self.repo_id = Path(folder), repo_id
        self._scheduler: Any = None
        self._guard = Guard(f"the completions are not uploaded to {repo_id}; they are in {self.folder}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begins to upload in the background."""
        self._stop()  # of a run that was broken off in the same notebook
        if not state.is_world_process_zero:
            return
        from huggingface_hub import CommitScheduler

        with self._guard:
            self._scheduler = CommitScheduler(
                repo_id=self.repo_id,
                repo_type="dataset",
                folder_path=self.folder,
                every=MINUTES,
                private=args.hub_private_repo,
                token=args.hub_token,
                allow_patterns=f"{FILE_PREFIX}*.parquet",
            )

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Uploads what is left, and waits for it."""
        if self._scheduler is not None:
            with self._guard:
                self._scheduler.trigger().result()
        self._stop()

    def _stop(self) -> None:
        if self._scheduler is not None:
            self._scheduler.stop()
            self._scheduler = None
