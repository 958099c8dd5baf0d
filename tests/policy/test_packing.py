from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.policy.packing import Segment, pack
from grpo_trainer.types import RolloutBatch

TOKEN = st.integers(4, 6)  # few, so that rows agree a while
PROMPTS = st.lists(st.lists(TOKEN, min_size=1, max_size=5), min_size=1, max_size=4)
COMPLETION = st.lists(TOKEN, max_size=5)


def batch_of(prompts, rows) -> RolloutBatch:
    """Rows of (index into prompts, completion)."""
    lengths = tuple(len(c) for _, c in rows)
    width = max(lengths)
    return RolloutBatch(
        prompt_ids=tuple(torch.tensor(p) for p in prompts),
        prompt_of_row=tuple(p for p, _ in rows),
        lengths=lengths,
        completion_ids=torch.tensor([[*c, *[0] * (width - len(c))] for _, c in rows], dtype=torch.long),
        mask=torch.arange(width) < torch.tensor(lengths)[:, None],
        advantages=torch.zeros(len(rows)),
    )


def test_two_groups_by_hand():
    """The picture in the module's docstring."""
    prompts = [(10, 11, 12), (20, 21)]
    packed = pack(batch_of(prompts, [(0, (30, 31, 32)), (0, (30, 41, 42)), (1, (50, 51, 52, 53)), (1, (60,))]))
    assert packed.input_ids.tolist() == [[10, 11, 12, 30, 31, 41, 20, 21, 50, 51, 52]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 4, 0, 1, 2, 3, 4]]
    assert packed.segments == (
        Segment(0, 4, 0, -1),
        Segment(4, 1, 4, 0),
        Segment(5, 1, 4, 0),
        Segment(6, 2, 0, -1),
        Segment(8, 3, 2, 3),
    )
    # the last token of each prompt predicts the first of both its completions, and is needed once
    assert packed.predictors.tolist() == [2, 3, 4, 5, 7, 8, 9, 10]
    assert packed.places.tolist() == [0, 0, 1, 1, 2, 3, 4, 4, 5, 6, 7]
    assert packed.targets.tolist() == [30, 30, 31, 41, 32, 42, 50, 60, 51, 52, 53]
    assert packed.cells.tolist() == [0, 4, 1, 5, 2, 6, 8, 12, 9, 10, 11]  # row * 4 + column


def test_what_prompts_begin_with_alike_stands_once():
    packed = pack(batch_of([(1, 2, 3), (1, 2, 4)], [(0, (5, 6)), (1, (5, 7)), (0, (5, 8))]))
    assert packed.input_ids.tolist() == [[1, 2, 3, 5, 4, 5]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 2, 3]]
    assert [s.parent for s in packed.segments] == [-1, 0, 0]
    assert packed.targets.tolist() == [5, 5, 6, 8, 5, 7]


@st.composite
def batches(draw):
    prompts = draw(PROMPTS)
    rows = draw(st.lists(st.tuples(st.integers(0, len(prompts) - 1), COMPLETION), min_size=1, max_size=8))
    return prompts, rows


@settings(max_examples=60, deadline=None)
@given(batches(), st.booleans())
def test_every_token_is_predicted_by_the_one_before_it_in_its_own_row(drawn, keep_last):
    prompts, rows = drawn
    batch = batch_of(prompts, rows)
    packed = pack(batch, keep_last=keep_last)
    ids, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()
    width = batch.completion_ids.shape[1]
    at = packed.predictors[packed.places].tolist()
    predicted = dict(zip(packed.cells.tolist(), zip(at, packed.targets.tolist(), strict=True), strict=True))
    assert len(predicted) == len(at) == sum(batch.lengths)  # each scored token once
    for row, (p, completion) in enumerate(rows):
        whole = [*prompts[p], *completion]
        for t, token in enumerate(completion):
            place, target = predicted[row * width + t]
            assert target == token
            assert positions[place] == len(prompts[p]) + t - 1
            assert ids[place] == whole[positions[place]]
    # each beginning of a row stands there once, nothing is padding
    computed = [[*prompts[p], *(c if keep_last else c[:-1])] for p, c in rows if c] or [prompts[rows[0][0]]]
    assert len(ids) == len(positions) == len({tuple(row[:n]) for row in computed for n in range(1, len(row) + 1)})


@settings(max_examples=60, deadline=None)
@given(batches())
def test_segments_cover_the_stream_from_end_to_end_and_follow_their_parents(drawn):
    packed = pack(batch_of(*drawn))
    at = 0
    for segment in packed.segments:
        assert segment.start == at and segment.tokens > 0
        at = segment.end
        depths = list(range(segment.depth, segment.depth + segment.tokens))
        assert packed.position_ids[0, segment.start : segment.end].tolist() == depths
        if segment.parent < 0:
            assert segment.depth == 0
        else:
            parent = packed.segments[segment.parent]
            assert parent.end <= segment.start and parent.depth + parent.tokens == segment.depth
    assert at == packed.input_ids.shape[1]


@settings(max_examples=30, deadline=None)
@given(batches())
def test_unpack_puts_values_back_into_their_rows(drawn):
    batch = batch_of(*drawn)
    packed = pack(batch)
    back = packed.unpack(packed.targets.float(), batch.completion_ids.shape)
    assert torch.equal(back, batch.completion_ids.float())


def test_rows_of_a_prompt_need_not_be_neighbours():
    packed = pack(batch_of([(5,), (6,)], [(1, (20, 21)), (0, (30, 31)), (1, (40, 41))]))
    assert packed.input_ids.tolist() == [[6, 20, 40, 5, 30]]


def test_without_a_token_to_score_one_prompt_stays():
    packed = pack(batch_of([(5, 6), (7,)], [(1, ()), (0, ())]))
    assert packed.input_ids.tolist() == [[7]]
    assert packed.segments == (Segment(0, 1, 0, -1),)
    assert len(packed.predictors) == len(packed.targets) == 0
    assert packed.unpack(torch.zeros(0), (2, 0)).shape == (2, 0)


def test_a_batch_without_rows_is_refused():
    with pytest.raises(ValueError, match="at least one completion"):
        pack(batch_of([(5, 6)], [(0, (7,))]).select([]))


def test_the_stream_comes_from_the_host_in_one_piece(monkeypatch):
    """One tensor is made of host numbers, however many rows there are, and nothing is asked of the device."""
    made = []
    tensor = torch.tensor
    batch = batch_of([(5, 6), (7,)], [(0, (20, 21)), (1, (30, 31, 32)), (0, (1,))] * 4)
    batch = batch.to("meta")  # where whatever is asked raises an error
    monkeypatch.setattr(torch, "tensor", lambda *a, **k: made.append(a) or tensor(*a, **k))
    packed = pack(batch)
    assert len(made) == 1
    assert {getattr(packed, f.name).device.type for f in dataclasses.fields(packed) if f.name != "segments"} == {"meta"}
