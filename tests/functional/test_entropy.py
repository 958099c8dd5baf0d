from __future__ import annotations

import pytest
import torch

from grpo_trainer.functional.entropy import (
    adaptive_entropy_coefficient,
    applied_entropy_coefficient,
    entropy_bonus,
)
from grpo_trainer.functional.logprobs import token_entropy


def test_the_bonus_rewards_uncertainty():
    assert entropy_bonus(torch.tensor([[2.0, 0.5]]), coefficient=0.1)[0].tolist() == pytest.approx([-0.2, -0.05])
    # descent along its gradient makes the distribution flatter
    logits = torch.tensor([[[2.0, 0.0, 0.0]]], requires_grad=True)
    (gradient,) = torch.autograd.grad(entropy_bonus(token_entropy(logits), coefficient=1.0).sum(), logits)
    assert gradient[0, 0, 0] > 0 > gradient[0, 0, 1]


def test_the_coefficient_rises_at_or_below_the_target_and_falls_above():
    steps = [adaptive_entropy_coefficient(0.5, h, target=0.2, delta=0.01) for h in (0.0, 0.2, 0.2001, 3.0)]
    assert steps == pytest.approx([0.51, 0.51, 0.49, 0.49])


def test_the_coefficient_stays_within_its_bounds():
    assert adaptive_entropy_coefficient(0.001, 1.0) == 0.0
    assert adaptive_entropy_coefficient(0.998, 0.0) == 1.0
    assert adaptive_entropy_coefficient(0.05, 0.0, maximum=0.05) == 0.05
    with pytest.raises(ValueError, match=r"0.5, is above the greatest, 0.1"):
        adaptive_entropy_coefficient(0.2, 0.0, minimum=0.5, maximum=0.1)


def test_the_coefficient_is_applied_only_while_there_is_need():
    assert applied_entropy_coefficient(0.3, 0.2) == 0.3
    assert applied_entropy_coefficient(0.3, 0.21) == 0.0
    assert applied_entropy_coefficient(0.3, float("inf")) == 0.0  # before anything was measured


def test_an_entropy_that_falls_is_caught_at_its_target():
    """An entropy that sinks by itself and rises with the coefficient that is applied."""
    coefficient, entropy, seen = 0.0, 1.0, []
    for _ in range(4000):
        applied = applied_entropy_coefficient(coefficient, entropy)
        coefficient = adaptive_entropy_coefficient(coefficient, entropy)
        entropy = max(0.0, entropy - 0.01 + 0.2 * applied)
        seen.append(entropy)
    assert 0.1 < sum(seen[-1000:]) / 1000 < 0.3
