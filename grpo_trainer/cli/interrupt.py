"""Ctrl-C that loses nothing: the first lets the step finish and saves a checkpoint, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from transformers.trainer_callback import TrainerCallback


class GracefulStop(TrainerCallback):
    """While it is entered, the first SIGINT asks the trainer to save and stop after the current step.

    It does nothing in a thread other than the main one, which gets no signals.

    Args:
        say: prints a line.

    Attributes:
        requested: whether a SIGINT came.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = False
        self._say = say
        self._previous: Any = None

    def __enter__(self) -> GracefulStop:
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._say("Ctrl-C: finishing this step and saving a checkpoint. Press it again to stop at once.")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Asks for a checkpoint and the end of training, if a SIGINT came."""
        if self.requested:
            control.should_save = control.should_training_stop = True
        return control
