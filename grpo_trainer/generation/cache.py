"""Keys and values of rows that come and go.

All rows end in the same column, whatever their length, so one new column serves every row and what a window or a mask
looks at is counted from the right::

    buffer    0 1 2 3 4 5 6 7 8 9 . .        rows 0-2 in flight, next token goes to column 10
    row 0     . . a a a a a a a a            begin = 2, end = 10, width = 8
    row 1     . . 0 0 0 b b b b b            0: masked by whoever knows the lengths
    row 2     . . 0 c c c c c c c
    (free)    . . . . . . . . . .

A row that leaves is overwritten by the last one; when the longest leaves, ``begin`` moves right; a row that comes is
laid against the right edge. Nothing else is copied but when a buffer is full, and then in proportion to what is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

_MIN_ROOM = 32
"""Least columns that a buffer which had to grow has to spare."""


class RowLayer(CacheLayerMixin):
    """One layer's keys and values, each a buffer (rows, heads, columns, head size).

    Args:
        window: tokens that the layer attends to, the new one included; None for all. Of a window of w, w - 1 columns
            are kept, as transformers' own sliding layer does.
        dtype: that keys and values are stored in; None keeps theirs.
    """

    def __init__(self, window: int | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.width = 0  # columns that the rows span, counted as if none was dropped
        self._kept = None if window is None else window - 1
        self._dtype = dtype
        self._buffers: list[Tensor] = []
        self._rows = self._begin = self._end = 0

    # -- what a model asks for -----------------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing for states (B, H, T, D): the buffers are made when rows are added."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Stores the new columns of all rows.

        Args:
            key_states: (B, H, T, D): rows in flight, heads, new tokens, head size.
            value_states: the same.
            *args: unused.
            **kwargs: unused.

        Returns:
            Keys and values that the new tokens attend to, views of the buffers.
        """
        new = key_states.shape[2]
        if self._end + new > self._buffers[0].shape[2]:
            self._move(self._rows, self._end - self._begin, room=new)
        for buffer, states in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[: self._rows, :, self._end : self._end + new] = states
        self._end += new
        self.width += new
        keys, values = (buffer[: self._rows, :, self._begin : self._end] for buffer in self._buffers)
        if self._kept is not None:
            self._begin = max(self._begin, self._end - self._kept)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that q new tokens attend to, and the number of columns dropped before them."""
        return self._end - self._begin + query_length, self.width - (self._end - self._begin)

    def get_seq_length(self) -> int:
        """The number of columns, dropped ones included."""
        return self.width

    def get_max_length(self) -> int:
        """No bound."""
        return -1

    # -- rows come and go ----------------------------------------------------------------------------------------------

    def add(self, keys: Tensor, values: Tensor, source: Tensor, width: int) -> None:
        """Adds rows behind those there are.

        Args:
            keys: (P, H, T, D), each prompt ending in the last column.
            values: the same.
            source: (B,) for each new row which of the P it begins with.
            width: columns that the longest new row needs, those included that a window has dropped.
        """
        first, rows, columns = self._rows, self._rows + len(source), min(keys.shape[2], width)
        if not self._buffers:
            self._buffers = [self._empty(keys), self._empty(values)]
        span = max(self._end - self._begin, columns)
        if rows > self._buffers[0].shape[0] or span > self._end:
            self._move(rows, span, room=0)
        begin, start = self._end - span, self._end - columns
        for buffer, states in zip(self._buffers, (keys, values), strict=True):
            buffer[:first, :, begin : self._begin] = 0  # masked, but garbage may be NaN, and 0 times NaN is NaN
            buffer[first:rows, :, begin:start] = 0
            buffer[first:rows, :, start : self._end] = states[source.to(states.device), :, -columns:]
        self._rows, self._begin, self.width = rows, begin, max(self.width, width)

    def keep(self, targets: Tensor, sources: Tensor, rows: int, width: int) -> None:
        """Overwrites some rows by others, then keeps the first rows and the last columns.

        Args:
            targets: (B,) rows to overwrite.
            sources: (B,) rows to copy, as many, none of them a target.
            rows: to keep.
            width: columns to keep, at most those that there are.
        """
        for buffer in self._buffers if len(targets) else ():
            live = buffer[:, :, self._begin : self._end]
            live[targets.to(live.device)] = live[sources.to(live.device)]
        self._rows, self.width = rows, width
        self._begin = max(self._begin, self._end - width)

    def clear(self) -> None:
        """Removes all rows and gives their memory back."""
        self._buffers = []
        self._rows = self._begin = self._end = self.width = 0

    @property
    def nbytes(self) -> int:
        """Bytes of both buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers)

    def _move(self, rows: int, span: int, room: int) -> None:
        """Into new buffers: what is there ends at column ``span``, with space for more columns to the right."""
        columns, old = span + max(room, _MIN_ROOM, span // 4), self._end - self._begin
        for i, buffer in enumerate(self._buffers):  # one by one: never both old ones beside both new ones
            moved = buffer.new_empty((rows, buffer.shape[1], columns, buffer.shape[3]))
            moved[: self._rows, :, span - old : span] = buffer[: self._rows, :, self._begin : self._end]
            self._buffers[i] = moved
        self._begin, self._end = span - old, span

    def _empty(self, states: Tensor) -> Tensor:
        dtype = self._dtype if self._dtype is not None and states.dtype == torch.float32 else states.dtype
        return states.new_empty((0, states.shape[1], 0, states.shape[3]), dtype=dtype)


class RowCache(Cache):
    """The cache of rows in flight, one ``RowLayer`` per layer.

    Args:
        like: a cache that a model has filled; the layers take after its layers.
        dtype: that float32 keys and values are stored in; None keeps them.
    """

    layers: list[RowLayer]

    def __init__(self, like: Cache, dtype: torch.dtype | None = None) -> None:
        super().__init__(layers=[RowLayer(getattr(layer, "sliding_window", None), dtype) for layer in like.layers])
        self.rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(layer.nbytes for layer in self.layers)

    def add(self, filled: Cache, source: Tensor, width: int) -> None:
        """Adds rows.

        Args:
            filled: what the model made of P prompts, padded on the left.
            source: (B,) for each new row its prompt among the P.
            width: tokens of the longest of these rows' prompts.
        """
        for layer, states in zip(self.layers, filled.layers, strict=True):
            layer.add(states.keys, states.values, source, width)
        self.rows += len(source)

    def remove(self, gone: Sequence[int], width: int) -> list[int]:
        """Removes rows; the last ones take their places.

        Args:
            gone: rows to remove, not all of them.
            width: tokens of the longest row that stays.

        Returns:
            For each place which row stands there now, by its place before: whoever keeps something else per row
            orders it so.
        """
        order = list(range(self.rows - len(gone)))
        leaving = set(gone)
        targets = [row for row in order if row in leaving]
        sources = [row for row in range(len(order), self.rows) if row not in leaving]
        for target, source in zip(targets, sources, strict=True):
            order[target] = source
        self.rows = len(order)
        for layer in self.layers:
            layer.keep(torch.tensor(targets), torch.tensor(sources), self.rows, width)
        return order

    def clear(self) -> None:
        """Removes all rows and gives their memory back."""
        self.rows = 0
        for layer in self.layers:
            layer.clear()
