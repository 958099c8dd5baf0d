"""Rows are shared out by tokens: whole groups, as few parts as hold them, of about equal size."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.policy.packing import pack
from grpo_trainer.policy.parts import fitting, halves, num_tokens, share_out, split
from grpo_trainer.types import RolloutBatch


def batch_of(groups: list[tuple[list[int], list[int]]]) -> RolloutBatch:
    """From prompt ids and lengths of completions; no two completions begin with the same token."""
    lengths = tuple(n for _, each in groups for n in each)
    width = max(lengths, default=0)
    ids = torch.arange(1000, 1000 + len(lengths) * width).view(len(lengths), width)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return RolloutBatch(
        prompt_ids=tuple(torch.tensor(prompt) for prompt, _ in groups),
        prompt_of_row=tuple(i for i, (_, each) in enumerate(groups) for _ in each),
        lengths=lengths,
        completion_ids=ids * mask,
        mask=mask,
        advantages=torch.ones(len(lengths)),
    )


GROUPS = st.lists(
    st.tuples(st.lists(st.integers(1, 3), min_size=1, max_size=6), st.lists(st.integers(1, 9), min_size=1, max_size=5)),
    min_size=1,
    max_size=6,
)


@given(GROUPS)
def test_the_tokens_of_a_part_are_those_of_its_stream(groups):
    batch = batch_of(groups)
    assert num_tokens(batch, range(len(batch))) == pack(batch, keep_last=True).input_ids.shape[1]


@given(GROUPS, st.integers(1, 60), st.booleans())
def test_every_row_is_in_one_part_and_no_part_is_too_large(groups, limit, packed):
    batch = batch_of(groups)
    parts = share_out(batch, limit, packed=packed)
    assert sorted(itertools.chain(*parts)) == list(range(len(batch)))
    assert all(part == sorted(part) for part in parts)
    assert all(len(part) == 1 or num_tokens(batch, part, packed=packed) <= limit for part in parts)


@given(GROUPS, st.integers(1, 60))
def test_a_group_that_fits_stays_together(groups, limit):
    batch = batch_of(groups)
    place = {row: i for i, part in enumerate(share_out(batch, limit)) for row in part}
    by_prompt: dict = {}
    for row, p in enumerate(batch.prompt_of_row):
        by_prompt.setdefault(tuple(batch.prompt_ids[p].tolist()), []).append(row)
    for rows in by_prompt.values():
        if num_tokens(batch, rows) <= limit:
            assert len({place[row] for row in rows}) == 1


def test_parts_are_as_equal_as_whole_groups_allow():
    # eight groups of 2 + 2 * 4 = 10 tokens: two parts hold them up to 70, of 40 tokens each rather than 70 and 10
    batch = batch_of([([i, i], [4, 4]) for i in range(1, 9)])
    assert [num_tokens(batch, part) for part in share_out(batch, 70)] == [40, 40]
    assert [num_tokens(batch, part) for part in share_out(batch, 80)] == [80]


def test_prompts_that_begin_alike_are_computed_together():
    few_shot = list(range(100, 200))
    groups = [([*few_shot, i], [3]) for i in (1, 2)] + [([*range(300, 400), i], [3]) for i in (1, 2)]
    batch = batch_of([groups[0], groups[2], groups[1], groups[3]])
    # a pair with its common hundred: 100 + 2 * (1 + 3)
    assert share_out(batch, 108) == [[0, 2], [1, 3]]
    assert share_out(batch, 107) == [[0], [2], [1], [3]]


def test_a_group_that_is_too_large_is_cut_between_its_completions():
    batch = batch_of([([1, 2, 3], [5, 5, 5, 5])])
    assert share_out(batch, 13) == [[0, 1], [2, 3]]
    assert share_out(batch, 1) == [[0], [1], [2], [3]]


def test_rows_of_equal_prompts_are_one_group_wherever_they_come_from():
    batch = RolloutBatch.join([batch_of([([1, 2, 3], [2])]), batch_of([([1, 2, 3], [4, 1])])])
    assert num_tokens(batch, range(3)) == 3 + 2 + 4 + 1
    assert share_out(batch, 10) == [[0, 1, 2]]


def test_halves_are_about_equal():
    assert halves(batch_of([([1] * 10, [1, 1, 9, 9])])) == [[0, 1, 2], [3]]  # 21 and 19, against 12 and 28
    assert halves(batch_of([([1] * 10, [1, 1, 9, 9])]), packed=False) == [[0, 1], [2, 3]]  # 22 and 38


def test_work_that_does_not_fit_says_so_and_other_trouble_is_raised():
    def fails(error):
        raise error

    assert fitting(lambda: 3) == 3
    assert fitting(lambda: fails(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))) is None
    cpu = RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried")
    assert fitting(lambda: fails(cpu)) is None
    assert fitting(lambda: fails(MemoryError())) is None
    with pytest.raises(RuntimeError, match="shapes differ"):
        fitting(lambda: fails(RuntimeError("shapes differ")))


def test_memory_that_a_real_allocation_lacks_is_told_from_other_trouble():
    assert fitting(lambda: torch.empty(2**60, dtype=torch.uint8)) is None


def test_a_single_row_cannot_be_split():
    with pytest.raises(MemoryError, match="a single completion of 4 tokens after a prompt of 2, which cannot be split"):
        split(batch_of([([1, 2], [4])]))
