from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.reports.summary import (
    Interval,
    mean_and_interval,
    student_t_quantile,
    total_over_steps,
)


def test_the_interval_is_that_of_the_means_per_prompt():
    # Four prompts, two samples each. Means per prompt: 1, 1/2, 1/2, 0; their mean 1/2.
    # s^2 = (1/4 + 0 + 0 + 1/4) / 3 = 1/6, s / sqrt(4) = 0.204124; t(0.975, 3) = 3.182446 from a printed table.
    # 3.182446 * 0.204124 = 0.649614
    rewards = torch.tensor([[1.0, 1.0], [0.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    interval = mean_and_interval(rewards)
    assert interval.mean == 0.5
    assert interval.low == pytest.approx(0.5 - 0.649614, abs=1e-6)
    assert interval.high == pytest.approx(0.5 + 0.649614, abs=1e-6)
    assert interval.n == 4


def test_more_samples_that_say_the_same_do_not_narrow_the_interval():
    few = torch.tensor([[1.0], [0.0], [1.0], [0.0]])
    many = few.expand(4, 100)
    assert mean_and_interval(many) == mean_and_interval(few)


def test_unscorable_samples_are_left_out():
    nan = math.nan
    # means 1, 0.5 and none at all: mean 0.75, s = 0.353553, s / sqrt(2) = 0.25, t(0.975, 1) = 12.706205
    interval = mean_and_interval(torch.tensor([[1.0, nan], [0.0, 1.0], [nan, nan]]))
    assert interval.n == 2
    assert interval.mean == 0.75
    assert interval.high == pytest.approx(0.75 + 0.25 * 12.706205, abs=1e-5)


def test_equal_means_give_an_interval_of_no_width():
    interval = mean_and_interval(torch.full((5, 3), 0.25))
    assert (interval.low, interval.mean, interval.high) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("rewards", [torch.ones(1, 4), torch.tensor([[1.0], [math.nan]])])
def test_one_prompt_has_no_interval(rewards):
    with pytest.raises(ValueError, match="at least 2 prompts with a scorable sample, but there is 1"):
        mean_and_interval(rewards)


def test_a_flat_list_of_rewards_is_refused():
    with pytest.raises(ValueError, match=r"\(P, G\), one row per prompt, but has the shape \(4,\)"):
        mean_and_interval(torch.ones(4))


# 95 % two-sided, and 99 %, as printed in tables of Student's t
@pytest.mark.parametrize(
    ("freedom", "coverage", "quantile"),
    [
        (1, 0.95, 12.706),
        (2, 0.95, 4.303),
        (3, 0.95, 3.182),
        (4, 0.95, 2.776),
        (10, 0.95, 2.228),
        (29, 0.95, 2.045),
        (60, 0.95, 2.000),
        (120, 0.95, 1.980),
        (5, 0.99, 4.032),
        (10_000, 0.95, 1.960),
    ],
)
def test_quantiles_are_those_of_the_tables(freedom, coverage, quantile):
    assert student_t_quantile(freedom, coverage) == pytest.approx(quantile, abs=6e-4)


def test_totals_weigh_each_log_by_the_steps_that_it_speaks_for():
    history = [
        {"step": 4, "time/update": 1.5},  # steps 1 to 4: 6 s
        {"step": 4, "eval_reward": 0.5},
        {"step": 6, "time/update": 2.0},  # steps 5 and 6: 4 s
        {"step": 6, "train_runtime": 99.0},
    ]
    assert total_over_steps(history, "time/update") == 10.0
    assert total_over_steps(history, "time/generation") == 0.0


def test_an_interval_reads_as_mean_and_ends():
    assert str(Interval(0.5, 0.25, 0.75, 8)) == "0.500 [0.250, 0.750]"
