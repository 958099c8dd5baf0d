from __future__ import annotations

import itertools
import math

import pytest
import torch

from grpo_trainer.functional.losses import POLICY_LOSSES, clipped, importance_ratio


def column(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def run(log_ratios, advantages, **knobs):
    """Loss and its gradient for rows of one token each, old log-probs 0."""
    logprobs = column(log_ratios).requires_grad_()
    out = clipped(logprobs, torch.zeros_like(logprobs), column(advantages)[:, 0], torch.ones_like(logprobs), **knobs)
    gradient = torch.autograd.grad(out.loss.sum(), logprobs)[0]
    return out.loss.detach()[:, 0], gradient[:, 0], {name: v[:, 0].tolist() for name, v in out.stats.items()}


def on_paper(log_ratio, advantage, epsilon, epsilon_high, delta) -> tuple[float, float]:
    """-min(min(r, delta) A, clip(r) A) and its derivative in log r, one scalar at a time.

    The derivative of a clip is 1 inside and on its bounds, 0 beyond; where both branches are equal, so are theirs.
    """
    low, high = 1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high)
    delta = math.inf if delta is None else delta
    r = math.exp(max(-20.0, min(20.0, log_ratio)))
    slope = r if abs(log_ratio) <= 20 else 0.0
    free, bounded = min(r, delta) * advantage, max(low, min(high, r)) * advantage
    if free < bounded:
        return -free, -advantage * (slope if r <= delta else 0.0)
    if bounded < free:
        return -bounded, -advantage * (slope if low <= r <= high else 0.0)
    return -free, -advantage * (slope if r <= delta and (low <= r <= high) else 0.0)


def test_every_loss_in_the_table_is_tested_here():
    assert set(POLICY_LOSSES) == {"clipped"}


# --- the clipped surrogate --------------------------------------------------------------------------------------------


def test_the_clip_binds_only_where_the_policy_has_already_moved_the_way_it_is_pushed():
    # epsilon .2; ratio and A: 1.5, +1 -> -1.2 clipped; 1.5, -1 -> 1.5 free; .5, +1 -> -.5 free; .5, -1 -> .8 clipped;
    # A = 0 -> 0
    logs = [math.log(r) for r in (1.5, 1.5, 0.5, 0.5, 1.5)]
    loss, gradient, _ = run(logs, [1, -1, 1, -1, 0])
    assert loss.tolist() == pytest.approx([-1.2, 1.5, -0.5, 0.8, 0.0], abs=1e-12)
    # a free token's gradient is -A r, a clipped one's 0
    assert gradient.tolist() == pytest.approx([0.0, 1.5, -0.5, 0.0, 0.0], abs=1e-12)


def test_a_ratio_of_e_either_way():
    loss, _, _ = run([1, -1, 1, -1], [1, 1, -1, -1])
    assert loss.tolist() == pytest.approx([-1.2, -math.exp(-1), math.e, 0.8], abs=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
@pytest.mark.parametrize("epsilon_high", [None, 0.0, 0.28])
@pytest.mark.parametrize("delta", [None, 2.0])
def test_loss_and_gradient_are_those_worked_out_on_paper(epsilon, epsilon_high, delta):
    logs = [-1000.0, -25.0, -20.0, -3.0, -0.5, -0.2, -0.01, 0.0, 0.01, 0.2, 0.24, 0.5, 0.7, 3.0, 20.0, 25.0, 1000.0]
    cases = list(itertools.product(logs, [-2.5, -1.0, 0.0, 0.3, 2.0]))
    loss, gradient, _ = run(*zip(*cases, strict=True), epsilon=epsilon, epsilon_high=epsilon_high, delta=delta)
    expected = [on_paper(log, a, epsilon, epsilon_high, delta) for log, a in cases]
    assert loss.isfinite().all() and gradient.isfinite().all()
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12, abs=1e-12)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(("log_ratio", "bound"), [(0.2, "epsilon_high"), (-0.2, "epsilon"), (0.6, "delta")])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_exactly_on_a_bound_is_not_yet_clipped(log_ratio, bound, sign):
    ratio = torch.tensor(log_ratio, dtype=torch.float64).exp().item()
    # r - 1 and 1 - r are exact for r in [1/2, 2], so that 1 +- epsilon is the ratio itself
    knobs = {"epsilon_high": {"epsilon_high": ratio - 1}, "epsilon": {"epsilon": 1 - ratio}, "delta": {"delta": ratio}}
    loss, gradient, stats = run([log_ratio], [sign], **knobs[bound])
    if bound == "delta" and sign > 0:  # where A > 0 the upper clip, 1.2, binds long before delta
        assert (loss.item(), gradient.item()) == (-1.2, 0.0)
        return
    assert loss.item() == -ratio * sign
    assert gradient.item() == pytest.approx(-ratio * sign, rel=1e-15)
    assert stats["clip_ratio/region"] == [0.0]


def test_clip_higher_moves_the_upper_bound_alone():
    loss, _, stats = run([math.log(1.25), math.log(1.5), math.log(0.75)], [1, 1, -1], epsilon=0.2, epsilon_high=0.28)
    assert loss.tolist() == pytest.approx([-1.25, -1.28, 0.8], abs=1e-12)
    assert stats["clip_ratio/high"] == [0.0, 1.0, 0.0]
    assert stats["clip_ratio/low"] == [0.0, 0.0, 1.0]


