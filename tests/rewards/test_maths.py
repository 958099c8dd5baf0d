from __future__ import annotations

import pytest

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.maths import last_integer


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("19", 19, 1),
        ("The sum of 7 and 12 is 19.", 19, 1),
        ("7 + 12 = **19**\n", 19, 1),
        ("$19", 19, 1),
        ("19cm", 19, 1),
        ("It is 19, no, 18", 19, 0),  # the last one decides
        ("It is 18, no, 19", 19, 1),
        ("119", 19, 0),
        ("191", 19, 0),
        ("", 19, 0),
        ("nineteen", 19, 0),
        # a minus sign: only directly before the digits, and not after a digit or a word
        ("-7", -7, 1),
        ("\u22127", -7, 1),
        ("x = -7", -7, 1),
        ("(-7)", -7, 1),
        ("- 7", 7, 1),
        ("20-7", 7, 1),
        ("20-7", -7, 0),
        ("item-7", 7, 1),
        ("20 -7", -7, 1),
        ("-7", 7, 0),
        ("-0", 0, 1),
        # thousands
        ("1,234", 1234, 1),
        ("1,234", 234, 0),
        ("12,345,678.", 12345678, 1),
        ("-1,234", -1234, 1),
        ("1, 234", 234, 1),
        ("1,23", 23, 1),
        ("1,2345", 2345, 1),
        ("7,12,19", 19, 1),
        # decimals belong to their number
        ("19.0", 19, 1),
        ("19.00", 19, 1),
        ("19.0", 0, 0),
        ("19.5", 19, 0),
        ("19.5", 5, 0),
        ("0.19", 19, 0),
        (".19", 19, 0),
        ("...19", 19, 1),
        ("so it is.19", 19, 1),
        ("1,234.0", 1234, 1),
        ("-19.0", -19, 1),
        ("19 is right, not 19.5", 19, 0),  # the last number is no integer
        ("1.2.19", 19, 0),
        ("19. ", 19, 1),
        ("0019", 19, 1),
        ("2e3", 3, 1),
    ],
)
def test_the_last_number_decides(completion, answer, reward):
    assert last_integer([completion], answer=[answer]) == [reward]


@pytest.mark.parametrize("answer", [1234, "1234", "1,234", "1234.0", 1234.0, " 1234 "])
def test_the_answer_may_be_a_number_or_a_text(answer):
    assert last_integer(["It is 1,234", "It is 234"], answer=[answer] * 2) == [1.0, 0.0]


def test_messages_are_read_like_texts():
    chats = [
        [{"role": "assistant", "content": "7 + 12 = 19"}],
        [{"role": "assistant", "content": "19"}, {"role": "assistant", "content": "18"}],
        [{"role": "assistant", "content": None}],
        [],
    ]
    assert last_integer(completions=chats, answer=[19, 19, 19, 19], prompts=None) == [1.0, 0.0, 0.0, 0.0]


def test_a_missing_answer_means_that_the_reward_does_not_apply():
    assert last_integer(["19", "19"], answer=[None, 19]) == [None, 1.0]


@pytest.mark.parametrize("answer", ["nineteen", "19.5", "", "7 + 12", "x19", True, [19]])
def test_an_answer_that_is_no_integer_is_refused_with_its_row(answer):
    with pytest.raises(ValueError, match=r"the answer of row 1 is .*, not an integer"):
        last_integer(["19", "19"], answer=[19, answer])


def test_a_completion_of_thousands_of_digits_is_scored():
    digits = "9" * 10_000  # more than Python turns into an int
    assert last_integer([digits, digits], answer=[19, digits]) == [0.0, 1.0]


def test_the_reward_can_be_asked_for_by_name():
    assert REWARDS["last_integer"] is last_integer
