from __future__ import annotations

import itertools
import math

import pytest
import torch

from grpo_trainer.functional.losses import (
    POLICY_LOSSES,
    clipped,
    clipped_sequence,
    clipped_sequence_token,
    gmpo,
    importance_ratio,
    sapo,
)


def column(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def row_of(log_ratios, advantage, loss, **knobs):
    """Loss, gradient of its mean over the row, and stats, for one completion with old log-probs 0."""
    logprobs = column(log_ratios).T.contiguous().requires_grad_()
    out = loss(logprobs, torch.zeros_like(logprobs), column([advantage])[:, 0], torch.ones_like(logprobs), **knobs)
    gradient = torch.autograd.grad(out.loss.mean(), logprobs)[0]
    return out.loss.detach()[0].tolist(), gradient[0].tolist(), out.stats


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


# --- one ratio per completion -----------------------------------------------------------------------------------------

WIDE = {"epsilon": 0.2, "epsilon_high": 0.2}


def test_a_completion_is_clipped_as_a_whole_by_the_mean_of_its_log_ratios():
    # d = .1, .2, .6: exp(.3) = 1.34986; A = +1 is clipped at 1.2, though two of the tokens alone would be free
    loss, gradient, stats = row_of([0.1, 0.2, 0.6], 1.0, clipped_sequence, **WIDE)
    assert loss == pytest.approx([-1.2] * 3) and gradient == [0.0] * 3
    assert stats["clip_ratio/high"].tolist() == [[1.0]]
    # A = -1 is free: the mean of three equal losses moves each token by s / 3
    loss, gradient, stats = row_of([0.1, 0.2, 0.6], -1.0, clipped_sequence, **WIDE)
    assert loss == pytest.approx([math.exp(0.3)] * 3) and gradient == pytest.approx([math.exp(0.3) / 3] * 3)
    assert stats["clip_ratio/region"].tolist() == [[0.0]]


def test_the_clip_of_a_completion_is_the_papers_unless_told_otherwise():
    # within 1 - 3e-4 and 1 + 4e-4, or not: exp(3e-4) = 1.00030, exp(5e-4) = 1.00050, exp(-4e-4) = .99960
    assert row_of([3e-4], 1.0, clipped_sequence)[1][0] != 0.0
    assert row_of([5e-4], 1.0, clipped_sequence)[0] == pytest.approx([-1.0004], abs=1e-12)
    assert row_of([-4e-4], -1.0, clipped_sequence)[0] == pytest.approx([0.9997], abs=1e-12)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratios", [[0.05, -0.1, 0.02], [0.3, 0.4, 0.1], [-0.5, -0.3, -0.6]])
def test_the_token_form_is_the_same_as_long_as_all_tokens_have_one_advantage(log_ratios, advantage):
    one, other = (row_of(log_ratios, advantage, loss, **WIDE) for loss in (clipped_sequence, clipped_sequence_token))
    assert one[0] == pytest.approx(other[0], rel=1e-14) and one[1] == pytest.approx(other[1], rel=1e-14)


def test_the_token_form_moves_each_token_by_its_own_weight():
    def slopes(loss):
        logprobs = column([0.05, -0.1]).T.contiguous().requires_grad_()
        out = loss(logprobs, torch.zeros_like(logprobs), torch.ones(1), torch.ones(1, 2), **WIDE)
        return torch.autograd.grad((out.loss * torch.tensor([[1.0, 0.0]])).sum(), logprobs)[0][0].tolist()

    s = math.exp(-0.025)
    assert slopes(clipped_sequence) == pytest.approx([-s / 2, -s / 2])  # the ratio belongs to both
    assert slopes(clipped_sequence_token) == pytest.approx([-s, 0.0])


@pytest.mark.parametrize("level", ["sequence", "sequence_token"])
def test_the_level_of_the_ratio_is_a_knob_of_clipped(level):
    named = {"sequence": clipped_sequence, "sequence_token": clipped_sequence_token}[level]
    by_knob = row_of([0.1, 0.2, 0.6], -1.0, clipped, importance_sampling_level=level)
    assert by_knob[:2] == row_of([0.1, 0.2, 0.6], -1.0, named, **WIDE)[:2]
    with pytest.raises(ValueError, match=r"importance_sampling_level 'sentence'\. Known: token, sequence"):
        row_of([0.1], 1.0, clipped, importance_sampling_level="sentence")


@pytest.mark.parametrize("loss", [clipped_sequence, clipped_sequence_token, gmpo], ids=lambda f: f.__name__)
def test_only_credited_tokens_are_in_the_ratio_of_a_completion(loss):
    masked = torch.tensor([[True, False, True]])
    logprobs = column([0.02, 99.0, 0.04]).T.contiguous().requires_grad_()
    out = loss(logprobs, torch.zeros_like(logprobs), torch.ones(1), masked, **({} if loss is gmpo else WIDE)).loss
    gradient = torch.autograd.grad((out * masked).sum(), logprobs)[0]
    assert out[0, 0].item() == pytest.approx(-math.exp(0.03), rel=1e-12)
    assert gradient[0, 1].item() == 0.0


@pytest.mark.parametrize("loss", [clipped_sequence, clipped_sequence_token, gmpo], ids=lambda f: f.__name__)
def test_a_completion_without_a_credited_token_has_ratio_one(loss):
    out = loss(torch.full((1, 2), 50.0), torch.zeros(1, 2), torch.tensor([2.0]), torch.zeros(1, 2))
    assert out.loss.tolist() == [[-2.0, -2.0]]


# --- a soft gate ------------------------------------------------------------------------------------------------------


def test_the_gate_is_open_on_policy_and_closes_on_either_side():
    def slope(log_ratio, advantage):
        return row_of([log_ratio], advantage, sapo)[1][0]

    assert slope(0.0, 1.0) == pytest.approx(-1.0) and slope(0.0, -1.0) == pytest.approx(1.0)
    # w = sech^2(tau / 2 * (r - 1)), r = 3: sech(1)^2 = .41997, and for tau = 1.05 sech(1.05)^2 = .38878
    assert slope(math.log(3.0), 1.0) == pytest.approx(-3 * 0.41997, abs=2e-4)
    assert slope(math.log(3.0), -1.0) == pytest.approx(3 * 0.38878, abs=2e-4)
    assert abs(slope(6.0, 1.0)) < 1e-12  # far above: let go, where the clip would hold a slope of 0 from 1.2 on
    assert slope(-6.0, 1.0) == pytest.approx(-4 * 0.19661 * math.exp(-6), rel=1e-2)  # far below: p(1 - p) = .1966 at -1


def test_the_temperature_goes_by_the_sign_of_the_advantage():
    knobs = {"sapo_temperature_pos": 2.0, "sapo_temperature_neg": 0.5}
    # at ratio 1 the gate is 4 / tau / 2
    assert [row_of([0.0], a, sapo, **knobs)[0][0] for a in (1.0, -1.0)] == pytest.approx([-1.0, 4.0])


# --- the geometric mean of clipped tokens -----------------------------------------------------------------------------


def test_one_outlier_neither_silences_nor_outweighs_the_others():
    # d = .1, .2, 5: the last counts as .4, so exp(.7 / 3) = 1.262802; it alone has no slope
    loss, gradient, stats = row_of([0.1, 0.2, 5.0], 1.0, gmpo)
    assert loss == pytest.approx([-1.262802] * 3, abs=1e-6)
    assert gradient == pytest.approx([-1.262802 / 3, -1.262802 / 3, 0.0], abs=1e-6)
    assert stats["clip_ratio/high"].tolist() == [[0.0, 0.0, 1.0]]
    # pushed down, what has grown is free: exp(5.3 / 3) = 5.851316
    assert row_of([0.1, 0.2, 5.0], -1.0, gmpo)[0] == pytest.approx([5.851316] * 3, abs=1e-6)


def test_the_two_distances_of_the_geometric_clip():
    knobs = {"gmpo_epsilon": 0.1, "gmpo_epsilon_high": 0.3}
    assert row_of([1.0], 1.0, gmpo, **knobs)[0] == pytest.approx([-math.exp(0.3)])
    assert row_of([-1.0], -1.0, gmpo, **knobs)[0] == pytest.approx([math.exp(-0.1)])
    assert row_of([-1.0], 1.0, gmpo, **knobs)[0] == pytest.approx([-math.exp(-1.0)])


@pytest.mark.parametrize("loss", [clipped_sequence, clipped_sequence_token, sapo, gmpo], ids=lambda f: f.__name__)
@pytest.mark.parametrize("log_ratio", [-1e30, -1000.0, 1000.0, 1e30])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_no_ratio_overflows(loss, log_ratio, dtype):
    for advantage in (-1.0, 1.0):
        logprobs = torch.full((1, 2), log_ratio, dtype=dtype, requires_grad=True)
        out = loss(logprobs, torch.zeros(1, 2, dtype=dtype), torch.tensor([advantage]), torch.ones(1, 2)).loss
        assert out.isfinite().all() and out.dtype == torch.float32
        assert torch.autograd.grad(out.sum(), logprobs)[0].isfinite().all()


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
@pytest.mark.parametrize("loss", POLICY_LOSSES.values(), ids=POLICY_LOSSES)
def test_a_shape_that_does_not_fit_is_refused_by_name(loss, name, shape):
    good = {
        "logprobs": torch.zeros(2, 3),
        "old_logprobs": torch.zeros(2, 3),
        "advantages": torch.zeros(2),
        "mask": torch.ones(2, 3),
    }
    loss(**good)
    with pytest.raises(ValueError, match=rf"{name} \({shape[0]},"):
        loss(**{**good, name: torch.zeros(shape)})
