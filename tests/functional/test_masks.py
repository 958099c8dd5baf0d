from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.masks import (
    entropy_threshold,
    high_entropy_mask,
    off_policy_sequence_mask,
    without_truncated,
)

NAN = math.nan


def test_a_completion_that_was_cut_off_is_not_credited():
    mask = torch.tensor([[True, True, False], [True, False, True]])
    assert without_truncated(mask, torch.tensor([True, False])).tolist() == [[True, True, False], [False] * 3]
    with pytest.raises(ValueError, match=r"finished \(3,\), rows \(2,\)"):
        without_truncated(mask, torch.ones(3))


# --- off-policy sequences ---------------------------------------------------------------------------------------------


def keep(drift, advantage, mask=None, threshold=0.5):
    """Whether one completion is kept whose tokens have become less likely by ``drift`` nats."""
    drift = torch.tensor([drift])
    mask = torch.ones_like(drift) if mask is None else torch.tensor([mask])
    return off_policy_sequence_mask(
        -drift, torch.zeros_like(drift), torch.tensor([advantage]), mask, threshold=threshold
    )


@pytest.mark.parametrize(
    ("drift", "advantage", "kept"),
    # means .6, .5 and -.6: only a bad completion that the policy has left behind is dropped
    [([0.2, 1.0], -1.0, False), ([0.0, 1.0], -1.0, True), ([-0.2, -1.0], -1.0, True), ([0.2, 1.0], 1.0, True),
     ([0.2, 1.0], 0.0, True)],
)  # fmt: skip
def test_only_what_is_bad_and_left_behind_is_dropped(drift, advantage, kept):
    assert keep(drift, advantage).tolist() == [[kept]]


def test_the_mean_is_over_credited_tokens_and_an_unknown_one_counts_as_none():
    assert keep([0.6, 99.0], -1.0, mask=[1, 0]).item() is False
    assert keep([0.4, 99.0], -1.0, mask=[1, 0]).item() is True
    assert keep([0.8, NAN], -1.0).item() is True  # .4 on average
    assert keep([9.0, 9.0], -1.0, mask=[0, 0]).item() is True


def test_on_policy_everything_is_kept_and_nothing_carries_a_gradient():
    logprobs = torch.full((2, 3), -5.0, requires_grad=True)
    got = off_policy_sequence_mask(logprobs, None, torch.tensor([-1.0, 1.0]), torch.ones(2, 3), threshold=0.01)
    assert got.all() and not got.requires_grad and got.shape == (2, 1)


# --- high-entropy tokens ----------------------------------------------------------------------------------------------

ENTROPY = torch.tensor([[1.0, 2.0, 3.0, 4.0, 0.0, 0.0]])
VALID = torch.tensor([[1, 1, 1, 1, 0, 0]])


@pytest.mark.parametrize(("top", "threshold", "kept"), [(0.5, 2.5, 2), (1.0, 1.0, 4), (0.0, 4.0, 1), (0.25, 3.25, 1)])
def test_the_threshold_is_a_quantile_of_the_real_tokens(top, threshold, kept):
    got = entropy_threshold(ENTROPY, VALID, top=top)
    assert got.item() == pytest.approx(threshold)
    assert high_entropy_mask(ENTROPY, VALID, got).sum() == kept


@pytest.mark.parametrize("top", [0.0, 0.1, 0.2, 0.37, 0.8, 1.0])
def test_it_is_torchs_quantile(top):
    entropy = torch.rand(7, 11, dtype=torch.float64)
    mask = torch.rand(7, 11) < 0.7
    expected = torch.quantile(entropy[mask], 1 - top)
    assert entropy_threshold(entropy, mask, top=top).item() == pytest.approx(expected.item(), rel=1e-12)


def test_tokens_at_the_threshold_are_kept():
    entropy = torch.ones(1, 4)
    assert high_entropy_mask(entropy, torch.ones(1, 4), entropy_threshold(entropy, torch.ones(1, 4), top=0.2)).all()


def test_hidden_tokens_are_never_kept():
    entropy = torch.tensor([[9.0, 1.0]])
    assert high_entropy_mask(entropy, torch.tensor([[0, 1]]), 0.5).tolist() == [[False, True]]


def test_no_credited_token_is_no_token_kept():
    nothing = torch.zeros(1, 3)
    threshold = entropy_threshold(torch.ones(1, 3), nothing, top=0.2)
    assert threshold.item() == math.inf
    assert not high_entropy_mask(torch.ones(1, 3), nothing, threshold).any()


@pytest.mark.parametrize("top", [-0.1, 1.1])
def test_a_share_is_between_zero_and_one(top):
    with pytest.raises(ValueError, match=f"between 0 and 1, got {top}"):
        entropy_threshold(ENTROPY, VALID, top=top)
