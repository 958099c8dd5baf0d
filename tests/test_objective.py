from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch

from grpo_trainer.functional.aggregation import AGGREGATIONS
from grpo_trainer.functional.losses import POLICY_LOSSES, TokenLoss, clipped
from grpo_trainer.objective import LOSS_TYPES, SCALE_REWARDS, Recipe, recipe_of
from tests.test_loss import build, loss_of, rows_of

CLIPPED = ["grpo", "dapo", "bnpo", "dr_grpo", "luspo"]  # whose policy loss is the clipped surrogate


# --- each loss type on paper ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss_type", "value"),
    # ratio 1: the loss of a token is -A. A = 1 on 2 tokens, A = -2 on 4 tokens; L = 8. The losses that are a constant
    # times a log-prob, here -1, are A; the gate of sapo at ratio 1 is 2 / tau.
    [
        ("grpo", (-1 + 2) / 2),
        ("dapo", (-2 + 8) / 6),
        ("bnpo", (-2 + 8) / 6),
        ("dr_grpo", (-2 + 8) / (2 * 8)),
        ("luspo", (-2 + 8) / 2),
        ("cispo", (2 - 8) / 6),
        ("vespo", (2 - 8) / 6),
        ("reinforce", (2 - 8) / 2),
        ("gmpo", (-1 + 2) / 2),
        ("sapo", (-2 / 1.0 + 2 * 2 / 1.05) / 2),
    ],
)
@pytest.mark.parametrize("pads", [0, 5])
def test_each_loss_type_is_its_published_formula_whatever_the_padding(loss_type, value, pads):
    batch = rows_of(2, 4, advantages=[1.0, -2.0], pads=pads)
    assert loss_of(build(loss_type), -torch.ones(2, 4 + pads), batch)[0] == pytest.approx(value, rel=1e-6)


def test_every_loss_type_is_in_the_test_above():
    assert {*CLIPPED, "cispo", "vespo", "reinforce", "gmpo", "sapo"} == set(LOSS_TYPES)


@pytest.mark.parametrize("loss_type", CLIPPED)
@pytest.mark.parametrize("weighted", [True, False])
def test_loss_and_gradient_are_those_of_a_plain_loop(loss_type, weighted):
    lengths, beta = (2, 3, 0), 0.1
    logprobs, old, ref = (-torch.rand(3, 3, dtype=torch.float64) * 2 for _ in range(3))
    advantages = [0.7, -1.3, 0.5]
    rows = []  # (weight, value, slope) of each token, in Python numbers
    for b, length in enumerate(lengths):
        each = {"dapo": 1 / 5, "bnpo": 1 / 5, "dr_grpo": 1 / 8 / 3, "luspo": 1 / 3, "grpo": 1 / max(length, 1) / 3}
        weight = each[loss_type]
        for t in range(length):
            a, ratio = advantages[b], math.exp(logprobs[b, t] - old[b, t])
            d = (ref[b, t] - logprobs[b, t]).item()
            k3, k3_slope = math.exp(d) - d - 1, 1 - math.exp(d)
            kl, kl_slope = (ratio * k3, ratio * k3 + ratio * k3_slope) if weighted else (k3, k3_slope)
            free = min(ratio * a, max(0.8, min(1.2, ratio)) * a) == ratio * a
            surrogate, slope = (ratio * a, ratio * a) if free else (max(0.8, min(1.2, ratio)) * a, 0.0)
            rows.append((b, t, weight * (beta * kl - surrogate), weight * (beta * kl_slope - slope)))
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for b, t, _, slope in rows:
        expected[b, t] = slope
    batch = replace(rows_of(*lengths, old=old, ref=ref), advantages=torch.tensor(advantages, dtype=torch.float64))
    objective = build(loss_type, beta=beta, kl_importance_weighted=weighted)
    loss, gradient = loss_of(objective, logprobs, batch)
    assert loss == pytest.approx(sum(value for _, _, value, _ in rows), rel=1e-6)
    assert torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9)


# --- from names to functions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scale_rewards", "ddof", "value"),
    # group 0, 10: centred 5; deviation 7.07107 (ddof 1) or 5 (ddof 0). Batch 0, 0, 0, 10: squares about 2.5 are 75, so
    # sqrt(75 / 3) = 5 and sqrt(75 / 4) = 4.33013
    [
        ("group", 1, 5 / 7.07117),
        ("group", 0, 5 / 5.0001),
        ("batch", 1, 5 / 5.0001),
        ("batch", 0, 5 / 4.33023),
        ("none", 1, 5.0),
        ("none", 0, 5.0),
    ],
)
def test_scale_rewards_and_the_kind_of_deviation_choose_the_advantage(scale_rewards, ddof, value):
    objective = build(scale_rewards=scale_rewards, advantage_ddof=ddof)
    got = objective.advantage(torch.tensor([[0.0, 0.0], [0.0, 10.0]], dtype=torch.float64))
    assert got[0].tolist() == [0.0, 0.0]
    assert got[1].tolist() == pytest.approx([-value, value], rel=1e-5)
    assert set(SCALE_REWARDS) == {"group", "batch", "none"}


def test_an_advantage_by_name_takes_the_place_of_the_scale():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    objective = build(advantage_estimator="leave_one_out")
    assert objective.advantage(rewards)[0].tolist() == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])
    assert build(advantage_estimator="statistics:mean").advantage is statistics.mean


