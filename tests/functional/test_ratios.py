from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.ratios import (
    RATIOS,
    importance_ratio,
    log_ratio,
    ratio_at,
    sequence_ratio,
    sequence_token_ratio,
    token_ratio,
)

each = pytest.mark.parametrize("level", RATIOS)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_every_level_is_tested_here():
    assert {"token": token_ratio, "sequence": sequence_ratio, "sequence_token": sequence_token_ratio} == RATIOS


def test_the_ratio_of_a_completion_is_the_geometric_mean_of_its_tokens():
    # ratios 2, 8 and (hidden) 1000: sqrt(16) = 4, not the arithmetic 5; a product would be 16
    now, mask = double([[2.0, 8.0, 1000.0]]).log(), torch.tensor([[1, 1, 0]])
    assert sequence_ratio(now, torch.zeros_like(now), mask).tolist() == [[pytest.approx(4.0)]]
    assert sequence_token_ratio(now, torch.zeros_like(now), mask)[0].tolist() == [pytest.approx(4.0)] * 3
    assert token_ratio(now, torch.zeros_like(now), mask)[0].tolist() == pytest.approx([2.0, 8.0, 1000.0])


def test_each_level_has_its_own_gradient():
    def slopes(level):
        now = double([[0.1, 0.3]]).requires_grad_()
        ratio = ratio_at(level, now, torch.zeros_like(now), torch.ones(1, 2)).expand(1, 2)
        return torch.autograd.grad(ratio[0, 0], now)[0][0].tolist()  # of the first token's ratio alone

    s = math.exp(0.2)
    assert slopes("token") == pytest.approx([math.exp(0.1), 0.0])
    assert slopes("sequence") == pytest.approx([s / 2, s / 2])
    assert slopes("sequence_token") == pytest.approx([s, 0.0])


@each
def test_without_old_logprobs_it_is_exactly_one_with_the_gradient_of_the_log_prob(level):
    now = torch.tensor([[-0.1, -1e4], [-3.3, -1e-8]], requires_grad=True)
    mask = torch.ones(2, 2)
    ratio = ratio_at(level, now, None, mask).expand(2, 2)
    assert torch.equal(ratio, torch.ones(2, 2))
    assert torch.equal(torch.autograd.grad(ratio.sum(), now)[0], torch.ones(2, 2))
    assert torch.equal(log_ratio(now, None), torch.zeros(2, 2))


@each
@pytest.mark.parametrize("log", [-1e30, -21.0, 21.0, 1e30])
def test_beyond_the_cut_there_is_a_value_and_no_gradient(level, log):
    now = torch.full((1, 2), log, requires_grad=True)
    ratio = ratio_at(level, now, torch.zeros(1, 2), torch.ones(1, 2))
    assert ratio.tolist()[0][0] == pytest.approx(math.exp(math.copysign(20, log)), rel=1e-5)
    assert torch.autograd.grad(ratio.sum(), now)[0].tolist() == [[0.0, 0.0]]


@each
def test_half_precision_differences_are_exponentiated_in_float32(level):
    now = torch.full((1, 2), 15.0, dtype=torch.float16)
    ratio = ratio_at(level, now, torch.zeros(1, 2, dtype=torch.float16), torch.ones(1, 2))
    assert ratio[0, 0].item() == pytest.approx(math.exp(15), rel=1e-5)  # float16 ends at 65504


@each
def test_shapes_that_differ_are_refused(level):
    with pytest.raises(ValueError, match=r"logprobs \(2, 3\), mask \(2, 4\)"):
        ratio_at(level, torch.zeros(2, 3), None, torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"logprobs \(2, 3\), old_logprobs \(1, 3\)"):
        ratio_at(level, torch.zeros(2, 3), torch.zeros(1, 3), torch.ones(2, 3))


def test_an_unknown_level_is_refused():
    with pytest.raises(ValueError, match=r"importance_sampling_level 'turn'\. Known: token, sequence"):
        ratio_at("turn", torch.zeros(1, 1), None, torch.ones(1, 1))


def test_the_ratio_of_a_token_is_the_quotient_of_the_two_probabilities():
    # .5 / .25 = 2, and .1 / .4 = .25
    got = importance_ratio(torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[0.25, 0.4]]).log())
    assert got[0].tolist() == pytest.approx([2.0, 0.25], rel=1e-6)
