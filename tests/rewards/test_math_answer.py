"""Each pair with its right verdict and the reason for it, none of them taken from math-verify's own tests."""

from __future__ import annotations

import logging

import pytest

pytest.importorskip("math_verify", reason="needs the extra `rewards`")

from grpo_trainer.rewards import REWARDS
from grpo_trainer.rewards.math_answer import LONGEST, math_answer, read_answer
from grpo_trainer.rewards.options import options_of

RIGHT, WRONG, NONE = 1.0, 0.0, None

PAIRS = [
    ("72", "#### 72", RIGHT, "gsm8k's mark"),
    ("72", "#### 72.", RIGHT, "the sentence's full stop"),
    ("72", "#### $72", RIGHT, "the dollar is no part of the number"),
    ("72", "#### 72 clips", RIGHT, "an unknown unit is dropped"),
    ("72", "#### 3. Add them up: 72", RIGHT, "a heading is not the mark"),
    ("1,450,000", "#### 1450000", RIGHT, "thousands in the reference"),
    ("1450000", "It is 1,450,000.", RIGHT, "thousands in the answer"),
    ("1,000", "1000", RIGHT, "thousands on one side only"),
    ("1/2", "0.5", RIGHT, "a fraction and a decimal"),
    ("0.5", r"\boxed{\frac{1}{2}}", RIGHT, "a decimal and a fraction"),
    ("0.5", r"\boxed{\dfrac12}", RIGHT, "LaTeX's short fraction"),
    ("1-1/e", r"\boxed{1+1/e}", WRONG, "one sign differs, which rounding must not hide"),
    (r"$1-\frac1e$", r"$1-\frac{1}{e}$", RIGHT, "the same irrational number"),
    ("12", "21", WRONG, "digits in another order"),
    ("12", r"\boxed{12}", RIGHT, "a box"),
    ("6", r"\boxed{5} or \boxed{6}", WRONG, "two candidates"),
    ("5, 6", r"\boxed{5} and \boxed{6}", RIGHT, "a list that the reference is"),
    ("6", r"First \boxed{5}. Checking again gives \boxed{6}", RIGHT, "the last box decides"),
    ("5", r"First \boxed{5}. Checking again gives \boxed{6}", WRONG, "an earlier box does not count"),
    ("6", "1, 2, 3, 4, 5, 6", WRONG, "all candidates"),
    ("6", "The answer is 5 or 6.", WRONG, "two candidates in words"),
    ("6", "<answer>5, 6</answer>", WRONG, "two candidates in the answer's place"),
    ("6", "<answer>5</answer><answer>6</answer>", WRONG, "two answers"),
    ("6", "<answer>6</answer>", RIGHT, "the answer's place"),
    ("6", "<answer>The answer is 6.</answer>", RIGHT, "words in the answer's place"),
    ("6", "<answer>6</answer> because 2 * 3 = 7", RIGHT, "what follows the answer is not read"),
    ("6", "<think>7</think> 6", RIGHT, "thinking is not read"),
    ("6", "<think>maybe 6", WRONG, "thinking that was not finished"),
    ("6", "so 2*3 is 6</think><answer>6</answer>", RIGHT, "the prompt had opened the thinking"),
    ("7", "3 + 4", WRONG, "the question repeated"),
    ("7", r"\boxed{3+4}", WRONG, "a sum left undone"),
    ("7", r"\boxed{3+4=7}", RIGHT, "a calculation with its result"),
    ("7", "$3 + 4 = 7$", RIGHT, "the same as a formula"),
    ("7", "3 + 4 = 7", RIGHT, "the same in plain text"),
    ("12", r"\boxed{3 \cdot 4}", WRONG, "a product left undone"),
    ("1024", r"\boxed{2^{10}}", WRONG, "a power left undone"),
    ("2^{10}", r"\boxed{1024}", RIGHT, "the reference is a power"),
    ("1500", r"\boxed{1.5 \times 10^3}", RIGHT, "a power of ten"),
    ("1500", "1.5e3", RIGHT, "an exponent"),
    ("120", r"\boxed{5!}", WRONG, "a factorial left undone"),
    ("6", r"\boxed{5=6}", WRONG, "a false equation"),
    ("5", "x = 5", RIGHT, "a value given to a letter"),
    ("x=5", r"\boxed{5}", RIGHT, "the reference names the letter"),
    ("5", r"\boxed{x=5}", RIGHT, "the answer names the letter"),
    (r"\{1,2,3\}", r"\boxed{\{3,2,1\}}", RIGHT, "a set has no order"),
    ("{1,2,3}", "The set is {3, 2, 1}.", RIGHT, "a set in plain text"),
    ("(1,2)", r"\boxed{(1,2)}", RIGHT, "an open interval"),
    ("(1,2)", r"\boxed{[1,2]}", WRONG, "a closed interval is another"),
    ("(1,2)", "The interval is (1, 2).", RIGHT, "an interval in plain text"),
    ("(1,2)", r"\boxed{(2,1)}", WRONG, "a pair has an order"),
    (r"[0, \infty)", r"\boxed{[0,\infty)}", RIGHT, "an interval without end"),
    (r"(-\infty,2)\cup(3,\infty)", r"$(3,\infty)\cup(-\infty,2)$", RIGHT, "a union has no order"),
    ("x<3", r"\boxed{(-\infty,3)}", RIGHT, "an inequality as an interval"),
    (r"(-\infty,3)", r"\boxed{x<3}", WRONG, "math-verify compares in one direction only: documented"),
    ("50%", "50%", RIGHT, "a percentage"),
    ("50%", "0.5", RIGHT, "a percentage as a share"),
    ("50%", r"\boxed{50\%}", RIGHT, "a percentage in LaTeX"),
    ("5 cm", "5", RIGHT, "a unit on one side"),
    ("5", "5 cm", RIGHT, "a unit on the other side"),
    ("5 cm", "5 cm", RIGHT, "the same unit"),
    ("5 cm", "5 m", WRONG, "another unit"),
    (r"5 \text{ cm}", r"\boxed{5\text{ m}}", WRONG, "another unit in LaTeX"),
    (r"5 \text{ cm}", r"\boxed{5\text{ cm}}", RIGHT, "the same unit in LaTeX"),
    ("18", "He makes $18 per day.", RIGHT, "a currency on one side"),
    ("$18", "He makes $18.", RIGHT, "a currency on both sides"),
    ("$18", "He makes €18.", WRONG, "another currency"),
    (r"90^\circ", r"\boxed{90}", RIGHT, "degrees are dropped"),
    ("-7", "x = -7", RIGHT, "a minus"),
    ("-7", r"\boxed{-7}", RIGHT, "a minus in a box"),
    ("-7", "It is −7", RIGHT, "a typographic minus"),
    ("7", "It is -7", WRONG, "a sign too much"),
    ("3", "20-3", WRONG, "a difference left undone"),
    (r"\sqrt{2}", r"\boxed{\sqrt{2}}", RIGHT, "a root"),
    (r"\sqrt{2}", "1.4142135", RIGHT, "a root to seven places"),
    (r"\sqrt{2}", "1.41", WRONG, "a root to two places"),
    (r"\pi", "3.14", WRONG, "pi is not 3.14"),
    (r"2\pi", r"\boxed{2\pi}", RIGHT, "a multiple of pi"),
    ("1/3", "0.33", WRONG, "a third is not 0.33"),
    ("1/3", "0.3333333", RIGHT, "a third to seven places"),
    ("3.5", "3 1/2", RIGHT, "a mixed number"),
    (r"3\frac12", r"\boxed{\frac72}", RIGHT, "a mixed number and an improper fraction"),
    ("3/4", r"The answer is $\frac{3}{4}$.", RIGHT, "the last formula is the answer"),
    ("4", r"The answer is $\frac{3}{4}$.", WRONG, "not its last number"),
    ("x^2+2x+1", r"\boxed{(x+1)^2}", RIGHT, "a polynomial factored"),
    ("x^2+2x+1", r"\boxed{x^2+2x-1}", WRONG, "another polynomial"),
    ("6x", r"\boxed{6x}", RIGHT, "a monomial"),
    ("6", r"\boxed{6x}", WRONG, "a letter too much"),
    ("6", "6x", WRONG, "a letter too much in plain text"),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}", RIGHT, "a name in LaTeX"),
    (r"\text{Evelyn}", r"\boxed{\text{Bob}}", WRONG, "another name"),
    ("Evelyn", r"\boxed{\text{Evelyn}}", NONE, "a word is no mathematics"),
    ("", "5", NONE, "an empty reference"),
    ("seven", "7", NONE, "a number in words is no reference"),
    (r"\frac{", "7", NONE, "broken LaTeX is no reference"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}1\\2\end{pmatrix}}", RIGHT, "a vector"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix}2\\1\end{pmatrix}}", WRONG, "another vector"),
    ("9", r"\boxed{9^{9^{9^{9}}}}", WRONG, "a tower of powers"),
    (r"\sqrt{2}", r"\boxed{9^{9^{9^{9}}}}", WRONG, "the same against a root"),
    (r"\sqrt{2}", r"\boxed{7^{3000000000}}", WRONG, "a power of ten digits"),
    (r"\sqrt{2}", r"\boxed{100000000!}", WRONG, "a huge factorial"),
    (r"\sqrt{2}", r"\boxed{\binom{100000000}{50000000}}", WRONG, "a huge binomial"),
    ("9", "9**9**9**9", WRONG, "the end of a power left undone"),
    (r"\sqrt{2}", r"\boxed{\sqrt[100000]{2^{100000}+1}}", WRONG, "a huge root"),
    ("3+4i", r"\boxed{4i+3}", RIGHT, "a complex number"),
    (r"\frac{3+\sqrt{5}}{2}", r"\boxed{\frac{3+\sqrt5}{2}}", RIGHT, "a surd"),
    (r"\frac{3+\sqrt{5}}{2}", r"\boxed{\frac{3-\sqrt5}{2}}", WRONG, "another surd"),
    ("x = 2, 3", r"\boxed{2, 3}", RIGHT, "solutions as a list"),
    ("2,3", r"\boxed{x=2 \text{ or } x=3}", RIGHT, "solutions with their letter"),
    ("5", "the sum is 5.0", RIGHT, "a decimal that is whole"),
    ("5", "5.0000001", WRONG, "nearly is not equal"),
    ("6", "six", WRONG, "a number in words is no answer"),
    ("5", r"\boxed{5}\%", RIGHT, "a percent sign outside the box is not read"),
    (r"The answer is \boxed{5}.", "5", RIGHT, "a box in the reference"),
    ("10", r"\boxed{10 \text{ apples}}", RIGHT, "a unit in LaTeX"),
    ("10", r"\boxed{10 apples}", RIGHT, "a word in a box"),
    ("10", "**10**", RIGHT, "bold"),
    ("10", "The answer is **10**.", RIGHT, "bold in a sentence"),
    ("10", r"\[ 2 \times 5 = 10 \]", RIGHT, "a displayed formula"),
    ("10", r"\[ \boxed{10} \]", RIGHT, "a box in a displayed formula"),
    ("0", "-0", RIGHT, "no negative zero"),
    ("16", "3 and 13 make 16", RIGHT, "the last number of a sentence"),
    ("1234", "1{,}234", RIGHT, "LaTeX's comma in plain text"),
    ("1234", r"\boxed{1{,}234}", RIGHT, "LaTeX's comma in a box"),
    ("1234", r"\boxed{1,234}", RIGHT, "a comma in a box"),
    (r"\emptyset", r"\boxed{\emptyset}", RIGHT, "the empty set"),
]


