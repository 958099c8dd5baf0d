from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.kl import KL_ESTIMATORS, k3


def k3_of(d, dtype=torch.float64, at=0.0):
    """k3 where log pi_ref - log pi_theta = d."""
    policy = torch.full((1, len(d)), at, dtype=dtype, requires_grad=True)
    value = k3(policy, torch.tensor([d], dtype=dtype) + at)
    return value, torch.autograd.grad(value.sum(), policy)[0]


def test_the_three_values_on_paper():
    # e^.5 - .5 - 1 = 1.648721 - 1.5; e^-.5 + .5 - 1 = .606531 - .5; e^0 - 0 - 1
    value, _ = k3_of([0.5, -0.5, 0.0])
    assert value[0].tolist() == pytest.approx([0.148721, 0.106531, 0.0], abs=5e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_a_large_difference_stays_finite_and_a_small_one_exact(dtype):
    d = [0.0, 0.5, -5.0, 100.0, -100.0]  # all of them exact in eight bits
    value, gradient = k3_of(d, dtype)
    assert value.isfinite().all() and gradient.isfinite().all()
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    # e^-5 + 5 - 1 = 4.006738; e^-100 is nothing beside 99
    assert value[0, [0, 1, 2, 4]].tolist() == pytest.approx([0.0, 0.148721, 4.006738, 99.0], rel=1e-5)


def test_the_cap_alters_nothing_up_to_twenty():
    # e^20 = 485165195.4098, less 21; e^-20 = 2.0611536e-9, plus 19; e^5 = 148.4131591026, less 6
    value, _ = k3_of([20.0, -20.0, 5.0])
    assert value[0].tolist() == pytest.approx([485165174.4098, 19.0000000020611536, 142.4131591026], rel=1e-12)


def test_it_is_never_negative_also_where_it_cancels():
    d = torch.logspace(-30, 1.3, 20_001)
    for both in (d, -d):
        assert k3(torch.zeros(1, len(d)), both[None]).min() >= 0


def test_its_gradient_is_the_slope_of_its_value():
    points = [-19.0, -8.0, -1.0, -0.1, 0.0, 0.1, 1.0, 5.0, 10.0]
    _, gradient = k3_of(points)
    h = 1e-6
    for d, got in zip(points, gradient[0].tolist(), strict=True):

        def value(x: float) -> float:
            return math.exp(x) - x - 1

        # the policy's own log-prob enters as -d
        slope = (value(d - h) - value(d + h)) / (2 * h)
        assert got == pytest.approx(slope, rel=1e-6, abs=1e-8)
        assert got == pytest.approx(1 - math.exp(d), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("d", [0.5, 10.0, 19.9, 20.1, 25.0, 100.0])
def test_it_never_pushes_a_token_further_away_from_the_reference(d):
    # The reference finds the token likelier by e^d, so descent must not make it still less likely: slope <= 0. And the
    # other way round, slope >= 0.
    assert k3_of([d])[1].item() <= 0
    assert k3_of([-d])[1].item() >= 0


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS)
def test_its_mean_under_the_policy_is_the_kl_divergence(estimator):
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    # the definition, one term after the other
    kl = sum(p * (math.log(p) - math.log(q)) for p, q in zip(policy.tolist(), reference.tolist(), strict=True))
    mean = (policy * estimator(policy.log()[None], reference.log()[None])[0]).sum().item()
    assert mean == pytest.approx(kl, rel=1e-12)


@pytest.mark.parametrize("other", [(2, 1), (1, 3), (3, 2), (6,)])
def test_shapes_that_differ_are_refused(other):
    with pytest.raises(ValueError, match=r"logprobs \(2, 3\), ref_logprobs"):
        k3(torch.zeros(2, 3), torch.zeros(other))
