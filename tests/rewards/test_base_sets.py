"""Names, weights and logs of a set of reward functions; the contract of a single one is in test_base.py."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
import torch

from grpo_trainer.functional.advantages import group_zscore
from grpo_trainer.rewards.base import RewardError, RewardInputs, RewardSet, reward_name

NAN = math.nan


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def constant(value: float):
    return lambda completions, **kwargs: [value] * len(completions)


def batch(count: int = 2) -> RewardInputs:
    return RewardInputs(rows=[{"prompt": "p"}] * count, completions=["c"] * count, completion_ids=[[1]] * count)


# --- weights ----------------------------------------------------------------------------------------------------------


def test_the_total_is_the_weighted_sum():
    # .7 * 1 + .3 * 0
    rewards = RewardSet([constant(1.0), constant(0.0)], weights=[0.7, 0.3])
    assert rewards.combine(rewards.score(batch())[0]).tolist() == pytest.approx([0.7, 0.7])


def test_each_function_weighs_one_by_default():
    assert RewardSet([constant(1.0)] * 3).combine(double([[1, 2, 4]])).tolist() == [7.0]


def test_a_negative_and_a_zero_weight_are_legal():
    assert RewardSet([constant(1.0)] * 3, weights=[1, -2, 0]).combine(double([[5, 3, 100]])).tolist() == [-1.0]


def test_functions_that_do_not_apply_are_left_out_and_a_row_without_any_is_unscorable():
    combine = RewardSet([constant(1.0)] * 2, weights=[2.0, 10.0]).combine
    got = combine(double([[1, 1], [1, NAN], [NAN, 1], [NAN, NAN], [0, NAN]]))
    # 2 + 10, 2, 10, none; and a zero is a reward
    assert np.array_equal(got.numpy(), [12.0, 2.0, 10.0, NAN, 0.0], equal_nan=True)
    assert got.dtype == torch.float64


def test_equal_rewards_have_equal_totals_to_the_last_bit_wherever_the_row_stands():
    # a rounding difference between equal rows would be an advantage in a constant group
    for functions in (2, 3, 7, 16):
        rewards = RewardSet([constant(0.0)] * functions, weights=[0.1 * (i + 1) for i in range(functions)])
        row = torch.rand(functions, dtype=torch.float64)
        for rows in (2, 5, 8, 33, 64):
            wide = torch.cat([row.expand(rows, -1), torch.zeros(rows, 3, dtype=torch.float64)], dim=1)
            for layout in (wide[:, :functions], wide[:, :functions].contiguous(), wide.T.contiguous().T[:, :functions]):
                assert len(rewards.combine(layout).unique()) == 1


def test_several_rewards_are_summed_first_and_normalised_then():
    # A = 0, 1 and B = 0, 10: totals 0, 11, and 5.5 / (7.77817 + .0001) = .70710; the other order would give 1.41411
    totals = RewardSet([constant(0.0)] * 2).combine(double([[0, 0], [1, 10]]))
    assert group_zscore(totals[None])[0].tolist() == pytest.approx([-0.70710, 0.70710], abs=5e-6)


@pytest.mark.parametrize("weights", [[1.0], [1.0, 2.0, 3.0], []])
def test_a_wrong_number_of_weights_is_refused_with_both_numbers(weights):
    with pytest.raises(ValueError, match=f"reward_weights has {len(weights)} entries for 2 reward functions"):
        RewardSet([constant(1.0)] * 2, weights=weights)


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf])
def test_weights_must_be_finite(bad):
    with pytest.raises(ValueError, match="reward_weights must be finite"):
        RewardSet([constant(1.0)] * 2, weights=[1.0, bad])


def test_a_set_without_functions_is_refused():
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        RewardSet([])


def test_what_cannot_be_called_is_refused():
    with pytest.raises(ValueError, match=r"'accuracy' \(str\), which is not callable"):
        RewardSet([constant(1.0), "accuracy"])


# --- names ------------------------------------------------------------------------------------------------------------


def correct(completions, scale=1, **kwargs):
    return [float(scale)] * len(completions)


class Judge:
    def __call__(self, completions, **kwargs):
        return [0.0] * len(completions)

    def opinion(self, completions, **kwargs):
        return [0.5] * len(completions)


def test_a_name_is_the_functions_the_wrapped_functions_or_the_classes():
    assert reward_name(correct) == "correct"
    assert reward_name(functools.partial(correct, scale=2)) == "correct"
    assert reward_name(functools.partial(functools.partial(correct), scale=2)) == "correct"
    assert reward_name(Judge()) == "Judge"
    assert reward_name(functools.partial(Judge())) == "Judge"
    assert reward_name(Judge().opinion) == "opinion"
    assert reward_name(lambda **kwargs: []) == "lambda"


def test_names_are_unique_so_that_no_figure_hides_another():
    several = [functools.partial(correct, scale=2), lambda **k: [0.0, 0.0], lambda **k: [1.0, 1.0], Judge(), correct]
    rewards = RewardSet(several)
    assert rewards.names == ["correct", "lambda", "lambda_2", "Judge", "correct_2"]
    # and each is called: its own column
    assert rewards.score(batch())[0].tolist() == [[2.0, 0.0, 1.0, 0.0, 1.0]] * 2


def test_a_suffix_never_meets_a_name_that_exists():
    assert RewardSet([correct] * 4, names=["a", "a_2", "a", "a"]).names == ["a", "a_2", "a_3", "a_4"]
    assert len(set(RewardSet([correct] * 3, names=["a", "a", "a_2"]).names)) == 3


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]])
def test_a_wrong_number_of_names_is_refused_at_once(names):
    with pytest.raises(ValueError, match="names"):
        RewardSet([correct, correct], names=names)


# --- what functions log -----------------------------------------------------------------------------------------------


def test_extra_columns_and_metrics_are_kept():
    def first(completions, log_extra, log_metric, **kwargs):
        log_extra("parsed", ["x", "y"])
        log_metric("accuracy", 0.25)
        return [0.0] * 2

    def second(completions, log_extra, log_metric, **kwargs):
        log_extra("tokens", np.array([3, 4]))
        log_metric("accuracy", 1)
        log_metric("speed", np.float32(0.5))
        return [0.0] * 2

    _, log = RewardSet([first, second]).score(batch())
    assert log.extra == {"parsed": ["x", "y"], "tokens": [3, 4]}
    assert log.metrics == {"accuracy": [0.25, 1.0], "speed": [0.5]}


def test_a_log_belongs_to_one_batch():
    def reward(completions, log_metric, **kwargs):
        log_metric("calls", 1)
        return [0.0] * len(completions)

    rewards = RewardSet([reward])
    assert [rewards.score(batch())[1].metrics for _ in range(2)] == [{"calls": [1.0]}] * 2


@pytest.mark.parametrize("values", [[1], [1, 2, 3], []])
def test_an_extra_column_of_another_length_is_refused(values):
    def reward(log_extra, **kwargs):
        log_extra("parsed", values)
        return [0.0] * 2

    with pytest.raises(RewardError, match=rf"log_extra\('parsed', ...\) got {len(values)} values for 2 completions"):
        RewardSet([reward]).score(batch())


@pytest.mark.parametrize("value", [NAN, math.inf, None, "1", [1.0]])
def test_a_metric_that_is_no_finite_number_is_refused(value):
    def reward(log_metric, **kwargs):
        log_metric("accuracy", value)
        return [0.0] * 2

    with pytest.raises(RewardError, match=r"log_metric\('accuracy', ...\) got .*not a finite number"):
        RewardSet([reward]).score(batch())