def test_delta_bounds_what_the_clip_leaves_free():
    # A = -1, ratio 5, delta 4: -min(4 * -1, 1.2 * -1) = 4, without gradient; A = +1: the clip binds first, as ever
    loss, gradient, _ = run([math.log(5.0), math.log(5.0), math.log(3.0)], [-1, 1, -1], delta=4.0)
    assert loss.tolist() == pytest.approx([4.0, -1.2, 3.0], abs=1e-12)
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 3.0], abs=1e-12)


@pytest.mark.parametrize("log_ratio", [-1000.0, -1.0, 0.0, 1.0, 1000.0])
def test_no_advantage_is_no_loss_no_gradient_and_no_clip(log_ratio):
    loss, gradient, stats = run([log_ratio], [0.0], delta=2.0)
    assert loss.item() == 0.0 and gradient.item() == 0.0
    assert all(values == [0.0] for values in stats.values())


@pytest.mark.parametrize("log_ratio", [-1e30, -1000.0, -21.0, 21.0, 1000.0, 1e30])
def test_a_log_ratio_beyond_the_cap_is_finite_and_has_no_gradient(log_ratio):
    for advantage in (-1.0, 1.0):
        logprobs = torch.tensor([[log_ratio]], requires_grad=True)  # float32, as in training
        out = clipped(logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1))
        assert out.loss.isfinite().all()
        assert torch.autograd.grad(out.loss.sum(), logprobs)[0].item() == 0.0


# --- no old log-probs: the sampling policy is the current one ---------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.0, 0.2])
def test_without_old_logprobs_the_ratio_is_one_and_the_gradient_the_score_functions(epsilon):
    logprobs = torch.tensor([[-0.1, -1e4, 0.0], [-3.3, -17.7, -1e-8]], requires_grad=True)
    advantages = torch.tensor([2.0, -0.5])
    out = clipped(logprobs, None, advantages, torch.ones(2, 3, dtype=torch.bool), epsilon=epsilon)
    # -A for each token, and d(-A log pi) / d(log pi) = -A
    assert out.loss.tolist() == [[-2.0] * 3, [0.5] * 3]
    assert torch.autograd.grad(out.loss.sum(), logprobs)[0].tolist() == [[-2.0] * 3, [0.5] * 3]
    assert not any(v.any() for v in out.stats.values())
    assert torch.equal(importance_ratio(logprobs, None), torch.ones(2, 3))


def test_without_old_logprobs_all_is_as_with_the_current_ones_given():
    logprobs = -torch.rand(3, 4).requires_grad_()
    args = (torch.tensor([1.0, -1.0, 0.5]), torch.ones(3, 4))
    given, absent = clipped(logprobs, logprobs.detach(), *args), clipped(logprobs, None, *args)
    assert torch.equal(given.loss, absent.loss)
    assert torch.equal(*(torch.autograd.grad(o.loss.sum(), logprobs, retain_graph=True)[0] for o in (given, absent)))


def test_the_ratio_is_the_quotient_of_the_two_probabilities():
    # .5 / .25 = 2, and .1 / .4 = .25
    got = importance_ratio(torch.tensor([[0.5, 0.1]]).log(), torch.tensor([[0.25, 0.4]]).log())
    assert got[0].tolist() == pytest.approx([2.0, 0.25], rel=1e-6)


# --- statistics and shapes --------------------------------------------------------------------------------------------


def test_clip_fractions_count_the_side_that_binds():
    # ratios 1.5, 1.5, .5, .5 and A = +1, -1, +1, -1: the first is clipped above, the last below
    _, _, stats = run([math.log(r) for r in (1.5, 1.5, 0.5, 0.5)], [1, -1, 1, -1])
    assert stats == {
        "clip_ratio/high": [1.0, 0.0, 0.0, 0.0],
        "clip_ratio/low": [0.0, 0.0, 0.0, 1.0],
        "clip_ratio/region": [1.0, 0.0, 0.0, 1.0],
    }


def test_figures_carry_no_gradient():
    out = clipped(torch.zeros(1, 2, requires_grad=True), None, torch.ones(1), torch.ones(1, 2))
    assert out.loss.requires_grad
    assert not any(v.requires_grad for v in out.stats.values())


def test_each_row_has_its_own_advantage_also_in_a_square_batch():
    out = clipped(torch.zeros(3, 3), None, torch.tensor([1.0, 2.0, 3.0]), torch.ones(3, 3))
    assert out.loss.tolist() == [[-1.0] * 3, [-2.0] * 3, [-3.0] * 3]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("logprobs", (2, 1)), ("old_logprobs", (1, 3)), ("advantages", (3,)), ("advantages", (2, 1)), ("mask", (2, 4))],
)
def test_a_shape_that_does_not_fit_is_refused_by_name(name, shape):
    good = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3),
    }
    clipped(**good)
    with pytest.raises(ValueError, match=rf"{name} \({shape[0]},"):
        clipped(**{**good, name: torch.zeros(shape)})
