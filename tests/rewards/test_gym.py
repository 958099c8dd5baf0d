"""The scorers of reasoning-gym say what they say, and what they evaluate reaches nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_trainer.gym import load_gym_task
from grpo_trainer.rewards.base import RewardSet
from grpo_trainer.rewards.contract import RewardInputs
from grpo_trainer.rewards.gym import reasoning_gym
from grpo_trainer.rewards.options import options_of
from grpo_trainer.rewards.sandbox import sandbox_is_available

pytest.importorskip("reasoning_gym", reason="the extra `rewards` is not installed")


def rows_of(name):
    return list(load_gym_task(f"reasoning_gym:{name}", seed=0)[0])


def test_the_answer_is_in_the_last_tags_or_is_the_whole_text():
    (row,) = rows_of("chain_sum?size=1&test_size=1")
    right = row["answer"]
    texts = [right, f" {right}\n", f"so <answer> {right} </answer>.", f"<answer>{right}</answer> no <answer>1</answer>"]
    assert reasoning_gym(texts, problem=[row["problem"]] * 4)[:3] == [1.0, 1.0, 1.0]
    assert reasoning_gym(texts, problem=[row["problem"]] * 4)[3] < 1.0
    messages = [[{"role": "assistant", "content": right}]]
    assert reasoning_gym(messages, problem=[row["problem"]]) == [1.0]
    assert reasoning_gym(["7"], problem=[None]) == [None]


@pytest.mark.parametrize("name", ["gcd", "letter_counting", "spell_backward", "knights_knaves", "number_sorting"])
def test_reference_answers_score_full_marks_and_nonsense_none(name):
    rows = rows_of(f"{name}?size=4&test_size=1")
    problems = [row["problem"] for row in rows]
    assert reasoning_gym([row["answer"] for row in rows], problem=problems) == [1.0] * 4
    assert max(reasoning_gym(["zzz"] * 4, problem=problems, full_only=True)) == 0.0


def test_parts_of_the_credit_can_be_left_out():
    (row,) = rows_of("countdown?size=1&test_size=1")
    some = reasoning_gym(["1 + 1"], problem=[row["problem"]])
    assert 0.0 < some[0] < 1.0
    assert reasoning_gym(["1 + 1", row["answer"]], problem=[row["problem"]] * 2, full_only=True) == [0.0, 1.0]


def test_an_answer_that_a_scorer_cannot_read_is_wrong():
    (row,) = rows_of("prime_factorization?size=1&test_size=1")
    assert reasoning_gym(["foo"], problem=[row["problem"]]) == [0.0]


def test_all_of_them_are_scored_in_a_sandbox():
    assert options_of(reasoning_gym).isolation == "sandbox"


@pytest.mark.slow
@pytest.mark.skipif(not sandbox_is_available(), reason="bubblewrap is not installed or does not work here")
def test_what_a_scorer_evaluates_reaches_nothing(tmp_path: Path):
    """countdown's scorer evaluates the text."""
    (row,) = rows_of("countdown?size=1&test_size=1")
    mark = tmp_path / "mark"
    evil = f"__import__('os').system('touch {mark}')"
    rewards = RewardSet([reasoning_gym])
    try:
        scores, _ = rewards.score(
            RewardInputs(
                rows=[row] * 3,
                completions=[evil, row["answer"], "(lambda: [0 for _ in iter(int, 1)])()"],
                completion_ids=[[1]] * 3,
            )
        )
    finally:
        rewards.close()
    assert not mark.exists()
    assert scores[1, 0] == 1.0 and not scores[0, 0] >= 0.5 and not scores[2, 0] >= 0.5
    assert json.loads(row["problem"])["task"] == "countdown"
