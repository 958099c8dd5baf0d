"""Rows as one flat stream: each prompt once, followed by its completions, without padding.

Two prompts with two completions each; ``a``, ``b`` … are completion tokens, the last one of each in brackets::

    row 0  P0 P1 P2  a0 a1 [a2]         stream     P0 P1 P2 a0 a1 b0 R0 R1 c0 c1 c2
    row 1  P0 P1 P2  b0 [b1]       ->   position    0  1  2  3  4  3  0  1  2  3  4
    row 2  R0 R1  c0 c1 c2 [c3]         predicts         a0 a1 a2 b1    c0 c1 c2 c3
    row 3  R0 R1  [d0]                                   b0             d0

A completion's last token predicts nothing that is scored, so it need not be computed. The first one is predicted by the
last token of the prompt, which all completions of the group share.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from grpo_trainer.types import RolloutBatch

VERIFY_PACKING = {
    "first_step": "once, before the first micro-batch is trained on",
    "never": "not at all",
    "always": "before every micro-batch, which costs time",
}
"""When packed rows are compared with padded ones, by name."""


class Group(NamedTuple):
    """A prompt and its completions in the stream.

    Attributes:
        start: position in the stream of the prompt's first token.
        prompt: number of prompt tokens.
        completions: for each completion its number of tokens in the stream; they lie one after the other.
    """

    start: int
    prompt: int
    completions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A micro-batch as one stream of L tokens, of which M positions predict the N tokens that are scored.

    Attributes:
        input_ids: (1, L) int64.
        position_ids: (1, L) int64, each row's own count from 0.
        groups: where everything lies, on the host.
        predictors: (M,) int64, ascending: the positions of the stream whose hidden state is needed.
        places: (N,) int64, ascending: for each scored token the one of the M that predicts it.
        targets: (N,) int64, the scored tokens.
        cells: (N,) int64, where each stands in the flattened (B, T) of the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    groups: tuple[Group, ...]
    predictors: Tensor
    places: Tensor
    targets: Tensor
    cells: Tensor

    def unpack(self, values: Tensor, shape: Sequence[int]) -> Tensor:
        """Values of the scored tokens, back in their rows.

        Args:
            values: (N,).
            shape: B and T.

        Returns:
            (B, T), 0 where no token is scored.
        """
        rows, width = shape
        return values.new_zeros(rows * width).index_copy(0, self.cells, values).view(rows, width)


def pack(batch: RolloutBatch, *, keep_last: bool = False) -> Packed:
    """The stream of a batch, rows of one prompt together, in the order in which the prompts first come.

    Args:
        batch: B rows. A prompt none of whose completions has a token is left out; if that leaves nothing, the first
            prompt stays, so that there is something to compute.
        keep_last: also put each completion's last token into the stream.

    Returns:
        The stream, on the batch's device. Its indices are made on the host and moved in one piece.

    Raises:
        ValueError: if the batch has no rows.

    Example:
        >>> batch = RolloutBatch(
        ...     prompt_ids=(torch.tensor([7, 8, 9]),),
        ...     prompt_of_row=(0, 0),
        ...     lengths=(3, 2),
        ...     completion_ids=torch.tensor([[10, 11, 12], [20, 21, 0]]),
        ...     mask=torch.tensor([[True, True, True], [True, True, False]]),
        ...     advantages=torch.zeros(2),
        ... )
        >>> packed = pack(batch)
        >>> packed.input_ids.tolist(), packed.position_ids.tolist()
        ([[7, 8, 9, 10, 11, 20]], [[0, 1, 2, 3, 4, 3]])
        >>> packed.predictors[packed.places].tolist(), packed.targets.tolist()
        ([2, 2, 3, 4, 5], [10, 20, 11, 12, 21])
    """
    if not len(batch):
        raise ValueError("a micro-batch without rows cannot be scored: it takes at least one completion")
    indices, groups = _plan(batch, keep_last)
    device = batch.completion_ids.device
    flat = torch.tensor([index for part in indices for index in part], dtype=torch.long)
    if device.type == "cuda":  # from pinned memory the copy waits for nothing
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([len(part) for part in indices])
    source, position, predictors, places, cells = parts
    completions = batch.completion_ids.flatten()
    return Packed(
        input_ids=torch.cat([*batch.prompt_ids, completions])[source][None],
        position_ids=position[None],
        groups=groups,
        predictors=predictors,
        places=places,
        targets=completions[cells],
        cells=cells,
    )


class _Indices(NamedTuple):
    """Host numbers: of each stream token its place among all prompts and completions, and its position; the rest as in
    ``Packed``.
    """

    source: list[int]
    position: list[int]
    predictors: list[int]
    places: list[int]
    cells: list[int]


def _plan(batch: RolloutBatch, keep_last: bool) -> tuple[_Indices, tuple[Group, ...]]:
    """Where everything comes from and goes."""
    width = batch.completion_ids.shape[1]
    sizes = [len(ids) for ids in batch.prompt_ids]
    offsets = list(itertools.accumulate(sizes, initial=0))  # all prompts, then the completions, flattened
    source: list[int] = []
    position: list[int] = []
    groups: list[Group] = []
    predicted: list[tuple[int, int]] = []  # of each scored token the stream's place before it, and its cell
    for prompt, rows in _rows_by_prompt(batch).items():
        start, size = len(source), sizes[prompt]
        source += range(offsets[prompt], offsets[prompt] + size)
        position += range(size)
        kept = []
        for row in rows:
            first, cell, tokens = len(source), row * width, batch.lengths[row]
            kept.append(tokens if keep_last else tokens - 1)
            source += range(offsets[-1] + cell, offsets[-1] + cell + kept[-1])
            position += range(size, size + kept[-1])
            predicted.append((start + size - 1, cell))
            predicted += zip(range(first, first + tokens - 1), range(cell + 1, cell + tokens), strict=True)
        groups.append(Group(start, size, tuple(kept)))
    predicted.sort()
    place = {at: i for i, at in enumerate(dict.fromkeys(at for at, _ in predicted))}
    return (
        _Indices(source, position, list(place), [place[at] for at, _ in predicted], [cell for _, cell in predicted]),
        tuple(groups),
    )


def _rows_by_prompt(batch: RolloutBatch) -> dict[int, list[int]]:
    """The rows that have a token, by prompt; if there are none, one prompt without rows."""
    rows: dict[int, list[int]] = {}
    for row, prompt in enumerate(batch.prompt_of_row):
        if batch.lengths[row]:
            rows.setdefault(prompt, []).append(row)
    return rows or {batch.prompt_of_row[0]: []}
