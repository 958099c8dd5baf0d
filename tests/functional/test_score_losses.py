from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.losses import clipped
from grpo_trainer.functional.score_losses import cispo, reinforce, vespo


def run(loss, log_ratios, advantage, **knobs):
    """Loss, gradient of its sum, and stats, for one completion with old log-probs 0."""
    logprobs = torch.tensor([log_ratios], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([advantage], dtype=torch.float64)
    out = loss(logprobs, torch.zeros_like(logprobs), advantages, torch.ones_like(logprobs), **knobs)
    gradient = torch.autograd.grad(out.loss.sum(), logprobs)[0]
    return out.loss.detach()[0].tolist(), gradient[0].tolist(), {n: v.tolist() for n, v in out.stats.items()}


# --- CISPO ------------------------------------------------------------------------------------------------------------


def test_a_token_beyond_the_cap_keeps_a_gradient():
    # ratios 10, 2, .1: weights 5, 2 and .1, for either sign; the clip would give -A r in the middle and 0 elsewhere
    logs = [math.log(r) for r in (10.0, 2.0, 0.1)]
    for sign in (1.0, -1.0):
        loss, gradient, stats = run(cispo, logs, sign)
        assert gradient == pytest.approx([-5.0 * sign, -2.0 * sign, -0.1 * sign])
        assert loss == pytest.approx([g * x for g, x in zip(gradient, logs, strict=True)])
        assert stats == {"cispo_clip_ratio": [[1.0, 0.0, 0.0]]}
    assert run(cispo, logs, 0.0)[2] == {"cispo_clip_ratio": [[0.0, 0.0, 0.0]]}


def test_the_cap_is_a_ratio_and_not_a_distance_from_one():
    assert run(cispo, [math.log(10.0)], 1.0, epsilon_high=1.28)[1] == pytest.approx([-1.28])
    with pytest.raises(ValueError, match=r"epsilon_high=0.2 would shrink every token.*at least 1"):
        run(cispo, [0.0], 1.0, epsilon_high=0.2)


def test_the_weight_may_be_the_completions():
    gradient = run(cispo, [0.1, 0.5], 1.0, importance_sampling_level="sequence")[1]
    assert gradient == pytest.approx([-math.exp(0.3)] * 2)


# --- VESPO ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("w", "advantage", "phi"),
    # W^2 exp(3 (1 - W)) for A >= 0, W^3 exp(2 (1 - W)) below: 1 on policy; .25 e^1.5, 4 e^-3; .125 e, 8 e^-2
    [(1, 1, 1), (1, -1, 1), (0.5, 1, 1.120422), (2, 1, 0.199148), (0.5, -1, 0.339785), (2, -1, 1.082682)],
)
def test_the_kernel_on_paper(w, advantage, phi):
    _, gradient, stats = run(vespo, [math.log(w)], float(advantage))
    assert stats["vespo/phi_seq_mean"] == [[pytest.approx(phi, abs=1e-6)]]
    assert gradient == pytest.approx([-advantage * phi], abs=1e-6)


def test_the_weight_is_that_of_the_whole_completion():
    # ratios 2 and .5: W = 1, so phi is 1, though no token is on policy; hidden tokens are no part of it
    assert run(vespo, [math.log(2.0), math.log(0.5)], 1.0)[1] == pytest.approx([-1.0, -1.0])
    logprobs = torch.tensor([[0.3, 50.0]], dtype=torch.float64)
    out = vespo(logprobs, torch.zeros_like(logprobs), torch.ones(1), torch.tensor([[1, 0]]))
    phi = math.exp(2 * 0.3 + 3 * (1 - math.exp(0.3)))
    assert out.stats["vespo/phi_seq_mean"].tolist() == [[pytest.approx(phi)]]


def test_the_kernel_is_largest_at_k_over_lambda_and_vanishes_far_from_it():
    def phi(w):
        return run(vespo, [math.log(w)], 1.0)[2]["vespo/phi_seq_mean"][0][0]

    assert phi(2 / 3) > max(phi(0.6), phi(0.73))
    assert phi(1e-6) < 1e-10 and phi(30.0) < 1e-30


@pytest.mark.parametrize("log_ratio", [-1e30, -1000.0, 1000.0, 1e30])
def test_a_completion_that_has_moved_far_is_let_go(log_ratio):
    for advantage in (1.0, -1.0):
        logprobs = torch.full((1, 2), log_ratio, requires_grad=True)  # float32, as in training
        out = vespo(logprobs, torch.zeros(1, 2), torch.tensor([advantage]), torch.ones(1, 2))
        assert out.loss.isfinite().all()
        assert torch.autograd.grad(out.loss.sum(), logprobs)[0].tolist() == [[0.0, 0.0]]


# --- REINFORCE --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("log_ratio", [-3.0, 0.0, 0.5, 3.0])
@pytest.mark.parametrize("advantage", [1.0, -2.0])
def test_its_gradient_is_that_of_a_surrogate_that_never_clips(log_ratio, advantage):
    never = run(clipped, [log_ratio], advantage, epsilon=1.0, epsilon_high=1e9)[1]
    assert run(reinforce, [log_ratio], advantage)[1] == pytest.approx(never, rel=1e-12)


def test_without_the_weight_it_is_the_score_function():
    loss, gradient, stats = run(reinforce, [2.0, -1.0], 3.0, importance_weighted=False)
    assert gradient == [-3.0, -3.0] and loss == [-6.0, 3.0] and stats == {}


def test_on_policy_the_weight_is_one():
    logprobs = torch.tensor([[-0.5, -2.0]], requires_grad=True)
    for weighted in (True, False):
        out = reinforce(logprobs, None, torch.tensor([2.0]), torch.ones(1, 2), importance_weighted=weighted)
        assert out.loss.tolist() == [[1.0, 4.0]]
        assert torch.autograd.grad(out.loss.sum(), logprobs)[0].tolist() == [[-2.0, -2.0]]


# --- all of them ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [cispo, vespo, reinforce], ids=lambda f: f.__name__)
def test_no_weight_carries_a_gradient(loss):
    """Only log pi does: the second derivative is 0."""
    logprobs = torch.tensor([[0.2, -0.3]], requires_grad=True)
    out = loss(logprobs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    assert not any(v.requires_grad for v in out.stats.values())
    (first,) = torch.autograd.grad(out.loss.sum(), logprobs, create_graph=True)
    assert not first.requires_grad


@pytest.mark.parametrize("loss", [cispo, vespo, reinforce], ids=lambda f: f.__name__)
def test_half_precision_log_probs_give_a_float32_loss(loss):
    half = torch.full((1, 2), -2.0, dtype=torch.bfloat16)
    assert loss(half, None, torch.ones(1), torch.ones(1, 2)).loss.dtype == torch.float32
