"""Prompts become keys and values, and what all of them begin with is computed once.

A system prompt, or few-shot examples, are often the greater part of every prompt of a rollout::

    prompts      ssssssaaa   ssssssb   sssssscc
    first pass   ssssss                             once in a rollout, one row
    then         ......aaa   ......__b   ......_cc  the rest of each, after a copy of it

A shorter prompt has its padding between what is shared and the rest, so the columns of what is shared are moved up to
the rest when the pass is over: a cache of rows that all end in the last column, as without sharing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from grpo_trainer.generation.hf import pad_left
from grpo_trainer.generation.schedule import CHEAP_PADDING

Forward = Callable[[Tensor, "Tensor | None", Tensor, Cache], Tensor]
"""``(ids (B, T), mask or None, positions (B, T), cache to extend) -> (B, V)``, logits of each row's last token."""


class Prefill:
    """Prefills prompts of one call.

    Attributes:
        shared: tokens that all prompts begin with, and that are computed once; 0 if that would not pay.

    Args:
        forward: the policy.
        config: of the part of it that writes text.
        prompts: those that will be prefilled, none of them empty.
        device: where the policy is.
    """

    def __init__(self, forward: Forward, config: Any, prompts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._forward, self._config, self._device = forward, config, device
        self.shared = common_length(prompts)
        if (len(prompts) - 1) * self.shared <= CHEAP_PADDING:
            self.shared = 0
        self._slides = any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=config).layers)
        self._beginning: Cache | None = None

    def __call__(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Cache]:
        """Prefills some of them.

        Args:
            prompts: P of the prompts.

        Returns:
            (P, V) logits of their last tokens, and a cache of their keys and values, all ending in the last column.
        """
        even = len(set(map(len, prompts))) == 1
        if not self.shared or (self._slides and not even):  # a window would slide over the padding too
            return self._pass(prompts, DynamicCache(config=self._config))
        if self._beginning is None:
            self._beginning = self._pass([prompts[0][: self.shared]], DynamicCache(config=self._config))[1]
        return self._pass([prompt[self.shared :] for prompt in prompts], self._copies(len(prompts)))

    def clear(self) -> None:
        """Forgets what is shared: no prompt is waiting."""
        self._beginning = None

    def _pass(self, rows: Sequence[Sequence[int]], cache: Cache) -> tuple[Tensor, Cache]:
        """One forward pass, after what the cache holds."""
        before = cache.get_seq_length()
        ids, mask = pad_left(rows, self._device)
        missing = [ids.shape[1] - len(row) for row in rows]
        positions = before + (mask.cumsum(dim=1) - 1).clamp(min=0)
        if before:
            mask = torch.cat([mask.new_ones(len(rows), before), mask], dim=1)
        logits = self._forward(ids, mask if any(missing) else None, positions, cache)
        if before and any(missing):
            for layer in cache.layers:
                for states in (layer.keys, layer.values):
                    for row, gap in enumerate(missing):
                        if gap:
                            states[row, :, gap : gap + before] = states[row, :, :before].clone()
        return logits, cache

    def _copies(self, count: int) -> Cache:
        """A cache of rows that each begin with what is shared; the next pass copies what it extends."""
        assert self._beginning is not None
        cache = copy.copy(self._beginning)
        cache.layers = [copy.copy(layer) for layer in cache.layers]
        for layer in cache.layers:
            layer.keys = layer.keys.expand(count, -1, -1, -1)
            layer.values = layer.values.expand(count, -1, -1, -1)
        return cache


def common_length(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, such that each has at least one more.

    Args:
        prompts: at least one, none of them empty.

    Returns:
        The number.

    Example:
        >>> common_length([(5, 6, 7), (5, 6, 8, 9)]), common_length([(5, 6), (5, 6)]), common_length([(5,), (5, 6)])
        (2, 1, 0)
    """
    first, last = (pick(map(tuple, prompts)) for pick in (min, max))  # whatever these two agree on, all agree on
    end = min(map(len, prompts)) - 1
    return next((i for i in range(end) if first[i] != last[i]), end)
