from __future__ import annotations

import itertools
import re

import pytest

from grpo_trainer.rewards.maths import last_integer
from grpo_trainer.tasks import BUILTIN_TASKS, gsm8k_answer, load_task


def terms(row) -> tuple[int, int]:
    """The two numbers that a row asks for, read from its question alone."""
    (message,) = row["prompt"]
    assert message["role"] == "user"
    match = re.fullmatch(r"What is (\d+) \+ (\d+)\? Answer with a number\.", message["content"])
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("seed", [0, 1, 2, 12345])
def test_every_question_is_in_exactly_one_part(seed):
    train, heldout = load_task("builtin:sums", seed)
    asked = [terms(row) for row in [*train, *heldout]]
    assert len(heldout) == 64
    assert sorted(asked) == sorted(itertools.product(range(1, 21), repeat=2))  # 20 * 20 questions, each once


def test_answers_are_the_sums():
    train, heldout = load_task("builtin:sums", 3)
    for row in [*train, *heldout]:
        a, b = terms(row)
        assert row["answer"] == a + b
        assert last_integer([f"{a} + {b} = {a + b}"], [row["answer"]]) == [1.0]


def test_the_seed_fixes_split_and_order():
    first, again, other = (load_task("builtin:sums", seed) for seed in (1, 1, 2))
    assert [p.to_list() for p in first] == [p.to_list() for p in again]
    assert {terms(r) for r in first[1]} != {terms(r) for r in other[1]}


def test_rows_are_shuffled():
    train, heldout = load_task("builtin:sums", 0)
    for part in (train, heldout):
        asked = [terms(row) for row in part]
        assert asked != sorted(asked)
    assert any(a > b for a, b in map(terms, heldout))  # both orders are asked
    # the two orders of a sum are not neighbours, which would put them into one batch; by chance, about one pair is
    asked = [terms(row) for row in train]
    assert sum(x == y[::-1] and x != y for x, y in itertools.pairwise(asked)) < 10


def test_a_smaller_size_takes_the_first_rows_and_leaks_nothing():
    train, heldout = load_task("builtin:sums", 0)
    few_train, few_heldout = load_task("builtin:sums", 0, train_size=5, heldout_size=3)
    assert few_train.to_list() == train.to_list()[:5]
    assert few_heldout.to_list() == heldout.to_list()[:3]


def test_an_unknown_task_is_refused_with_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown task 'builtin:sum'\. Did you mean 'builtin:sums'\?"):
        load_task("builtin:sum")
    assert set(BUILTIN_TASKS) == {"builtin:sums", "builtin:sums_in_tags", "builtin:countdown", "builtin:functions"}


@pytest.mark.parametrize("size", [0, -1, 65])
def test_an_impossible_size_is_refused_with_the_legal_ones(size):
    with pytest.raises(ValueError, match=rf"heldout_size of builtin:sums is {size}; give a number from 1 to 64"):
        load_task("builtin:sums", heldout_size=size)


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("48/2 = <<48/2=24>>24 clips in May.\n#### 72", "72"),
        ("It costs $1,450,000.\n#### 1,450,000", "1,450,000"),
        ("He owes.\n#### -10", "-10"),
        ("#### 1 is not it\n#### 2", "2"),
    ],
)
def test_the_answer_of_gsm8k_is_what_follows_the_last_mark(solution, answer):
    assert gsm8k_answer({"question": "q", "answer": solution}) == {"answer": answer, "solution": solution}


@pytest.mark.parametrize("solution", ["72", "so it is 72 ####", "####  "])
def test_a_solution_of_gsm8k_without_an_answer_is_refused(solution):
    with pytest.raises(ValueError, match="no final number after ####"):
        gsm8k_answer({"answer": solution})


def test_sums_in_tags_are_the_sums_after_one_in_the_form_that_is_asked_for():
    from grpo_trainer.rewards.format import think_answer_format

    for plain, tagged in zip(load_task("builtin:sums", 3), load_task("builtin:sums_in_tags", 3), strict=True):
        assert tagged["answer"] == plain["answer"]
        assert [prompt[-1] for prompt in tagged["prompt"]] == [prompt[-1] for prompt in plain["prompt"]]
        (example,) = {prompt[1]["content"] for prompt in tagged["prompt"]}
        assert think_answer_format([example]) == [1.0]


SOLUTIONS = {
    "a plus {}": "a + {}",
    "a minus {}": "a - {}",
    "twice a, plus {}": "2 * a + {}",
    "{} minus a": "{} - a",
    "the remainder of a divided by {}": "a % {}",
    "the larger of a and {}": "max(a, {})",
    "the smaller of a and {}": "min({}, a)",
    "the square of a, plus {}": "a ** 2 + {}",
    "whether a is greater than {}": "a > {}",
    "whether a is divisible by {}": "a % {} == 0",
}


def asked(row) -> tuple[str, int]:
    """The kind of function that a row asks for and its constant, read from its prompt alone."""
    *_, comment, start = row["prompt"].split("\n")
    assert start == row["code_prefix"] == "def f(a): return"
    (k,) = re.findall(r"[0-9]+", comment)
    return comment.removeprefix("# ").replace(k, "{}"), int(k)


@pytest.mark.parametrize("seed", [0, 7])
def test_every_function_is_in_exactly_one_part_and_every_kind_in_both(seed):
    train, heldout = load_task("builtin:functions", seed)
    assert len(heldout) == 64
    rows = [asked(row) for row in [*train, *heldout]]
    assert sorted(rows) == sorted(itertools.product(SOLUTIONS, range(2, 26)))
    assert {kind for kind, _ in map(asked, train)} == {kind for kind, _ in map(asked, heldout)} == set(SOLUTIONS)


def test_a_function_passes_its_own_tests_and_no_other_kinds():
    _, heldout = load_task("builtin:functions", 0)
    for row in heldout:
        kind, k = asked(row)
        for other, solution in SOLUTIONS.items():
            namespace: dict = {}
            exec(f"{row['code_prefix']} {solution.format(k)}", namespace)
            passed = [eval(test.removeprefix("assert "), dict(namespace)) for test in row["tests"]]
            assert all(passed) is (other == kind), (kind, k, other)
        assert len(row["tests"]) == 8


def test_a_function_off_by_one_fails():
    _, heldout = load_task("builtin:functions", 1)
    for row in heldout:
        kind, k = asked(row)
        for wrong in (k - 1, k + 1):
            namespace: dict = {}
            exec(f"{row['code_prefix']} {SOLUTIONS[kind].format(wrong)}", namespace)
            try:
                passed = all(eval(test.removeprefix("assert "), dict(namespace)) for test in row["tests"])
            except ZeroDivisionError:
                continue
            assert not passed, (kind, k, wrong)
