"""A notebook as a place to write to: output that is replaced where it stands, and the end of a cell."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook.

    Returns:
        False also in IPython's shell in a terminal.
    """
    ipython = sys.modules.get("IPython")  # a kernel has imported it
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class Output:
    """A place in the output of a cell, which shows one thing at a time."""

    def __init__(self) -> None:
        self._handle: Any = None

    def show(self, content: bytes | str, text: str) -> None:
        """Shows something in place of what was shown before.

        Args:
            content: HTML, or a picture as PNG.
            text: the same in words, for who cannot see it.
        """
        from IPython.display import display

        kind = "image/png" if isinstance(content, bytes) else "text/html"
        bundle = {kind: content, "text/plain": text}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def at_end_of_cell(function: Callable[[], None]) -> None:
    """Calls a function once, when the cell that is running has ended, was interrupted or has failed.

    Args:
        function: what to call; does nothing where there is no cell.
    """
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return

    def once(*_: Any) -> None:
        shell.events.unregister("post_run_cell", once)
        function()

    shell.events.register("post_run_cell", once)
