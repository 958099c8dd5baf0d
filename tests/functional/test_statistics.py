from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.statistics import centred, deviations, in_dtype_of, is_constant, nanstd, scaled

NAN = math.nan


def double(rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_is_constant_tells_groups_without_signal():
    rewards = double([[1, 1, 1], [1, 1, 2], [NAN, 3, NAN], [NAN, NAN, NAN], [NAN, 3, 4]])
    assert is_constant(rewards).tolist() == [True, False, True, True, False]
    with pytest.raises(ValueError, match=r"\(P, G\)"):
        is_constant(torch.zeros(3))


def test_centred_rewards_are_zero_where_there_is_nothing_to_compare():
    got = centred(double([[1, 3, NAN], [0.1, 0.1, 0.1], [NAN, 7, NAN]]))
    assert got.tolist() == [[-1.0, 1.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(("ddof", "expected"), [(1, 1.0), (0, math.sqrt(2 / 3))])
def test_the_deviation_is_that_of_the_numbers_that_are_there(ddof, expected):
    # 1, 2, 3: squares 1 + 0 + 1
    assert nanstd(double([[1, NAN, 2, 3]]), dim=-1, ddof=ddof).tolist() == [[pytest.approx(expected)]]


def test_too_few_numbers_have_no_deviation():
    assert nanstd(double([[5, NAN], [NAN, NAN]]), dim=-1, ddof=1).tolist() == [[0.0], [0.0]]


def test_differences_far_from_zero_are_kept():
    far = 1e15
    assert deviations(double([[far, far + 1]]), dim=-1).tolist() == [[-0.5, 0.5]]


def test_zero_over_zero_is_zero():
    assert scaled(double([0.0, 3.0]), double([0.0]), 1.5).tolist() == [0.0, 2.0]
    assert scaled(double([0.0]), double([0.0]), 0.0).tolist() == [0.0]


def test_advantages_of_whole_numbers_are_float32():
    assert in_dtype_of(torch.tensor([[1, 2]]), double([[0.5, -0.5]])).dtype == torch.float32
    assert in_dtype_of(torch.ones(1, 2, dtype=torch.float16), double([[0.5, -0.5]])).dtype == torch.float16
