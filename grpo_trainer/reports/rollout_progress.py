"""A line of progress while a long rollout is drawn."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from tqdm.auto import tqdm

from grpo_trainer.generation.base import Observer
from grpo_trainer.reports.notebook import in_notebook

DELAY = 10.0
"""Seconds that a rollout takes before the line appears."""
SPOKEN_EVERY = 30.0
"""Seconds from one line to the next where lines are printed one below the other."""


class _Line(Observer):
    """Counts completions, and says how many tokens a second there were."""

    def __init__(self, bar: tqdm) -> None:
        self._bar, self._tokens, self._start = bar, 0, time.perf_counter()

    def tick(self, tokens: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.perf_counter() - self._start, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update(0)

    def finished(self, prompt: int, completion: int, ids: tuple[int, ...], ended: bool) -> None:
        self._bar.update()


class Spoken(Observer):
    """Says now and then how far a rollout is, where another bar is drawn already.

    Args:
        total: completions of the rollout on this process.
        say: takes a line.
    """

    def __init__(self, total: int, say: Callable[[str], None]) -> None:
        self._total, self._say = total, say
        self._done, self._tokens, self._start = 0, 0, time.perf_counter()
        self._next = self._start + SPOKEN_EVERY

    def tick(self, tokens: int) -> None:
        """Counts, and says a line when it is time.

        Args:
            tokens: drawn in this step.
        """
        self._tokens += tokens
        now = time.perf_counter()
        if now >= self._next:
            self._next = now + SPOKEN_EVERY
            rate = self._tokens / (now - self._start)
            self._say(f"rollout: {self._done}/{self._total} completions, {rate:.0f} tokens/s")

    def finished(self, prompt: int, completion: int, ids: tuple[int, ...], ended: bool) -> None:
        """Counts.

        Args:
            prompt: index of its prompt.
            completion: index among the prompt's completions.
            ids: its tokens.
            ended: whether it ended by itself.
        """
        self._done += 1


@contextlib.contextmanager
def rollout_progress(total: int) -> Iterator[Observer]:
    """A line that appears if the rollout is not drawn within ``DELAY`` seconds, and goes when it is.

    In a file or pipe, where each state of it stays, it is written every ``SPOKEN_EVERY`` seconds.

    Args:
        total: completions of the rollout on this process.

    Yields:
        What an engine tells of them.
    """
    pause = 1.0 if sys.stderr.isatty() or in_notebook() else SPOKEN_EVERY
    with tqdm(total=total, desc="rollout", unit="completion", leave=False, delay=DELAY, mininterval=pause) as bar:
        yield _Line(bar)
