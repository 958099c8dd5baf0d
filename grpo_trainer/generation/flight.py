"""Rows that are being decoded: what is known of each on the host, and on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True)
class Row:
    """What is known of one completion on the host.

    Attributes:
        prompt: index of its prompt.
        completion: index among the prompt's completions.
        prompt_length: tokens of the prompt.
        ids: drawn so far.
        logprobs: of those.
    """

    prompt: int
    completion: int
    prompt_length: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion so far."""
        return self.prompt_length + len(self.ids)


@dataclass(slots=True)
class Flight:
    """Rows in flight, in the order in which they lie in the cache.

    Attributes:
        rows: on the host.
        keys: (B,) int64, of their random numbers.
        last: (B,) int64, the token that was drawn last.
        lengths: (B,) int64, tokens of prompt and completion.
        counts: (B,) int64, tokens drawn.
        tokens: (B, L) int64, all tokens from the left, then the first one repeated; L = 0 if nobody reads them.
    """

    rows: list[Row]
    keys: Tensor
    last: Tensor
    lengths: Tensor
    counts: Tensor
    tokens: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """All fields that have an entry per row on the device."""
        return self.keys, self.last, self.lengths, self.counts, self.tokens

    def joined(self, other: Flight) -> Flight:
        """These rows, and others behind them.

        Args:
            other: the others.

        Returns:
            All of them.
        """
        pairs = zip(self.tensors(), other.tensors(), strict=True)
        return Flight(self.rows + other.rows, *(torch.cat(pair) for pair in pairs))

    def chosen(self, places: Sequence[int]) -> Flight:
        """Some of these rows.

        Args:
            places: of the rows, in the order in which they shall stand.

        Returns:
            Those rows.
        """
        index = torch.tensor(places, dtype=torch.int64, device=self.keys.device)
        return Flight([self.rows[i] for i in places], *(tensor[index] for tensor in self.tensors()))

    def append(self, tokens: Tensor) -> None:
        """Takes up the token that was drawn for each row.

        Args:
            tokens: (B,) int64.
        """
        self.last = tokens
        if self.tokens.shape[1]:
            self.tokens.scatter_(1, self.lengths[:, None], tokens[:, None])
        self.lengths = self.lengths + 1
        self.counts = self.counts + 1
