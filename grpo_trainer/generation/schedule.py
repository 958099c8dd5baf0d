"""Which rows are in flight together: numbers only, no tensors.

Rows are admitted group by group, long prompts first, so that rows in flight are of similar length and little of the
cache is padding. A row is admitted only if the cache has room for all rows in flight at their greatest length, so
nothing that has begun is ever thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

PREFILL_TOKENS = 4096
"""Most tokens of one prefill, padding included; a longer prompt goes alone."""

CHEAP_PADDING = 64
"""Tokens of padding that cost less than another pass, however few the prompts have."""

_REFILL_SHARE = 8
"""Places are refilled when this part of them is free, so that prompts are not prefilled one by one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of one prompt that begin together.

    Attributes:
        prompt: its index.
        completions: their indices among the prompt's completions.
    """

    prompt: int
    completions: range


class Schedule:
    """Says which rows begin next.

    Args:
        lengths: tokens of each of P prompts.
        num_samples: completions of each.
        max_new_tokens: most tokens of a completion.
        max_cache_tokens: most tokens that the cache may hold.

    Raises:
        ValueError: if a single row may need more.
    """

    def __init__(
        self, lengths: Sequence[int], num_samples: Sequence[int], max_new_tokens: int, max_cache_tokens: int
    ) -> None:
        self._lengths, self._new, self._room = lengths, max_new_tokens, max_cache_tokens
        order = sorted((p for p, n in enumerate(num_samples) if n), key=lambda p: -lengths[p])
        longest = max((lengths[p] for p in order), default=0) + max_new_tokens
        if longest > max_cache_tokens:
            raise ValueError(
                f"max_cache_tokens={max_cache_tokens} has no room for one completion: the longest prompt has "
                f"{longest - max_new_tokens} tokens, max_completion_length is {max_new_tokens}; set it to at least "
                f"{longest}, or to None"
            )
        self._queue = [Batch(p, range(num_samples[p])) for p in order]

    @property
    def waiting(self) -> int:
        """Rows that have not begun."""
        return sum(len(batch.completions) for batch in self._queue)

    def next_rows(self, in_flight: int, longest_prompt: int) -> list[Batch]:
        """The rows that begin now; they are taken from the queue.

        Args:
            in_flight: rows that are being decoded.
            longest_prompt: tokens of the longest prompt among them, 0 if there are none.

        Returns:
            Batches, longest prompt first; none if it is better to wait for more rows to end.
        """
        if not self._queue:
            return []
        width = max(longest_prompt, self._lengths[self._queue[0].prompt]) + self._new  # the queue is sorted
        places = self._room // width
        free = places - in_flight
        enough = max(len(self._queue[0].completions), places // _REFILL_SHARE)
        if in_flight and free < min(enough, places, self.waiting):
            return []
        taken: list[Batch] = []
        while self._queue and free > 0:
            head = self._queue[0]
            rows = head.completions
            if len(rows) > free:  # a group is torn apart only if it could never fit whole
                if len(rows) <= places:
                    break
                self._queue[0] = Batch(head.prompt, rows[free:])
                rows = rows[:free]
            else:
                self._queue.pop(0)
            taken.append(Batch(head.prompt, rows))
            free -= len(rows)
        return taken


def prefill_batches(batches: Sequence[Batch], lengths: Sequence[int], shared: int = 0) -> list[list[Batch]]:
    """Cuts rows that begin together into prefills, such that padding is at most a quarter of one, or cheap.

    Args:
        batches: longest prompt first.
        lengths: tokens of each prompt.
        shared: of these, those that are not computed, since all prompts begin with them.

    Returns:
        Lists of batches.

    Example:
        >>> cut = prefill_batches([Batch(0, range(4)), Batch(2, range(4)), Batch(1, range(4))], [400, 50, 350])
        >>> [[batch.prompt for batch in part] for part in cut]
        [[0, 2], [1]]
    """
    parts: list[list[Batch]] = []
    real = 0
    for batch in batches:
        length = lengths[batch.prompt]
        if parts:
            rows = len(parts[-1]) + 1
            padded = lengths[parts[-1][0].prompt] * rows
            computed = padded - shared * rows
            if padded <= PREFILL_TOKENS and padded - (real + length) <= max(CHEAP_PADDING, computed // 4):
                parts[-1].append(batch)
                real += length
                continue
        parts.append([batch])
        real = length
    return parts
