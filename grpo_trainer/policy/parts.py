"""How the rows of a micro-batch are shared out over forward passes: by tokens, whole groups together.

What an update costs, and what it holds in memory, goes with the tokens of a pass, not with its rows. The objective is a
sum over rows, so how they are shared out changes nothing but the order in which numbers are added.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size

from grpo_trainer.types import RolloutBatch

Rows = list[int]
"""Indices into a batch."""


def num_tokens(batch: RolloutBatch, rows: Iterable[int], *, packed: bool = True) -> int:
    """Tokens of one forward pass over some rows.

    Args:
        batch: holds the rows.
        rows: indices into it.
        packed: whether what prompts begin with alike is computed once and nothing is padded (an upper bound, as
            completions may agree as well); otherwise the rectangle.

    Returns:
        The number of tokens.

    Example:
        >>> import torch
        >>> batch = RolloutBatch(
        ...     prompt_ids=(torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4, 5])),
        ...     prompt_of_row=(0, 0, 1),
        ...     lengths=(2, 6, 1),
        ...     completion_ids=torch.zeros(3, 6, dtype=torch.long),
        ...     mask=torch.zeros(3, 6, dtype=torch.bool),
        ...     advantages=torch.zeros(3),
        ... )
        >>> num_tokens(batch, range(3)), num_tokens(batch, range(3), packed=False)
        (14, 30)
    """
    rows = list(rows)
    prompts = [batch.prompt_ids[p] for p in dict.fromkeys(batch.prompt_of_row[row] for row in rows)]
    if not packed:
        longest = max((len(p) for p in prompts), default=0)
        return len(rows) * (longest + max((batch.lengths[row] for row in rows), default=0))
    total = sum(batch.lengths[row] for row in rows)
    before: list[int] = []
    for ids in sorted(p.tolist() for p in prompts):  # neighbours share the most
        total += len(ids) - _agreement(before, ids)
        before = ids
    return total


def share_out(batch: RolloutBatch, max_tokens: int, *, packed: bool = True) -> list[Rows]:
    """The rows of a batch in as few parts as hold them, of about equal size.

    A group stays together, so that its prompt is computed once, unless it alone is too large. A row that is too large
    is a part by itself.

    Args:
        batch: B rows, at least one.
        max_tokens: most tokens of a part, as ``num_tokens`` counts them.
        packed: as for ``num_tokens``.

    Returns:
        The parts, each in ascending order; together all rows.
    """
    units = [piece for group in _groups(batch) for piece in _cut(batch, group, max_tokens, packed)]
    fewest = _fill(batch, units, max_tokens, packed)
    # the least limit that takes as many parts makes them as equal as they can be without changing their order
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_fill(batch, units, middle, packed)) > len(fewest):
            low = middle + 1
        else:
            high = middle
    return [sorted(part) for part in _fill(batch, units, high, packed)]


def halves(batch: RolloutBatch, *, packed: bool = True) -> list[Rows]:
    """Two parts of a batch of at least two rows, of about equal size, for when the whole does not fit.

    Args:
        batch: B rows.
        packed: as for ``num_tokens``.

    Returns:
        The parts.
    """
    rows = list(range(len(batch)))
    return min(
        ([rows[:cut], rows[cut:]] for cut in range(1, len(rows))),
        key=lambda parts: max(num_tokens(batch, part, packed=packed) for part in parts),
    )


def _groups(batch: RolloutBatch) -> list[Rows]:
    """The rows of each prompt, prompts that begin alike next to each other."""
    by_prompt: dict[tuple[int, ...], Rows] = {}
    ids = [tuple(p.tolist()) for p in batch.prompt_ids]
    for row, prompt in enumerate(batch.prompt_of_row):
        by_prompt.setdefault(ids[prompt], []).append(row)
    return [by_prompt[prompt] for prompt in sorted(by_prompt)]


def _cut(batch: RolloutBatch, group: Rows, max_tokens: int, packed: bool) -> list[Rows]:
    """A group, in pieces if it is too large."""
    if num_tokens(batch, group, packed=packed) <= max_tokens:
        return [group]
    return _fill(batch, [[row] for row in group], max_tokens, packed)


def _fill(batch: RolloutBatch, units: Sequence[Rows], max_tokens: int, packed: bool) -> list[Rows]:
    """Units in their order, as many in each part as it holds."""
    parts: list[Rows] = []
    for unit in units:
        if parts and num_tokens(batch, parts[-1] + unit, packed=packed) <= max_tokens:
            parts[-1] = parts[-1] + unit
        else:
            parts.append(list(unit))
    return parts


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


# --- when memory runs out ---------------------------------------------------------------------------------------------

T = TypeVar("T")


def fitting(work: Callable[[], T]) -> T | None:
    """What some work gives, or None if memory ran out.

    Args:
        work: to be done.

    Returns:
        Its result, or None.
    """
    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        if not (isinstance(error, MemoryError) or should_reduce_batch_size(error)):
            raise
        traceback.clear_frames(error.__traceback__)  # they hold the tensors that were too many
    clear_device_cache(garbage_collection=True)
    return None


def split(batch: RolloutBatch) -> list[Rows]:
    """Two parts of a batch that did not fit.

    Args:
        batch: B rows.

    Returns:
        The parts.

    Raises:
        MemoryError: if it is a single row, saying what a user can change.
    """
    if len(batch) > 1:
        return halves(batch)
    raise MemoryError(
        f"memory ran out over a single completion of {batch.lengths[0]} tokens after a prompt of "
        f"{len(batch.prompt_ids[batch.prompt_of_row[0]])}, which cannot be split. Lower max_completion_length or "
        "max_prompt_length, set gradient_checkpointing=True, or train an adapter (peft_config)"
    )
