"""Masks and the weights for a sampler's mismatch, against the loops of ``reference``."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_trainer.functional.correction import CORRECTIONS, mismatch_stats
from grpo_trainer.functional.masks import entropy_threshold, high_entropy_mask, off_policy_sequence_mask
from tests.oracle import reference
from tests.oracle.test_losses import completions, double


def tensors(rows):
    logprobs, mask = double([row["logp"] for row in rows]), torch.tensor([row["mask"] for row in rows])
    old = None if rows[0]["old"] is None else double([row["old"] for row in rows])
    return logprobs, old, double([row["A"] for row in rows]), mask


@given(rows=completions(), threshold=st.sampled_from([0.0, 0.1, 0.5, 2.0]))
def test_the_off_policy_mask_is_that_of_the_loops(rows, threshold):
    got = off_policy_sequence_mask(*tensors(rows), threshold=threshold)
    assert got[:, 0].tolist() == [reference.keep_sequence(row, threshold) for row in rows]


# Entropies of few values, so that ties with the threshold are common.
entropies = st.lists(
    st.lists(st.tuples(st.integers(0, 6).map(lambda k: k / 4), st.booleans()), min_size=4, max_size=4),
    min_size=1,
    max_size=4,
)


@given(cells=entropies, top=st.sampled_from([0.0, 0.2, 0.5, 0.8, 1.0]))
def test_the_entropy_mask_is_that_of_the_loops(cells, top):
    entropy = double([[h for h, _ in row] for row in cells])
    mask = torch.tensor([[m for _, m in row] for row in cells])
    valid = [h for row in cells for h, m in row if m]
    threshold = entropy_threshold(entropy, mask, top=top)
    expected = reference.quantile(valid, 1 - top) if valid else math.inf
    assert threshold.item() == pytest.approx(expected, rel=1e-12)
    kept = high_entropy_mask(entropy, mask, threshold)
    # at a tie of the last bit either is right; the threshold that was computed decides
    assert kept.tolist() == [[m and h >= threshold.item() for h, m in row] for row in cells]


bounds = st.sampled_from([(None, 3.0), (0.5, 2.0), (0.9, None), (None, None), (0.999, 1.001)])


@pytest.mark.parametrize("name", CORRECTIONS)
@settings(max_examples=40)
@given(rows=completions(), clip=bounds, unknown=st.booleans())
def test_the_weights_are_those_of_the_loops(name, rows, clip, unknown):
    sampler = [[x - 0.25 for x in row["logp"]] if row["old"] is None else list(row["old"]) for row in rows]
    if unknown:
        sampler[0][0] = math.nan
    low, high = clip
    logprobs, _, _, mask = tensors(rows)
    got = CORRECTIONS[name](logprobs, double(sampler), mask, clip_min=low, clip_max=high)
    for weights, row, scores in zip(got.tolist(), rows, sampler, strict=True):
        assert weights == pytest.approx(reference.correction(name, row, scores, low, high), rel=1e-9)


@given(rows=completions(), name=st.sampled_from(list(CORRECTIONS)), unknown=st.booleans())
def test_the_figures_are_those_of_the_loops(rows, name, unknown):
    sampler = [[x - 0.25 for x in row["logp"]] if row["old"] is None else list(row["old"]) for row in rows]
    if unknown:
        sampler[0][0] = math.nan
    logprobs, _, _, mask = tensors(rows)
    weights = CORRECTIONS[name](logprobs, double(sampler), mask)
    got = mismatch_stats(logprobs, double(sampler), mask, weights)
    apart, ratios = [], []
    for row, scores in zip(rows, sampler, strict=True):
        tokens = reference.credited(row)
        apart += [abs(row["logp"][t] - scores[t]) for t in tokens if scores[t] == scores[t]]
        each = reference.correction(name, row, scores, None, 3.0)
        ratios += [each[t] for t in tokens] if name.startswith("token") else each[: bool(tokens)]
    assert (got.difference_count.item(), got.ratio_count.item()) == (len(apart), len(ratios))
    assert got.difference_sum.item() == pytest.approx(math.fsum(apart), rel=1e-9)
    assert got.difference_max.item() == max(apart, default=0.0)
    assert got.ratio_sum.item() == pytest.approx(math.fsum(ratios), rel=1e-9)
    assert got.ratio_min.item() == pytest.approx(min(ratios, default=math.inf), rel=1e-9)
    assert got.ratio_max.item() == pytest.approx(max(ratios, default=-math.inf), rel=1e-9)
