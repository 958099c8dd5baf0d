"""What must not change the objective, for every policy loss under every aggregation that claims it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.losses import POLICY_LOSSES
from tests.oracle.test_losses import LENGTH, completions, double

INVARIANT = [name for name in AGGREGATIONS if name != "micro_batch_token_mean"]
each = pytest.mark.parametrize("name", POLICY_LOSSES)
some = settings(max_examples=20)
aggregations = st.sampled_from(list(AGGREGATIONS))


class Sum(NamedTuple):
    """A micro-batch: the weighted sum of its losses, the size of its terms, its items, the gradient of the sum."""

    total: float
    size: float
    items: float
    gradient: torch.Tensor


def run(name, aggregation, rows) -> Sum:
    logprobs = double([row["logp"] for row in rows]).requires_grad_()
    old = None if rows[0]["old"] is None else double([row["old"] for row in rows])
    mask = torch.tensor([row["mask"] for row in rows])
    token = POLICY_LOSSES[name](logprobs, old, double([row["A"] for row in rows]), mask)
    length = {"length": LENGTH} if aggregation == "fixed_length" else {}
    weights, items = AGGREGATIONS[aggregation](mask.double(), **length)
    terms = torch.where(mask, token.loss * weights, 0.0)
    gradient = torch.autograd.grad(terms.sum(), logprobs)[0]
    return Sum(terms.sum().item(), terms.abs().sum().item(), items.item(), gradient)


def same(got: Sum, expected: Sum, factor: float = 1.0) -> None:
    """Equal up to the rounding of a sum whose terms may cancel, and of a mean whose summands may."""
    assert got.total == pytest.approx(factor * expected.total, rel=1e-9, abs=1e-9 * abs(factor) * expected.size)
    assert torch.allclose(got.gradient, factor * expected.gradient, rtol=1e-9, atol=1e-300)


@each
@some
@given(rows=completions(), aggregation=st.sampled_from(INVARIANT), data=st.data())
def test_a_split_into_micro_batches(name, rows, aggregation, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    bounds = zip([0, *cuts], [*cuts, len(rows)], strict=True)
    parts = [run(name, aggregation, rows[a:b]) for a, b in bounds if a < b]
    totals, sizes, counts, gradients = zip(*parts, strict=True)
    whole = run(name, aggregation, rows)
    assert sum(counts) == whole.items
    same(Sum(sum(totals), sum(sizes), sum(counts), torch.cat(gradients)), whole)


@each
@some
@given(rows=completions(), aggregation=aggregations, pads=st.integers(1, 3))
def test_padding(name, rows, aggregation, pads):
    """Whatever stands in the padding, it adds nothing and its gradient is 0."""
    padded = [
        {
            **row,
            "logp": row["logp"] + [123.0] * pads,
            "old": row["old"] and row["old"] + [-7.0] * pads,
            "mask": row["mask"] + [False] * pads,
        }
        for row in rows
    ]
    width = len(rows[0]["mask"])
    whole, wide = run(name, aggregation, rows), run(name, aggregation, padded)
    assert wide.items == whole.items
    same(wide._replace(gradient=wide.gradient[:, :width]), whole)
    assert not wide.gradient[:, width:].any()


@each
@some
@given(rows=completions(), aggregation=aggregations, data=st.data())
def test_the_order_of_rows(name, rows, aggregation, data):
    order = list(data.draw(st.permutations(range(len(rows)))))
    whole, moved = run(name, aggregation, rows), run(name, aggregation, [rows[i] for i in order])
    assert moved.items == whole.items
    same(moved, whole._replace(gradient=whole.gradient[order]))


@each
@some
@given(rows=completions(), aggregation=aggregations)
def test_a_row_without_advantage_adds_nothing(name, rows, aggregation):
    silent = run(name, aggregation, [{**row, "A": 0.0} for row in rows])
    assert silent.total == 0.0 and not silent.gradient.any()
    # ... and takes nothing from the others, but for its place in the count
    loud = [{**row, "A": row["A"] or 1.0} for row in rows]
    beside = run(name, "token_mean", [*loud, {**rows[0], "A": 0.0}])
    same(beside._replace(gradient=beside.gradient[:-1]), run(name, "token_mean", loud))


@each
@some
@given(rows=completions(), aggregation=aggregations, factor=st.sampled_from([0.25, 2.0, 1024.0]))
def test_the_advantage_scales_the_loss(name, rows, aggregation, factor):
    """Its size decides no clip, gate or kernel: only its sign does."""
    scaled = run(name, aggregation, [{**row, "A": row["A"] * factor} for row in rows])
    same(scaled, run(name, aggregation, rows), factor)


@each
@some
@given(rows=completions(), aggregation=st.sampled_from(INVARIANT))
def test_every_completion_twice(name, rows, aggregation):
    """Doubles the sum and Z: the objective is the same."""
    whole, doubled = run(name, aggregation, rows), run(name, aggregation, rows + rows)
    assert doubled.items == 2 * whole.items
    same(doubled._replace(gradient=doubled.gradient[: len(rows)] * 2), whole, 2.0)


@each
@some
@given(rows=completions(), shift=st.sampled_from([-0.5, 2.0]))
def test_on_policy_every_loss_has_the_same_gradient(name, rows, shift):
    """The ratio is 1: each token's slope is -A / |o| under the mean over completions, whatever the loss."""
    fresh = [{**row, "old": None, "logp": [x + shift for x in row["logp"]]} for row in rows]
    gradient = run(name, "sequence_mean", fresh).gradient
    for slopes, row in zip(gradient.tolist(), fresh, strict=True):
        length = max(sum(row["mask"]), 1)
        assert slopes == pytest.approx([-row["A"] / length * m for m in row["mask"]], rel=1e-12)
