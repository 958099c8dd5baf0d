"""Coroutines of reward functions: an event loop in a thread of its own, beside whatever the trainer does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any


class LoopThread:
    """An event loop that runs until it is closed. A context."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._loop: asyncio.AbstractEventLoop
        self._stop: asyncio.Event
        self._thread = threading.Thread(target=lambda: asyncio.run(self._live()), name="rewards", daemon=True)
        self._thread.start()
        self._begun.wait()

    def __enter__(self) -> LoopThread:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def submit(self, work: Callable[[], Coroutine[Any, Any, None]]) -> Future[None]:
        """Lets a coroutine run.

        Args:
            work: makes the coroutine, in the thread.

        Returns:
            Its outcome; also one that would end a process is an outcome only.
        """
        outcome: Future[None] = Future()

        async def settle() -> None:
            try:
                await work()
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)
                if isinstance(error, asyncio.CancelledError):
                    raise

        asyncio.run_coroutine_threadsafe(settle(), self._loop)
        return outcome

    def close(self) -> None:
        """Cancels what is still running, and waits until it has ended. What blocks the loop is waited for."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    async def _live(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._begun.set()
        await self._stop.wait()


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end, also where an event loop is already running (a notebook).

    Args:
        coroutine: it.

    Raises:
        BaseException: what it raises; if this is interrupted, it is cancelled first.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with LoopThread() as loop:  # Ctrl-C: what went on behind the notebook's back would meet the next run
        return loop.submit(lambda: coroutine).result()
