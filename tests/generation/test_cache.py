from __future__ import annotations

import random

import pytest
import torch
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from grpo_trainer.generation.cache import RowCache

HEADS, SIZE = 2, 3


def states(*rows: list[float]) -> torch.Tensor:
    """(rows, heads, columns, size), each number repeated over heads and size."""
    return torch.tensor(rows)[:, None, :, None].expand(-1, HEADS, -1, SIZE).contiguous()


def prefilled(window, *rows):
    """What transformers' own cache holds after a prefill, one layer."""
    cache = DynamicCache()
    cache.layers = [DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)]
    cache.layer_class_to_replicate = None
    cache.update(states(*rows), -states(*rows), 0)
    return cache


def step(cache, *tokens):
    """One token per row; what each row then attends to, as keys, and that the values are theirs."""
    keys, values = cache.update(states(*([t] for t in tokens)), -states(*([t] for t in tokens)), 0)
    assert torch.equal(keys, -values) and torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    return keys[:, 0, :, 0].tolist()


def test_rows_are_copied_from_their_prompts_and_grow_by_a_column_a_step():
    filled = prefilled(None, [1.0, 2.0], [0.0, 3.0])  # the second prompt is padded
    cache = RowCache(filled)
    cache.add(filled, torch.tensor([0, 0, 1]), width=2)
    assert (cache.rows, cache.get_seq_length(), cache.get_mask_sizes(1, 0)) == (3, 2, (3, 0))
    assert step(cache, 4.0, 5.0, 6.0) == [[1, 2, 4], [1, 2, 5], [0, 3, 6]]
    assert step(cache, 7.0, 8.0, 9.0) == [[1, 2, 4, 7], [1, 2, 5, 8], [0, 3, 6, 9]]


def test_a_row_that_leaves_is_overwritten_by_the_last_and_the_width_shrinks_to_the_longest():
    filled = prefilled(None, [1.0, 2.0, 3.0], [0.0, 0.0, 4.0])
    cache = RowCache(filled)
    cache.add(filled, torch.tensor([0, 1, 1, 1]), width=3)
    step(cache, 5.0, 6.0, 7.0, 8.0)
    assert cache.remove([0, 2], width=2) == [3, 1]
    assert step(cache, 9.0, 10.0) == [[4, 8, 9], [4, 6, 10]]
    assert (cache.rows, cache.get_seq_length()) == (2, 3)
    assert cache.remove([1], width=3) == [0]  # nothing has to move
    assert step(cache, 11.0) == [[4, 8, 9, 11]]


def test_rows_that_come_lie_against_the_right_edge_whether_longer_or_shorter():
    first = prefilled(None, [1.0, 2.0])
    cache = RowCache(first)
    cache.add(first, torch.tensor([0]), width=2)
    step(cache, 3.0)
    cache.add(prefilled(None, [4.0]), torch.tensor([0]), width=1)
    assert step(cache, 5.0, 6.0) == [[1, 2, 3, 5], [0, 0, 4, 6]]
    cache.add(prefilled(None, [7.0, 8.0, 9.0, 10.0, 11.0, 12.0]), torch.tensor([0]), width=6)
    assert step(cache, 13.0, 14.0, 15.0) == [
        [0, 0, 1, 2, 3, 5, 13],
        [0, 0, 0, 0, 4, 6, 14],
        [7, 8, 9, 10, 11, 12, 15],
    ]


def test_columns_that_only_a_prompt_left_out_had_are_not_taken_over():
    filled = prefilled(None, [1.0, 2.0, 3.0], [0.0, 0.0, 4.0])
    cache = RowCache(filled)
    cache.add(filled, torch.tensor([1]), width=1)
    assert cache.get_seq_length() == 1
    assert step(cache, 5.0) == [[4, 5]]


