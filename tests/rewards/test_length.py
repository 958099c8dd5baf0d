"""Values worked out on paper from DAPO (equation 13), Yeo et al. 2025 (C.1) and Kimi k1.5 (2.3.3)."""

from __future__ import annotations

import math

import pytest

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.length import cosine_length, relative_length, soft_overlong
from grpo_trainer.rewards.options import options_of


def ids(*lengths: int) -> list[list[int]]:
    return [[1] * length for length in lengths]


@pytest.mark.parametrize(
    ("length", "reward"),
    # L_max 100, L_cache 20: (80 - y) / 20 between 80 and 100
    [(0, 0), (79, 0), (80, 0), (81, -0.05), (85, -0.25), (90, -0.5), (99, -0.95), (100, -1), (101, -1), (10_000, -1)],
)
def test_dapos_punishment(length, reward):
    assert soft_overlong(ids(length), max_length=100, cache=20, prompts=["p"]) == [pytest.approx(reward)]


def test_dapos_own_setting():
    # 20480 tokens at most, of which 4096 are the cache: nothing up to 16384, half way at 18432
    assert soft_overlong(ids(16384, 18432, 20480), max_length=20480, cache=4096) == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("cache", [0, -1, 101])
def test_a_cache_out_of_range_is_refused(cache):
    with pytest.raises(ValueError, match=rf"cache={cache} must be above 0 and at most max_length=100"):
        soft_overlong(ids(1), max_length=100, cache=cache)


PAPER = dict(correct_short=2.0, correct_long=1.0, wrong_short=-10.0, wrong_long=0.0, exceeded=-10.0)


@pytest.mark.parametrize(
    ("length", "right", "wrong"),
    [
        (0, 2.0, -10.0),  # cos 0 = 1: the value at no tokens
        (50, 1.5, -5.0),  # cos(π/2) = 0: the middle
        (25, 1.0 + 0.5 * (1 + math.sqrt(0.5)), -5.0 * (1 + math.sqrt(0.5))),  # cos(π/4)
        (99, 1.0 + 0.5 * (1 + math.cos(0.99 * math.pi)), -5.0 * (1 + math.cos(0.99 * math.pi))),
        (100, -10.0, -10.0),  # as long as can be: exceeded, whatever the answer
        (150, -10.0, -10.0),
    ],
)
def test_the_papers_cosine(length, right, wrong):
    got = cosine_length(
        ["7", "8", "7"], ids(*[length] * 3), answer=[7, 7, None], max_length=100, correctness="last_integer", **PAPER
    )
    assert got == [pytest.approx(right), pytest.approx(wrong, abs=1e-9), None]


def test_trls_defaults_and_no_turning_back_beyond_the_longest():
    got = cosine_length(["7", "8"] * 3, ids(0, 0, 50, 50, 200, 200), answer=[7] * 6, max_length=100)
    assert got == pytest.approx([1.0, -1.0, 0.75, -0.75, 0.5, -0.5])


def test_kimis_relative_length():
    # lengths 10 to 30: λ = .5, 0, -.5 and, at 15, .25
    answers = ["7", "7", "7", "8", "8", "8", "7"]
    got = relative_length(
        answers, ids(10, 20, 30, 10, 15, 30, 15), answer=[7] * 7, prompts=["p"] * 7, correctness="last_integer"
    )
    assert got == [0.5, 0.0, -0.5, 0.0, 0.0, -0.5, 0.25]


def test_it_is_relative_to_the_group_also_where_it_is_called_with_several():
    got = relative_length(
        ["7", "7", "9", "9"], ids(10, 20, 1000, 2000), answer=[7, 7, 9, 9], prompts=["p", "p", "q", "q"]
    )
    assert got == [0.5, -0.5, 0.5, -0.5]
    assert options_of(REWARDS["relative_length"]).group


def test_equally_long_completions_are_neither_rewarded_nor_punished():
    assert relative_length(["7", "8"], ids(10, 10), answer=[7, 7], correctness="last_integer") == [0.0, 0.0]


def test_what_is_right_may_be_asked_of_any_reward_that_needs_no_sandbox():
    with pytest.raises(ValueError, match="asks for a sandbox"):
        cosine_length(["7"], ids(1), reasoning_gym=["{}"], max_length=10, correctness="reasoning_gym")
    with pytest.raises(ValueError, match="Did you mean 'last_integer'"):
        relative_length(["7"], ids(1), answer=[7], correctness="last_integr")
    with pytest.raises(ValueError, match="max_length=0 must be above 0"):
        cosine_length(["7"], ids(1), answer=[7], max_length=0)


def test_all_go_by_their_names():
    assert REWARDS["soft_overlong"] is soft_overlong and REWARDS["cosine_length"] is cosine_length
