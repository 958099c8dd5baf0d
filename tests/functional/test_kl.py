from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.kl import KL_ESTIMATORS, adaptive_kl_coefficient, k1, k2, k3, kl_penalty
from grpo_trainer.functional.ratios import importance_ratio


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


# A policy over four tokens and its reference: every mean below is a sum over the tokens, not a sample.
POLICY = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)


def divergence(p, q) -> float:
    """The definition, one term after the other."""
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True))


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_its_mean_under_the_policy_is_the_kl_divergence(name):
    mean = (POLICY * KL_ESTIMATORS[name](POLICY.log()[None], REFERENCE.log()[None])[0]).sum().item()
    assert mean == pytest.approx(divergence(POLICY.tolist(), REFERENCE.tolist()), rel=1e-12)


def test_the_mean_of_k2_is_another_figure():
    # half the mean of the squared log-ratio; near the reference the two meet
    mean = (POLICY * k2(POLICY.log()[None], REFERENCE.log()[None])[0]).sum().item()
    assert mean == pytest.approx(sum(p * math.log(p / q) ** 2 / 2 for p, q in zip(POLICY, REFERENCE, strict=True)))
    assert abs(mean / divergence(POLICY.tolist(), REFERENCE.tolist()) - 1) > 0.1


def mean_gradient(estimator, weighted):
    """What a loss of one sampled token does to the logits, averaged over all tokens that could be sampled."""
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)[None]
    value = estimator(logprobs, REFERENCE.log()[None])
    if weighted:
        value = value * importance_ratio(logprobs, logprobs.detach())
    return torch.autograd.grad((POLICY * value[0]).sum(), logits)[0]


def true_gradient(objective):
    """Central differences of a divergence of the policy, one logit at a time."""
    slopes = []
    for i in range(len(POLICY)):
        values = []
        for step in (1e-5, -1e-5):
            logits = POLICY.log().clone()
            logits[i] += step
            values.append(objective(torch.softmax(logits, dim=0).tolist()))
        slopes.append((values[0] - values[1]) / 2e-5)
    return slopes


def reverse(p) -> float:
    return divergence(p, REFERENCE.tolist())


def forward(p) -> float:
    return divergence(REFERENCE.tolist(), p)


def squared(p) -> float:
    return sum(a * math.log(a / b) ** 2 / 2 for a, b in zip(p, REFERENCE.tolist(), strict=True))


@pytest.mark.parametrize(
    ("estimator", "weighted", "objective"),
    # weighted by the importance ratio the gradient is that of the estimator's mean; without it, another one's
    [(k1, True, reverse), (k2, True, squared), (k3, True, reverse), (k2, False, reverse), (k3, False, forward)],
)
def test_what_a_kl_term_in_the_loss_pulls_at(estimator, weighted, objective):
    assert mean_gradient(estimator, weighted).tolist() == pytest.approx(true_gradient(objective), abs=1e-8)


def test_k1_in_the_loss_pulls_at_nothing_unless_it_is_weighted():
    assert mean_gradient(k1, False).tolist() == pytest.approx([0.0] * 4, abs=1e-15)


