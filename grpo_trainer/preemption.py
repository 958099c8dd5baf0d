"""SIGTERM, the word of a scheduler that wants its machine back: noted at once, acted upon at the next safe point."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

GRACE = 10.0
"""Seconds in which a repeated SIGTERM is the same word again: a scheduler and a launcher may both pass it on."""
EXIT_CODE = 128 + signal.SIGTERM
"""143, the code by which shells and schedulers know a process that SIGTERM ended."""


class TerminationNotice:
    """While it is entered, SIGTERM is noted rather than fatal; one that comes ``GRACE`` seconds later is fatal again.

    It does nothing in a thread other than the main one, which gets no signals, or where the program has a handler of
    its own for SIGTERM.

    Attributes:
        given: whether a SIGTERM came.
    """

    def __init__(self) -> None:
        self.given = False
        self._since = 0.0
        self._installed = False

    def __enter__(self) -> TerminationNotice:
        self.given = False
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_signal)
            self._installed = True
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._installed:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._installed = False

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.given and time.monotonic() - self._since >= GRACE:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        if not self.given:
            self._since = time.monotonic()
        self.given = True