@pytest.mark.parametrize(
    ("gold", "completion", "verdict", "reason"), PAIRS, ids=[f"{g}|{c}"[:60] for g, c, *_ in PAIRS]
)
def test_the_verdict_is_the_right_one(gold, completion, verdict, reason):
    assert math_answer([completion], [gold]) == [verdict], f"{reason}; read {read_answer(completion)!r}"


def test_there_are_at_least_sixty_pairs_of_each_kind_some():
    verdicts = [verdict for _, _, verdict, _ in PAIRS]
    assert len(PAIRS) >= 60 and min(verdicts.count(v) for v in (RIGHT, WRONG)) >= 25


def test_a_missing_reference_is_none_and_an_unreadable_one_is_reported(caplog):
    metrics, columns = {}, {}
    with caplog.at_level(logging.WARNING):
        rewards = math_answer(
            ["7", "7", "7", "\\boxed{8}"],
            [None, "Wednesday", 7, 7],
            log_metric=metrics.__setitem__,
            log_extra=columns.__setitem__,
        )
    assert rewards == [None, None, 1.0, 0.0]
    assert metrics == {"math_answer/unreadable_references": 0.25}
    assert columns == {"math_answer/read": ["7", "7", "7", "8"]}
    assert "'Wednesday' is no mathematics" in caplog.text


