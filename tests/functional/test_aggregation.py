from __future__ import annotations

import functools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.functional.aggregation import (
    AGGREGATIONS,
    fixed_length,
    micro_batch_token_mean,
    sequence_mean,
    sequence_sum,
    token_mean,
)

EIGHT = functools.partial(fixed_length, length=8)
INVARIANT = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "fixed_length": EIGHT,
    "sequence_sum": sequence_sum,
}
ALL = {**INVARIANT, "micro_batch_token_mean": micro_batch_token_mean}
each = pytest.mark.parametrize("aggregation", ALL.values(), ids=ALL)
each_invariant = pytest.mark.parametrize("aggregation", INVARIANT.values(), ids=INVARIANT)

masks = st.integers(1, 6).flatmap(
    lambda t: st.lists(st.lists(st.booleans(), min_size=t, max_size=t), min_size=1, max_size=6)
)


def of_lengths(*lengths: int, pads: int = 0) -> torch.Tensor:
    return torch.arange(max(lengths) + pads) < torch.tensor(lengths)[:, None]


def objective(aggregation, *parts: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Sum of w * loss over all micro-batches, divided by the sum of their items."""
    weighted = [(aggregation(mask), loss) for mask, loss in parts]
    total = sum((weights * loss).sum().item() for (weights, _), loss in weighted)
    return total / sum(items.item() for (_, items), _ in weighted)


def test_every_name_in_the_table_is_tested_here():
    assert set(AGGREGATIONS) == set(ALL)


# --- values on paper --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("aggregation", "value"),
    # row A: 2 tokens of loss 1; row B: 4 tokens of loss 3; L = 8
    [
        (token_mean, 14 / 6),
        (sequence_mean, (1 + 3) / 2),
        (EIGHT, (2 + 12) / (2 * 8)),
        (sequence_sum, (2 + 12) / 2),
        (micro_batch_token_mean, 14 / 6),
    ],
    ids=ALL,
)
@pytest.mark.parametrize("pads", [0, 3])
def test_the_value_is_the_formula_whatever_the_padding(aggregation, value, pads):
    mask = of_lengths(2, 4, pads=pads)
    loss = torch.tensor([[1.0], [3.0]]).expand(mask.shape)
    assert objective(aggregation, (mask, loss)) == pytest.approx(value, rel=1e-6)


def test_sequence_mean_and_token_mean_are_two_definitions():
    # A: 2 tokens with loss 1, B: 8 tokens with loss 0: (1 + 0) / 2 and 2 / 10
    mask, loss = of_lengths(2, 8), torch.tensor([[1.0], [0.0]]).expand(2, 8)
    assert objective(sequence_mean, (mask, loss)) == pytest.approx(0.5)
    assert objective(token_mean, (mask, loss)) == pytest.approx(0.2)


@pytest.mark.parametrize("pads", [0, 3])
def test_fixed_length_divides_by_the_constant_and_not_by_the_width(pads):
    # lengths 2 and 4, L = 8, loss 1: (2 + 4) / (2 * 8)
    mask = of_lengths(2, 4, pads=pads)
    assert objective(EIGHT, (mask, torch.ones(mask.shape))) == 0.375


def test_fixed_length_has_no_default_constant():
    with pytest.raises(TypeError, match="length"):
        fixed_length(of_lengths(2))


def test_a_mean_of_micro_batch_means_is_not_the_token_mean():
    # one token of value 1, three of value 3: 10 / 4 = 2.5; apart, (1 + 3) / 2 = 2
    mask, loss = of_lengths(1, 3), torch.tensor([[1.0], [3.0]]).expand(2, 3)
    whole, apart = [(mask, loss)], [(mask[:1], loss[:1]), (mask[1:], loss[1:])]
    assert objective(token_mean, *whole) == objective(token_mean, *apart) == 2.5
    assert objective(micro_batch_token_mean, *whole) == pytest.approx(2.5)
    assert objective(micro_batch_token_mean, *apart) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("aggregation", "weights", "items"),
    # a row of 2 credited tokens, and one without any (a truncated completion that is masked): it counts as a row
    [
        (token_mean, [1, 1, 0], 2),
        (sequence_mean, [1 / 2, 1 / 2, 0], 2),
        (EIGHT, [1 / 8, 1 / 8, 0], 2),
        (sequence_sum, [1, 1, 0], 2),
        (micro_batch_token_mean, [1 / 2, 1 / 2, 0], 1),
    ],
    ids=ALL,
)
def test_a_row_without_credited_tokens_adds_nothing_and_counts_as_a_row(aggregation, weights, items):
    got, count = aggregation(torch.tensor([[True, True, False], [False, False, False]]))
    assert got[0].tolist() == pytest.approx(weights)
    assert got[1].tolist() == [0, 0, 0]
    assert count.item() == items


# --- properties -------------------------------------------------------------------------------------------------------


@each
@given(rows=masks)
def test_weights_are_the_formula_row_by_row(aggregation, rows):
    total = sum(map(sum, rows))
    divisor = {
        token_mean: lambda row: 1,
        sequence_mean: lambda row: max(sum(row), 1),
        EIGHT: lambda row: 8,
        sequence_sum: lambda row: 1,
        micro_batch_token_mean: lambda row: max(total, 1),
    }[aggregation]
    items = {token_mean: total, micro_batch_token_mean: 1}.get(aggregation, len(rows))
    weights, count = aggregation(torch.tensor(rows))
    assert count.item() == items and count.shape == ()
    assert weights.dtype == count.dtype == torch.float32
    for got, row in zip(weights.tolist(), rows, strict=True):
        assert got == pytest.approx([credited / divisor(row) for credited in row], rel=1e-6)


@each
@given(rows=masks, pads=st.integers(0, 4))
def test_padding_columns_carry_no_weight_and_change_none(aggregation, rows, pads):
    mask = torch.tensor(rows)
    weights, items = aggregation(mask)
    wide, wide_items = aggregation(torch.nn.functional.pad(mask, (0, pads)))
    assert torch.equal(wide, torch.nn.functional.pad(weights, (0, pads)))
    assert torch.equal(wide_items, items)


@each_invariant
@given(rows=masks, data=st.data())
def test_weights_and_items_of_a_split_are_those_of_the_whole(aggregation, rows, data):
    mask = torch.tensor(rows)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    parts = [p for p in torch.tensor_split(mask, cuts) if len(p)]
    weights, items = zip(*map(aggregation, parts), strict=True)
    whole, total = aggregation(mask)
    assert torch.equal(torch.cat(weights), whole)
    assert sum(i.item() for i in items) == total.item()


@each
def test_a_micro_batch_without_credited_tokens_is_zero_and_finite(aggregation):
    weights, items = aggregation(torch.zeros(2, 3, dtype=torch.bool))
    assert torch.equal(weights, torch.zeros(2, 3))
    assert math.isfinite(items.item())


@each
def test_a_float64_mask_gives_float64_weights(aggregation):
    weights, items = aggregation(of_lengths(3).double())
    assert weights.dtype == items.dtype == torch.float64


@each
def test_a_mask_of_no_columns_is_legal(aggregation):
    weights, _ = aggregation(torch.zeros(2, 0, dtype=torch.bool))
    assert weights.shape == (2, 0)


@each
@pytest.mark.parametrize("shape", [(3,), (1, 2, 3)])
def test_a_mask_of_another_rank_is_refused(aggregation, shape):
    with pytest.raises(ValueError, match=r"\(B, T\), got mask"):
        aggregation(torch.ones(shape, dtype=torch.bool))
