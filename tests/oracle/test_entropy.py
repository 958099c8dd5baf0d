"""The entropy, its bonus, and the coefficient that follows it, in plain Python floats."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.functional.entropy import (
    adaptive_entropy_coefficient,
    applied_entropy_coefficient,
    entropy_bonus,
)
from grpo_trainer.functional.logprobs import token_entropy

logits = st.lists(st.integers(-640, 640).map(lambda k: k / 64), min_size=1, max_size=6)


def entropy(z: list[float], temperature: float) -> tuple[float, list[float]]:
    """H of softmax(z / T), and dH/dz_v = -p_v (log p_v + H) / T."""
    shifted = [(x - max(z)) / temperature for x in z]
    total = math.fsum(map(math.exp, shifted))
    logp = [x - math.log(total) for x in shifted]
    value = -math.fsum(math.exp(x) * x for x in logp)
    return value, [-math.exp(x) * (x + value) / temperature for x in logp]


@given(z=logits, temperature=st.sampled_from([1.0, 0.5, 2.0]), coefficient=st.sampled_from([0.01, 1.0, -0.5]))
def test_value_and_gradient_are_those_of_the_loops(z, temperature, coefficient):
    given_logits = torch.tensor([[z]], dtype=torch.float64, requires_grad=True)
    out = entropy_bonus(token_entropy(given_logits, temperature=temperature), coefficient=coefficient)
    value, slopes = entropy(z, temperature)
    assert out.item() == pytest.approx(-coefficient * value, rel=1e-9, abs=1e-15)
    got = torch.autograd.grad(out.sum(), given_logits)[0][0, 0].tolist()
    assert got == pytest.approx([-coefficient * s for s in slopes], rel=1e-9, abs=1e-14)


def test_the_case_on_paper():
    # p = (3/4, 1/4): H = 3/4 log(4/3) + 1/4 log 4 = .215762 + .346574 = .562335;
    # dH/dz_1 = -3/4 (log 3/4 + H) = -3/4 (-.287682 + .562335) = -.205990, and dH/dz_2 is its opposite
    z = torch.tensor([[[math.log(3), 0.0]]], dtype=torch.float64, requires_grad=True)
    out = entropy_bonus(token_entropy(z), coefficient=2.0)
    assert out.item() == pytest.approx(-2 * 0.562335, abs=2e-6)
    slopes = torch.autograd.grad(out.sum(), z)[0][0, 0].tolist()
    assert slopes == pytest.approx([2 * 0.205990, -2 * 0.205990], abs=2e-6)


@given(
    coefficient=st.integers(0, 100).map(lambda k: k / 100),
    measured=st.one_of(st.floats(0, 6), st.just(0.2)),
    delta=st.sampled_from([0.005, 0.3]),
    bounds=st.sampled_from([(0.0, 1.0), (0.1, 0.5)]),
)
def test_the_coefficient_follows_the_rule(coefficient, measured, delta, bounds):
    low, high = bounds
    moved = coefficient + delta if measured <= 0.2 else coefficient - delta
    expected = low if moved < low else high if moved > high else moved
    got = adaptive_entropy_coefficient(coefficient, measured, target=0.2, delta=delta, minimum=low, maximum=high)
    assert got == pytest.approx(expected, rel=1e-9)
    assert applied_entropy_coefficient(coefficient, measured, target=0.2) == (coefficient if measured <= 0.2 else 0.0)
