"""Signals that ask a run to stop: noted at once, acted upon at the next safe point."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

GRACE = 10.0
"""Seconds in which a repeated signal is the same word again: a scheduler and a launcher may both pass it on."""
EXIT_CODE = 128 + signal.SIGTERM
"""143, the code by which shells and schedulers know a process that SIGTERM ended."""


class SignalNotice:
    """While it is entered, a signal is noted rather than acted upon; one that comes ``grace`` seconds later is fatal.

    It does nothing in a thread other than the main one, which gets no signals.

    Args:
        number: of the signal.
        grace: seconds; None stands for ``GRACE``.
        heard: called when the signal comes for the first time, in the signal's handler.

    Attributes:
        given: whether it came.
    """

    def __init__(
        self, number: signal.Signals, grace: float | None = None, heard: Callable[[], Any] = lambda: None
    ) -> None:
        self.given = False
        self._number, self._grace, self._heard = number, grace, heard
        self._since = 0.0
        self._previous: Any = None

    def __enter__(self) -> SignalNotice:
        self.given = False
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(self._number, self._on_signal)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._previous is not None:
            signal.signal(self._number, self._previous)
            self._previous = None

    def _on_signal(self, number: int, frame: Any) -> None:
        if not self.given:
            self.given, self._since = True, time.monotonic()
            self._heard()
        elif time.monotonic() - self._since >= (GRACE if self._grace is None else self._grace):
            self._end()

    def _end(self) -> None:
        """Does to the process what the signal does by default."""
        if self._number == signal.SIGINT:
            raise KeyboardInterrupt
        signal.signal(self._number, signal.SIG_DFL)
        os.kill(os.getpid(), self._number)


class TerminationNotice(SignalNotice):
    """Notes SIGTERM, the word of a scheduler that wants its machine back.

    A program that has a handler of its own for SIGTERM keeps it.
    """

    def __init__(self) -> None:
        super().__init__(signal.SIGTERM)

    def __enter__(self) -> TerminationNotice:
        self.given = False
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            super().__enter__()
        return self
