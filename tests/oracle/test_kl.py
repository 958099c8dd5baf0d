"""Each KL estimator, its ratio-weighted form, and the penalty in the reward, against the loops of ``reference``."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_trainer.functional.kl import KL_ESTIMATORS, adaptive_kl_coefficient, kl_penalty
from grpo_trainer.functional.ratios import importance_ratio
from tests.oracle import reference

differences = st.one_of(
    st.integers(-400, 400).map(lambda k: k / 64),
    st.sampled_from([0.0, 0.1, 1e-3, -1e-3, 1e-7, -1e-12, 5.0, -5.0, 20.0, 20.5, 100.0, -100.0, 1000.0]),
)
each = pytest.mark.parametrize("name", KL_ESTIMATORS)


def double(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


@each
@given(points=st.lists(differences, min_size=1, max_size=6))
def test_value_and_gradient_are_those_of_the_loops(name, points):
    logprobs = torch.zeros(1, len(points), dtype=torch.float64, requires_grad=True)
    value = KL_ESTIMATORS[name](logprobs, double([points]))
    slope = torch.autograd.grad(value.sum(), logprobs)[0]
    for got, slant, d in zip(value[0].tolist(), slope[0].tolist(), points, strict=True):
        expected, derivative = reference.kl(name, 0.0, d)
        # near 0 exp(d) - 1 - d is known to the rounding of d, and 1 - exp(d) to that of 1
        assert got == pytest.approx(expected, rel=1e-9, abs=4e-16 * abs(d))
        assert slant == pytest.approx(derivative, rel=1e-9, abs=1e-15)


@each
@given(
    tokens=st.lists(st.tuples(differences, st.integers(-300, 300).map(lambda k: k / 64)), min_size=1, max_size=5),
)
def test_the_ratio_weighted_form_is_a_product(name, tokens):
    """r * k and its derivative r * (k + k'), with r = exp(logp - old), whose derivative is r itself."""
    logprobs = torch.zeros(1, len(tokens), dtype=torch.float64, requires_grad=True)
    reference_logprobs, old = double([[d for d, _ in tokens]]), double([[-x for _, x in tokens]])
    value = KL_ESTIMATORS[name](logprobs, reference_logprobs) * importance_ratio(logprobs, old)
    slope = torch.autograd.grad(value.sum(), logprobs)[0]
    for got, slant, (d, x) in zip(value[0].tolist(), slope[0].tolist(), tokens, strict=True):
        (k, dk), (r, dr) = reference.kl(name, 0.0, d), reference.ratio(x)
        assert got == pytest.approx(r * k, rel=1e-9, abs=4e-16 * r * abs(d))
        assert slant == pytest.approx(dr * k + r * dk, rel=1e-9, abs=1e-13 * (abs(dr * k) + r))


@each
@given(points=st.lists(st.tuples(differences, st.booleans()), min_size=1, max_size=6))
def test_the_penalty_is_the_price_of_the_credited_tokens(name, points):
    logprobs = torch.zeros(1, len(points), dtype=torch.float64)
    value = KL_ESTIMATORS[name](logprobs, double([[d for d, _ in points]]))
    got = kl_penalty(value, torch.tensor([[m for _, m in points]]), beta=0.05)
    terms = [0.05 * reference.kl(name, 0.0, d)[0] for d, m in points if m]
    rounding = 1e-9 * math.fsum(map(abs, terms)) + 1e-16 * math.fsum(abs(d) for d, _ in points)
    assert got.tolist() == pytest.approx([math.fsum(terms)], rel=1e-9, abs=rounding)


def test_the_case_on_paper():
    # d = .5: -.5, .125, e^.5 - 1.5 = .148721; slopes 1, -.5, 1 - e^.5 = -.648721
    expected = {"k1": (-0.5, 1.0), "k2": (0.125, -0.5), "k3": (0.148721, -0.648721)}
    assert set(expected) == set(KL_ESTIMATORS)
    for name, (value, slope) in expected.items():
        logprobs = torch.zeros(1, 1, dtype=torch.float64, requires_grad=True)
        out = KL_ESTIMATORS[name](logprobs, double([[0.5]]))
        assert out.item() == pytest.approx(value, abs=5e-7)
        assert torch.autograd.grad(out.sum(), logprobs)[0].item() == pytest.approx(slope, abs=5e-7)


@given(beta=st.floats(1e-6, 10), kl=st.floats(0, 50), target=st.floats(1e-3, 10), gain=st.sampled_from([0.1, 0.5]))
def test_the_coefficient_follows_the_rule(beta, kl, target, gain):
    error = (kl - target) / target
    error = 0.2 if error > 0.2 else -0.2 if error < -0.2 else error
    assert adaptive_kl_coefficient(beta, kl, target=target, gain=gain) == pytest.approx(
        beta * (1 + gain * error), rel=1e-9
    )
