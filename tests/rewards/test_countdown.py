"""Countdown: exactly the given numbers, exactly the target, and nothing is evaluated."""

from __future__ import annotations

import pytest

from grpo_trainer.rewards.countdown import countdown
from grpo_trainer.tasks import load_task

RIGHT = [
    "(8 - 2) * 7",
    "<answer>(8 - 2) * 7</answer>",
    "I try.\n<answer>7*(8-2)</answer>",
    "thoughts 1 + 1\n(8−2)×7 = 42",
    "<answer>7 * 8 - 7</answer> no: <answer>(8 - 2) * 7 = 42</answer>",
    "<answer>\n(8 - 2)\n* 7\n</answer>",
]
WRONG = [
    "",
    "42",
    "8 * 7 - 14",  # another number
    "6 * 7",
    "(8 - 2) * 7 + 2 - 2",  # a number used more than once
    "8 - 2 * 7",
    "(8 - 2) * 7 =",  # read up to the sign: this one is right, see below
    "8 ** 2 - 7",
    "__import__('os').getpid()",
    "(8 - 2) * 7; 1",
    "(8 - 2) * 7 # 42",
    "(8 - 2) * 0x7",
    "-(2 - 8) * 7",  # a sign in front
    "(8 - 2) * 7.0",
    "87 - 2",
    "9" * 5000,
    "(" * 5000,
    "((8 - 2) * 7",
    "7 / (8 - 8)",
]


@pytest.mark.parametrize("text", RIGHT)
def test_right(text):
    assert countdown([text], numbers=[[2, 7, 8]], target=[42]) == [1.0]


@pytest.mark.parametrize("text", [text for text in WRONG if not text.endswith("=")])
def test_wrong(text):
    assert countdown([text], numbers=[[2, 7, 8]], target=[42]) == [0.0]


def test_from_the_equals_sign_on_nothing_is_read():
    assert countdown(["(8 - 2) * 7 ="], numbers=[[2, 7, 8]], target=[42]) == [1.0]


def test_fractions_are_exact():
    assert countdown(["8 / (3 - 8 / 3)"], numbers=[[3, 3, 8, 8]], target=[24]) == [1.0]


def test_all_numbers_or_some_of_them():
    assert countdown(["7 * 6"], numbers=[[6, 7, 8]], target=[42]) == [0.0]
    assert countdown(["7 * 6"], numbers=[[6, 7, 8]], target=[42], use_all=False) == [1.0]
    assert countdown(["7 * 6"], numbers=[[6, 8]], target=[42], use_all=False) == [0.0]
    assert countdown(["8 + 8"], numbers=[[8, 8]], target=[16]) == [1.0]  # a number that is there twice


def test_no_problem_is_none():
    assert countdown(["1", "1"], numbers=[None, [1]], target=[1, None]) == [None, None]


def test_every_problem_of_the_task_has_a_solution_that_scores():
    train, heldout = load_task("builtin:countdown", 0)
    for part in (train, heldout):
        texts = [f"<answer>{answer}</answer>" for answer in part["answer"]]
        assert set(countdown(texts, numbers=part["numbers"], target=part["target"])) == {1.0}
    known = {(tuple(n), t) for n, t in zip(train["numbers"], train["target"], strict=True)}
    assert not known & {(tuple(n), t) for n, t in zip(heldout["numbers"], heldout["target"], strict=True)}
