from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.policy.entropy_bonus import EntropyBonus


def step(bonus: EntropyBonus, *sums: tuple[float, float], **kwargs) -> None:
    for total, count in sums:
        bonus.count(torch.tensor(total), torch.tensor(count))
    bonus.end_step(**kwargs)


def test_a_fixed_coefficient_stays_and_nothing_is_saved():
    bonus = EntropyBonus(coefficient=0.3)
    step(bonus, (0.0, 5.0))
    assert (bonus.applied, bonus.enabled, bonus.state_dict()) == (0.3, True, {})
    assert not EntropyBonus().enabled


def test_an_adaptive_coefficient_follows_the_mean_over_the_tokens_of_the_step():
    bonus = EntropyBonus(coefficient=0.1, adaptive=True, target=1.0, delta=0.05)
    assert bonus.enabled and bonus.applied == 0.0
    step(bonus, (9.0, 3.0), (0.0, 7.0))  # 9 nats over 10 tokens, though the mean of the means is 1.5
    assert bonus.last_entropy == pytest.approx(0.9)
    assert bonus.applied == bonus.coefficient == pytest.approx(0.15)
    step(bonus, (11.0, 10.0))
    assert (bonus.applied, bonus.coefficient) == (0.0, pytest.approx(0.1))


def test_sums_of_other_processes_are_added_before_they_are_divided():
    bonus = EntropyBonus(adaptive=True, target=1.0)
    step(bonus, (2.0, 1.0), add_up=lambda sums: sums + torch.tensor([1.0, 5.0]))
    assert bonus.last_entropy == pytest.approx(0.5)


def test_a_step_without_a_token_measures_nothing():
    bonus = EntropyBonus(coefficient=0.1, adaptive=True)
    step(bonus, (0.0, 0.0))
    assert (bonus.coefficient, bonus.last_entropy) == (0.1, math.inf)


def test_what_is_saved_goes_on_as_if_there_had_been_no_break():
    whole = EntropyBonus(adaptive=True, target=1.0)
    step(whole, (1.0, 2.0))
    again = EntropyBonus(adaptive=True, target=1.0)
    again.load_state_dict(whole.state_dict())
    assert again.applied == whole.applied > 0
    for bonus in (whole, again):
        step(bonus, (1.0, 2.0))
    assert again.state_dict() == whole.state_dict()
    again.load_state_dict({})  # a checkpoint of a run without one
    assert again.state_dict() == whole.state_dict()
