"""Ctrl-C that loses nothing: the first lets the step finish and saves a checkpoint, a later one stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from grpo_trainer.preemption import EXIT_CODE, GRACE, SignalNotice

INTERRUPTED, TERMINATED = 130, EXIT_CODE
"""Exit codes after Ctrl-C and after SIGTERM, with a checkpoint saved."""


def train_until_stopped(trainer: Any, checkpoint: str | None, progress: Any, say: Callable[[str], None]) -> int:
    """Trains. Ctrl-C leaves the run by the way that SIGTERM takes, and SIGTERM as ever.

    With several processes the terminal and the launcher both pass Ctrl-C on, so there one that comes soon is the same.

    Args:
        trainer: a ``GRPOTrainer``.
        checkpoint: to go on from; None starts anew.
        progress: a context manager that is entered meanwhile.
        say: prints a line.

    Returns:
        0 when the run came to its end; 130 or 143 if it was stopped and a checkpoint saved.

    Raises:
        KeyboardInterrupt: at a later Ctrl-C.
        SystemExit: if something else leaves the program.
    """
    alone = trainer.args.world_size == 1
    again = "Press it again" if alone else f"Press it again after {GRACE:.0f} seconds"

    def heard() -> None:
        trainer.stop_after_step(INTERRUPTED)
        say(f"Ctrl-C: finishing this step and saving a checkpoint. {again} to stop at once.")

    with progress, SignalNotice(signal.SIGINT, 0.0 if alone else GRACE, heard):
        try:
            trainer.train(resume_from_checkpoint=checkpoint)
        except SystemExit as end:
            if end.code not in (INTERRUPTED, TERMINATED):
                raise
            return int(end.code)
    return 0