@pytest.mark.parametrize("estimator", KL_ESTIMATORS.values(), ids=KL_ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_every_estimator_is_finite_and_exact_up_to_five(estimator, dtype):
    d = [0.0, 0.5, -0.5, 5.0, -5.0, 100.0, -100.0]  # all of them exact in eight bits
    policy = torch.zeros(1, len(d), dtype=dtype, requires_grad=True)
    value = estimator(policy, torch.tensor([d], dtype=dtype))
    assert value.isfinite().all() and torch.autograd.grad(value.sum(), policy)[0].isfinite().all()
    exact = {k1: lambda x: -x, k2: lambda x: x * x / 2, k3: lambda x: math.expm1(x) - x}[estimator]
    assert value[0, :5].tolist() == pytest.approx([exact(x) for x in d[:5]], rel=1e-6)


# --- in the reward ----------------------------------------------------------------------------------------------------


def test_the_penalty_of_k1_is_the_log_ratio_of_the_whole_completion():
    # pi(o) = .5 * .25, pi_ref(o) = .25 * .25: log 2 = .693147; the third token is not credited
    logprobs, reference = torch.tensor([[0.5, 0.25, 0.9]]).log(), torch.tensor([[0.25, 0.25, 0.1]]).log()
    got = kl_penalty(k1(logprobs, reference), torch.tensor([[True, True, False]]), beta=0.1)
    assert got.tolist() == pytest.approx([0.0693147], abs=1e-6)


def test_the_penalty_is_a_constant_and_blind_to_what_is_hidden():
    kl = torch.tensor([[1.0, float("nan")], [float("inf"), 2.0]], requires_grad=True)
    got = kl_penalty(kl, torch.tensor([[1, 0], [0, 1]]), beta=2.0)
    assert got.tolist() == [2.0, 4.0] and not got.requires_grad
    with pytest.raises(ValueError, match=r"kl \(2, 2\), mask \(1, 2\)"):
        kl_penalty(kl, torch.ones(1, 2), beta=1.0)


@pytest.mark.parametrize(
    ("estimator", "objective"),
    # only k1 pulls at the KL. k3 has the gradient of the difference of the two directions, k2 that of neither
    [(k1, reverse), (k3, lambda p: reverse(p) - forward(p))],
)
def test_what_a_price_in_the_reward_pulls_at(estimator, objective):
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    price = kl_penalty(estimator(logprobs[:, None], REFERENCE.log()[:, None]), torch.ones(4, 1), beta=1.0)
    (gradient,) = torch.autograd.grad((POLICY * price * logprobs).sum(), logits)  # the policy gradient of the price
    assert gradient.tolist() == pytest.approx(true_gradient(objective), abs=1e-8)


def test_k2_in_the_reward_pulls_elsewhere():
    logits = POLICY.log().requires_grad_()
    logprobs = torch.log_softmax(logits, dim=0)
    price = kl_penalty(k2(logprobs[:, None], REFERENCE.log()[:, None]), torch.ones(4, 1), beta=1.0)
    (gradient,) = torch.autograd.grad((POLICY * price * logprobs).sum(), logits)
    assert (gradient - torch.tensor(true_gradient(reverse))).norm() > 0.1 * gradient.norm()


# --- the coefficient --------------------------------------------------------------------------------------------------


def test_the_coefficient_moves_by_at_most_two_percent_a_step():
    steps = [adaptive_kl_coefficient(0.5, kl, target=2.0) for kl in (0.0, 1.8, 2.0, 2.2, 200.0)]
    # clip(kl / 2 - 1) is -.2, -.1, 0, .1, .2
    assert steps == pytest.approx([0.49, 0.495, 0.5, 0.505, 0.51])
    assert adaptive_kl_coefficient(0.0, 9.0, target=2.0) == 0.0
    with pytest.raises(ValueError, match=r"must be above 0 nats, got 0\.0"):
        adaptive_kl_coefficient(0.5, 1.0, target=0.0)


def test_the_coefficient_holds_a_policy_at_its_target():
    """A policy whose KL is 1 / beta settles where that is the target."""
    beta = 1.0
    for _ in range(400):
        beta = adaptive_kl_coefficient(beta, 1 / beta, target=0.25)
    assert 1 / beta == pytest.approx(0.25, rel=0.01)


@pytest.mark.parametrize("other", [(2, 1), (1, 3), (3, 2), (6,)])
def test_shapes_that_differ_are_refused(other):
    for estimator in KL_ESTIMATORS.values():
        with pytest.raises(ValueError, match=r"logprobs \(2, 3\), ref_logprobs"):
            estimator(torch.zeros(2, 3), torch.zeros(other))
