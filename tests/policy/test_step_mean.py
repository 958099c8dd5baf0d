from __future__ import annotations

import torch

from grpo_trainer.policy.step_mean import StepMean


def test_a_mean_over_all_parts_and_a_new_beginning():
    mean = StepMean()
    mean.count(torch.tensor(9.0), torch.tensor(3.0))
    mean.count(torch.tensor(0.0), torch.tensor(7))  # 9 over 10, though the mean of the means is 1.5
    assert mean.take() == 0.9
    assert mean.take() is None


def test_sums_of_other_processes_are_added_before_they_are_divided():
    mean = StepMean()
    mean.count(torch.tensor(2.0), torch.tensor(1.0))
    assert mean.take(lambda sums: sums + torch.tensor([1.0, 5.0])) == 0.5


def test_nothing_counted_is_no_mean():
    mean = StepMean()
    mean.count(torch.tensor(0.0), torch.tensor(0.0))
    assert mean.take() is None


def test_no_gradient_is_held():
    mean = StepMean()
    mean.count(torch.tensor(1.0, requires_grad=True), torch.tensor(1.0))
    assert mean.take(lambda sums: sums if not sums.requires_grad else sums / 0) == 1.0
