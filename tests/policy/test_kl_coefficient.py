from __future__ import annotations

import pytest
import torch

from grpo_trainer.policy.kl_coefficient import KLCoefficient


def step(coefficient: KLCoefficient, *sums: tuple[float, float], **kwargs) -> None:
    for total, count in sums:
        coefficient.count(torch.tensor(total), torch.tensor(count))
    coefficient.end_step(**kwargs)


def test_a_fixed_one_stays_and_nothing_is_saved():
    fixed = KLCoefficient(beta=0.3)
    step(fixed, (50.0, 5.0))
    assert (fixed.beta, fixed.adaptive, fixed.state_dict()) == (0.3, False, {})


def test_it_follows_the_mean_over_the_tokens_of_the_step():
    # 1 nat over 10 tokens is the target .1 exactly; .11 is a tenth above: 1 + .1 * .1; far away 1 + .1 * .2, or less
    moving = KLCoefficient(beta=1.0, target=0.1)
    step(moving, (1.0, 4.0), (0.0, 6.0))
    assert moving.beta == 1.0
    step(moving, (1.1, 10.0))
    assert moving.beta == pytest.approx(1.01)
    step(moving, (500.0, 10.0))
    assert moving.beta == pytest.approx(1.01 * 1.02)
    step(moving, (-3.0, 10.0))  # k1 can be negative
    assert moving.beta == pytest.approx(1.01 * 1.02 * 0.98)


def test_its_gain_is_the_share_of_the_error_that_is_corrected():
    eager = KLCoefficient(beta=2.0, target=0.1, gain=0.5)
    step(eager, (1.1, 10.0))
    assert eager.beta == pytest.approx(2.0 * 1.05)


def test_a_step_without_a_measurement_moves_nothing():
    moving = KLCoefficient(beta=1.0, target=0.1)
    step(moving)
    step(moving, (0.0, 0.0))
    assert moving.beta == 1.0


def test_sums_of_other_processes_are_added_before_they_are_divided():
    moving = KLCoefficient(beta=1.0, target=0.1)
    step(moving, (0.1, 1.0), add_up=lambda sums: sums + torch.tensor([1.0, 9.0]))  # 1.1 over 10
    assert moving.beta == pytest.approx(1.01)


def test_what_is_saved_goes_on_as_if_there_had_been_no_break():
    whole = KLCoefficient(beta=1.0, target=0.1)
    step(whole, (9.0, 3.0))
    again = KLCoefficient(beta=1.0, target=0.1)
    again.load_state_dict(whole.state_dict())
    assert again.beta == whole.beta == 1.02
    again.load_state_dict({})  # a checkpoint of a run without one
    assert again.beta == 1.02
