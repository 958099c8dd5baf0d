"""A line of progress while a long rollout is drawn."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from tqdm.auto import tqdm

from grpo_trainer.generation.base import Observer

DELAY = 10.0
"""Seconds that a rollout takes before the line appears."""


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


@contextlib.contextmanager
def rollout_progress(total: int) -> Iterator[Observer]:
    """A line that appears if the rollout is not drawn within ``DELAY`` seconds, and goes when it is.

    Args:
        total: completions of the rollout on this process.

    Yields:
        What an engine tells of them.
    """
    with tqdm(total=total, desc="rollout", unit="completion", leave=False, delay=DELAY, mininterval=1.0) as bar:
        yield _Line(bar)
