from __future__ import annotations

import math

import pytest
import torch

from grpo_trainer.functional.numeric import bounded_exp, row_mean, row_sum, wide

NAN = math.nan


def test_no_arithmetic_is_narrower_than_float32():
    kinds = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.int64: torch.float32}
    for narrow, expected in {**kinds, torch.float32: torch.float32, torch.float64: torch.float64}.items():
        assert wide(torch.ones(2, dtype=narrow)).dtype == expected


def test_exponents_are_cut_at_twenty_and_exact_up_to_it():
    exponents = torch.tensor([0.0, 5.0, 20.0, -20.0, 20.5, -1000.0, math.inf], dtype=torch.float64, requires_grad=True)
    values = bounded_exp(exponents)
    expected = [math.exp(x) for x in (0, 5, 20, -20, 20, -20, 20)]
    assert values.tolist() == pytest.approx(expected, rel=1e-15)
    slopes = torch.autograd.grad(values.sum(), exponents)[0].tolist()
    assert slopes == pytest.approx([*expected[:4], 0.0, 0.0, 0.0], rel=1e-15)


def test_sums_and_means_are_blind_to_what_is_hidden():
    values = torch.tensor([[1.0, NAN, 4.0], [NAN, math.inf, NAN]], requires_grad=True)
    mask = torch.tensor([[1, 0, 1], [0, 0, 0]])
    assert row_sum(values, mask).tolist() == [[5.0], [0.0]]
    assert row_mean(values, mask).tolist() == [[2.5], [0.0]]
    gradient = torch.autograd.grad(row_mean(values, mask).sum(), values)[0]
    assert gradient.tolist() == [[0.5, 0.0, 0.5], [0.0, 0.0, 0.0]]


def test_a_row_of_no_columns_has_mean_zero():
    assert row_mean(torch.zeros(2, 0), torch.zeros(2, 0)).tolist() == [[0.0], [0.0]]