def test_memory_behind_the_columns_is_never_seen():
    """Nobody says that fresh memory holds numbers, and a weight of 0 times NaN is NaN."""
    filled = prefilled(None, [1.0])
    cache = RowCache(filled)
    cache.add(filled, torch.tensor([0]), width=1)
    for buffer in cache.layers[0]._buffers:
        buffer[:, :, 1:] = float("nan")
    cache.add(prefilled(None, [2.0, 3.0, 4.0]), torch.tensor([0]), width=3)
    assert step(cache, 5.0, 6.0) == [[0, 0, 1, 5], [2, 3, 4, 6]]


@pytest.mark.parametrize("window", [None, 2, 5, 40])
def test_what_rows_attend_to_is_what_transformers_own_cache_would_give_each_alone(window):
    """Rows come and go at random; each is followed by a cache of its own."""
    source = random.Random(0)
    cache: RowCache | None = None
    own: list[DynamicCache] = []
    number = iter(range(1, 10**6))
    for _ in range(120):
        if not own or source.random() < 0.1:
            prompt = [float(next(number)) for _ in range(source.randint(1, 12))]
            count = source.randint(1, 4)
            filled = prefilled(window, prompt)
            cache = cache or RowCache(filled)
            cache.add(filled, torch.zeros(count, dtype=torch.long), width=len(prompt))
            own += [prefilled(window, prompt) for _ in range(count)]
        new = [float(next(number)) for _ in own]
        sizes = cache.get_mask_sizes(1, 0)
        seen = step(cache, *new)
        assert sizes == (len(seen[0]), max(c.get_seq_length() for c in own) + 1 - len(seen[0]))
        for row, token, alone in zip(seen, new, own, strict=True):
            expected = step(alone, token)[0]
            assert row[len(row) - len(expected) :] == expected
            assert not any(row[: len(row) - len(expected)])
        if source.random() < 0.3:
            gone = source.sample(range(len(own)), source.randint(1, len(own)))
            stay = [c for i, c in enumerate(own) if i not in gone]
            if stay:
                order = cache.remove(gone, width=max(c.get_seq_length() for c in stay))
                own = [own[i] for i in order]
            else:
                cache.clear()
                own = []
    assert cache.layers[0].is_sliding is (window is not None)


def test_float32_is_stored_as_asked_and_other_types_as_they_are():
    filled = prefilled(None, [1.0])
    cache = RowCache(filled, torch.bfloat16)
    cache.add(filled, torch.tensor([0]), width=1)
    keys, _ = cache.update(states([2.0]), states([2.0]), 0)
    assert keys.dtype == torch.bfloat16
    for dtype in (torch.bfloat16, torch.float64):
        filled.layers[0].keys, filled.layers[0].values = (x.to(dtype) for x in (filled.layers[0].keys,) * 2)
        cache = RowCache(filled, torch.float16)
        cache.add(filled, torch.tensor([0]), width=1)
        assert cache.update(states([2.0]).to(dtype), states([2.0]).to(dtype), 0)[0].dtype == dtype


def test_buffers_take_little_more_than_what_is_in_them_and_nothing_when_cleared():
    filled = prefilled(None, [float(i) for i in range(1000)])
    cache = RowCache(filled)
    cache.add(filled, torch.zeros(4, dtype=torch.long), width=1000)
    held = 2 * 4 * HEADS * 1000 * SIZE * 4
    assert held <= cache.nbytes <= 1.25 * held
    for _ in range(600):
        step(cache, 1.0, 2.0, 3.0, 4.0)
    assert 1.6 * held <= cache.nbytes <= 1.6 * 1.25 * held
    cache.clear()
    assert (cache.nbytes, cache.rows, cache.get_seq_length()) == (0, 0, 0)


def test_a_sliding_layer_keeps_no_more_than_its_window():
    filled = prefilled(10, [float(i) for i in range(1000)])
    cache = RowCache(filled)
    cache.add(filled, torch.zeros(1, dtype=torch.long), width=1000)
    for _ in range(500):
        step(cache, 1.0)
    assert cache.get_seq_length() == 1500 and cache.nbytes <= 2 * HEADS * SIZE * 4 * (9 + 32)
