"""Rows as one flat stream without padding, in which whatever rows begin with alike stands once.

The rows of a micro-batch are sequences, a prompt and its completion, and together a tree: they share what they begin
with and part where they first differ. Completions of one prompt share all of it, and go on sharing while they agree;
prompts share a system prompt or the examples before the question. A node of the tree is a segment, a run of tokens that
the same rows have; the stream is the segments, each followed by those that continue it.

Two prompts with two completions each, in letters, a row's last token in brackets::

    row 0  P0 P1 P2  a0 a1 [a2]         stream     P0 P1 P2 a0 a1 b1 R0 R1 c0 c1 c2
    row 1  P0 P1 P2  a0 b1 [b2]    ->   position    0  1  2  3  4  4  0  1  2  3  4
    row 2  R0 R1  c0 c1 c2 [c3]         predicts         a0 a1 a2 b2    c0 c1 c2 c3
    row 3  R0 R1  [d0]                                   a0 b1          d0

    segments   P0 P1 P2 a0  ─┬─  a1            R0 R1  ───  c0 c1 c2
                             └─  b1

A completion's last token predicts nothing that is scored, so it need not be computed.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Sequence
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


class Segment(NamedTuple):
    """Tokens that the same rows have, one after the other in the stream.

    Attributes:
        start: position in the stream of the first token.
        tokens: how many.
        depth: position of the first token in its rows.
        parent: index of the segment that they continue; -1 where the rows begin.
    """

    start: int
    tokens: int
    depth: int
    parent: int

    @property
    def end(self) -> int:
        """One past the last token in the stream."""
        return self.start + self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A micro-batch as one stream of L tokens, of which M positions predict the N tokens that are scored.

    Attributes:
        input_ids: (1, L) int64.
        position_ids: (1, L) int64, each row's own count from 0.
        segments: where everything lies, on the host; a segment comes after its parent.
        predictors: (M,) int64, ascending: the positions of the stream whose hidden state is needed.
        places: (N,) int64, ascending: for each scored token the one of the M that predicts it.
        targets: (N,) int64, the scored tokens.
        rows: (L,) int64, how many rows a token stands for; 0 for a filler.
        cells: (N,) int64, where each stands in the flattened (B, T) of the batch.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: tuple[Segment, ...]
    predictors: Tensor
    places: Tensor
    targets: Tensor
    cells: Tensor
    rows: Tensor

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


def pack(batch: RolloutBatch, *, keep_last: bool = False, multiple: int = 1) -> Packed:
    """The stream of a batch, in the order in which the rows first come.

    Args:
        batch: B rows. A row without a token is left out; if that leaves nothing, the first prompt stays, so that there
            is something to compute.
        keep_last: also put each completion's last token into the stream, and the prompt of a row without a token.
        multiple: the stream is filled up to a multiple of so many tokens, with a row that nobody reads.

    Returns:
        The stream, on the batch's device. It is laid out on the host and moved in one piece.

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
    columns, segments = _lay_out(batch, keep_last)
    missing = -len(columns.ids) % multiple
    if missing:
        segments = (*segments, Segment(len(columns.ids), missing, 0, -1))
        columns.ids.extend([0] * missing)
        columns.rows.extend([0] * missing)
        columns.positions.extend([0] * missing)  # any that every model has
    flat = torch.tensor([number for column in columns for number in column], dtype=torch.long)
    if batch.device.type == "cuda":  # from pinned memory the copy waits for nothing
        flat = flat.pin_memory()
    parts = flat.to(batch.device, non_blocking=True).split([len(column) for column in columns])
    ids, positions, predictors, places, targets, cells, rows = parts
    return Packed(
        input_ids=ids[None],
        position_ids=positions[None],
        segments=segments,
        predictors=predictors,
        places=places,
        targets=targets,
        cells=cells,
        rows=rows,
    )


class _Columns(NamedTuple):
    """Host numbers, as in ``Packed``."""

    ids: list[int]
    positions: list[int]
    predictors: list[int]
    places: list[int]
    targets: list[int]
    cells: list[int]
    rows: list[int]


def _lay_out(batch: RolloutBatch, keep_last: bool) -> tuple[_Columns, tuple[Segment, ...]]:
    """Where everything comes from and goes."""
    prompts = [ids.tolist() for ids in batch.prompt_ids]
    answers = [row[:n] for row, n in zip(batch.completion_ids.tolist(), batch.lengths, strict=True)]
    rows = [row for row, n in enumerate(batch.lengths) if n or keep_last]
    sequences = [prompts[batch.prompt_of_row[row]] + answers[row][: None if keep_last else -1] for row in rows]
    ids, positions, segments, paths = _tree(sequences or [prompts[batch.prompt_of_row[0]]])
    scored: list[tuple[int, int, int]] = []  # of each token the place in the stream before it, its cell, itself
    for row, path in zip(rows, paths, strict=False):
        before = len(prompts[batch.prompt_of_row[row]]) - 1
        cell = row * batch.completion_ids.shape[1]
        scored += zip(path[before:], range(cell, cell + len(answers[row])), answers[row], strict=False)
    scored.sort()
    place = {at: i for i, at in enumerate(dict.fromkeys(at for at, _, _ in scored))}
    through = collections.Counter(itertools.chain.from_iterable(paths))
    columns = _Columns(
        ids,
        positions,
        list(place),
        [place[at] for at, _, _ in scored],
        [token for _, _, token in scored],
        [cell for _, cell, _ in scored],
        [through[place] for place in range(len(ids))],
    )
    return columns, segments


def _tree(sequences: Sequence[list[int]]) -> tuple[list[int], list[int], tuple[Segment, ...], list[list[int]]]:
    """The tree of some sequences: the ids and positions of its stream, its segments, the places of each sequence.

    >>> ids, positions, segments, paths = _tree([[5, 6, 7], [5, 6, 8, 9], [5, 6]])
    >>> ids, positions, paths
    ([5, 6, 7, 8, 9], [0, 1, 2, 2, 3], [[0, 1, 2], [0, 1, 3, 4], [0, 1]])
    >>> [tuple(segment) for segment in segments]
    [(0, 2, 0, -1), (2, 1, 2, 0), (3, 2, 2, 0)]
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    paths: list[list[int]] = [[] for _ in sequences]
    waiting = [(branch, 0, -1) for branch in reversed(_branches(sequences, range(len(sequences)), 0))]
    while waiting:
        members, depth, parent = waiting.pop()
        first = sequences[members[0]]
        end = len(first)
        for member in members[1:]:
            end = _agree(first, sequences[member], depth, end)
        here, segment = len(segments), Segment(len(ids), end - depth, depth, parent)
        segments.append(segment)
        ids += first[depth:end]
        positions += range(depth, end)
        for member in members:
            paths[member] += range(segment.start, segment.end)
        waiting += [(branch, end, here) for branch in reversed(_branches(sequences, members, end))]
    return ids, positions, tuple(segments), paths


def _branches(sequences: Sequence[list[int]], members: Iterable[int], depth: int) -> list[list[int]]:
    """Those of some sequences that go on at a depth, together where they have the same token there."""
    branches: dict[int, list[int]] = {}
    for member in members:
        if len(sequences[member]) > depth:
            branches.setdefault(sequences[member][depth], []).append(member)
    return list(branches.values())


def _agree(a: list[int], b: list[int], start: int, end: int) -> int:
    """Up to where, and at most to ``end``, two sequences that agree before ``start`` agree."""
    end = min(end, len(b))
    if a[start:end] == b[start:end]:
        return end
    return next(i for i in range(start, end) if a[i] != b[i])