def test_rewards_can_be_normalised_before_they_are_added():
    assert build().joint_advantage is None
    joint = build(multi_objective_aggregation="normalize_then_sum", advantage_ddof=0).joint_advantage
    # population z-scores are -1, 1 for either function; weighted 3 and 1, the groups' sums are -4, 4 and -3, 3
    rewards = torch.tensor([[[0.0, 0.0], [9.0, 1.0]], [[0.0, 5.0], [1.0, 5.0]]], dtype=torch.float64)
    std = math.sqrt((16 + 9) / 2)
    expected = [[-4 / std, 4 / std], [-3 / std, 3 / std]]
    got = joint(rewards, weights=torch.tensor([3.0, 1.0]))
    assert torch.allclose(got, torch.tensor(expected, dtype=torch.float64), rtol=1e-3)


def test_rewards_times_ten_are_gradients_times_ten_only_without_scaling():
    rewards, logprobs = torch.tensor([[0.0, 1.0, 5.0]]), -torch.rand(3, 2)
    for scale, factor in (("none", 10.0), ("group", 1.0), ("batch", 1.0)):
        objective = build(scale_rewards=scale)
        one, ten = (
            loss_of(objective, logprobs, rows_of(1, 2, 2, advantages=objective.advantage(r)[0].tolist()))[1].norm()
            for r in (rewards, rewards * 10)
        )
        assert (ten / one).item() == pytest.approx(factor, rel=1e-3)


def test_knobs_reach_the_policy_loss_and_none_leaves_its_default():
    logprobs, old = torch.tensor([[0.5]]), torch.zeros(1, 1)
    batch = rows_of(1, advantages=[1.0], old=old)
    for knobs in ({"epsilon": 0.1}, {"epsilon": 0.1, "epsilon_high": 0.3}, {"delta": None}):
        kept = {name: value for name, value in knobs.items() if value is not None}
        expected = clipped(logprobs, old, batch.advantages, batch.mask, **kept).loss.item()
        assert build(**knobs)(logprobs, batch).loss.item() == expected


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_every_policy_loss_is_a_loss_type_by_its_own_name(name):
    assert recipe_of(name) == LOSS_TYPES.get(name, (name, "token_mean"))
    batch = rows_of(2, 4, advantages=[1.0, -2.0])
    pair = LOSS_TYPES.get(name, Recipe(name, "token_mean"))
    direct = POLICY_LOSSES[name](-torch.ones(2, 4), None, batch.advantages, batch.mask).loss
    weights, items = AGGREGATIONS[pair.aggregation](batch.mask)
    expected = torch.where(batch.mask, direct * weights, 0.0).sum() / items
    assert loss_of(build(name), -torch.ones(2, 4), batch)[0] == pytest.approx(expected.item())


def test_a_kl_estimator_of_ones_own_is_given_by_its_path():
    assert build(kl_estimator="torch:sub").kl is torch.sub


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"loss_type": "gpro"}, r"unknown loss_type 'gpro'\. Did you mean 'grpo'\? Known: grpo, dapo, bnpo, dr_grpo"),
        ({"loss_aggregation": "token_maen"}, r"unknown loss_aggregation 'token_maen'\. Did you mean 'token_mean'\?"),
        ({"importance_sampling_level": "word"}, r"unknown importance_sampling_level 'word'\. Known: token, sequence"),
        ({"scale_rewards": "groups"}, r"unknown scale_rewards 'groups'\. Did you mean 'group'\?"),
        ({"kl_estimator": "k9"}, r"unknown kl_estimator 'k9'"),
        ({"epsilom": 0.1}, r"'epsilom'.*epsilon"),
    ],
)
def test_an_unknown_name_is_refused_with_the_legal_ones(knobs, message):
    with pytest.raises(ValueError, match=message):
        build(**knobs)


def test_the_cap_of_cispo_is_the_papers_unless_it_is_given():
    """Neither epsilon, which is a distance from 1, nor anything else takes its place: ratios 7 and 4, A = 1."""
    logprobs, old = torch.zeros(1, 2), -torch.tensor([[7.0, 4.0]]).log()
    batch = rows_of(2, advantages=[1.0], old=old)
    for knobs, slopes in [({}, [-5.0, -4.0]), ({"epsilon": 0.2}, [-5.0, -4.0]), ({"epsilon_high": 2.0}, [-2.0, -2.0])]:
        assert loss_of(build("cispo", **knobs), logprobs, batch)[1][0].tolist() == pytest.approx(
            [s / 2 for s in slopes]
        )


@pytest.mark.parametrize(
    ("aggregation", "value"),
    [("token_mean", 1.0), ("sequence_mean", 0.5), ("sequence_sum", 3.0), ("fixed_length", 3 / 8)],
)
def test_an_aggregation_by_name_takes_the_place_of_the_losss_own(aggregation, value):
    batch = rows_of(2, 4, advantages=[1.0, -2.0])  # losses -1 and 2, see above
    loss = loss_of(build("grpo", loss_aggregation=aggregation), torch.zeros(2, 4), batch)[0]
    assert loss == pytest.approx(value, rel=1e-6)


def squared(logprobs, old_logprobs, advantages, mask, *, epsilon=0.2):
    """Minds rows without an advantage, too."""
    return TokenLoss((logprobs - advantages[:, None]).square() * epsilon, {})


def test_a_policy_loss_of_ones_own_is_given_by_its_path_and_computed_whole(monkeypatch):
    monkeypatch.setattr(torch, "squared_for_this_test", squared, raising=False)
    objective = build("torch:squared_for_this_test", epsilon=0.5, delta=3.0)
    batch = rows_of(1, 2, advantages=[0.0, 1.0])
    # (0 - 0)^2, (0 - 1)^2 twice, each half, over three tokens
    assert loss_of(objective, torch.zeros(2, 2), batch)[0] == pytest.approx(1 / 3)
    assert objective.live_rows(batch) == [0, 1]
    assert objective.silent_stats(batch, [0, 1]) == {}