@pytest.mark.parametrize(
    "completion",
    [
        "(" * 5000 + "1" + ")" * 5000,
        "\\boxed{" + "(" * 200 + "2" + ")" * 200 + "}",
        "\\boxed{" + "\\frac{1}{" * 25 + "2" + "}" * 25 + "}",
        "\\boxed{" * 5000,
        "\\boxed{" + "9" * (LONGEST + 1) + "}",
        "9" * 10_000,
        "9^{9^{9^{9}}}",
        "$9^{9^{9^{9}}}$",
        "\\boxed{100000000!}",
        "\\boxed{\\binom{100000000}{50000000}}",
        "\\boxed{\\sum_{n=1}^{1000000000} n}",
        "\\boxed{\\sqrt[100000]{2^{100000}+1}}",
        "\\boxed{__import__('os').system('true')}",
        "\x00\ud800\u202e",
        "<answer>" * 5000,
        "$" * 20_000,
        "1,2" * 20_000,
    ],
    ids=lambda text: text[:20].encode("ascii", "replace").decode(),
)
@pytest.mark.parametrize("gold", ["3", "\\sqrt{2}"])
def test_a_hostile_answer_is_wrong_also_inline(completion, gold):
    """None of these needs the worker's time limit; a run of the suite would hang if one did."""
    assert math_answer([completion], [gold]) == [0.0]


def test_the_last_message_is_read():
    chat = [{"role": "user", "content": "5"}, {"role": "assistant", "content": "\\boxed{6}"}]
    assert math_answer([chat, [], [{"role": "assistant", "content": None}]], [6, 6, 6]) == [1.0, 0.0, 0.0]


def test_it_runs_in_a_worker_with_a_time_limit_and_can_be_asked_for_by_name():
    options = options_of(math_answer)
    assert (options.isolation, options.rows_per_call) == ("process", 16) and options.time_limit
    assert REWARDS["math_answer"] is math_answer
